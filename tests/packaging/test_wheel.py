"""The wheel carries everything that the compiler reads, and works outside the source tree."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from itertools import product
from pathlib import Path

import pytest

from tests.pipeline.gpus import needs_nvrtc

SPEC = "attention installed { head_dim 32 mask causal and window_left(8) }"


@pytest.fixture(scope="module")
def wheel(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(repository)]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that the wheel is installed in, alone; its dependencies are those of this environment."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-compile"]
    subprocess.run([*command, "--target", str(folder), str(wheel)], check=True, capture_output=True, timeout=120)
    return folder


def run(site: Path, folder: Path, *command: str) -> str:
    """Run Python with the installed package before the checkout, in a folder outside the source tree."""
    environment = {**os.environ, "PYTHONPATH": str(site)}
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_it_holds_what_the_compiler_reads(wheel: Path, repository: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {"flashgen/language/attn.lark", "flashgen/language/prelude.attn", "flashgen/py.typed"} <= names
    templates = {
        f"flashgen/{file.relative_to(repository).as_posix()}"
        for file in (repository / "templates").rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    assert templates
    assert templates <= names
    specs = {f"flashgen/specs/{file.name}" for file in (repository / "specs").glob("*.attn")}
    assert len(specs) > 30
    assert specs <= names


def test_it_holds_nothing_else(wheel: Path) -> None:
    for name in zipfile.ZipFile(wheel).namelist():
        assert name.split("/")[0] == "flashgen" or ".dist-info/" in name, name
        assert "__pycache__" not in name


def test_it_works_outside_the_source_tree(site: Path, tmp_path: Path) -> None:
    (tmp_path / "installed.attn").write_text(SPEC)
    where = run(site, tmp_path, "-c", "import flashgen; print(flashgen.__file__)")
    assert Path(where.strip()).is_relative_to(site)
    run(site, tmp_path, "-m", "flashgen", "check", "installed.attn")
    run(site, tmp_path, "-m", "flashgen", "build", "installed.attn")
    use = "import torch; from generated.installed import installed; x = torch.ones(1, 1, 5, 32)"
    assert float(run(site, tmp_path, "-c", f"{use}; print(installed(x, x, x).sum().item())")) == pytest.approx(160.0)


def test_it_brings_the_gallery(site: Path, tmp_path: Path) -> None:
    code = "import flashgen; print(flashgen.load('alibi', backend='reference').spec.name)"
    assert run(site, tmp_path, "-c", code).strip() == "alibi"
    assert "alibi" in run(site, tmp_path, "-m", "flashgen", "show", "alibi", "--shape", "1,1,1,64,64")


@needs_nvrtc
@pytest.mark.slow
def test_it_builds_the_gallery_for_gpus(site: Path, tmp_path: Path) -> None:
    run(site, tmp_path, "-m", "flashgen", "build", "gpt_oss", "--target", "sm_80,sm_90a")
    cubins = {each.stem for each in (tmp_path / "generated" / "gpt_oss").glob("*.cubin")}
    wanted = product(("sm_80", "sm_90a"), ("forward", "backward"), ("f16", "bf16", "f32"))
    assert cubins == {f"gpt_oss_d64_{name}_{element}_{target}" for target, name, element in wanted}


def test_the_command_is_installed(site: Path, tmp_path: Path) -> None:
    assert (site / "bin" / "flashgen").exists()
    assert "check" in run(site, tmp_path, str(site / "bin" / "flashgen"), "--help")
