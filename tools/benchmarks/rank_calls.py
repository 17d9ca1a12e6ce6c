"""Calls over ranks that are timed: variants, tensors, what of it one device would do alone, and who does the same.

In: a ``Setting``. Out: callables, and the bytes that its mask needs. Every rank calls the same functions in one order.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import flashgen
from flashgen.distributed import ContextParallel, Partition, context_parallel, partition

D = 128
WINDOW, DOCUMENT = 4096, 4096
SPECS = {
    "causal": "mask causal",
    "window": "mask causal and window_left({window})",
    "documents": "tensor doc: i32[B, Nk]  mask causal and same_document(doc)",
    "alibi": "tensor slope: f32[H] grad  score s - slope[h] * (i - j)  mask causal",
}
# How each is dealt out: windows and documents send least where a rank holds one part.
PARTITIONS = {"window": "runs", "documents": "runs"}
METHODS = ("ring", "all_gather", "ulysses")
# PyTorch's own, for causal masks: the backend that computes its parts.
PEERS = {"torch flash": SDPBackend.FLASH_ATTENTION, "torch cudnn": SDPBackend.CUDNN_ATTENTION}

Pass = Callable[[], object]


@dataclass(frozen=True)
class Scale:
    """What a run is of: heads, tokens a rank in the order of their weight, the device; masks shrink with ``unit``."""

    heads: int
    kv_heads: int
    tokens: tuple[int, ...]
    device: str
    unit: int  # of a window and of a document

    def settings(self) -> Iterator[Setting]:
        """The rows, those that matter most first."""
        middle, short, *longer = self.tokens
        first = [Setting(variant, "ring", 0) for variant in ("causal", "window", "documents")]
        first += [Setting(variant, "all_gather", 0) for variant in ("causal", "window", "documents")]
        then = [Setting("alibi", "ring", 0), *(Setting("causal", method, 0) for method in ("ulysses", *PEERS))]
        rest = [Setting("alibi", "all_gather", 0)]
        rest += [Setting(variant, "ulysses", 0) for variant in ("window", "documents", "alibi")]
        for tokens in (middle, short):
            yield from (replace(each, tokens=tokens) for each in (*first, *then))
        for tokens in longer:
            yield from (replace(each, tokens=tokens) for each in first)
        for tokens in (middle, short):
            yield Setting("causal", "ring", tokens, wide=False)
            yield from (replace(each, tokens=tokens) for each in rest)
        for tokens in longer:
            yield from (replace(each, tokens=tokens) for each in (*then, *rest))


@dataclass(frozen=True)
class Setting:
    """One row: ``tokens`` a rank. ``wide``: parts of 16-bit tensors are written in float32."""

    variant: str
    method: str
    tokens: int
    wide: bool = True

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.variant}, {self.method}, {self.tokens} tokens a rank{'' if self.wide else ', narrow'}"


@functools.cache
def operator(variant: str, unit: int) -> Any:
    """The op of a variant."""
    return flashgen.loads(text_of(variant, unit))


def text_of(variant: str, unit: int) -> str:
    """Its spec."""
    return f"attention ranks_{variant} {{ head_dim {D}  {SPECS[variant].format(window=unit)} }}"


@functools.cache
def captured(variant: str, scale: Scale, length: int) -> dict[str, Tensor]:
    """What a variant reads, the same on every rank."""
    if variant == "documents":
        generator = torch.Generator().manual_seed(1)
        starts = torch.rand(1, length, generator=generator) < 1 / scale.unit
        return {"doc": starts.cumsum(1).to(torch.int32).to(scale.device)}
    if variant == "alibi":
        slope = 2.0 ** (-8.0 * torch.arange(1, scale.heads + 1) / scale.heads)
        return {"slope": slope.to(scale.device).requires_grad_()}
    return {}


@functools.cache
def dealt(variant: str, scale: Scale, tokens: int) -> Partition:
    """Who holds what."""
    world = dist.get_world_size()
    named: dict[str, Any] = {**captured(variant, scale, tokens * world)}
    return partition(
        operator(variant, scale.unit), tokens * world, world, method=PARTITIONS.get(variant, "balanced"),
        heads=scale.heads, kv_heads=scale.kv_heads, **named,
    )  # fmt: skip


def first_key(setting: Setting, scale: Scale, position: int) -> int:
    """The first key that the mask keeps for a query."""
    if setting.variant == "window":
        return max(position - scale.unit + 1, 0)
    if setting.variant == "documents":
        doc = captured("documents", scale, setting.tokens * dist.get_world_size())["doc"][0]
        return int(torch.searchsorted(doc, doc[position]))
    return 0


def bytes_needed(setting: Setting, scale: Scale) -> list[int]:
    """Bytes of keys and values that the mask keeps for each rank and others hold: to the key, nothing rounded."""
    held = dealt(setting.variant, scale, setting.tokens)
    found = []
    for own in held.spans:
        needed = torch.zeros(held.length, dtype=torch.bool)
        for start, stop in own:
            needed[first_key(setting, scale, start) : stop] = True
        for start, stop in own:
            needed[start:stop] = False
        found.append(int(needed.sum()) * scale.kv_heads * 2 * D * 2)
    return found


class Calls:
    """The tensors of a setting on this rank, and what is timed of them."""

    def __init__(self, setting: Setting, scale: Scale) -> None:
        self.setting, self.scale = setting, scale
        self.length = setting.tokens * dist.get_world_size()
        self.held = dealt(setting.variant, scale, setting.tokens)
        self.named = captured(setting.variant, scale, self.length)
        self.op = operator(setting.variant, scale.unit)
        self.rows = self.held.lengths[dist.get_rank()]
        self.q, self.d_o = (self._drawn(n, scale.heads, self.rows) for n in (0, 1))
        self.k, self.v = (self._drawn(n, scale.kv_heads, self.rows) for n in (2, 3))
        self.sharded: ContextParallel = context_parallel(
            self.op, method=setting.method, partition=self.held, check=False, wide=setting.wide
        )

    def over_ranks(self, *, backward: bool) -> Pass:
        """The call over ranks."""
        leaves = [x.detach().requires_grad_() for x in (self.q, self.k, self.v)]
        learned = [x for x in self.named.values() if x.requires_grad]

        def both() -> object:
            return torch.autograd.grad(self.sharded(*leaves, **self.named), [*leaves, *learned], self.d_o)

        return both if backward else self._without_gradients(lambda: self.sharded(*leaves, **self.named))

    def alone(self, *, backward: bool) -> Pass:
        """The same share of the work on this device alone: calls of the op, one a span of rows, with all their keys."""
        parts = []
        before = 0
        whole_k, whole_v = (self._drawn(n, self.scale.kv_heads, self.length) for n in (2, 3))
        for start, stop in self.held.spans[dist.get_rank()]:
            at = slice(before, before + stop - start)
            low = first_key(self.setting, self.scale, start)
            tensors = (self.q[:, :, at], whole_k[:, :, low:stop], whole_v[:, :, low:stop])
            where = {"q_start": start, "kv_start": low, "q_total": self.length, "kv_total": self.length}
            parts.append((tuple(x.detach().requires_grad_() for x in tensors), where, self.d_o[:, :, at]))
            before += stop - start
        learned = [x for x in self.named.values() if x.requires_grad]

        def both() -> object:
            return [
                torch.autograd.grad(self.op(*own, **where, **self.named), [*own, *learned], d_o)
                for own, where, d_o in parts
            ]

        def forward() -> object:
            return [self.op(*own, **where, **self.named) for own, where, _ in parts]

        return both if backward else self._without_gradients(forward)

    @staticmethod
    def _without_gradients(call: Pass) -> Pass:
        def run() -> object:
            with torch.no_grad():
                return call()

        return run

    def _drawn(self, seed: int, heads: int, rows: int) -> Tensor:
        """What is drawn matters for no time."""
        generator = torch.Generator(self.scale.device).manual_seed(seed)
        shape = (1, heads, rows, D)
        return torch.randn(shape, generator=generator, device=self.scale.device, dtype=torch.bfloat16)


@contextlib.contextmanager
def peer(setting: Setting, scale: Scale) -> Iterator[Callable[[bool], Pass]]:
    """PyTorch's context parallelism while it is entered: a callable that makes a pass, with backward or without.

    Raises whatever the version at hand does where it has none.
    """
    from torch.distributed.tensor.experimental import context_parallel as of_torch

    world, kind = dist.get_world_size(), scale.device.split(":")[0]
    mesh = init_device_mesh(kind, (world,))
    shape = (1, scale.heads, setting.tokens * world, D)
    # Of few key/value heads it knows nothing in every version: each head has its own.
    buffers = [torch.randn(shape, device=scale.device, dtype=torch.bfloat16) for _ in range(4)]
    with of_torch(mesh, buffers=buffers, buffer_seq_dims=[2] * 4, no_restore_buffers=set(buffers)):
        leaves, d_o = [x.detach().requires_grad_() for x in buffers[:3]], buffers[3]

        def attend() -> Tensor:
            return functional.scaled_dot_product_attention(leaves[0], leaves[1], leaves[2], is_causal=True)

        def made(backward: bool) -> Pass:
            def run() -> object:
                with sdpa_kernel(PEERS[setting.method]):
                    if backward:
                        return torch.autograd.grad(attend(), leaves, d_o)
                    with torch.no_grad():
                        return attend()

            return run

        yield made
