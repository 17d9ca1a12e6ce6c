"""What specs are drawn from where chance alone would seldom find it: forms that people write, as data.

In: nothing. Out: tables. Places of expressions are in braces: ``{s}`` the score so far, ``{n}`` a float, ``{c}`` a
condition, ``{l}`` a literal, ``{e}`` anything; ``{0}`` of an index an int.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True)
class Way:
    """An index that stays inside a dimension, or is clamped into it."""

    text: str

    def fits(self, indices: Collection[str]) -> bool:
        """Whether a place knows the names that it uses."""
        used = set(re.findall(r"\b(b|h|hkv|i|j|I|J)\b", self.text))
        return used <= set(indices)


@dataclass(frozen=True)
class Dimension:
    """A size of a captured tensor, and the indices that go with it. ``@`` is the block of the layout."""

    size: str
    ways: tuple[Way, ...]

    def fits(self, indices: Collection[str]) -> bool:
        """Whether a place has an index of its own for it."""
        return any(way.fits(indices) for way in self.ways)


def _dimension(size: str, *ways: str) -> Dimension:
    return Dimension(size, tuple(map(Way, ways)))


_B, _H, _HKV = _dimension("B", "b"), _dimension("H", "h", "H - 1 - h"), _dimension("Hkv", "hkv")
_ROW = _dimension("Nq", "i", "Nq - 1 - i")
_COLUMN = _dimension("Nk", "j", "Nk - 1 - j")
_ONE = _dimension("1", "0")

DIMENSIONS = (
    *(_B, _H, _HKV, _ROW, _COLUMN, _H, _ROW, _COLUMN, _ONE),
    _dimension("max(Nq, Nk)", "i", "j"),
    _dimension("Nq + Nk", "i - j + Nk", "i + j", "Nk - j + i"),
    _dimension("2 * max(Nq, Nk)", "i - j + max(Nq, Nk)"),
    _dimension("16", "clamp({0}, 0, 15)", "({0}) % 16", "min(abs(i - j), 15)", "popcount({0}) % 16", "{0}"),
    _dimension("7", "({0}) % 7", "clamp(i - j, 0, 6)", "hash({0}, 3) % 7", "clamp({0}, -3, 3) + 3"),
    _dimension("ceildiv(Nk, 16)", "j // 16"),
    _dimension("ceildiv(Nq, 8)", "i // 8"),
    _dimension("Nk // 64", "{0}"),  # of short calls: no entries
    _dimension("B * H", "b * H + h"),
    _dimension("ceildiv(Nq, @)", "I"),
    _dimension("ceildiv(Nk, @)", "J"),
)
BIASES = (
    (_dimension("B", "b"), _dimension("Nk", "j")),
    (_dimension("Nq", "i"), _dimension("Nk", "j")),
    (_dimension("B", "b"), _dimension("H", "h"), _dimension("Nq", "i"), _dimension("Nk", "j")),
    (_dimension("H", "h"), _dimension("Nq", "i"), _dimension("Nk", "j")),
    (_dimension("Nq", "i"), _dimension("B", "b"), _dimension("Nk", "j"), _dimension("H", "h")),
    (_dimension("B", "b"), _dimension("Nq", "i")),
    (_dimension("H", "h"),),
)

HEAD_DIMS = (
    *("16", "32", "64", "16", "32", "64", "128", "8", "24", "40", "48", "96", "80"),
    *(
        "32/16",
        "16/48",
        "64/32",
        "24/8",
        "192/128",
        "224/160",
        "320",
        "1",
        "2",
        "3",
        "7",
        "13/5",
        "1/16",
        "20",
        "33",
        "100",
        "256",
        "300",
        "512",
        "576/512",
    ),
)

MASKS = (
    *(
        "causal",
        "causal",
        "causal_lower_right",
        "causal and window_left(17)",
        "window(11)",
        "prefix(20)",
        "chunked(32)",
    ),
    *("dilated(30, 3)", "causal and sink_window(4, 16)", "global_tokens(5)", "causal and strided(9)", "fixed(16, 4)"),
    *("neighborhood_2d(6, 8, 2)", "j <= i + 5", "(i * 7 + j * 3) % 5 != 0", "hash(i, j, h) % 4 != 0"),
    *(
        "hash(b, i // 8, j // 8) % 3 > 0",
        "h % 2 == 0 or causal",
        "i // 4 >= j // 8",
        "j < Nk - b",
        "(i & 3) != (j & 3)",
    ),
    *(
        "0 <= i - j < 40",
        "i != j",
        "i == j",
        "true",
        "i < 0 and j > i",
        "j < Nk // 2",
        "i % 5 != 0",
        "j % 7 != 3 or i < j",
    ),
    *("causal and chunked({p})", "(i + Nk - Nq) // {p} == j // {p}", "abs(i // {p} - j // {p}) <= 1"),
)
# What keys are near to, where biases by place have nine entries.
NEIGHBOURHOODS = ("clamp(i, 2, Nk - 3)", "clamp(i, 2, 6)", "i", "max(i, 2)", "min(i, Nk - 3)")
LAYOUTS = (
    *(
        "I >= J",
        "local_global(1, 1)",
        "butterfly(3)",
        "random_blocks(0.5, 7) or I == J",
        "(I + J + h) % 2 == 0",
        "I == J",
    ),
    *("random_blocks(0.3, 11)", "J == 0", "I != J", "(h <= J) or (H < 3)", "popcount(I ^ J) < 2", "b == 0 or I <= J"),
)
BLOCKS = (8, 16, 16, 32, 32, 64, 64, 128, 24, 5, 1, 100)
# Blocks of a selection, and as how many a list names.
SELECTED = (1, 1, 4, 8, 16, 16, 32, 64, 64, 128, 24, 3, 100)
# Those of lists that kernels may go through by blocks, and what a list is of beside queries.
TILES = (16, 16, 16, 32, 64)
QUERY_LISTS = {"B": _B, "Hkv": _HKV, "Nq": _ROW}
LISTED = ("1", "2", "3", "5", "8", "40", "ceildiv(Nk, 16)", "D")


@dataclass(frozen=True)
class Form:
    """A step from one score to the next."""

    text: str


SCORES = tuple(
    map(
        Form,
        (
            *("({s} + {n})",) * 3,
            *("({s} - {n})", "({s} * (1 + 0.5 * tanh({n})))", "({n} * {s} / 4)", "({s} * {n})"),
            *("(5 * tanh({s} / 5))", "softcap({s}, 3.0)", "log1p(exp({s}))", "gelu({s})", "(sin({s}) + 0.1 * {s})"),
            *("softcap({s}, 40.0 * {p})", "({s} * {p})"),
            *("min({s}, 4 + {n})", "max({s}, {n} - 3)", "clamp({s}, -3, 3 + {n})", "({s} / sqrt(1 + {n} ** 2))"),
            *("({s} if {c} else 0.5 * {s})", "where({c}, {s}, {s} + {n})", "({s} if {c} else {n})"),
            *("({s} if {c} else -inf)", "where({c}, -inf, {s})"),
            *("where({s} > {l}, {s}, -inf)", "({s} if {s} >= {l} else -inf)", "where({s} < {l} and {c}, -inf, {s})"),
            *(
                "where(dot > {l}, {s}, -inf)",
                "where(not ({s} <= {l} or {c}), {s}, -inf)",
                "where({s} * {n} > {l}, {s}, -inf)",
            ),
            *(
                "({s} - 0.02 * abs(i - j))",
                "({s} - alibi_slope(h) * (i - j) / 16)",
                "({s} - log(1 + abs(i - j)) * {n})",
            ),
            *("({s} - {n} * clamp(0.25 * (i - j), 0, 4))", "({s} * (1 if log(1 + abs(i - j)) < 2.0 else tanh({s})))"),
            *(
                "({s} + cos(0.3 * (i - j)) * {n})",
                "({s} * log(i + 2) / log(Nk + 2))",
                "abs({s})",
                "(-{s})",
                "({s} * {s} / 8)",
            ),
            *("where({s} > {l}, {s}, 0.3 * {s})", "(floor({s} * 2) / 2 + 0.1 * {s})", "max({s} + {n}, {s} - {n})"),
            *("{e}", "{e}", "{e}"),
        ),
    )
)
POINTWISE = (
    *("sigmoid(s)", "silu(s) / Nk", "tanh(s) / 8", "relu(s)", "exp(-abs(s))", "sigmoid(s + {n})", "{n} * sigmoid(s)"),
    *(
        "relu(s) ** 2 / Nk",
        "exp(min(s, 2.0)) / (1 + Nk)",
        "where(s > 0, s, {n})",
        "gelu(s - {n}) / 4",
        "1.0 / (1 + s * s)",
    ),
    *("{n}", "s / 8", "(s if i >= j else {n}) / 4"),
)
NORMALIZED = (
    *("exp(s)", "softplus(s)", "sigmoid(s) + 0.1", "exp(s) + s * s", "exp(s) * sigmoid({n})", "relu(s) ** 2 + 0.01"),
    *("relu(s)", "where(s > 0, 1 + s, exp(s))", "abs(s + {n}) + 0.05", "1.0", "exp(s - {n})", "exp2(s) + exp(-s)"),
)
SCALES = (
    "0.3",
    "1 / D",
    "0.125",
    "1 / sqrt(float(D))",
    "log(2.0 + Nk) / (4 * sqrt(float(D)))",
    "-0.25",
    "1.0",
    "",
    "",
    "",
)
DROPOUTS = ("0.25", "0.1", "0.9", "0.0", "1/3", "{p}", "{p}", "{p}")
