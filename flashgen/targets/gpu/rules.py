"""The rules of thumb that decide on every GPU, each once, with the measurement behind it.

Figures are of an H200 unless they say otherwise. ``docs/notebook.md`` has what was tried and lost.
"""

from __future__ import annotations

from flashgen.plan.by_blocks import QUERIES
from flashgen.plan.recipe import Rule

# -- over caches -------------------------------------------------------------------------------------------------------

FEW_ROWS = Rule(
    "few rows",
    "the query heads of a key/value head are the rows of a tile, 16 a warp: as many warps as there are rows for",
    "an H200, 64 sequences of 8k rows, 32/8 heads: 4.5 of 4.8 TB/s",
)

FEW_ROWS_SHARED = Rule(
    "few rows shared",
    "four warps share 16 rows, or two 32: what one warp does of a tile holds up the next copies; two blocks with three "
    "tiles on the way, of 8 bits with two of twice as many keys, which share what a tile costs beside its keys",
    "an H100, 32/8 heads: 1 sequence of 8k rows 15.5 → 12.9 µs, 64 of 8k 737 → 714; 8 bits on an H200, 64 of 8k, "
    "beside bfloat16: tiles of 64 keys × 1.54, of 128 × 1.96",
    128,
)

LAST_BLOCK_MERGES = Rule(
    "last block merges",
    "the last block to come to its end merges what all left of a tile, so long as these are few bytes; more are merged "
    "by a kernel of many blocks",
    "an H200: 8 sequences of 8k, 4 parts of 128 columns, 79.7 → 72.5 µs; a first form of this, beside a second "
    "kernel: 33 parts of 4 rows (66 KB) 18.7 → 15.2, of 8 rows (132 KB) 18.6 → 17.8, of 16 (264 KB) 20.1 → 23.3",
    160 * 1024,
)

WIDE_ROWS = Rule(
    "wide rows",
    "above D 256 two stages fill a multiprocessor's memory: one of twice as many keys has half of the steps, each of "
    "which waits once",
    "an H200, 576/512, 64 sequences of 8k rows 343 → 300 µs, 8 of 32k 169 → 149; two blocks of one stage 284 and 150, "
    "but 1 of 32k 59 where one has 43, as there are twice as many parts to merge",
    2,
)

WARPS_OF_A_MULTIPROCESSOR = Rule(
    "warps of a multiprocessor",
    "a multiprocessor has four parts, each with a warp that waits for memory: key tiles leave room for four warps",
    "an H100, 32 keys of 128: 2.9 of 3.35 TB/s, by five blocks of a warp",
    4,
)

# -- by blocks of keys, where each query lists some --------------------------------------------------------------------

BY_BLOCKS = Rule(
    "by blocks of keys",
    "K and V of a block are read once for the many queries that list it, whose parts another kernel merges: in the "
    "order of queries each reads what it lists from the last cache",
    "an H200, 32k causal, 32/2 heads of 128, 16 blocks of 64 a query: 7.29 → 2.93 ms; 128 queries 1.31 → 0.12",
)

NEAR_QUERIES = Rule(
    "near queries",
    "blocks go through the lists of so many neighbouring queries before those of others, so that the last cache "
    "holds their rows of Q",
    "an H200, 32k, 16 blocks of 64 a query: 1,024 queries 3.02 ms, 2,048 2.87, 4,096 2.94",
    QUERIES,
)

# -- which tiles are visited -------------------------------------------------------------------------------------------

RANGES_ALONE = Rule(
    "ranges alone",
    "the mask compares positions, or reads captured tensors: ranges settle a tile as a whole",
    "to look for tiles that ranges leave open took up to half of the forward pass (neighbourhoods, chunks)",
)
PIECES = Rule(
    "pieces",
    "the mask draws its blocks by a hash or by bits, so that ranges leave many tiles open: those are cut in pieces",
    "blocks of 32: 4 times as fast",
)
EACH_FINDS = Rule(
    "each block finds its tiles",
    "rows keep a run of keys, which ranges find; a list would be another launch",
    "two launches take longer than what fewer than 512 blocks find",
)
LISTS_OF_A_CALL = Rule(
    "lists of a call",
    "the mask reads captured tensors: what tiles visit follows from the call, and heads that share it read one list",
    "documents, windows: lists and tiles of 128 rows together 1.1 to 1.3 times as fast at D 128",
)
KEPT_LISTS = Rule(
    "kept lists",
    "the mask follows from positions alone and a row may keep many runs of keys: the host keeps lists for later calls",
    "at 16k tokens a block found its list by 700 to 1,200 instructions a warp, two or three tiles' worth; to copy it "
    "takes 60",
)
LONGEST_FIRST = Rule(
    "longest first",
    "heads share lists, so that these are few, and no long one should begin last; heads go in groups that the cache "
    "holds",
    "1 to 3 % above the ideal balance, where the order of tiles has 6 to 15 %; over all heads at once documents of 2k "
    "tokens took 1.3 times as long",
)
BY_POSITION = Rule(
    "by position",
    "there are no lists, or one for each head, too many to order: the last query tiles come first, under a causal mask "
    "the longest",
    "not measured apart",
)
BATCH_INSIDE = Rule(
    "batch inside",
    "batch entries share what pairs read or add to: blocks of one tile run side by side, so that the last cache has it",
    "an H200, causal, D 128, `[H, Nq, Nk]` with backward, beside staged pairs: 2.57 → 2.29 ms at 4k, B 2; in groups of "
    "heads besides forward 0.89 and 0.87 of the time at 2k, B 4, and 4k",
)
LONG_TILES = Rule(
    "long tiles",
    "a block has its multiprocessor to itself, and rows of tiles grow: the longest of as many heads as a cache holds "
    "come before shorter ones, as the last ones of one head would leave most blocks idle",
    "an H200, causal, 16k tokens, beside one head after another: forward at D 128 of 2k and 8k 0.90 and 0.92, D 256 of "
    "8k 0.91; with backward 64/8 heads of 2k 0.93, D 128 0.96; with three blocks a multiprocessor 1.01 to 1.07; an "
    "even number of groups, with backward, 3 × 4,099: D 256 with 2 key/value heads 0.84, D 128 0.96",
    limit=24 << 20,
)
DIAGONALS = Rule(
    "diagonals",
    "what i - j alone decides and takes longer than a read is computed once for each diagonal, into the workspace",
    "T5: 81 → 316 TFLOP/s forward, 42 → 164 with backward; a table of all distances 288 → 319",
)
PAIR_BY_PAIR = Rule(
    "pair by pair",
    "nothing that i - j alone decides takes longer than a read",
    "ALiBi, which computes it: 397 and 400 TFLOP/s",
)

# -- the backward pass -------------------------------------------------------------------------------------------------

DQ_ADDED_UP = Rule(
    "dQ added up",
    "nothing is summed over rows: the kernel of dK and dV adds up dQ in float32, and recomputes scores once for all",
    "tiles of 64 × 64: 13.7 ms, in two kernels 15.2",
)
LAG = Rule(
    "lag",
    "O shrinks once a row's maximum has grown by more than 2^8: weights stay below, where float32 loses nothing",
    "as FlashAttention-4 does; not measured apart",
    limit=8,
)

BOUNDED_SCORES = Rule(
    "bounded scores",
    "the formula bounds the scores, so that weights are numbers from wherever exponents are counted: from a row's "
    "first maximum, until weights add up to more than 2^8; operands of 16 bits, no warps that share rows",
    "soft-cap 50 at D 128, causal of 8k, forward: 1.24 → 1.06 ms, with exponentials beside the polynomials of tanh",
)

SUMS_TELL = Rule(
    "sums tell",
    "scores are products but for a factor: where all of a tile is kept weights are counted from the maxima of before, "
    "and their sums tell whether one has grown so far that it matters; such a warp multiplies its scores again",
    "an H200, forward of 8k, of the time before: causal D 64 0.91, D 128 0.89, 192/128 0.93, D 256 0.97; plain D 64 "
    "and 128 0.90, 192/128 0.91, but D 256, whose K then stays longer in its ring, 1.01 and 1.06",
    limit=192,
)

NORMS_OF_ROWS = Rule(
    "norms of rows",
    "the score is linear in |q - k|² by a factor that keys share: a softmax sees nothing of |q|², so that a pair is "
    "one fused operation from its product; lse gets the row's part back",
    "an H200, causal of 4k at D 64: forward 1.14 → 0.84 ms, with backward 6.07 → 4.88",
)

LAG_OF_8_BITS = Rule(
    "lag of 8 bits",
    "P of 8 bits ends at 448: O shrinks once a maximum has grown by more than 2^2, and exponents begin 2^6 above it: "
    "weights down to 2^-12 of the largest keep three bits",
    "FlashAttention-3 begins 2^8 above and has no lag; not measured",
    limit=2,
)
HEADROOM_OF_8_BITS = 6  # by which exponents begin above a maximum: with the lag at most 2^8
HEADROOM_BESIDE_8_BITS = 7  # where weights are float16: with the lag at most 2^15

# -- tiles where one warp multiplies -----------------------------------------------------------------------------------

WARPS = Rule(
    "the table of warps",
    "rows in the order of their times; the widest that fits is first",
    "long sequences on an H200 without warpgroups, as targets/gpu/tables.py has them",
)
LIGHT_MASK = Rule(
    "light mask",
    "a mask of at most nine nodes (a causal window has as many) needs few registers; divisions and captured tensors do "
    "not fit beside half a head dimension more",
    "one condition a pair more packs predicates into bits: 130 of 800 instructions of a PARTIAL step",
    limit=9,
)
NARROW_SCORES = Rule(
    "narrow scores",
    "a score that is more than a scaled product, dropout, a heavy mask, or copies through registers (before sm_80) "
    "leave 168 registers of a thread for S and O",
    "wider tiles spill: the assembler's report, tests/cuda/test_compile.py",
    limit=168,
)
TWO_BLOCKS = Rule(
    "two blocks a multiprocessor",
    "with at most 100 KiB of shared memory a multiprocessor, above D 64, tiles of 128 × 32 come first",
    "not measured: such a GPU was not at hand",
    limit=100 * 1024,
)
DIVIDED_HEADS = Rule(
    "divided heads",
    "above D 64 a heavy mask takes the registers of a whole head dimension: two warps share one",
    "spills of the whole one: the assembler's report, tests/cuda/test_compile.py",
    limit=64,
)
SHARED_ROWS = Rule(
    "shared rows",
    "above D 256 registers do not hold 16 rows of O or dQ, nor 16 keys by half of dK and dV: warps share them, each "
    "with its part of the columns, and of a tile's scores; weights go through shared memory",
    "not measured; with scores of its own for each warp a forward pass had 1.5 times the products where two share rows",
)
ONE_TILE_A_BLOCK = Rule(
    "one tile a block",
    "several blocks share a multiprocessor, and what one begins and ends with is hidden by the others",
    "documents at D 64 on an H200: four small blocks 232 TFLOP/s, one wide one 144",
)
COPIES_BY_ALL = Rule(
    "copies by all",
    "copies of 16 bytes (cp.async) take no registers on the way, and all warps have some to start",
    "one warp that copies for others was slower than four that copy for themselves",
)
