"""Speed on a CPU beside PyTorch's, all in one process, taking turns: the goals, and whether each is met.

    python -m tools.benchmarks.speed [--quick] [--only speed,variants,overhead,window,block_mask]

Every ratio is how many times longer the peer takes, round by round; a goal is met where the median reaches it. Beside
it stands the share of the speed of a float32 matrix product (2048 × 2048) that takes turns with them.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import statistics
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

import flashgen
from flashgen.ir.shape import Shape
from flashgen.ir.spec import HeadDim
from flashgen.op.node import ENVIRONMENT_VARIABLE as NODE
from flashgen.op.op import AttentionOp
from flashgen.tuning.tune import Spread, paired_times
from flashgen.verification.inputs import Inputs, random_inputs
from tools.benchmarks.bench import Comparison, compare
from tools.benchmarks.report import publish

F32, BF16 = torch.float32, torch.bfloat16
BASE = Shape(1, 8, 8, 4096, 4096)
DOCUMENTS = 8

Attention = Callable[..., Tensor]
Table = tuple[list[str], list[list[str]], str]

BODIES = {
    "plain": "",
    "causal": "mask causal",
    "window 256": "mask causal and window_left(256)",
    "window 512": "mask causal and window_left(512)",
    "ALiBi": "score s - alibi_slope(h) * (i - j)  mask causal",
    "soft-cap": "score softcap(s, 30.0)  mask causal",
    "documents": "tensor doc: i32[B, Nk]  mask causal and same_document(doc)",
    "relative positions": "tensor t: f32[H, 257] grad  score s + t[h, clamp(i - j, -128, 128) + 128]  mask causal",
}


@dataclass(frozen=True)
class Setting:
    """One row: what is timed, against whom, and the goal for the ratio."""

    variant: str
    head_dim: int
    goal: float
    shape: Shape = BASE
    dtype: torch.dtype = F32
    backward: bool = False
    peer: str = "sdpa"

    @property
    def pass_name(self) -> str:
        """As tables show it."""
        return "forward+backward" if self.backward else "forward"


def names_of(known: Collection[str]) -> Callable[[str], list[str]]:
    """Reads names with commas between them, of those that are known."""

    def read(text: str) -> list[str]:
        names = text.split(",")
        if unknown := [name for name in names if name not in known]:
            raise argparse.ArgumentTypeError(f"there is no '{unknown[0]}'; there are {', '.join(known)}")
        return names

    return read


def main() -> None:
    """Measure and publish."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick", action="store_true", help="a first look: D 64, few rounds, printed and not published"
    )
    parser.add_argument("--only", type=names_of(SECTIONS), default=[*SECTIONS], help="tables, with commas between them")
    given = parser.parse_args()
    os.environ.setdefault(NODE, "1")  # as calls are after the first thousand
    for name in given.only:
        begin, busy = time.perf_counter(), time.process_time()
        columns, rows, remark = SECTIONS[name](quick=given.quick)
        seconds = time.perf_counter() - begin
        cores = (time.process_time() - busy) / seconds
        remark += (
            f" {torch.get_num_threads()} threads, which had {cores:.1f} cores on average: where other work ran, ratios "
            f"can be trusted further than speeds. Measured in {seconds:.0f} s."
        )
        if given.quick:
            print(f"\n{name}\n", *(" | ".join(line) for line in (columns, *rows)), remark, sep="\n")
        else:
            publish(name, "python -m tools.benchmarks.speed", columns, rows, remark)


def speed(*, quick: bool) -> Table:
    """Beside peers."""
    rounds = 3 if quick else 7
    chosen = [row for row in settings() if not quick or (row.head_dim == 64 and row.shape == BASE)]
    measured = [(setting, measure(setting, rounds)) for setting in chosen]
    speeds = sorted(comparison.gemm_speed / 1e9 for _, comparison in measured)
    columns = ["B,H,Hkv,Nq,Nk", "D", "dtype", "variant", "pass", "GFLOP/s", "of sgemm", "against"]
    remark = (
        f"Medians of up to {rounds} rounds. × is the peer's time over flashgen's. FLOPs are those of the pairs that "
        "the mask keeps: 4·D a pair forward, 2.5 times that backward. "
        f"sgemm: {speeds[0]:.0f} to {speeds[-1]:.0f} GFLOP/s, median {statistics.median(speeds):.0f}."
    )
    return [*columns, "× (quartiles)", "goal", "met"], [row(*pair) for pair in measured], remark


def settings() -> list[Setting]:
    """Every row against a peer; the goals hold within 15 % at the other shapes."""
    goals = {("plain", False): 1.15, ("plain", True): 1.1, ("causal", False): 1.3, ("causal", True): 1.3}
    rows = [Setting(name, d, goal, backward=both) for d in (64, 128, 96) for (name, both), goal in goals.items()]
    rows = [dataclasses.replace(row, goal=_within(row.goal)) if row.head_dim == 96 else row for row in rows]
    others = (
        Shape(1, 8, 8, 1024, 1024),
        Shape(1, 8, 8, 3000, 3000),
        Shape(4, 12, 12, 1024, 1024),
        Shape(1, 8, 2, 4096, 4096),
    )
    rows += [
        Setting(name, 64, _within(goal), shape, backward=both)
        for shape in others
        for (name, both), goal in goals.items()
    ]
    rows += [
        Setting(name, d, goal, dtype=BF16, backward=both)
        for d in (64, 128)
        for name in ("plain", "causal")
        for both, goal in ((False, 1.0), (True, 2.0))
    ]
    return rows + [Setting("window 256", d, 4.0, peer="flex") for d in (64, 128)]


def _within(goal: float) -> float:
    return 0.85 * goal


def measure(setting: Setting, rounds: int) -> Comparison:
    """The operator and its peer."""
    op = operator(setting.variant, setting.head_dim)
    (found,) = compare(
        op, inputs(op, setting), peers=(setting.peer,), passes=(setting.backward,), rounds=rounds, budget=4.0
    )
    print(setting, *row(setting, found)[5:], flush=True)
    return found


def row(setting: Setting, found: Comparison) -> list[str]:
    """A line of the first table."""
    head = [str(setting.shape), str(setting.head_dim), str(found.dtype), setting.variant, setting.pass_name]
    own = found.times[0]
    head += [f"{found.speed(own) / 1e9:.0f}", f"{found.of_gemm(own):.0%}", setting.peer]
    if len(found.times) < 2:
        return [*head, found.absent[0][1], f"{setting.goal:.2f}", "not measured"]
    return [*head, *verdict(found.times[1].ratio, setting.goal)]


def verdict(ratio: Spread, goal: float, *, most: bool = False) -> list[str]:
    """The ratio, the goal, and whether it is met; ``most``: the goal is an upper limit."""
    met = ratio.median <= goal if most else ratio.median >= goal
    return [f"{ratio.median:.2f} ({ratio.low:.2f}–{ratio.high:.2f})", f"{goal:.2f}", "yes" if met else "**no**"]


def variants(*, quick: bool) -> Table:
    """Other masks and scores beside flashgen's own causal kernel."""
    names = ("ALiBi", "soft-cap", "documents", "relative positions")
    table = []
    for d in (64,) if quick else (64, 128):
        calls, work = {}, {}
        for name in ("causal", *names):
            op = operator(name, d)
            given = inputs(op, Setting(name, d, 0.85))
            (found,) = compare(op, given, peers=(), passes=(False,), rounds=2, budget=0.0)
            calls[name], work[name] = forward(op, given), found.flops
        for times in paired_times(calls, rounds=3 if quick else 9)[1:]:
            ratio = Spread(1 / times.ratio.median, 1 / times.ratio.high, 1 / times.ratio.low)
            share = work[times.name] / work["causal"]
            each = [f"{work[times.name] / times.seconds.median / 1e9:.0f}", f"{share * ratio.median:.2f}"]
            table.append([times.name, str(d), *each, *verdict(ratio, 0.85)])
            print(*table[-1], flush=True)
    return (
        ["variant", "D", "GFLOP/s", "× a kept pair", "× (quartiles)", "goal", "met"],
        table,
        (
            "Forward, float32, B 1, H 8, N 4096, beside flashgen's own causal kernel in the same rounds: × is the "
            "causal kernel's time over the variant's; counted by the pairs that each keeps in the column before. "
            f"{DOCUMENTS} documents of random lengths."
        ),
    )


def overhead(*, quick: bool) -> Table:
    """Small work, where Python, dispatch and threads show."""
    table = []
    for shape in (Shape(1, 8, 8, 128, 128), Shape(1, 1, 1, 128, 128), Shape(1, 1, 1, 16, 16)):
        for name in ("plain", "causal"):
            for both in (False, True):
                op = operator(name, 64)
                setting = Setting(name, 64, 1.0, shape, backward=both)
                calls: dict[str, Attention] = {
                    "flashgen": op,
                    "sdpa": functools.partial(sdpa, is_causal=name == "causal"),
                }
                make = both_passes if both else forward
                given = inputs(op, setting)
                candidates = {who: make(call, given) for who, call in calls.items()}
                own, peer = paired_times(candidates, rounds=9 if quick else 25, budget=4.0)
                place = f"{shape.batch},{shape.heads},{shape.q_len},64"
                micros = [f"{times.seconds.median * 1e6:.0f}" for times in (own, peer)]
                table.append([place, name, setting.pass_name, *micros, *verdict(peer.ratio, setting.goal)])
                print(*table[-1], flush=True)
    columns = ["B,H,N,D", "variant", "pass", "flashgen (µs)", "SDPA (µs)", "× (quartiles)", "goal", "met"]
    return columns, table, "Calls of which dispatch and threads are a large part; in C++ (`FLASHGEN_NODE=1`)."


def window(*, quick: bool) -> Table:
    """Whether the time of a windowed mask is linear in the number of tokens."""
    op = operator("window 512", 64)
    short, long = 8192, 65536
    given = {n: inputs(op, Setting("window 512", 64, 1.2, Shape(1, 1, 1, n, n))) for n in (short, long)}
    table = []
    for name, make in (("forward", forward), ("forward+backward", both_passes)):
        first, second = paired_times({str(n): make(op, x) for n, x in given.items()}, rounds=3 if quick else 9)
        found = second.ratio
        ratio = Spread(*(x * short / long for x in (found.median, found.low, found.high)))
        each = [f"{x.seconds.median / n * 1e9:.0f}" for x, n in ((first, short), (second, long))]
        table.append([name, *each, *verdict(ratio, 1.2, most=True)])
        print(*table[-1], flush=True)
    columns = ["pass", "N 8192 (ns a token)", "N 65536 (ns a token)", "ratio (quartiles)", "goal: at most", "met"]
    return columns, table, "Causal window of 512, B 1, H 1, D 64, float32."


def block_mask(*, quick: bool) -> Table:
    """The causal window of 256 beside what PyTorch offers for it, with and without the time that its mask takes."""
    length = BASE.q_len

    def keep(_b: Tensor, _h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (j <= i) & (i - j < 256)

    def masked(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return torch.where(keep(b, h, i, j), s, -torch.inf)

    def made() -> BlockMask:
        return create_block_mask(keep, None, None, length, length, device="cpu")

    flex: Callable[..., Tensor] = torch.compile(flex_attention)
    found, place = made(), torch.arange(length)
    dense = torch.zeros(length, length).masked_fill(~keep(place, place, place[:, None], place), -torch.inf)
    table = []
    for d in (64,) if quick else (64, 128):
        op = operator("window 256", d)
        given = inputs(op, Setting("window 256", d, 10.0))
        peers: dict[str, Attention] = {
            "flex, its block mask made before": lambda q, k, v: flex(q, k, v, block_mask=found),
            "flex, its block mask made in the call": lambda q, k, v: flex(q, k, v, block_mask=made()),
            "flex, the mask as a score, no block mask": lambda q, k, v: flex(q, k, v, score_mod=masked),
            "sdpa, the mask as a tensor": lambda q, k, v: scaled_dot_product_attention(q, k, v, attn_mask=dense),
        }
        a, b = torch.randn(2, 2048, 2048)
        calls: dict[str, Callable[[], object]] = {
            name: forward(each, given) for name, each in ({"flashgen": op} | peers).items()
        }
        calls["sgemm"] = functools.partial(torch.mm, a, b, out=torch.empty(2048, 2048))
        own, *others, gemm = paired_times(calls, rounds=3 if quick else 7, budget=20.0)
        kept = sum(min(i + 1, 256) for i in range(length)) * BASE.heads
        floor = gemm.ratio.median * 4.0 * kept * d / (2.0 * 2048**3)  # as fast as sgemm, of flashgen's time
        for each in others:
            goal = {"before": 4.0, "call": 10.0}.get(each.name.split()[-1])
            ratio = f"{each.ratio.median:.1f} ({each.ratio.low:.1f}–{each.ratio.high:.1f})"
            judged = [ratio, "", ""] if goal is None else verdict(each.ratio, goal)
            millis = [f"{times.seconds.median * 1e3:.0f}" for times in (own, each)]
            table.append([str(d), each.name, *millis, *judged, f"{each.ratio.median / floor:.1f}"])
            print(*table[-1], flush=True)
    columns = ["D", "against", "flashgen (ms)", "peer (ms)", "× (quartiles)", "goal", "met", "× at the speed of sgemm"]
    remark = (
        "Causal window of 256, forward, float32, B 1, H 8, N 4096. A block mask made before costs nothing where masks "
        "never change; made in the call is what a mask costs that follows the data. The last column is what a kernel "
        "would reach that computes kept pairs alone, as fast as sgemm in the same rounds."
    )
    return columns, table, remark


@functools.cache
def operator(variant: str, head_dim: int) -> AttentionOp:
    """The operator of one variant, compiled or from the cache."""
    name = "bench_" + "".join(x if x.isalnum() else "_" for x in variant.lower())
    return flashgen.loads(f"attention {name} {{ head_dim {head_dim}  {BODIES[variant]} }}")


def inputs(op: AttentionOp, setting: Setting) -> Inputs:
    """Random arguments, the same every time."""
    given = random_inputs(
        op.spec, setting.shape, HeadDim(setting.head_dim, setting.head_dim), setting.dtype, realistic=True
    )
    if "doc" not in given.captured:
        return given
    ends = torch.randperm(setting.shape.kv_len, generator=torch.Generator().manual_seed(1))[: DOCUMENTS - 1]
    doc = torch.zeros_like(given.captured["doc"])
    doc[:, ends] = 1
    return dataclasses.replace(given, captured={"doc": doc.cumsum(1).to(doc.dtype)})


def sdpa(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool) -> Tensor:
    """PyTorch's own."""
    return scaled_dot_product_attention(q, k, v, is_causal=is_causal)


def forward(attention: Attention, given: Inputs) -> Callable[[], Tensor]:
    """One forward pass."""

    def run() -> Tensor:
        with torch.no_grad():
            return attention(given.q, given.k, given.v, **given.captured)

    return run


def both_passes(attention: Attention, given: Inputs) -> Callable[[], object]:
    """One forward and backward pass."""
    leaves = [x.detach().clone().requires_grad_() for x in (given.q, given.k, given.v)]
    return lambda: torch.autograd.grad(attention(*leaves, **given.captured), leaves, given.d_o)


SECTIONS: Mapping[str, Callable[..., Table]] = {
    "speed": speed,
    "variants": variants,
    "overhead": overhead,
    "window": window,
    "block_mask": block_mask,
}


if __name__ == "__main__":
    main()
