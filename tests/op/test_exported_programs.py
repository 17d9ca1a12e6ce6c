"""Programs that leave the process: one name for one operator, torch.export and AOTInductor in fresh processes."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import flashgen
import flashgen.nn
from flashgen.compiler.package.manifest import Manifest, digest
from flashgen.flex import from_mods, to_spec
from flashgen.op import loading
from flashgen.op.op import BaseOp
from flashgen.store.cache import Cache
from tests.op.helpers import random

pytestmark = pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")

TEXT = """
attention {name} {{
    head_dim 16
    const reach = 9
    tensor slope: f32[H] grad
    param gain: f32 = 1.0 grad
    score gain * s - slope[h] * (i - j)
    mask causal and i - j < reach
    dropout 0.25
}}
"""


def text_of(name: str) -> str:
    return TEXT.format(name=name)


def built(name: str, folder: Path) -> Path:
    """The folder that ``import <name>`` finds the package in."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{name}.attn"
    file.write_text(text_of(name))
    flashgen.build(file, output=folder, targets=["cpu"])
    return folder


def imported(name: str, folder: Path) -> Any:
    """The package's op."""
    found = importlib.util.spec_from_file_location(f"{folder.name}_{name}", folder / name / "__init__.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return getattr(module, name)


def forgotten(op: BaseOp) -> None:
    """As on another machine: nothing is known of the op's programs."""
    folder = Cache.of_operators().root / loading._key(op.name.partition("::")[2])
    shutil.rmtree(folder)


class Layer(torch.nn.Module):
    """A module around an op, whose dropout is off."""

    def __init__(self, op: Any) -> None:
        super().__init__()
        self.op = op
        self.project = torch.nn.Linear(16, 48)
        self.slope = torch.nn.Parameter(random(4, seed=3))
        self.gain = torch.nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x).chunk(3, -1)
        o: Tensor = self.op(q, k, v, slope=self.slope, gain=self.gain, dropout_p=0.0)
        return o


@dataclass(frozen=True)
class Results:
    """What a program gives in another process."""

    output: str
    done: subprocess.CompletedProcess[str]

    @property
    def failure(self) -> str:
        assert self.done.returncode != 0
        return self.done.stderr

    def agree(self, layer: torch.nn.Module, x: Tensor) -> None:
        assert self.done.returncode == 0, self.done.stderr
        o, gradients = torch.load(self.output)
        truth = layer(x)
        torch.testing.assert_close(o, truth.detach())
        if gradients is None:
            return
        names = [name for name, _ in layer.named_parameters()]
        expected = dict(zip(names, torch.autograd.grad(truth.sum(), list(layer.parameters())), strict=True))
        assert sorted(gradients) == sorted(names)
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, expected[name], msg=name)


def elsewhere(first: str, program: Path, x: Tensor, load: str = "torch.export.load(program).module()") -> Results:
    """Run a program in a fresh process that has executed ``first`` alone, with the gradients of its parameters."""
    code = f"""
import sys
{first}
import torch
program, x, out = sys.argv[1:]
x = torch.load(x)
run = {load}
o = run(x)
gradients = None
if hasattr(run, "parameters"):
    o.sum().backward()
    gradients = {{name: each.grad for name, each in run.named_parameters()}}
torch.save((o.detach(), gradients), out)
"""
    torch.save(x, program.with_suffix(".x"))
    out = str(program.with_suffix(".out"))
    command = [sys.executable, "-c", code, str(program), str(program.with_suffix(".x")), out]
    return Results(out, subprocess.run(command, capture_output=True, text=True, check=False))


def by_package(name: str, folder: Path) -> str:
    return f"sys.path.insert(0, {str(folder)!r})\nimport {name}"


def by_text(name: str) -> str:
    return f"import flashgen\nop = flashgen.loads({text_of(name)!r})"


def save(layer: torch.nn.Module, x: Tensor, path: Path) -> Path:
    length = torch.export.Dim("length", min=2, max=512)
    program = torch.export.export(layer, (x,), dynamic_shapes={"x": {2: length}})
    torch.export.save(program, path)
    return path


# Names ----------------------------------------------------------------------------------------------------------------


def test_one_spec_is_one_operator_however_it_was_made(tmp_path: Path) -> None:
    name = "named_alike"
    op = flashgen.loads(text_of(name))
    folder = built(name, tmp_path)
    written_otherwise = text_of(name).replace("    ", "  ").replace("i - j < reach", "(i - j) < reach")
    assert flashgen.loads(written_otherwise).name == op.name
    assert flashgen.load(folder / f"{name}.attn").name == op.name
    package = imported(name, folder)
    assert package.name == op.name
    assert flashgen.nn.Attention(folder / f"{name}.attn", heads=4).op.name == op.name
    q, k, v = (random(1, 4, 20, 16, seed=n) for n in range(3))
    arguments: dict[str, Any] = {"slope": random(4), "dropout_p": 0.0}
    assert torch.equal(package(q, k, v, **arguments), op(q, k, v, **arguments))


def test_ops_of_mods_are_named_as_their_specs() -> None:
    slopes = random(4)

    def named_by_its_spec(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return score - slopes[h] * (q - kv)

    op, _ = from_mods(score_mod=named_by_its_spec, head_dim=16)
    assert flashgen.loads(to_spec(score_mod=named_by_its_spec, head_dim=16)).name == op.name


@pytest.mark.slow
def test_other_specs_are_other_operators(tmp_path: Path) -> None:
    name = "named_otherwise"
    text = text_of(name)
    same = flashgen.loads(text)
    others = [
        flashgen.loads(text, const={"reach": 8}),
        flashgen.loads(text.replace("head_dim 16", "head_dim 16, 8")),
        flashgen.loads(text, backend="reference"),
        flashgen.loads(text, backend="cpu"),
        flashgen.loads(text, backend="emulator"),
        flashgen.loads(text, backend="emulator", target="sm_90a"),
    ]
    folder = built(name, tmp_path)
    source = folder / name / f"{name}_d16_cpu.cpp"
    source.write_text(source.read_text() + "\n// edited\n")
    others.append(imported(name, folder))
    assert len({each.name for each in (same, *others)}) == 1 + len(others)
    assert imported(name, folder).name == others[-1].name


def test_ops_of_one_operator_keep_what_they_run(tmp_path: Path) -> None:
    """An older package, whose sources are as it was written with, beside what the spec says today."""
    name = "kept_apart"
    op, folder = flashgen.loads(text_of(name)), built(name, tmp_path)
    source, manifest = folder / name / f"{name}_d16_cpu.cpp", folder / name / "manifest.json"
    source.write_text(source.read_text() + "\n// as an older flashgen wrote it\n")
    written = Manifest.read(folder / name)
    files = {**written.files, source.name: digest(source.read_bytes())}
    manifest.write_text(replace(written, files=files).to_json())
    package = imported(name, folder)
    assert package.name == op.name
    assert package.sources[0].text.endswith("wrote it\n")
    assert not op.sources[0].text.endswith("wrote it\n")
    q, k, v = (random(1, 4, 20, 16, seed=n).requires_grad_() for n in range(3))
    slope, runs = random(4), []
    for each in (op, package):
        plain = each_with(each, slope)
        compiled = torch.compile(plain, backend="aot_eager", fullgraph=True)
        runs += [torch.autograd.grad(run(q, k, v).sum(), (q, k, v)) for run in (plain, compiled)]
    for found in runs[1:]:
        torch.testing.assert_close(found, runs[0])


def each_with(op: Any, slope: Tensor) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    return lambda *x: op(*x, slope=slope, dropout_p=0.0)


# torch.export ---------------------------------------------------------------------------------------------------------


def test_a_program_runs_in_a_process_that_imported_flashgen_alone(tmp_path: Path) -> None:
    layer = Layer(flashgen.loads(text_of("left_behind")))
    program = save(layer, random(2, 4, 30, 16), tmp_path / "program.pt2")
    longer = random(2, 4, 50, 16, seed=9)
    elsewhere("import flashgen", program, longer).agree(layer, longer)
    elsewhere("import torch\nimport flashgen", program, longer).agree(layer, longer)


@pytest.mark.parametrize("module", ["flashgen.nn", "flashgen.op.op", "flashgen.reference.dense"])
def test_a_module_that_imports_torch_itself_brings_the_operators(module: str, tmp_path: Path) -> None:
    layer = Layer(flashgen.loads(text_of("left_behind")))
    program, x = save(layer, random(2, 4, 30, 16), tmp_path / "program.pt2"), random(2, 4, 20, 16)
    first = f"""
import warnings
warnings.simplefilter("error", RuntimeWarning)
import flashgen
assert "torch" not in sys.modules
import {module}
assert "torch" in sys.modules
"""
    elsewhere(first, program, x).agree(layer, x)


def test_a_program_finds_the_package_and_the_spec_where_nothing_is_remembered(tmp_path: Path) -> None:
    """Exported through ``load`` and run with the package; exported through the package and run with ``loads``."""
    name, x = "on_another_machine", random(2, 4, 30, 16)
    op, folder = flashgen.loads(text_of(name)), built(name, tmp_path)
    layer = Layer(op)
    program = save(layer, x, tmp_path / "loaded.pt2")
    forgotten(op)
    elsewhere(by_package(name, folder), program, x).agree(layer, x)

    code = f"""
import sys
{by_package(name, folder)}
import torch
from tests.op.test_exported_programs import Layer, save
from pathlib import Path
layer = Layer({name}.{name})
layer.load_state_dict(torch.load(sys.argv[1]))
save(layer, torch.zeros(2, 4, 30, 16), Path(sys.argv[2]))
"""
    torch.save(layer.state_dict(), tmp_path / "state.pt")
    program = tmp_path / "packaged.pt2"
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "state.pt"), str(program)], check=True)
    forgotten(op)
    elsewhere(by_text(name), program, x).agree(layer, x)


def test_a_program_without_its_operator_says_what_to_do(tmp_path: Path) -> None:
    name, x = "known_to_nobody", random(2, 4, 30, 16)
    op = flashgen.loads(text_of(name))
    program = save(Layer(op), x, tmp_path / "program.pt2")
    forgotten(op)
    failure = elsewhere("import flashgen", program, x).failure
    assert f"torch.ops.{op.name.replace('::', '.')}" in failure
    assert f"import the package that `flashgen build` wrote for '{name}', or call flashgen.load" in failure
    unknown = f"{name}_0123456789abcdef"
    with pytest.warns(RuntimeWarning, match="is there: other lines, constants"):
        assert not hasattr(torch.ops.flashgen, unknown)


def test_unknown_names_of_the_namespace() -> None:
    """Attributes are asked for as of any namespace; what looks like an operator is explained."""
    assert not hasattr(torch.ops.flashgen, "anything")
    assert not hasattr(torch.ops.flashgen, "__origin__")
    with pytest.warns(RuntimeWarning, match="attention 'lost'"), pytest.raises(AttributeError, match="flashgen build"):
        _ = torch.ops.flashgen.lost_0123456789abcdef
    with pytest.warns(RuntimeWarning, match="attention 'lost'"):
        assert not hasattr(torch.ops.flashgen, "lost_0123456789abcdef_backward")


def test_damaged_records_are_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    op = flashgen.loads(text_of("damaged"), backend="reference")
    name = op.name.partition("::")[2]
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path / "cache"))
    assert loading.recalled(name) is None
    record = loading.Exported(op.spec, "reference", "")
    assert record.name == name
    record.remember()
    found = loading.recalled(name)
    assert found == record
    assert [each.name for each in loading.all_recalled()] == [name]
    Cache.of_operators().write(loading._key(name), "operator.json", b'{"name": "damaged", "spec": {}}')
    assert loading.recalled(name) is None
    assert not list(loading.all_recalled())
    Cache.default().clear()
    assert not Cache.of_operators().root.exists()


# Modules --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strict", [False, True])
def test_attention_modules(strict: bool) -> None:
    layer = flashgen.nn.Attention(flashgen.loads(text_of("module")), heads=4).eval()
    length = torch.export.Dim("length", min=2, max=512)
    x = tuple(random(2, 4, 30, 16, seed=n) for n in range(3))
    program = torch.export.export(
        layer, x, dynamic_shapes={"q": {2: length}, "k": {2: length}, "v": {2: length}}, strict=strict
    )
    longer = [random(2, 4, 41, 16, seed=n) for n in range(3)]
    module = program.module()
    torch.testing.assert_close(module(*longer), layer(*longer))
    module(*longer).sum().backward()
    found = {name: each.grad for name, each in module.named_parameters()}
    layer(*longer).sum().backward()
    assert sorted(found) == ["gain", "slope"]
    for name, parameter in layer.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad)


class SelfAttention(torch.nn.Module):
    """PyTorch's layer around a spec, with padding."""

    def __init__(self) -> None:
        super().__init__()
        op = flashgen.loads("attention padded_module { head_dim 16  mask causal }")
        self.layer = flashgen.nn.MultiheadAttention(32, 2, spec=op, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        padding = torch.arange(x.shape[1], device=x.device).expand(x.shape[0], -1) >= x.shape[1] - 3
        o: Tensor = self.layer(x, x, x, key_padding_mask=padding)[0]
        return o


@pytest.mark.slow
def test_multihead_attention_in_a_fresh_process(tmp_path: Path) -> None:
    torch.manual_seed(0)
    layer = SelfAttention()
    program = torch.export.export(
        layer, (random(2, 30, 32),), dynamic_shapes={"x": {1: torch.export.Dim("length", min=4, max=512)}}
    )
    torch.export.save(program, tmp_path / "program.pt2")
    x = random(2, 41, 32, seed=4)
    elsewhere("import flashgen", tmp_path / "program.pt2", x).agree(layer, x)


# AOTInductor ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_compiled_packages_in_fresh_processes(tmp_path: Path) -> None:
    """By what is remembered, and by the package; without either PyTorch names the operator."""
    name, x = "ahead_of_time", random(2, 4, 30, 16)
    op, folder = flashgen.loads(text_of(name)), built(name, tmp_path)
    layer = Layer(op).requires_grad_(False)
    program, package = save(layer, x, tmp_path / "program.pt2"), tmp_path / "compiled.pt2"
    code = """
import sys
import flashgen, torch
options = {"aot_inductor.compile_wrapper_opt_level": "O0"}  # the compiler is not what is tested
program = torch.export.load(sys.argv[1])
torch._inductor.aoti_compile_and_package(program, package_path=sys.argv[2], inductor_configs=options)
"""
    subprocess.run([sys.executable, "-c", code, str(program), str(package)], check=True, capture_output=True)
    load = "torch._inductor.aoti_load_package(program)"
    elsewhere("import flashgen", package, x, load).agree(layer, x)
    forgotten(op)
    fails_first = f"""
import flashgen, torch
try:
    torch._inductor.aoti_load_package(sys.argv[1])
    raise SystemExit("found")
except RuntimeError as error:
    assert {op.name!r} in str(error), error
"""
    elsewhere(fails_first + by_package(name, folder), package, x, load).agree(layer, x)
