"""The rules of thumb that decide on CPUs, each with its measurement; ``docs/notebook.md`` has what lost."""

from __future__ import annotations

from flashgen.plan.recipe import Rule

VECTORS = Rule(
    "vectors",
    "scores are kept transposed: neighbouring query rows are the lanes, and one micro-kernel makes all products",
    "float32 by FMA units reaches 260 GFLOP/s on two cores (Xeon)",
)
PAIRS = Rule(
    "pairs of bfloat16",
    "an instruction multiplies and adds two neighbouring terms of bfloat16 a lane; other types stay float32",
    "vdpbf16ps starts as often as a multiply-add (Zen 5: 1.95 to 2.0 a clock, 512 bits), with twice the terms",
)
MATRIX_REGISTERS = Rule(
    "matrix registers",
    "numbers are sums of bfloat16: one part, or three for float32, where query rows repay the images that it takes",
    "890 GFLOP/s of float32 on two cores of a Xeon with AMX, where FMA units have 260",
)
KEPT_LISTS = Rule(
    "kept lists",
    "the mask follows from positions alone and a row may keep many runs of keys: lists serve later calls, too",
    "not measured apart; a list is made once a shape",
)
QUARTERED = Rule(
    "quartered ranges",
    "a query tile finds its key tiles by quartering the range of keys, so that the work follows the border of the mask",
    "a tree over captured tensors takes two nodes a tile",
)
BY_TASKS = Rule(
    "no atomics",
    "a key/value head, or a share of its query tiles, is a task with dK and dV of its own, added up in order",
    "not measured otherwise: sums repeat bit by bit",
)
LEAST_BESIDE = Rule(
    "least work beside the products",
    "of the tiles that fit three quarters of a core's cache the one with the least work beside the products",
    "256 rows ran 1 % faster than 128 where nothing is masked; 128 leave more tasks",
)
