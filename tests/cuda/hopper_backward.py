"""What tests of Hopper's backward kernels compare, on the emulator: results, bytes, windows and repeats."""

from __future__ import annotations

from collections.abc import Callable, Collection

import pytest
import torch

import flashgen
from flashgen.hosts.emulator.report import EmulatorError, FaultKind
from flashgen.ir.shape import Shape
from flashgen.ir.types import ElementType
from flashgen.op.loading import load_spec
from flashgen.op.op import AttentionOp
from flashgen.targets.gpu.schedules import Backward
from flashgen.verification.verify import verify_case
from tests.cuda.hopper import changed, random
from tests.numeric.helpers import failures


def loaded(name: str, text: str) -> AttentionOp:
    """The op of a spec's text in bfloat16, by the kernels of sm_90a."""
    spec = flashgen.loads(f"attention {name.replace(' ', '_')} {{ dtype bf16  {text} }}", backend="reference").spec
    return load_spec(spec, "emulator", "sm_90a")


def check_results_and_bytes(
    name: str, text: str, shape: tuple[int, int, int, int, int], planned: Callable[[Backward], bool]
) -> None:
    """The tiles are as ``planned``, results those of float64, and the bytes that move are the predicted ones."""
    op = loaded(name, text)
    assert all(planned(each.elements[0].backward) for each in op.plan.values())
    case = verify_case(op, op.spec.head_dims[0], ElementType.BF16, Shape(*shape))
    assert case.ok, failures(case)
    assert all(each.predicted == each.counted for each in case.hbm_bytes.values())


def check_gradients_repeat(name: str, text: str) -> None:
    """Asked to, gradients come out the same bit by bit."""
    op = loaded(name, text)
    width = op.spec.head_dims[0].qk
    learned = [random(1, 2, 150, width, seed=n).requires_grad_() for n in range(3)]
    d_o = random(1, 2, 150, width, seed=3)
    first, second = (torch.autograd.grad(op(*learned, deterministic=True), learned, d_o) for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))


def gradients(op: AttentionOp, *, deterministic: bool = False) -> float:
    """Runs both passes over several tiles; the largest error of a gradient, relative to its largest element."""
    D, Dv = op.spec.head_dims[0].qk, op.spec.head_dims[0].v
    q, d_o = random(1, 2, 330, D, seed=0), random(1, 2, 330, Dv, seed=1)
    k, v = random(1, 1, 70, D, seed=2), random(1, 1, 70, Dv, seed=3)
    learned = [x.requires_grad_() for x in (q, k, v)]
    found = torch.autograd.grad(op(*learned, deterministic=deterministic), learned, d_o)
    exact = [x.detach().double().requires_grad_() for x in learned]
    truth = torch.autograd.grad(op.reference(*exact), exact, d_o.double())
    return max(float((x - y).abs().max() / y.abs().max()) for x, y in zip(found, truth, strict=True))


def check_windows_of_two_tiles(name: str, text: str) -> None:
    """Gradients are right where a list of visits is worked on by two tiles at a time."""
    windows = r"(window \+=? |first\(\) \+ )fg::WINDOW"
    op = changed(name, text, "backward", windows, r"\g<1>2", count=6)
    for deterministic in (False, True):
        assert gradients(op, deterministic=deterministic) < 0.01


def check_mistake(name: str, text: str, old: str, new: str, kinds: Collection[FaultKind]) -> None:
    """With a pattern of its backward pass replaced a kernel that was right is refused, for one of these reasons."""
    op = changed(name, text, "backward", old, new)
    with pytest.raises(EmulatorError) as caught:
        gradients(op)
    assert caught.value.kind in kinds, str(caught.value)
