"""Build, check, open: what is written, when it is up to date, and what a damaged package says."""

from __future__ import annotations

import itertools
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import flashgen
from flashgen.compiler.building import build_file
from flashgen.compiler.pipeline import check_file, compile_spec, plan_file
from flashgen.diagnostics import SpecError
from flashgen.kinds.kind import BOTH
from flashgen.op.loading import load, loads
from flashgen.targets.cpu.target import CpuTarget
from flashgen.targets.device_table import known_devices
from flashgen.toolchains import cpp

SPEC = """
attention tiny {
    head_dim 16, 32
    const w = 8
    tensor slope: f32[H] grad
    score s - slope[h] * (i - j)
    mask window(w)
}
"""


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    file = tmp_path / "tiny.attn"
    file.write_text(SPEC)
    return file


def run(folder: Path, code: str) -> subprocess.CompletedProcess[str]:
    """Python code in a process of its own that sees the generated packages of ``folder``."""
    return subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=False)


def test_build_writes_a_package_that_is_then_up_to_date(spec: Path, tmp_path: Path) -> None:
    output = tmp_path / "generated"
    (first,) = build_file(spec, output=output)
    names = {"__init__.py", "tiny.attn", "spec.json", "manifest.json"}
    names |= {f"tiny_d{d}_cpu.cpp" for d in (16, 32)}
    parts = itertools.product((16, 32), BOTH, ("f16", "bf16", "f32"), ("sm_80", "sm_90a"))
    names |= {f"tiny_d{d}_{name}_{element}_{target}.cu" for d, name, element, target in parts}
    assert {file.name for file in first.files if file.parent == first.folder} == names
    headers = {file for file in first.files if (first.folder / "include" / "flashgen") in file.parents}
    assert {file.name for file in headers} >= {"instructions.cuh", "math.cuh", "ranges.h"}
    assert len(first.files) == len(names) + len(headers)
    assert first.changed == first.files
    assert not build_file(spec, output=output)[0].changed
    assert not build_file(spec, output=output, check=True)[0].changed


def test_check_writes_nothing_and_names_what_differs(spec: Path, tmp_path: Path) -> None:
    output = tmp_path / "generated"
    (differing,) = build_file(spec, output=output, check=True)
    assert differing.changed == differing.files
    assert not output.exists()
    build_file(spec, output=output)
    (output / "tiny" / "tiny_d16_cpu.cpp").write_text("// edited\n")
    (changed,) = build_file(spec, output=output, check=True)[0].changed
    assert changed.name == "tiny_d16_cpu.cpp"


def test_sources_of_an_earlier_build_go(spec: Path, tmp_path: Path) -> None:
    output = tmp_path / "generated"
    build_file(spec, output=output)
    spec.write_text(SPEC.replace("16, 32", "16"))
    (result,) = build_file(spec, output=output)
    assert "tiny_d32_cpu.cpp" in {file.name for file in result.changed}
    assert not (output / "tiny" / "tiny_d32_cpu.cpp").exists()


def test_the_text_does_not_depend_on_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = flashgen.language.parse_text(SPEC).specs[0]
    texts = []
    for name in ("zen2", "sapphire-rapids"):
        monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path / name))  # each emits for itself
        texts.append([kernel.source.text for kernel in compile_spec(spec, CpuTarget(known_devices().cpus[name]))])
    assert texts[0] == texts[1]


def test_the_generated_op_is_the_loaded_op(spec: Path, tmp_path: Path) -> None:
    build_file(spec, output=tmp_path / "generated")
    code = """
import torch
from generated.tiny import tiny
torch.manual_seed(0)
q, k, v = (torch.randn(1, 2, 40, 16, requires_grad=True) for _ in range(3))
o, lse = tiny(q, k, v, slope=torch.tensor([0.5, 0.25]), return_lse=True)
o.sum().backward()
print(o.double().abs().sum().item(), q.grad.double().abs().sum().item())
"""
    done = run(tmp_path, code)
    assert done.returncode == 0, done.stderr
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 40, 16, requires_grad=True) for _ in range(3))
    o = load(spec)(q, k, v, slope=torch.tensor([0.5, 0.25]))
    (dq,) = torch.autograd.grad(o.sum(), q)
    here = [o.double().abs().sum().item(), dq.double().abs().sum().item()]
    assert [float(each) for each in done.stdout.split()] == here


def test_an_edited_source_is_compiled_as_it_stands(spec: Path, tmp_path: Path) -> None:
    build_file(spec, output=tmp_path / "generated")
    file = tmp_path / "generated" / "tiny" / "tiny_d16_cpu.cpp"
    file.write_text(file.read_text() + "\n#error edited\n")
    code = (
        "import torch; from generated.tiny import tiny; x = torch.ones(1, 2, 5, 16); tiny(x, x, x, slope=x[0, :, 0, 0])"
    )
    done = run(tmp_path, code)
    assert done.returncode != 0
    assert "edited" in done.stderr


def test_a_damaged_package_says_what_to_do(spec: Path, tmp_path: Path) -> None:
    """In a process of its own, as users import it; ``test_manifest.py`` has what else may be damaged."""
    build_file(spec, output=tmp_path / "generated")
    written = tmp_path / "generated" / "tiny" / "spec.json"
    written.write_text(written.read_text().replace("16", "32"))
    said = run(tmp_path, "import generated.tiny").stderr.splitlines()[-1]
    assert said.startswith("ImportError: ")
    assert "spec.json' is not as flashgen wrote it; run 'flashgen build'" in said


def test_a_missing_source_says_what_to_do(spec: Path, tmp_path: Path) -> None:
    build_file(spec, output=tmp_path / "generated")
    (tmp_path / "generated" / "tiny" / "tiny_d16_cpu.cpp").unlink()
    done = run(tmp_path, "import generated.tiny")
    assert "ImportError" in done.stderr
    assert "tiny_d16_cpu.cpp' cannot be read" in done.stderr


def test_constants_can_be_overridden() -> None:
    op = loads(SPEC, const={"w": 0})
    q, k = torch.randn(2, 1, 1, 5, 16).unbind()
    v = torch.randn(1, 1, 5, 16)
    assert torch.allclose(op(q, k, v, slope=torch.zeros(1)), v)


def test_the_attention_is_chosen_by_name() -> None:
    both = "attention one { head_dim 16 } attention two { head_dim 16 mask causal }"
    assert loads(both, name="two").spec.name == "two"
    with pytest.raises(ValueError, match="choose one by name: 'one' or 'two'"):
        loads(both)
    with pytest.raises(ValueError, match="did you mean 'two'"):
        loads(both, name="tow")


def test_unknown_targets_and_devices_name_the_nearest(spec: Path, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="there is no target 'cpi'"):
        build_file(spec, output=tmp_path, targets=("cpi",))
    with pytest.raises(SpecError, match="did you mean 'zen3'"):
        plan_file(spec, device="zen33")


def test_an_index_that_is_outside_everywhere_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "wrong.attn"
    file.write_text("attention a { head_dim 16 tensor t: f32[8] score s + t[8] }")
    with pytest.raises(SpecError) as refused:
        check_file(file)
    assert [diagnostic.code for diagnostic in refused.value.diagnostics] == ["E211"]
    with pytest.raises(SpecError):
        load(file)


def test_the_compiler_does_not_import_torch(spec: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", shlex.join(cpp.find_compiler().command))  # without products that tests leave out
    code = (
        "import sys; from flashgen.compiler.building import build_file; from pathlib import Path\n"
        f"build_file(Path({str(spec)!r}), output=Path({str(tmp_path)!r}))\n"
        "print('torch' in sys.modules)"
    )
    assert run(tmp_path, code).stdout.strip() == "False"
