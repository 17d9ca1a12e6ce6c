"""Trains a small GPT for a moment, then writes on from prompts of different lengths, token by token, in a paged cache.

    python -m examples.generate alibi --tokens 100

Beside it the same weights by the dense formula, which computes the whole sequence for every token: the tokens have to
be the same. What stands in a page is written once, by ``op.decode``; pages of the sequences lie in any order.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from examples.small_gpt import Block, Gpt, InPyTorch, Refused, attentions_of, learned_by, positive
from examples.train_gpt import VOCABULARY, Settings, train
from flashgen import SpecError

PROMPTS = ("def ", "import os\n\nclass ", "    return ")


class PagedCache:
    """Keys and values of all layers and sequences, in pages [pages, H, page, D] that ``table`` [B, P] names.

    ``filled`` [B] are the rows of each sequence.
    """

    def __init__(self, model: Gpt, batch: int, room: int, page: int) -> None:
        each = -(-room // page)
        self.table = torch.randperm(batch * each).view(batch, each).int()
        self.filled = torch.zeros(batch, dtype=torch.int32)
        self.layers = []
        for block in model.blocks:
            assert isinstance(block, Block)
            heads, dims = block.attention.kv_heads, block.attention.head_dim
            self.layers.append(tuple(torch.zeros(batch * each, heads, page, width) for width in (dims.qk, dims.v)))

    def step(self, model: Gpt, tokens: Tensor, first: int = 0) -> Tensor:
        """The logits behind the last of ``tokens`` [B, new], of sequences from ``first`` on; their rows are kept."""
        sequences = slice(first, first + len(tokens))
        filled, table = self.filled[sequences], self.table[sequences]
        x = model.embedded(tokens, filled[:, None] + torch.arange(tokens.shape[1]))
        for block, (k_pages, v_pages) in zip(model.blocks, self.layers, strict=True):
            assert isinstance(block, Block)
            q, k, v = block.heads_of(x)
            o = block.attention.op.decode(
                *(q, k_pages, v_pages, filled),
                k=k,
                v=v,
                block_table=table,
                b_start=first,
                b_total=len(self.table),
                **learned_by(block.attention),
            )
            x = block.with_attended(x, o)
        filled += tokens.shape[1]
        logits: Tensor = model.head(x[:, -1])
        return logits


@dataclass(frozen=True)
class Written:
    """The tokens of each prompt, those of the prompt included, and the seconds that a new token took of all of them."""

    tokens: list[list[int]]
    seconds: float


@torch.no_grad()
def with_cache(model: Gpt, prompts: Sequence[bytes], count: int, page: int) -> Written:
    """``count`` tokens more of each prompt: prompts one by one, then all sequences a token at a time."""
    cache = PagedCache(model, len(prompts), max(map(len, prompts)) + count, page)
    last = torch.cat([cache.step(model, torch.tensor([list(prompt)]), b) for b, prompt in enumerate(prompts)])
    found, start = [list(prompt) for prompt in prompts], time.perf_counter()
    for n in range(count):
        tokens = last.argmax(-1)
        for own, token in zip(found, tokens.tolist(), strict=True):
            own.append(token)
        if n + 1 < count:
            last = cache.step(model, tokens[:, None])
    return Written(found, (time.perf_counter() - start) / count)


@torch.no_grad()
def by_the_formula(model: Gpt, prompts: Sequence[bytes], count: int) -> Written:
    """The same of the whole sequence for every token, each sequence alone."""
    found, start = [list(prompt) for prompt in prompts], time.perf_counter()
    for _ in range(count):
        for own in found:
            own.append(int(model(torch.tensor([own]))[0, -1].argmax()))
    return Written(found, (time.perf_counter() - start) / count)


def generate(
    settings: Settings, prompts: Sequence[bytes], count: int, page: int, tell: Callable[[str], None] = print
) -> tuple[Written, Written]:
    """Train, write with a cache, write by the formula. Raises ``Refused`` and ``SpecError``."""
    if any(not prompt for prompt in prompts):
        raise Refused("a prompt is empty; one byte is the least")
    longest = max(map(len, prompts)) + count
    if longest > settings.length:
        raise Refused(f"a sequence would have {longest} bytes; the model has {settings.length} positions: see --length")
    (run,) = train(settings, tell)
    model = run.model.eval()
    block = model.blocks[0]
    assert isinstance(block, Block)
    dense = attentions_of(InPyTorch, block.attention.op, settings.layers, settings.heads, settings.length)
    beside = Gpt(VOCABULARY, dense, settings.length if settings.positions else 0)
    beside.load_state_dict(model.state_dict())
    return with_cache(model, prompts, count, page), by_the_formula(beside.eval(), prompts, count)


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, write, compare; 1 where tokens differ, 2 where what was asked for cannot be."""
    usual = Settings(steps=60)
    parser = argparse.ArgumentParser(
        prog="python -m examples.generate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("spec", nargs="?", default=usual.spec, help=f"a name of the gallery, or an .attn file ({usual.spec})")
    add("--prompt", action="append", help="to write on from; may be given several times")
    add("--tokens", type=positive, default=60, help="to write (%(default)s)")
    add("--page", type=positive, default=16, help="rows of a page (%(default)s)")
    add("--text", type=Path, help="what is learned: a file, or a folder of .py files (the standard library)")
    for name in ("steps", "batch", "length", "layers", "heads", "head_dim", "seed"):
        add(f"--{name.replace('_', '-')}", type=int, default=getattr(usual, name), help="(%(default)s)")
    given = vars(parser.parse_args(arguments))
    prompts = [prompt.encode() for prompt in given.pop("prompt") or PROMPTS]
    count, page = given.pop("tokens"), given.pop("page")
    try:
        paged, dense = generate(Settings(**given, beside=False), prompts, count, page)
    except (Refused, SpecError, ValueError) as error:
        print(error if isinstance(error, SpecError) else f"generate: {error}", file=sys.stderr)
        return 2
    for tokens in paged.tokens:
        print(f"{'-' * 60}\n{bytes(tokens).decode(errors='replace')}")
    print("-" * 60)
    for name, each in (("paged cache", paged), ("dense formula", dense)):
        print(f"{name:>13}: {1e3 * each.seconds:.2f} ms for a token of each of {len(prompts)} sequences")
    if paged.tokens != dense.tokens:
        print("generate: the tokens differ", file=sys.stderr)
        return 1
    print("the tokens are the same")
    return 0


if __name__ == "__main__":
    sys.exit(main())
