"""A GPT small enough for a laptop around the attention of any spec, and the same attention by PyTorch's own operators.

What the other examples share: ``Gpt`` is made of ``Block``s, a block of a ``flashgen.nn.Attention`` that owns what the
spec learns. ``InPyTorch`` has the same Parameters and computes the same with ``scaled_dot_product_attention`` where
that can, so that two models of one ``state_dict`` differ in nothing but their kernels.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import click
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

import flashgen
from flashgen.analysis.simplify import simplify
from flashgen.cli.options import read_constant
from flashgen.compiler.reading import Constant
from flashgen.ir.expr import literal
from flashgen.ir.spec import AttentionSpec, HeadDim
from flashgen.nn import Attention
from flashgen.nn.attention import learned_values
from flashgen.nn.multihead import masked
from flashgen.op.op import BaseOp
from flashgen.picture.plotting import SUFFIXES, require
from flashgen.reference import dense
from flashgen.reference.evaluate import Evaluator
from flashgen.reference.shard import Shard
from tools.benchmarks.peer import Inexpressible
from tools.benchmarks.peers import CAUSAL, additive_terms

_PAIRS_AT_ONCE = 2**24
Kind = TypeVar("Kind", bound=Attention)


class Refused(Exception):  # noqa: N818 - reads as what it says
    """What was asked for cannot be; the message says what to ask for instead."""


# -- the model ---------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """x + attention, x + perceptron, each behind a norm; [B, N, width]."""

    def __init__(self, width: int, attention: Attention) -> None:
        super().__init__()
        self.attention = attention
        self.before_attention, self.before_perceptron = nn.LayerNorm(width), nn.LayerNorm(width)
        self.project, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.perceptron = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        return self.with_attended(x, self.attention(*self.heads_of(x)))

    def heads_of(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v, [B, H, N, D] each."""
        heads = self.project(self.before_attention(x)).unflatten(-1, (3, self.attention.heads, -1))
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        return q, k, v

    def with_attended(self, x: Tensor, o: Tensor) -> Tensor:
        """What follows the attention, whose result is ``o`` [B, H, N, D]."""
        x = x + self.out(o.transpose(1, 2).flatten(2))
        return x + self.perceptron(self.before_perceptron(x))  # type: ignore[no-any-return]


class Gpt(nn.Module):
    """Tokens [B, N] → logits [B, N, vocabulary], with one block for each attention.

    ``positions``: how many of them get an embedding of their own; 0 leaves positions to the attention.
    """

    def __init__(self, vocabulary: int, attentions: Sequence[Attention], positions: int) -> None:
        super().__init__()
        width = attentions[0].heads * attentions[0].head_dim.qk
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(positions, width) if positions else None
        self.blocks = nn.Sequential(*(Block(width, each) for each in attentions))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False))
        for each in (self.tokens, self.positions):
            if each is not None:
                nn.init.normal_(each.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.blocks(self.embedded(tokens, torch.arange(tokens.shape[1]))))
        return logits

    def embedded(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """[B, N, width] of tokens [B, N] at positions [N] or [B, N]."""
        x: Tensor = self.tokens(tokens)
        return x if self.positions is None else x + self.positions(positions.to(tokens.device))


# -- its attention -----------------------------------------------------------------------------------------------------


def spec_of(
    spec: str,
    heads: int,
    head_dim: int,
    length: int,
    *,
    name: str | None = None,
    const: Mapping[str, Constant] | None = None,
    causal: bool = False,
) -> AttentionSpec:
    """The spec of a gallery's name or a file, for heads of ``head_dim`` columns whatever it names.

    ``causal`` drops every key after the query, too. Raises ``Refused`` for what a layer of these sizes cannot own, and
    what ``flashgen.load`` raises.
    """
    own = flashgen.load(spec, name=name, const=const, backend="reference").spec  # compiles nothing
    found = masked(own, (), causal=causal)
    if HeadDim(head_dim, head_dim) not in own.head_dims:
        found = replace(found, head_dims=(HeadDim(head_dim, head_dim),))
    for param in own.params:
        if param.default is None:
            raise Refused(f"'{own.name}' takes '{param.name}', which has no default; give it one in the spec")
    sizes = {"H": heads, "Hkv": heads, "D": head_dim, "Dv": head_dim, "Nq": length, "Nk": length}
    owned = {each.name for each in learned_values(found, sizes, {})}
    for tensor in own.tensors:
        if tensor.name in owned:
            continue
        if tensor.grad:
            raise Refused(
                f"'{own.name}' captures '{tensor.name}', whose shape depends on the batch: it is computed from the "
                "input, not owned by a layer; write the module that computes it"
            )
        raise Refused(
            f"'{own.name}' captures '{tensor.name}', which is data that a call brings; here every tensor of a spec "
            "has to be learned (`grad`)"
        )
    return found


def attentions_of(kind: Callable[..., Kind], op: BaseOp, layers: int, heads: int, length: int) -> list[Kind]:
    """One for each layer."""
    return [kind(op, heads=heads, sizes={"Nq": length, "Nk": length}) for _ in range(layers)]


def first_leak(spec: AttentionSpec, batch: int, heads: int, length: int) -> tuple[int, int] | None:
    """The first query whose mask shows it a later key, and the first such key; None where there is none."""
    q = v = torch.empty(1, spec.head_dims[0].qk)
    rows = max(1, _PAIRS_AT_ONCE // (batch * heads * length))
    for start in range(0, length, rows):
        count = min(rows, length - start)
        shard = Shard(batch, heads, heads, count, length, q_start=start, q_total=length)
        evaluate, (_, _, i, j) = dense.evaluator(spec, q, v, shard, {}, {}, torch.float32)
        later = dense.kept_by_position(spec, evaluate).expand(batch, heads, count, length) & (j > i)
        if later.any():
            row, column = later.any(0).any(0).nonzero()[0].tolist()
            return start + row, column
    return None


def learned_by(attention: Attention) -> dict[str, Any]:
    """What a layer owns, by name, as its op takes it."""
    params = [param.name for param in attention.op.spec.params]
    return {name: x.reshape(()) if name in params else x for name, x in attention.named_parameters()}


class InPyTorch(Attention):
    """The module of the same spec, computed by PyTorch's operators; ``way`` says by which.

    ``standard`` forms scores and weights as matrices, as the paper's Algorithm 0 does, also where SDPA would not.
    """

    def __init__(self, op: BaseOp, *, standard: bool = False, **sizes: object) -> None:
        super().__init__(op, **sizes)  # type: ignore[arg-type]
        self._terms = None
        self._fixed: tuple[Shard, Tensor | None] | None = None
        try:
            bias, keep = additive_terms(op.spec)
        except Inexpressible:
            self.way = "the dense formula"
            return
        self._terms = bias, keep
        self._is_causal = bias is None and keep is not None and simplify(keep) == CAUSAL and not standard
        self._standard = standard
        if standard:
            self.way = "standard attention"
        elif bias is None and (keep is None or self._is_causal):
            self.way = "SDPA"
        else:
            self.way = f"SDPA with {'a mask' if bias is None else 'a bias'} of N × N"

    def forward(self, q: Tensor, k: Tensor, v: Tensor, **_: object) -> Tensor:
        params = [param.name for param in self.op.spec.params]
        learned = learned_by(self)
        o: Tensor
        if self._terms is None:
            if not self.training and self.op.spec.dropout is not None:
                learned["dropout_p"] = 0.0
            with torch.autocast(q.device.type, enabled=False):
                o = self.op.reference(q, k, v, dtype=None, **learned)
            return o
        tensors = {name: x for name, x in learned.items() if name not in params}
        chosen = {name: x for name, x in learned.items() if name in params}
        shard = Shard.whole(q.shape, k.shape)
        evaluate, _indices = dense.evaluator(self.op.spec, q, v, shard, tensors, chosen, torch.float32)
        evaluate.guard.narrow(torch.ones((1, 1, 1, 1), dtype=torch.bool, device=q.device))
        scale = evaluate.real(self.op.spec.scale)
        if self._standard:
            s = q @ k.transpose(-1, -2) * scale
            bias = self._bias(evaluate, shard)
            if bias is not None:
                s = s.masked_fill(~bias, -torch.inf) if bias.dtype is torch.bool else s + bias
            return torch.softmax(s, -1) @ v
        if scale.requires_grad:  # SDPA's scale is a number
            q, scale = q * scale, torch.ones(())
        bias = None if self._is_causal else self._bias(evaluate, shard)
        return scaled_dot_product_attention(q, k, v, attn_mask=bias, is_causal=self._is_causal, scale=float(scale))

    def _bias(self, evaluate: Evaluator, shard: Shard) -> Tensor | None:
        """What is added to scores, or which pairs are kept, [1 or B, H, N, N]; made once where nothing is learned."""
        assert self._terms is not None
        if self._fixed is not None and self._fixed[0] == shard:
            return self._fixed[1]
        bias, keep = self._terms
        kept = evaluate.boolean(literal(True) if keep is None else keep)
        kept = kept.broadcast_to(1 if kept.dim() < 4 else len(kept), shard.heads, shard.q_len, shard.kv_len)
        evaluate.guard.narrow(kept)
        found = None if keep is None else kept
        if bias is not None:
            found = torch.where(kept, evaluate.real(bias), -torch.inf)
        if not any(True for _ in self.parameters()):
            self._fixed = shard, found
        return found


# -- the command line --------------------------------------------------------------------------------------------------


def device_named(text: str) -> torch.device:
    """``cpu``, ``cuda`` or ``cuda:1``. Raises ``Refused`` for others, and where there is no such GPU."""
    try:
        device = torch.device(text)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise Refused(f"--device {text}: there is 'cpu', and 'cuda' or 'cuda:1' for a GPU")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        why = (
            "there is no CUDA here" if not torch.cuda.is_available() else f"there are {torch.cuda.device_count()} GPUs"
        )
        raise Refused(f"--device {text}: {why}; `flashgen doctor` says what a GPU needs")
    return device


def constant(text: str) -> tuple[str, Constant]:
    """``NAME=VALUE``, as the commands of flashgen read it."""
    try:
        return read_constant(text)
    except click.BadParameter as error:
        raise argparse.ArgumentTypeError(error.message) from None


def check_plot(path: Path) -> None:
    """Before anything takes long. Raises ``Refused`` for a suffix that is no picture's, ``PlottingMissing``."""
    require()
    if path.suffix not in SUFFIXES:
        raise Refused(f"--plot {path}: pictures are written as {', '.join(SUFFIXES)}")


def positive(text: str) -> int:
    """An int of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is too few; 1 is the least")
    return value
