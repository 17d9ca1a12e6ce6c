"""What is one number for a launch costs kernels for GPUs what a constant costs them, whatever its sign and size."""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import flashgen
from flashgen.ir.text import text
from flashgen.ir.types import ElementType
from flashgen.kinds.kind import PassName
from flashgen.op.op import AttentionOp
from flashgen.plan.plan import USUAL_CALLS
from flashgen.targets.gpu.compile import compile_calls
from flashgen.targets.gpu.emit import emit_cuda
from flashgen.targets.gpu.recipe import decide
from flashgen.targets.gpu.score import Bounded
from flashgen.targets.gpu.tiles import GpuPlan
from tests.cuda.helpers import planned, variant_of
from tests.cuda.nvrtc import needs_nvrtc
from tools.digests.elf import sections

# What layers say, with a number's declaration left open: as a param, and as a constant.
STRUCTURES: dict[str, tuple[str, str, str]] = {
    "scale": ("param f: f32", "const f = 0.1", "scale f"),
    "scale, causal": ("param f: f32", "const f = 0.1", "scale f  mask j <= i + Nk - Nq"),
    "scale of a mod": ("param f: f32", "const f = 1.5", "score s * f  mask causal"),
    "scale, sink": ("param f: f32", "const f = 0.1", "tensor z: f32[H] grad  scale f  weights softmax(sink = z[h])"),
    "scale, slopes": ("param f: f32", "const f = 0.1", "tensor z: f32[H] grad  scale f  score s + z[h] * (j - i)"),
    "scale, bias": ("param f: f32", "const f = 0.1", "tensor z: f32[H, Nq, Nk] grad  scale f  score s + z[h, i, j]"),
    "scaled bias": ("param f: f32", "const f = 0.5", "tensor z: f32[H, Nq, Nk] grad  score f * (s + z[h, i, j])"),
    "scale, padding": ("param f: f32", "const f = 0.1", "tensor n: i32[B]  scale f  mask j < n[b]"),
    "scale, documents": ("param f: f32", "const f = 0.1", "tensor d: i32[B, Nk]  scale f  mask same_document(d)"),
    "scale, dropout": ("param f: f32", "const f = 0.1", "scale f  dropout 0.1  mask causal"),
    "scale, window": (
        "param f: f32  param w: i32",
        "const f = 0.1  const w = 512",
        "scale f  mask window_left(w) and causal",
    ),
    "cap": ("param c: f32", "const c = 50.0", "score softcap(s, c)  mask causal"),
    "cap by hand": ("param c: f32  param f: f32", "const c = 30.0  const f = 0.1", "scale f  score c * tanh(s / c)"),
    "chunks": ("param w: i32", "const w = 1024", "mask causal and i // w == j // w"),
    "prefix": ("param w: i32", "const w = 1024", "mask causal or j < w"),
}


def decided(plan: GpuPlan, title: str) -> list[tuple[str, str]]:
    return [(each.question, each.choice) for each in plan.decided(title)]


def shape_of(tiles: Any) -> list[object]:
    return [getattr(tiles, name, None) for name in ("Br", "Bc", "warps", "stages", "producers", "warpgroups", "split")]


@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("width", [64, 128, 256])
@pytest.mark.parametrize("name", STRUCTURES)
def test_plans_are_those_of_constants(name: str, width: int, target: str) -> None:
    param, constant, rest = STRUCTURES[name]
    texts = (f"attention numbers {{ head_dim {width}  {each}  {rest} }}" for each in (param, constant))
    (_, own), (_, other) = (planned(each, target) for each in texts)
    for title, tiles in other.passes.items():
        assert decided(own, title) == decided(other, title), title
        assert shape_of(own.passes[title]) == shape_of(tiles), title
    assert own.by_element.keys() == other.by_element.keys() == set(ElementType) & own.by_element.keys()


@pytest.mark.parametrize(
    ("body", "most"),
    [
        ("param c: f32  score softcap(s, c)", 55.4),
        ("param c: f32  score 2 * softcap(s, c)", 27.7),
        ("param c: f32  score c * c * tanh(s)", None),  # in more than proportion
        ("param c: f32  score s * c", None),
    ],
)
def test_which_params_bound_scores(body: str, most: float | None) -> None:
    score = decide(variant_of(f"attention bounds {{ head_dim 64  {body} }}")).score
    assert isinstance(score, Bounded) == (most is not None)
    if isinstance(score, Bounded):
        assert score.condition is not None
        assert f"<= {most}" in text(score.condition)


_BRANCH, _PRODUCT = 0x947, 0x9F0  # of warpgroups: the lowest 12 bits of an instruction


def lengths_of_main_loops(code: bytes) -> list[int]:
    """Instructions of the innermost loops that have several products, in their order."""
    words = [low for low, _ in struct.iter_unpack("<QQ", code)]
    loops = []
    for at, word in enumerate(words):
        if word & 0xFFF == _BRANCH and word >> 63:  # back; counted in words of 4 bytes
            first = at + 1 + ((word >> 34 << 8 | word >> 16 & 0xFF) - (1 << 38)) // 4
            if sum(each & 0xFFF == _PRODUCT for each in words[first : at + 1]) >= 4:
                loops.append((first, at))
    inner = [x for x in loops if not any(y != x and x[0] <= y[0] and y[1] <= x[1] for y in loops)]
    return [last - first + 1 for first, last in inner]


@needs_nvrtc
@pytest.mark.parametrize("name", ["forward", pytest.param("backward", marks=pytest.mark.slow)])
def test_main_loops_of_caps_are_those_of_constants(name: PassName) -> None:
    found = []
    for each in ("param c: f32", "const c = 50.0"):
        spec = f"attention numbers {{ head_dim 64  dtype bf16  {each}  score softcap(s, c)  mask causal }}"
        source = emit_cuda(planned(spec, "sm_90a")[1], name)
        (made,) = compile_calls([source], USUAL_CALLS, "sm_90a")
        (binary,) = made.parts.values()
        every = sections(binary.path.read_bytes())
        found.append(next(x.content for x in every if x.name == f".text.numbers_d64_{name}_bf16"))
    own, others = (lengths_of_main_loops(each)[:2] for each in found)  # where some and where all pairs are kept
    assert len(own) == len(others) == 2
    assert all(x <= 1.01 * y for x, y in zip(own, others, strict=True)), (own, others)


WIDTH, QUERIES, KEYS = 64, 200, 330
FACTORS = {"usual": 0.125, "negative": -0.125, "none": 0.0, "steep": -24.0}
NUMBERS = {
    "scale": "head_dim 64  dtype bf16  param f: f32  scale f  mask causal",
    "sink": "head_dim 64  dtype bf16  param f: f32  tensor z: f32[H]  scale f  weights softmax(sink = z[h])",
    "wide": "head_dim 256  dtype bf16  param f: f32  scale f  mask causal",
    "cap": "head_dim 64  dtype bf16  param f: f32  score 4 * f * tanh(s / (4 * f))",
}


@functools.cache
def op_of(name: str, target: str) -> AttentionOp:
    return flashgen.loads(f"attention numbers_of_{name} {{ {NUMBERS[name]} }}", backend="emulator", target=target)


def drawn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def arguments(op: AttentionOp, f: float) -> dict[str, Any]:
    return {"f": f} | {each.name: torch.tensor([0.3, -2.0]) for each in op.spec.tensors}


def deviations(found: Sequence[torch.Tensor], exact: Sequence[torch.Tensor]) -> float:
    """The largest, by norm."""
    pairs = [(x.detach().double(), y.detach().double()) for x, y in zip(found, exact, strict=True)]
    return max(float((x - y).norm() / y.norm().clamp(min=1e-30)) for x, y in pairs)


@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
@pytest.mark.parametrize(
    ("name", "factor"),
    [
        pytest.param(name, factor, marks=pytest.mark.slow if name in ("sink", "wide") else ())
        for name in NUMBERS
        for factor in FACTORS
        if (name, factor) != ("cap", "none")  # 0 / 0 is no number
    ],
)
def test_results(name: str, factor: str, target: str) -> None:
    op, f = op_of(name, target), FACTORS[factor]
    width = op.spec.head_dims[0].qk
    q, k, v = (drawn(1, 2, n, width, seed=n + 1).requires_grad_() for n in (QUERIES, KEYS, KEYS))
    known = arguments(op, f)
    o, lse = op(q, k, v, **known, return_lse=True)
    exact, exact_lse = op.reference(q, k, v, **known, return_lse=True, dtype=torch.float64)
    assert torch.allclose(lse.double(), exact_lse, rtol=2e-6, atol=1e-5)
    d_o, d_lse = drawn(*o.shape, seed=5), drawn(*lse.shape, seed=6).float()
    own = torch.autograd.grad((o, lse), (q, k, v), (d_o, d_lse))
    theirs = torch.autograd.grad((exact, exact_lse), (q, k, v), (d_o.double(), d_lse.double()))
    assert deviations((o, *own), (exact, *theirs)) < 1.2e-2
    if f == 0:
        assert not any(bool(x.any()) for x in own[:2])


@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
def test_no_number_is_not_hidden(target: str) -> None:
    op = op_of("scale", target)
    q, k, v = (drawn(1, 2, 20, WIDTH, seed=n) for n in range(3))
    assert op(q, k, v, f=math.nan).isnan().all()


@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("factor", ["negative", pytest.param("steep", marks=pytest.mark.slow)])
def test_sequences_and_caches(factor: str, target: str) -> None:
    op, f = op_of("scale", target), FACTORS[factor]
    lengths, kept = (70, 40), (130, 200)
    q_starts, k_starts = ([0, each[0], sum(each)] for each in (lengths, kept))
    q, k, v = (drawn(sum(n), 2, WIDTH, seed=sum(n)) for n in (lengths, kept, kept))
    cu_q, cu_k = (torch.tensor(each, dtype=torch.int32) for each in (q_starts, k_starts))
    ragged = op.varlen(q, k, v, cu_q, cu_k, max_seqlen_q=max(lengths), max_seqlen_k=max(kept), f=f)
    for b in range(2):
        own, seen = slice(q_starts[b], q_starts[b + 1]), slice(k_starts[b], k_starts[b + 1])
        alone = [x[None, part].transpose(1, 2) for x, part in ((q, own), (k, seen), (v, seen))]
        exact = op.reference(*alone, f=f, dtype=torch.float64)
        assert deviations([ragged[own].transpose(0, 1)[None]], [exact]) < 6e-3
    cache = [drawn(2, 2, 300, WIDTH, seed=seed) for seed in (8, 9)]
    step, used = drawn(2, 4, 1, WIDTH, seed=7), torch.tensor([300, 170], dtype=torch.int32)
    found = op.decode(step, cache[0], cache[1], used, f=f, num_splits=3)
    for b, length in enumerate(used.tolist()):
        alone = [step[b : b + 1], *(x[b : b + 1, :, :length] for x in cache)]
        exact = op.reference(*alone, f=f, q_start=length - 1, q_total=length, dtype=torch.float64)
        assert deviations([found[b : b + 1]], [exact]) < 6e-3
