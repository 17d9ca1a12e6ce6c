"""The rules of thumb that decide where warpgroups multiply, each once, with the measurement behind it, on an H200."""

from __future__ import annotations

from flashgen.plan.recipe import Rule
from flashgen.targets.gpu.lengths import FAR

WARPGROUPS = Rule(
    "warpgroups",
    "16-bit products of four warps (wgmma) take their operands from shared memory",
    "forward at D 128 1.3 times as fast as mma.sync, nothing else changed",
)
TENSOR_COPIES = Rule(
    "tensor copies",
    "rows are whole numbers of 16 bytes: one thread starts a copy, an mbarrier counts its bytes",
    "with persistent blocks, forward at D 128: causal and ALiBi of 2k tokens 1.22, plain 1.16, causal of 8k 1.01",
)
PRODUCERS = Rule(
    "producer warps",
    "a wide tile is the only block of its multiprocessor: warps that do not multiply copy meanwhile",
    "1.15 times as fast, with products that overlap with the weights",
)
ALONE = Rule(
    "a warpgroup alone",
    "several blocks share a multiprocessor and hide each other's copies",
    "documents of 900 tokens in 8k at D 64: 64 × 64 by four blocks 232 TFLOP/s, 192 × 96 with producers 144; one warp "
    "that copies for a warpgroup was slower than four that copy for themselves",
)
PERSISTENT = Rule(
    "persistent",
    "a block takes one query tile after another: what one begins and ends with hides behind products",
    "20,000 clocks a tile of 128 queries beside its products; forward at D 128: causal of 2k tokens 1.22, of 8k 1.01",
)
NEXT_TILE_EARLY = Rule(
    "the next tile early",
    "lists say which comes next: its list, Q and first K come while the last visits of this one are worked on",
    "random blocks at 1/16: 0.88 of the time (8k, B 8), 0.93 (B 2), everything kept 0.90",
)
NEXT_LIST_EARLY = Rule(
    "the next list early",
    "warps that copy have found it: Q and the first K come beside the last V of this tile, whose O leaves while the "
    "first product of the next one runs; K and V have rings of their own; warpgroups begin one after another",
    "an H200, of the time before, D 128: 512 tokens plain 0.94, causal 0.93, 64/8 heads 0.96, 2,048 plain 0.97; with "
    "one place for Q (K and V in one ring) 512 tokens of D 256 0.97, of 192/128 0.98, but causal of D 256 1.03",
)
PERSISTENT_KEYS = Rule(
    "persistent keys",
    "a warpgroup alone takes one key tile after another: K and V of the next are under way while dK and dV leave",
    "backward at 1/16 0.95 and 0.96 of the time (random blocks, butterfly), a window of 512 0.97, BigBird 1.01",
)
KEYS_OF_DOCUMENTS = Rule(
    "keys of documents",
    "the mask reads captured tensors: a block keeps to one key tile, as it would claim the next too early",
    "documents took 1.03 to 1.06 times as long in persistent blocks",
)
KEYS_OF_PRODUCERS = Rule(
    "keys of producers",
    "producer warps only copy, and hand tiles over by barriers: they know of one key tile",
    "an H200, D 128 with backward, persistent blocks: causal 0.99 to 1.02 of the time, plain 0.98 to 1.01",
)
LAST_KEYS = Rule(
    "last keys",
    "key tiles take equally long: those left once all blocks have had as many are worked on by several blocks each",
    "an H200, D 64 with backward, of the time before: 1,000 tokens 0.98, 2,048 0.97, 8,192 0.95; at D 128 0.98 to 1.03",
    limit=128,
)
KEYS_OF_SEQUENCES = Rule(
    "keys of sequences",
    "a ragged batch has fewer tiles than places: a warp that copies finds the next tile while one is worked on",
    "not measured otherwise",
)
SHORT_SEQUENCES = Rule(
    "keys of small blocks",
    "blocks that share a multiprocessor hide what each begins with; numbers that live from tile to tile would spill",
    "persistent, a window at D 64 spills 492 bytes, read in every step",
)
READ_AHEAD = Rule(
    "read ahead",
    "elements of 1 or 2 bytes that pairs read lie side by side: two neighbouring keys are one load, asked for well "
    "before they are needed, as memory takes longer than a product",
    "an H200, a bias of [B, H, Nq, Nk], causal, D 128, 4k: forward 0.43 ms, while products are waited for 0.51, pair "
    "by pair 0.68 (an H100)",
)
STAGED_PAIRS = Rule(
    "staged pairs",
    "rows of a tile are whole lines of memory, lanes' fragments of 16 bytes are not: warps copy their own rows to "
    "shared memory two tiles ahead, and have them from there as fragments",
    "an H200, causal, D 128, a bias of 4k tokens: forward 0.41 → 0.36 ms, without a mask 0.81 → 0.58; with backward, "
    "by one of the warps that copy, 0.92 to 0.95 of the time",
)
IN_TURN = Rule(
    "in turn",
    "batch entries share a gradient of pairs: the first one at a tile leaves its dS as it lies in registers, others "
    "add to it in any order, the last one rounds and stores the sum; no sums are cleared and converted for all pairs",
    "an H200, D 128, with backward: 0.82 of the time of float32 sums with two entries of 4k, 0.88 with four of 2k; "
    "four at most take turns",
)
NEAR_SCORES = Rule(
    "near scores",
    "a tanh asks the special function unit twice, which takes eight clocks for what others do in one: all pairs of a "
    "warp's tile are asked once whether a polynomial does",
    "an H200, soft-caps, causal, 8k: forward 1.48 → 1.22 ms (D 128), 1.09 → 1.04 (D 256)",
)
NORMS_OF_KEYS = Rule(
    "norms of keys",
    "scores use |q - k|²: warps that copy take the norms of keys beside products, else everyone does",
    "an H200, causal of 4k at D 64: 192 × 128 with producers 0.84 ms, 64 × 128 by three blocks 0.89",
)
OVERLAP_FORWARD = Rule(
    "weights beside O",
    "S of one tile is weighed while O takes in the tile before",
    "with producer warps 1.15; turns of the warpgroups (FlashAttention-3's ping-pong) changed little",
)
PRODUCTS_IN_TURN = Rule(
    "products in turn",
    "three warpgroups of a block start the products of each visit one after another, so that one multiplies while "
    "others weigh",
    "an H200, D 64, of the time of 64 × 128 by three blocks, causal: 8k 0.94, 32k 0.92, 4k 1.02, 2k 1.07; ragged (that "
    "tile looks for maxima): 2 of 8k 0.81, 16 of 64 to 2,048 0.95, 64 of 256 1.24; scores that are no mere products "
    "are unmeasured; two warpgroups of D 128 take 1.02",
)
OVERLAP_TANGENTS = Rule(
    "exponentials beside tangents",
    "registers hold O and its tangent beside P and its tangent with S, or S with its tangent: the tangent of S is "
    "multiplied once P is used up, while S, whose products do not enter it, is weighed",
    "an H200, causal of 8k, D 64 and 128: 502 and 511 TFLOP/s, nothing masked at D 128 668; with branches between "
    "products, which kept them apart, and copies by all warps 317 and 417 (an H100)",
)
TANGENTS_OF_PRODUCTS = Rule(
    "tangents with their products",
    "what a score changes by asks for the dot product: S waits for its tangent, while the other warpgroup multiplies",
    "an H200, a soft-cap causal of 8k: D 64 334 TFLOP/s, 1.64 times the time of the forward pass",
)
OVERLAP_BACKWARD = Rule(
    "dS a step late",
    "warpgroups take each other's dS a step late, so that one multiplies while another weighs",
    "1.1 times as fast",
)
WEIGHTS_FIRST = Rule(
    "weights first",
    "what follows the weights is linear in them: P is formed while dP is multiplied, and dot products die early, with "
    "them the score's derivative (a soft-cap's), which P takes in",
    "a soft-cap at D 128, whose derivatives lived across the product of dP: 532 bytes spilled, mma.sync instead",
)
ALL_AT_ONCE = Rule(
    "both products first",
    "gradients of what a score reads need the dot product beside the weight, or P is no exponential: S and dP are "
    "there together",
    "each of eight other tiles is slower",
)
SHARED_KEYS = Rule(
    "shared keys",
    "above D 128 a thread has no registers for dK and dV of 64 keys beside S and dP: two warpgroups share them, each "
    "with half of the columns, and scores of half a tile's queries; P and dS go through shared memory",
    "an H100, causal of 8k with forward, D 256: 409 TFLOP/s, half of dQ through shared memory 384; mma.sync 128 (H200)",
)
TURNS = Rule(
    "turns",
    "above D 320 two warpgroups share 64 rows, each with half of O's columns, and weigh key tiles in turns: while one "
    "does so the other multiplies, and tensor copies bring what comes next",
    "an H200, causal of 8k, D 512: 512 TFLOP/s; scores of half a tile's keys each, one step after another: 334",
)
CLUSTERS = Rule(
    "clusters",
    "64 rows a block read K and V twice as often as 128: two blocks of a cluster copy half of each tile for both, "
    "unless rows keep so few keys that those which only the other block's keep count",
    "an H200, 8k, D 512: 600 TFLOP/s where nothing is masked, 518 causal, without 508 and 493; "
    "a window of 4000 0.96 of the time, of 1500 1.00, of 512 1.05",
    limit=2048,
)
EXCHANGE = Rule(
    "exchange",
    "above D 256 registers do not hold dK and dV of 64 keys beside S and dP: two blocks of a cluster have half of the "
    "columns each, and send each other what they sum up of S and dP",
    "an H200, causal of 8k with forward, D 512: 353 TFLOP/s, mma.sync 185, D 256 432; D 384 314 and 178",
)
SHARED_DQ = Rule(
    "shared dQ",
    "a step of 64 keys waits for its additions to dQ: two blocks of a cluster, with 64 keys each, exchange dS, and add "
    "up half of the columns over the keys of both; Q and dO come once for both",
    "an H200, D 256, with backward, of cuDNN's time: causal of 8k 1.11 for 0.94, plain 1.19 for 1.03; a window of 256 "
    "takes 1.05 of the time, causal calls of 512 1.02; at D 128 it lost: causal of 8k 1.10 of the time, plain 1.04",
)
OWN_KEYS = Rule(
    "own keys",
    "above D 128 a thread has registers for dK and dV of 64 keys by 320 columns together, beside 32 queries at a time: "
    "twice the keys of a tile are half of the additions to dQ",
    "an H100, 192/128, causal of 8k with forward: 419 TFLOP/s, 64 shared keys 365; an H200: 64 columns of dQ by way of "
    "shared memory 0.96 of the time, with dS a step late and most of dQ in front of dK 0.97 of that (D 160 0.91)",
    limit=320,
)
WEIGHED_AT_A_TIME = Rule(
    "queries weighed at a time",
    "three blocks a multiprocessor leave registers for 32 queries, where P is formed before dP is there; else 64",
    "0.96 to 0.98 of the time; with 64 the assembler made 23 waits a step instead of 6 (C7512)",
    limit=32,
)
WHOLE_TILES = Rule(
    "whole tiles",
    "where dK and dV are narrow, S and dP of 128 queries fit beside them: products are twice as wide",
    "an H200, D 64 with backward, of the time of two parts: plain of 2k 0.93, of 8k 0.92, causal 0.91 and 0.89",
    limit=128,
)

EIGHT_BITS = Rule(
    "eight bits",
    "products of 8 bits are short: a wide tile waits less for them; sums of a few tiles are added up in shared memory",
    "forward, 16k tokens: at D 256 128 × 96 1,046 TFLOP/s, × 64 964 with Q in registers; at D 128 128 × 224 886, "
    "× 192 851; at D 64 192 × 160 621, 128 × 224 570",
)
TURNED_AHEAD = Rule(
    "turned ahead",
    "products of 8 bits read V along its keys: turned once for a call, it comes as K does, no block turns tiles",
    "33 MB each way at 16k tokens, 16 heads of 128; two warps that turned V took 1,300 clocks a tile",
)

# -- which tiles -------------------------------------------------------------------------------------------------------

WHOLE_ROWS = Rule(
    "whole rows",
    "the mask relates no queries to keys: every row has all tiles, and the widest hide best",
    "nothing masked, 16k tokens: D 64 192 × 128 513 TFLOP/s, 64 × 128 by three 461; D 128 128 × 160 665, 128 × 128 605",
)
LONG_ROWS = Rule(
    "long rows",
    "queries keep keys however far back: a block has tiles enough to hide what it begins and ends with",
    "from 8k tokens on the wide tiles win by 3 to 25 %",
    limit=FAR,
)
SMALL_BLOCKS = Rule(
    "small blocks",
    "the mask is drawn in blocks of fewer positions than a wide tile has: a tile of two visits what either keeps",
    "dQ of random blocks of 64 at D 64, 8 of 128 kept: 0.57 ms of 3.36 by the tile of 128 rows; all kept: 6.5 of 8.5",
    limit=128,
)
SHORT_ROWS = Rule(
    "short rows",
    "the mask leaves rows of tiles short: small blocks share a multiprocessor and hide what each begins and ends with",
    "documents 1.3 to 2 times as fast forward, causal at 2k tokens 1.2 times",
)
