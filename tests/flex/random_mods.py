"""Random mods, as Python text: positions, captured tensors of every type, the functions that mods use."""

from __future__ import annotations

import math
import random
import textwrap
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

B, H, NQ, NK = 2, 4, 12, 17
_SIZES = {"b": B, "h": H, "q": NQ, "kv": NK}
_COMPARISONS = ("<", "<=", ">", ">=", "==", "!=")
# No sum of the tenths and eighths below: 0.1 * 3 is 0.3 in float32, and more than 0.3 in float64.
_THRESHOLD = 0.3137
# What has a finite value and derivative anywhere; x is replaced.
_SMOOTH = (
    "torch.tanh(x)",
    "(x).sigmoid()",
    "torch.exp(-torch.abs(x))",
    "torch.log1p(abs(x))",
    "3 * torch.tanh((x) / 3)",
    "torch.sin(x)",
    "(x).cos()",
    "torch.relu(x)",
    "torch.nn.functional.silu(x)",
    "(x).clamp(-2.0, 2.5)",
    "torch.clamp(x, max=1.5)",
    "torch.clamp_min(x, 0.25)",
    "(x) / (1 + (x) * (x))",
    "torch.sqrt(1 + torch.square(x))",
    "torch.nn.functional.softplus(x)",
    "torch.nn.functional.softplus(x, 1.5, 0.7)",
    "torch.nn.functional.gelu(x, approximate='tanh')",
    "torch.nn.functional.silu((x) * 1.0, inplace=True)",
    "torch.erf(x)",
    "-(x)",
    "torch.pow(x, 2) / 4",
    "(x) ** 3 / 16",
    "torch.rsqrt(2 + (x) ** 2)",
    "torch.exp2(torch.minimum(x, torch.ones_like(x)))",
)


@dataclass
class Mods:
    """A score_mod and a mask_mod, the text that they are of, and the tensors that learn."""

    text: str
    score_mod: Any
    mask_mod: Any
    learned: list[Tensor]


@dataclass
class _Writer:
    chance: random.Random
    captured: dict[str, Any] = field(default_factory=dict)
    learned: list[Tensor] = field(default_factory=list)

    def pick(self, *choices: str) -> str:
        return self.chance.choice(choices)

    def _capture(self, value: Any) -> str:
        name = f"t{len(self.captured)}"
        self.captured[name] = value
        return name

    def _read(self, indices: list[str]) -> str:
        return f"[{', '.join(indices)}]" if self.chance.random() < 0.7 else "".join(f"[{each}]" for each in indices)

    def _place(self) -> tuple[list[int], str]:
        """The shape of a captured tensor, and an element of it."""
        kind = self.chance.randrange(4)
        if kind == 0:
            return [16], f"[torch.clamp({self.pick('q - kv', 'kv - q')}, 0, 15)]"
        if kind == 1:
            return [NQ + NK], "[q - kv + " + str(NK) + "]"
        names = self.chance.sample(list(_SIZES), self.chance.choice((1, 1, 2, 3)))
        return [_SIZES[each] for each in names], self._read(names)

    def whole(self, depth: int) -> str:
        """An int."""
        if depth <= 0 or self.chance.random() < 0.3:
            if self.chance.random() < 0.25:
                shape, place = self._place()
                dtype = self.chance.choice((torch.int32, torch.int64, torch.uint8))
                values = [self.chance.randrange(6) for _ in range(torch.Size(shape).numel())]
                return self._capture(torch.tensor(values, dtype=dtype).view(shape)) + place + ".long()"
            return self.pick("b", "h", "q", "kv", "q - kv", "kv - q", str(self.chance.randrange(1, 9)))
        x, y, n = self.whole(depth - 1), self.whole(depth - 1), self.chance.randrange(1, 7)
        chosen = self.condition(depth - 2)
        as_tensor = f"(q * 0 + {x})"  # methods and functions take no Python number
        return self.pick(
            f"({x} + {y})",
            f"({x} - {y})",
            f"({x} * {n})",
            f"({x} // {n})",
            f"({x} % {n})",
            f"abs({x})",
            f"torch.minimum({as_tensor}, kv * 0 + {y})",
            f"torch.maximum({as_tensor}, kv * 0 + {y})",
            f"torch.clamp({as_tensor}, -3, 9)",
            f"torch.div({as_tensor}, {n}, rounding_mode='floor')",
            f"torch.remainder({as_tensor}, {n})",
            f"torch.where({chosen}, {as_tensor}, {y})",
            f"({as_tensor} & {n})",
            f"{chosen}.to({self.pick('int', 'torch.int32', 'torch.long')})",
            f"torch.full_like({as_tensor}, {n}.7)",
        )

    def condition(self, depth: int) -> str:
        if depth <= 0 or self.chance.random() < 0.3:
            if self.chance.random() < 0.25:
                shape, place = self._place()
                values = [self.chance.random() < 0.7 for _ in range(torch.Size(shape).numel())]
                return self._capture(torch.tensor(values).view(shape)) + place
            if self.chance.random() < 0.2:
                shape, place = self._place()
                dtype = self.chance.choice((torch.int8, torch.uint8, torch.int16))
                few = [self.chance.randrange(-5 if dtype.is_signed else 0, 100) for _ in range(math.prod(shape))]
                read = self._capture(torch.tensor(few, dtype=dtype).view(shape)) + place
                read = self.pick(read, f"({read} & {self.chance.randrange(128)})", f"{read}.clamp(3, 90)")
                return f"({read} {self.chance.choice(_COMPARISONS)} {self.chance.randrange(100)})"
            return f"(q * 0 + {self.whole(0)} {self.chance.choice(_COMPARISONS)} {self.whole(1)})"
        x, y = self.condition(depth - 1), self.condition(depth - 1)
        return self.pick(
            f"({x} & {y})", f"({x} | {y})", f"({x} ^ {y})", f"(~{x})", f"torch.logical_and({x}, {y})",
            f"torch.logical_or({x}, {y})", f"torch.logical_not({x})", f"torch.where({x}, {y}, {self.condition(0)})",
        )  # fmt: skip

    def number(self, depth: int) -> str:
        """A float that depends on positions, of size 1 or so."""
        if depth <= 0 or self.chance.random() < 0.3:
            match self.chance.randrange(4):
                case 0:
                    return f"(0.1 * {self.whole(1)} + 0.0 * q)"
                case 1:
                    kind = self.pick("torch.float32", "float", "torch.double")
                    return f"(({self.whole(1)} + 0 * q).to({kind}).float() / 8)"
                case _:
                    shape, place = self._place()
                    dtype = self.chance.choice((torch.float32, torch.float32, torch.bfloat16, torch.float16))
                    generator = torch.Generator().manual_seed(self.chance.randrange(2**31))
                    tensor = torch.randn(shape, generator=generator).to(dtype)
                    if dtype is torch.float32 and self.chance.random() < 0.6:
                        self.learned.append(tensor.requires_grad_())
                    return self._capture(tensor) + place + ("" if dtype is torch.float32 else ".float()")
        return self._combined(self.number(depth - 1), self.number(depth - 1), depth)

    def score(self, depth: int) -> str:
        """A float that depends on the score."""
        if depth <= 0:
            return "score"
        x = self.score(depth - 1)
        y = self.number(depth - 1) if self.chance.random() < 0.8 else self.score(depth - 2)
        return self._combined(x, y, depth)

    def _combined(self, x: str, y: str, depth: int) -> str:
        if self.chance.random() < 0.35:
            return "(" + self.chance.choice(_SMOOTH).replace("x)", f"{x})").replace("(x", f"({x}") + ")"
        return self.pick(
            f"({x} + {y})",
            f"({x} - {y})",
            f"({x} * {y})",
            f"({x} / (1 + abs({y})))",
            f"torch.minimum({x}, {y})",
            f"torch.maximum({x}, {y})",
            f"torch.where({self.condition(depth - 1)}, {x}, {y})",
            f"torch.where(({y}) > {_THRESHOLD}, {x}, {y})",
            f"(2 * {x} + 0.5 * {y})",
        )


def random_mods(seed: int) -> Mods:
    """The same for the same seed."""
    writer = _Writer(random.Random(seed))
    score, mask = writer.score(3), writer.condition(3)
    if writer.chance.random() < 0.2:
        score = f"torch.where({writer.condition(1)}, {score}, -float('inf'))"
    text = textwrap.dedent(f"""
        def score_mod(score, b, h, q, kv):
            return {score}

        def mask_mod(b, h, q, kv):
            return {mask}
        """)
    space = {"torch": torch, **writer.captured}
    exec(compile(text, f"<random mods {seed}>", "exec"), space)
    return Mods(text, space["score_mod"], space["mask_mod"], writer.learned)
