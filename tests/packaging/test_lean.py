"""What `flashgen build` writes runs with PyTorch and NumPy alone: no parser, no templates, no commands, no compiler."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flashgen.compiler.building import build_file
from flashgen.compiler.package.manifest import Manifest
from flashgen.op.loading import open_package
from flashgen.op.op import BaseOp
from flashgen.toolchains.cpp import Compiler, lacking_features, needed_features
from tests.cli.helpers import flashgen

SPEC = """
attention lean {
    head_dim 16
    tensor slope: f32[H] grad
    param gain: f32 = 1.0 grad
    score gain * s - slope[h] * (i - j)
    mask causal
}
"""

# Everything that a package needs is imported under a finder that refuses what it does not.
RUN = """
import json, sys
from importlib.abc import MetaPathFinder

class Refused(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] in ("lark", "jinja2", "click", "rich", "matplotlib", "PIL", "cupy", "triton"):
            raise ModuleNotFoundError(f"{name} is not there", name=name)

sys.meta_path.insert(0, Refused())
import torch
torch.manual_seed(0)
from lean import lean

q, k, v = (torch.randn(2, heads, 40, 16, requires_grad=True) for heads in (4, 2, 2))
slope, gain = torch.rand(4, requires_grad=True), torch.tensor(0.7, requires_grad=True)
inputs = (q, k, v, slope, gain)

def gradients(call, **more):
    o, lse = call(q, k, v, slope=slope, gain=gain, return_lse=True, **more)
    return [o, lse, *torch.autograd.grad(o.square().sum() + lse.sum(), inputs)]

def sequences(op, **more):
    rows, named = [x[0].transpose(0, 1) for x in (q, k, v)], {"slope": slope, "gain": gain, **more}
    starts, filled = torch.tensor([0, 13, 40], dtype=torch.int32), torch.tensor([9, 40], dtype=torch.int32)
    return [op.varlen(*rows, starts, starts, **named), op.decode(q[:, :, :1], k, v, filled, **named)]

jagged = [torch.nested.nested_tensor_from_jagged(x[0].transpose(0, 1), torch.tensor([0, 13, 40])) for x in (q, k, v)]
jagged = lean(*(x.transpose(1, 2) for x in jagged), slope=slope, gain=gain).transpose(1, 2).values()
mine = [*gradients(lean), *sequences(lean), jagged]
exact = sequences(lean.reference, dtype=torch.float64)
pairs = zip(mine, [*gradients(lean.reference, dtype=torch.float64), *exact, exact[0]], strict=True)
print(json.dumps({
    "error": max(float((x - y).abs().max() / y.abs().max()) for x, y in pairs),
    "backends": lean.backends,
    "modules": sorted({name.partition(".")[0] for name in sys.modules}),
    "flashgen": sorted(name for name in sys.modules if name.startswith("flashgen.")),
}))
"""


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither here nor in processes."""
    monkeypatch.setenv("CXX", "/nowhere/c++")


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a library, which was made where a compiler is."""
    folder = tmp_path_factory.mktemp("built")
    (folder / "lean.attn").write_text(SPEC)
    (built,) = build_file(folder / "lean.attn", output=folder, targets=("cpu",))
    assert "lean_d16_cpu.so" in {file.name for file in built.files}
    assert not build_file(folder / "lean.attn", output=folder, targets=("cpu",), check=True)[0].changed
    return built.folder


def run(folder: Path, repository: Path) -> tuple[dict[str, Any], str]:
    """What a process said that imports the package of a folder and has none of what is refused; and its warnings."""
    path = os.pathsep.join((str(folder), str(repository)))
    environment = {**os.environ, "PYTHONPATH": path, "FLASHGEN_CACHE_DIR": str(folder / "none"), "CXX": "/nowhere/c++"}
    done = subprocess.run(
        [sys.executable, "-W", "default", "-c", RUN], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    said: dict[str, Any] = json.loads(done.stdout)
    assert said["error"] < 1e-5
    assert not {"lark", "jinja2", "click", "rich"} & set(said["modules"])
    for part in ("cli", "language.parser", "emit.environment", "flex", "benchmark", "fuzz", "picture", "verification"):
        assert f"flashgen.{part}" not in said["flashgen"], part
    return said, done.stderr


def test_the_library_of_a_package_needs_no_compiler(package: Path, repository: Path) -> None:
    said, warnings = run(package.parent, repository)
    assert said["backends"] == ["cpu", "reference"]
    assert "lean" not in warnings


@pytest.mark.usefixtures("no_compiler")
def test_a_package_of_text_runs_without_a_compiler(tmp_path: Path, repository: Path) -> None:
    (tmp_path / "lean.attn").write_text(SPEC)
    build_file(tmp_path / "lean.attn", output=tmp_path / "packages")
    said, warnings = run(tmp_path / "packages", repository)
    assert said["backends"] == ["reference"]
    assert "'lean' runs on the tiled PyTorch reference, which is slow: no C++ compiler" in warnings
    assert "`flashgen build --target cpu` makes it" in warnings


def opened(folder: Path) -> Any:
    return open_package(folder, BaseOp)


@pytest.mark.usefixtures("no_compiler")
def test_what_a_library_is_refused_for(package: Path, tmp_path: Path) -> None:
    """Another CPU, another system, an edited source, a library that was changed: named, and never loaded."""
    assert opened(package).backends == ("cpu", "reference")
    (plan,) = opened(package).plan.values()
    assert plan.reasons[0].startswith("compiled when the package was built, by ")

    def refused(change: Callable[[Path], None], said: str) -> None:
        copy = tmp_path / f"copy{len(list(tmp_path.iterdir()))}"
        shutil.copytree(package, copy)
        change(copy)
        with pytest.warns(UserWarning, match=said):
            assert opened(copy).backends == ("reference",)

    def edit(folder: Path) -> None:
        (folder / "lean_d16_cpu.cpp").write_text("int x;")

    refused(edit, "lean_d16_cpu.cpp' of the package is missing or was edited")
    refused(lambda folder: (folder / "lean_d16_cpu.so").unlink(), "lean_d16_cpu.so' of the package is missing")
    for name, value, said in (
        ("system", "Linux m68k", "was compiled for Linux m68k, this is "),
        ("features", ["avx2", "avx4096"], "a CPU with '?avx4096'?, which this one lacks"),
    ):
        refused(lambda folder, name=name, value=value: describe(folder, name, value), said)  # type: ignore[misc]

    def of_another_cpu(folder: Path) -> None:
        describe(folder, "features", None)
        describe(folder, "cpu", "0" * 64)

    refused(of_another_cpu, "was compiled for another CPU")


def describe(folder: Path, name: str, value: Any) -> None:
    """Let the manifest say something else of the library."""
    whole = Manifest.read(folder)
    (binary,) = whole.binaries
    changed = replace(whole, binaries=(replace(binary, **{name: value}),))
    (folder / "manifest.json").write_text(changed.to_json())


def test_features_are_those_of_the_compilers_target() -> None:
    plain = Compiler(("c++", "-march=x86-64"), "1")
    newer = Compiler(("c++", "-march=haswell"), "1")
    if needed_features(plain) is None:
        pytest.skip("features are known of x86-64 alone")
    assert needed_features(plain) == ()
    assert set(needed_features(newer) or ()) >= {
        "abm",
        "avx",
        "avx2",
        "bmi1",
        "bmi2",
        "fma",
        "f16c",
        "movbe",
        "pni",
        "sse42",
    }
    assert lacking_features(("fma", "pni"), Path("/nowhere")) == ("fma", "pni")


@pytest.mark.usefixtures("no_compiler")
def test_the_report_tells_the_size(tmp_path: Path) -> None:
    (tmp_path / "lean.attn").write_text(SPEC)
    (said,) = json.loads(flashgen("build", tmp_path / "lean.attn", "-o", tmp_path / "out", "--json").stdout)
    folder = tmp_path / "out" / "lean"
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    assert said["bytes"] == size
    shown = flashgen("build", tmp_path / "lean.attn", "-o", tmp_path / "out").stdout
    assert f"0 changed, {size / 1e3:.0f} kB, " in shown
    assert size == pytest.approx(1e6, rel=0.3)


def test_an_op_of_a_cpu_imports_nothing_of_gpus() -> None:
    """Neither does flashgen itself, nor a backward pass, ``op.plan`` or ``op.explain``."""
    code = """
import sys
import torch
import flashgen
op = flashgen.loads("attention a { head_dim 16 mask causal }", backend="cpu")
q = torch.randn(1, 1, 8, 16, requires_grad=True)
op(q, q, q).sum().backward()
op.explain(q, q, q)
op.plan
names = ("gpu", "mma", "cuda", "emulat", "nvrtc", "tensor_maps", "counters")
print([each for each in sys.modules if each.startswith("flashgen.") and any(name in each for name in names)])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
