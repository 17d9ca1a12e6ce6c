"""Every wrong call says which argument is wrong, what was expected and what came."""

from __future__ import annotations

import re
import shutil
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import flashgen
from flashgen.op import engine
from flashgen.op.op import BACKENDS, check_backend
from tests.op.helpers import CAUSAL, RICH, SIGMOID, captured, op, qkv

Change = Callable[[list[Any], dict[str, Any]], None]


def at(position: int, change: Callable[[Tensor], object]) -> Change:
    def apply(inputs: list[Any], _: dict[str, Any]) -> None:
        inputs[position] = change(inputs[position])

    return apply


def name(**arguments: object) -> Change:
    def apply(_: list[Any], given: dict[str, Any]) -> None:
        given.update(arguments)

    return apply


def without(argument: str) -> Change:
    def apply(_: list[Any], given: dict[str, Any]) -> None:
        del given[argument]

    return apply


CASES: list[tuple[Change, type[Exception], str]] = [
    (at(0, lambda x: x.tolist()), TypeError, "'q' must be a tensor, not list"),
    (at(0, lambda x: x[0]), ValueError, "'q' has shape [4, 37, 16]; [B, H, Nq, D] is expected"),
    (at(1, lambda x: x[:1]), ValueError, "'k' has shape [1, 2, 37, 16]; dimension 0 must be 2, the batch size of q"),
    (
        at(1, lambda x: x[..., :8]),
        ValueError,
        "'k' has shape [2, 2, 37, 8]; dimension 3 must be 16, the head dimension",
    ),
    (at(2, lambda x: x[:, :1]), ValueError, "'v' has shape [2, 1, 37, 16]; dimension 1 must be 2, the number of heads"),
    (at(2, lambda x: x[:, :, :5]), ValueError, "'v' has shape [2, 2, 5, 16]; dimension 2 must be 37, the length of k"),
    (at(2, lambda x: x[..., :8]), ValueError, "the head dimension is 16/8; 'rich' is built for 16"),
    (at(0, lambda x: x[:, :3]), ValueError, "q has 3 heads and k has 2; H must be a multiple of Hkv"),
    (at(1, lambda x: x.bfloat16()), TypeError, "'k' is torch.bfloat16, but 'q' is torch.float32"),
    (at(2, lambda x: x.to("meta")), ValueError, "'v' is on meta, but 'q' is on cpu"),
    (name(slope=torch.ones(4).to("meta")), ValueError, "tensor 'slope' is on meta, but 'q' is on cpu"),
    (without("slope"), TypeError, "missing argument 'slope': the spec declares tensor slope: f32[H]"),
    (name(slop=1), TypeError, "unknown argument 'slop'; did you mean 'slope'?"),
    (name(zzz=1), TypeError, "unknown argument 'zzz'. The spec declares 'slope', 'doc', 'table', 'bias', 'cut', 'ell'"),
    (name(max_seqlen_q=3), TypeError, "unknown argument 'max_seqlen_q': op.varlen takes it, this call does not"),
    (name(block_table=3), TypeError, "unknown argument 'block_table': op.decode takes it, this call does not"),
    (name(is_causal=True), TypeError, "unknown argument 'is_causal': the spec says this, by its statement `mask caus"),
    (name(scale=0.3), TypeError, "unknown argument 'scale': the spec says this, by its statement `scale`"),
    (name(return_lse="x"), TypeError, "'return_lse' must be a bool or None, not str"),
    (name(return_lse=1), TypeError, "'return_lse' must be a bool or None, not int"),
    (name(slope=[1.0]), TypeError, "argument 'slope' must be a tensor (f32[H] in the spec), not list"),
    (name(slope=torch.ones(8)), ValueError, "tensor 'slope' has shape [8]; the spec declares [H] = [4]"),
    (name(slope=torch.ones(1)), ValueError, "tensor 'slope' has shape [1]; the spec declares [H] = [4]"),
    (name(slope=torch.ones(4, dtype=torch.int32)), TypeError, "tensor 'slope' is torch.int32; the spec declares f32"),
    (name(slope=torch.ones(4).bool()), TypeError, "(torch.float32), which takes floating tensors"),
    (
        name(slope=torch.ones(4, dtype=torch.complex64)),
        TypeError,
        "tensor 'slope' is torch.complex64; the spec declares f32",
    ),
    (
        name(slope=torch.full((4,), 1e39, dtype=torch.float64)),
        ValueError,
        "'slope' is torch.float64 and holds numbers beyond f32",
    ),
    (name(slope=torch.ones(4).to_sparse()), TypeError, "'slope' has layout torch.sparse_coo; a dense tensor"),
    (name(doc=torch.zeros(2, 37)), TypeError, "tensor 'doc' is torch.float32; the spec declares i32 (torch.int32)"),
    (name(doc=torch.zeros(2, 37).bool()), TypeError, "tensor 'doc' is torch.bool; the spec declares i32 (torch.int32)"),
    (
        name(doc=torch.full((2, 37), 2**63 + 1, dtype=torch.uint64)),
        ValueError,
        "'doc' is torch.uint64 and holds numbers",
    ),
    (name(table=torch.ones(8).int()), TypeError, "tensor 'table' is torch.int32; the spec declares bf16"),
    (name(doc=torch.zeros(2, 1, dtype=torch.int32)), ValueError, "[2, 1]; the spec declares [B, Nk] = [2, 37]"),
    (name(bias="x"), TypeError, "argument 'bias' must be a number or a 0-dim tensor (f32 in the spec), not str"),
    (name(bias=True), TypeError, "argument 'bias' must be a number or a 0-dim tensor (f32 in the spec), not bool"),
    (name(bias=torch.ones(1)), ValueError, "param 'bias' has shape [1]; a 0-dim tensor is expected"),
    (name(bias=torch.tensor(1)), TypeError, "param 'bias' is torch.int64; the spec declares f32 (torch.float32)"),
    (name(bias=torch.tensor(1.0, device="meta")), ValueError, "param 'bias' is on meta; the CPU or the device of q"),
    (name(bias=torch.tensor(1e39, dtype=torch.float64)), ValueError, "param 'bias' is torch.float64 and holds numbers"),
    (name(bias=1e39), ValueError, "argument 'bias' is 1e+39; an f32 holds nothing beyond ±3.4028235e+38"),
    (name(bias=-(2**200)), ValueError, "an f32 holds nothing beyond ±3.4028235e+38"),
    (name(bias=10**400), ValueError, "an f32 holds nothing beyond ±3.4028235e+38"),
    (
        name(bias=np.ones(())),
        TypeError,
        "argument 'bias' must be a number or a 0-dim tensor (f32 in the spec), not nd",
    ),
    (name(cut=1.5), TypeError, "argument 'cut' must be a number or a 0-dim tensor (i32 in the spec), not float"),
    (name(cut=2**31), ValueError, "argument 'cut' is 2147483648; an i32 lies in [-2**31, 2**31)"),
    (name(cut=torch.tensor(2**31)), ValueError, "param 'cut' is torch.int64 and holds numbers beyond i32"),
    (name(cut=torch.tensor(2.0)), TypeError, "param 'cut' is torch.float32; the spec declares i32 (torch.int32)"),
    (name(dropout_p="x"), TypeError, "'dropout_p' must be a number or a 0-dim tensor, not str"),
    (name(dropout_p=True), TypeError, "'dropout_p' must be a number or a 0-dim tensor, not bool"),
    (name(dropout_p=torch.ones(2)), ValueError, "'dropout_p' has shape [2]; a 0-dim tensor is expected"),
    (name(dropout_p=torch.tensor(True)), TypeError, "'dropout_p' is torch.bool; it must be a number"),
    (name(dropout_p=torch.tensor(0.1).requires_grad_()), ValueError, "'dropout_p' requires a gradient"),
    (name(dropout_p=1.0), ValueError, "'dropout_p' is 1.0; a drop probability lies in [0, 1)"),
    (name(dropout_p=-0.5), ValueError, "'dropout_p' is -0.5; a drop probability lies in [0, 1)"),
    (name(seed=1.5), TypeError, "'seed' must be an int or a 0-dim tensor of integers, not float"),
    (name(seed=True), TypeError, "'seed' must be an int or a 0-dim tensor of integers, not bool"),
    (
        name(seed=torch.tensor(5.0)),
        TypeError,
        "'seed' is torch.float32; it must be an int or a 0-dim tensor of integers",
    ),
    (name(seed=torch.tensor(True)), TypeError, "'seed' is torch.bool; it must be an int or a 0-dim tensor of integers"),
    (name(seed=torch.tensor([5, 6])), ValueError, "'seed' has shape [2]; a 0-dim tensor is expected"),
    (name(seed=torch.tensor(5, device="meta")), ValueError, "'seed' is on meta; the CPU or the device of q (cpu) is"),
    (name(seed=torch.tensor(5.0), dropout_p=0.0), TypeError, "'seed' is torch.float32"),
    (name(deterministic="yes"), TypeError, "'deterministic' must be a bool or None, not str"),
    (name(q_start=1.5), TypeError, "'q_start' must be an int, not float"),
    (name(h_start=True), TypeError, "'h_start' must be an int, not bool"),
    (name(b_start=None), TypeError, "'b_start' must be an int, not NoneType"),
    (name(kv_total="a"), TypeError, "'kv_total' must be an int, not str"),
    (name(q_total=torch.tensor(40)), TypeError, "'q_total' must be an int, not Tensor; pass int(…) of it"),
    (name(q_start=-1), ValueError, "'q_start' is -1; it must not be negative"),
    (name(q_total=36), ValueError, "'q_total' is 36, but this call reaches to 37 (q_start = 0, local length 37)"),
]


@pytest.mark.parametrize(("change", "kind", "message"), CASES)
def test_wrong_arguments(backend: str, change: Change, kind: type[Exception], message: str) -> None:
    inputs: list[Any] = [x.detach() for x in qkv()]
    arguments = captured()
    change(inputs, arguments)
    with pytest.raises(kind, match=re.escape(message)):
        op(RICH, backend)(*inputs, **arguments)
    if "is built for" not in message and "but 'q' is torch" not in message:  # the reference takes any of them
        with pytest.raises(kind, match=re.escape(message)):
            op(RICH, backend).reference(*inputs, **arguments)


def test_a_name_where_the_spec_captures_nothing(backend: str) -> None:
    for call in (op(CAUSAL, backend), op(CAUSAL, backend).reference):
        with pytest.raises(TypeError, match=r"unknown argument 'slope'\. The spec captures nothing: it declares no"):
            call(*qkv(), slope=torch.ones(4))


def test_more_by_position_than_the_op_takes(backend: str) -> None:
    """As other libraries take masks and slopes: what to write is said, whatever the call."""
    plain: Any = flashgen.loads("attention plain { head_dim 16 mask causal }", backend=backend)
    slopes: Any = flashgen.loads(
        "attention slopes { head_dim 16 tensor slope: f32[H] param w: f32 = 1.0 score s - w * slope[h] * (i - j) }",
        backend=backend,
    )
    x, starts = torch.randn(1, 2, 8, 16), torch.tensor([0, 8], dtype=torch.int32)
    rows, slope = torch.randn(8, 2, 16), torch.ones(2)
    with pytest.raises(TypeError, match=r"1 more was: pass what the spec captures by name, slope=…, w=…"):
        slopes(x, x, x, slope)
    with pytest.raises(TypeError, match=r"2 more were: pass what the spec captures by name, slope=…, w=…"):
        slopes.varlen(rows, rows, rows, starts, starts, 8, 8, slope, 2.0)
    with pytest.raises(TypeError, match=r"cache_seqlens are given by position, and 1 more was: pass .* slope=…, w=…"):
        slopes.decode(x[:, :, :1], x, x, 8, slope)
    with pytest.raises(TypeError, match=r"1 more was: the spec captures nothing.* as in `mask causal`"):
        plain(x, x, x, None)


def test_a_spec_is_a_text() -> None:
    with pytest.raises(TypeError, match=r"the text of a spec must be a str, not NoneType; flashgen\.load takes files"):
        flashgen.loads(None)  # type: ignore[arg-type]


def test_wrong_types(backend: str) -> None:
    half_only = flashgen.loads("attention half { head_dim 16 dtype bf16 mask causal }", backend=backend)
    with pytest.raises(TypeError, match=r"q, k and v are torch\.float32; 'half' is built for torch\.bfloat16"):
        half_only(*qkv())
    with pytest.raises(TypeError, match=r"q, k and v are torch\.int32; 'causal' is built for torch\.float32"):
        op(CAUSAL, backend)(*(x.detach().int() for x in qkv()))


def test_float64_is_for_the_reference() -> None:
    with pytest.raises(TypeError, match=r"are torch\.float64; 'causal' is built for"):
        op(CAUSAL, "tiled")(*(x.double() for x in qkv()))


def test_no_lse_for_pointwise_weights(backend: str) -> None:
    for call in (op(SIGMOID, backend), op(SIGMOID, backend).reference):
        with pytest.raises(ValueError, match="return_lse: 'sigmoid' has pointwise weights"):
            call(*qkv(), return_lse=True)


def test_dropout_has_to_be_in_the_spec(backend: str) -> None:
    for call in (op(CAUSAL, backend), op(CAUSAL, backend).reference):
        with pytest.raises(ValueError, match="'causal' has no dropout; add the statement `dropout"):
            call(*qkv(), dropout_p=0.1)
        call(*qkv(), dropout_p=0.0)


def test_gradients_have_to_be_in_the_spec(backend: str) -> None:
    fixed = flashgen.loads(
        "attention f { head_dim 16 tensor slope: f32[H] param a: f32 = 1.0 score a * s - slope[h] * (i - j) }",
        backend=backend,
    )
    slope = torch.ones(4, requires_grad=True)
    with pytest.raises(ValueError, match=r"'slope' requires a gradient.*`tensor slope: f32\[H\] grad`"):
        fixed(*qkv(), slope=slope)
    with pytest.raises(ValueError, match=r"'a' requires a gradient.*`param a: f32 grad`"):
        fixed(*qkv(), slope=slope.detach(), a=torch.tensor(1.0, requires_grad=True))
    with torch.no_grad():
        fixed(*qkv(), slope=slope)


def test_required_params(backend: str) -> None:
    gaussian = flashgen.loads("attention g { head_dim 16 param ell: f32 score s * ell }", backend=backend)
    with pytest.raises(TypeError, match="missing argument 'ell': the spec declares param ell: f32"):
        gaussian(*qkv())


def test_indices_are_proved_for_the_sizes_of_the_call(backend: str) -> None:
    """doc[b, i] needs Nq ≤ Nk, which only a call can tell."""
    packed = flashgen.loads(
        "attention p { head_dim 16 tensor doc: i32[B, Nk] mask same_document(doc) }", backend=backend
    )
    q, k, v = qkv()
    doc = torch.zeros(2, 20, dtype=torch.int32)
    packed(q[:, :, :20], k[:, :, :20], v[:, :, :20], doc=doc)
    with pytest.raises(ValueError, match=r"'p': index 'i' of tensor 'doc' .*Nq = 37"):
        packed(q, k[:, :, :20], v[:, :, :20], doc=doc)


class LittleMemory:
    """Stands for PyTorch's ways to make tensors: the one numbered ``failing`` finds no memory, the others are noted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.failing: int | None = None
        self.made: list[weakref.ref[Tensor]] = []
        for module, *names in ((torch, "empty_strided", "zeros"), (engine, "empty_like", "empty_strided")):
            for name in names:
                monkeypatch.setattr(module, name, self._limited(getattr(module, name)))

    def _limited(self, make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def limited(*args: Any, **options: Any) -> Tensor:
            if self.failing == len(self.made):
                raise torch.OutOfMemoryError("out of memory")
            made = make(*args, **options)
            self.made.append(weakref.ref(made))
            return made

        return limited

    def attempt(self, run: Callable[[], Any], failing: int | None) -> Any:
        """The result of ``run``; None where it ran out of memory."""
        self.failing, self.made = failing, []
        try:
            return run()
        except torch.OutOfMemoryError:
            return None
        finally:
            self.failing = None


def test_out_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever it happens: PyTorch's own error, nothing left allocated, and the next call is right."""
    if shutil.which("c++") is None:
        pytest.skip("needs a C++ compiler")
    rich, inputs, arguments = op(RICH, "cpu"), qkv(), captured()
    learned = [*inputs, arguments["slope"], arguments["table"]]

    def forward() -> Tensor:
        o: Tensor = rich(*inputs, deterministic=True, **arguments)
        return o

    def backward() -> tuple[Tensor, ...]:
        return torch.autograd.grad(o, learned, torch.ones_like(o), retain_graph=True)

    o = forward()
    expected = [o.detach(), *backward()]
    memory = LittleMemory(monkeypatch)
    for run, least in ((forward, 3), (backward, 6)):
        rich._registered.engine._workspaces._spare.clear()  # so that the workspace is asked for as well
        failures = 0
        while memory.attempt(run, failures) is None:
            assert [each() for each in memory.made] == [None] * failures
            failures += 1
        assert failures >= least  # results, sums of captured gradients, the workspace
        assert len(memory.made) == failures
    found = [forward().detach(), *backward()]
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_unknown_backend() -> None:
    with pytest.raises(ValueError, match="unknown backend 'gpu'; known are 'cpu', 'cuda', 'emulator', 'reference'"):
        flashgen.loads(CAUSAL, backend="gpu")


def test_backends_that_are_there() -> None:
    for backend in (None, *BACKENDS):
        check_backend(backend)


@pytest.mark.parametrize(
    "text", ["attention seedless { head_dim 8 }", "attention tabled { head_dim 8  tensor t: f32[H]  score s + t[h] }"]
)
def test_a_wrong_seed_is_named_where_nothing_is_dropped(text: str) -> None:
    op = flashgen.loads(text, backend="cpu")
    q = torch.randn(1, 1, 2, 8)
    given: dict[str, Any] = {"t": torch.ones(1)} if op.spec.tensors else {}
    wrong: Any = 0.5
    for call in (op, op.reference):
        with pytest.raises(TypeError, match="'seed' must be an int or a 0-dim tensor of integers, not float"):
            call(q, q, q, seed=wrong, **given)
        call(q, q, q, seed=3, **given)
