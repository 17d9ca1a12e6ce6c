"""The paper's experiments for any spec: over the length, the size of the blocks, and the share of blocks kept.

In: an ``AttentionSpec`` and what the user asked for. Out: ``Point``s and ``Absent``s as they are measured
(``tools/benchmarks/sweep.py``). Figures are those of Dao et al., "FlashAttention", 2022, arXiv:2205.14135.

    length    run time and memory against N, with dropout and a padding mask (Figure 3); ``block_sparse`` among the
              peers is flashgen itself with the butterfly of blocks of 64, so that log N / N of the pairs are left
    blocks    run time and HBM bytes against B_r = B_c (Figure 2, left and middle)
    sparsity  run time against the share of blocks kept, for the butterfly and for random blocks (Figure 2, right)
    totals    flops, HBM bytes and run time of one shape (the table on the left of Figure 2)
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch

from flashgen.diagnostics import SpecError
from flashgen.hosts.backends import gpu_at_hand
from flashgen.ir.build import apply
from flashgen.ir.expr import Load, index, literal, size
from flashgen.ir.shape import Shape
from flashgen.ir.spec import AttentionSpec, CapturedTensor, Schedule
from flashgen.ir.types import ElementType, ScalarType
from flashgen.language import parse_text
from flashgen.op.loading import load_spec
from flashgen.op.signature import TORCH_DTYPES
from flashgen.reference.dense import drop_probability, param_values
from flashgen.reference.shard import Shard
from flashgen.targets.gpu.target import GpuTarget
from flashgen.toolchains.cpp import CompileFailed
from flashgen.verification.inputs import Inputs, random_inputs, refusal
from tools.benchmarks.peers import kept_share
from tools.benchmarks.sweep import OWN, Absent, Clock, Found, Place, Point, Setting, measure, own_run
from tools.benchmarks.traffic import MODELLED, PassBytes, kernel_bytes

LENGTHS = tuple(2**exponent for exponent in range(7, 17))
BLOCKS = (16, 32, 64, 128, 256)
SHARES = (1.0, 3 / 4, 1 / 2, 5 / 16, 3 / 16, 7 / 64, 1 / 16)

SPARSE = "block_sparse"
PADDING = "sweep_length"  # the tensor that padding adds to a spec
_BLOCK = 64
# The share of blocks is a param, so that one operator serves a whole line of the plot.
_PATTERNS: Mapping[str, str] = MappingProxyType(
    {
        "butterfly": "param sweep_stretch: i32 = 1  layout block 64: I // sweep_stretch == J // sweep_stretch "
        "or popcount((I // sweep_stretch) ^ (J // sweep_stretch)) == 1",
        "random blocks": "param sweep_share: f32 = 1.0  layout block 64: I == J or random_blocks(sweep_share, 1)",
    }
)
_MOST_COUNTING = 5.0  # seconds to count the tiles of a place; the places after it go without HBM bytes
_SPENT = "the budget is spent"
_MOST_COUNTED = 2**22  # pairs: at N = 8k every 16th row, four of each block
_CALLS = 8  # of each pass at one place, about: warming up, memory, rounds
_MOST_A_PLACE = 10.0  # seconds, where a place can be measured in that


@dataclass(frozen=True)
class Task:
    """What to sweep: the spec, where it runs, how long, and ``target``, whose kernels' HBM bytes are predicted."""

    spec: AttentionSpec
    setting: Setting
    shape: Shape
    backend: str | None = None
    budget: float = 300.0
    target: GpuTarget = MODELLED

    def inputs(self, spec: AttentionSpec, shape: Shape) -> Inputs:
        """Random arguments on the device."""
        dtype = TORCH_DTYPES[self.setting.element]
        return random_inputs(spec, shape, self.setting.head_dim, dtype, realistic=True).to(str(self.setting.device))


def with_padding(spec: AttentionSpec) -> AttentionSpec:
    """The spec with keys past a length of each batch entry left out, as padding is."""
    length = Load(ScalarType.INT, tensor=PADDING, indices=(index("b"),))
    return replace(
        spec,
        mask=apply("and", spec.mask, apply("lt", index("j"), length)),
        tensors=(*spec.tensors, CapturedTensor(PADDING, ElementType.I32, (size("B"),), grad=False)),
    )


def with_dropout(spec: AttentionSpec, probability: float) -> AttentionSpec:
    """The spec with this drop probability."""
    return replace(spec, dropout=literal(probability))


def task_for(
    spec: AttentionSpec,
    shape: Shape,
    *,
    element: ElementType | None = None,
    peers: tuple[str, ...] = (),
    device: str = "cpu",
    backend: str | None = None,
    budget: float = 300.0,
    dropout: float | None = None,
    padding: bool = False,
) -> Task:
    """The task, with a drop probability instead of the spec's and a padding mask beside its own where asked for.

    The element type is float32 on a CPU and bfloat16 on a GPU where the spec allows it, unless it is given. Raises
    ``ValueError`` for a GPU that nothing is generated for.
    """
    changed = with_padding(spec) if padding else spec
    if dropout is not None:
        changed = with_dropout(changed, dropout)
    on_gpu = device == "cuda"
    usual = ElementType.BF16 if on_gpu else ElementType.F32
    allowed = spec.dtypes or (usual,)
    setting = Setting(
        head_dim=spec.head_dims[0],
        element=element or (usual if usual in allowed else allowed[0]),
        device=torch.device(device),
        peers=peers,
        drop=_drop_probability(changed, shape),
    )
    target = gpu_at_hand() if on_gpu else MODELLED
    return Task(changed, setting, shape, backend or ("cuda" if on_gpu else None), budget, target)


def _drop_probability(spec: AttentionSpec, shape: Shape) -> float | None:
    """The drop probability of a call; None without a dropout statement."""
    if spec.dropout is None:
        return None
    head_dim = spec.head_dims[0]
    sizes = Shard(shape.batch, shape.heads, shape.kv_heads, shape.q_len, shape.kv_len).sizes(head_dim.qk, head_dim.v)
    given = {param.name: 1.0 for param in spec.params if param.default is None}
    return drop_probability(spec, param_values(spec, given, sizes), sizes)


def length_sweep(task: Task, lengths: Sequence[int] = LENGTHS) -> Iterator[Found]:
    """Nq = Nk = N for every N: flashgen and the peers, as long as the budget lasts."""
    op = load_spec(task.spec, task.backend)
    setting = replace(task.setting, peers=tuple(name for name in task.setting.peers if name != SPARSE))
    sparse = SPARSE in task.setting.peers and task.spec.layout is None
    sparse_spec = _with_pattern(task.spec, "butterfly")[0] if sparse else task.spec
    sparse_op = load_spec(sparse_spec, task.backend)
    clock, forecast, sparse_forecast = Clock(task.budget), _Forecast(), _Forecast()
    padded = any(tensor.name == PADDING for tensor in task.spec.tensors)
    for number, length in enumerate(lengths):
        shape = replace(task.shape, q_len=length, kv_len=length)
        place = Place("", length, str(length))
        reason = refusal(task.spec, shape)
        own = forecast.seconds(OWN, length)
        left = max(clock.left, 0.0)
        if reason is None and own > left:
            reason = f"it would take about {own:.1f} s, {left:.1f} s of the budget are left"
        if reason is not None:
            yield Absent("", length, place.label, OWN, backward=False, reason=reason)
            continue
        inputs = task.inputs(task.spec, shape)
        if padded:
            inputs = replace(inputs, captured={**inputs.captured, PADDING: _lengths(shape, task.setting.device)})
        share = max(clock.left / (len(lengths) - number), 1.0)
        slow = {
            name: f"it would take about {forecast.seconds(name, length):.0f} s; a larger --budget leaves it time"
            for name in task.setting.peers
            if forecast.seconds(name, length) > max(share, clock.left / 2)
        }
        seconds = min(share, _MOST_A_PLACE)
        for found in measure(
            op,
            inputs,
            setting,
            place,
            kept_share=kept_share(task.spec, inputs),
            hbm=forecast.bytes(task, inputs, task.spec),
            seconds=seconds,
            leave_out=slow,
        ):
            forecast.learn(found)
            yield found
        if SPARSE not in task.setting.peers:
            continue
        reason = slow.get(SPARSE) if sparse else "the spec has a layout of its own"
        if reason is not None:
            yield Absent("", length, place.label, SPARSE, backward=False, reason=reason)
            continue
        for found in measure(
            sparse_op,
            inputs,
            replace(setting, peers=()),
            place,
            kept_share=kept_share(sparse_spec, inputs),
            hbm=sparse_forecast.bytes(task, inputs, sparse_spec),
            seconds=seconds,
            beside={backward: own_run(op, inputs, setting, backward=backward) for backward in (False, True)},
        ):
            renamed = replace(found, who=SPARSE)
            forecast.learn(renamed)
            yield renamed


def block_sweep(task: Task, blocks: Sequence[int] = BLOCKS) -> Iterator[Found]:
    """What the planner chooses, then B_r = B_c = each block, pinned by the schedule for both passes."""
    inputs = task.inputs(task.spec, task.shape)
    share = kept_share(task.spec, inputs)
    setting = replace(task.setting, peers=())
    chosen: dict[bool, Callable[[], object]] = {}
    clock = Clock(task.budget)
    for block in (None, *blocks):
        if block is not None and clock.left < 0:
            yield Absent("B_r = B_c", block, f"{block} × {block}", OWN, backward=False, reason=_SPENT)
            continue
        spec = task.spec if block is None else with_tile(task.spec, setting.element, block)
        try:
            op = load_spec(spec, task.backend)
            own = {backward: own_run(op, inputs, setting, backward=backward) for backward in (False, True)}
            own[True]()  # on a GPU it is compiled now
        except (SpecError, CompileFailed) as error:
            if block is None:
                raise
            reason = error.diagnostics[0].message if isinstance(error, SpecError) else str(error).splitlines()[0]
            yield Absent("B_r = B_c", block, f"{block} × {block}", OWN, backward=False, reason=reason)
            continue
        chosen = chosen or own
        tiles = op.plan[setting.head_dim].of_element(setting.element)["forward"]
        label = f"{tiles.Br} × {tiles.Bc}"
        yield from measure(
            op,
            inputs,
            setting,
            Place("planner", math.sqrt(tiles.Br * tiles.Bc), label)
            if block is None
            else Place("B_r = B_c", block, label),
            kept_share=share,
            hbm=kernel_bytes(spec, inputs, setting.element, task.target),
            seconds=task.budget / (len(blocks) + 1),
            beside=chosen,
        )


def with_tile(spec: AttentionSpec, element: ElementType, block: int) -> AttentionSpec:
    """The spec for one element type with B_r = B_c pinned for both passes; warps and stages are the planner's."""
    pins = Schedule(Br=block, Bc=block, backward_Br=block, backward_Bc=block, span=spec.schedule.span)
    return replace(spec, schedule=pins, dtypes=(element,))


def sparsity_sweep(task: Task, shares: Sequence[float] = SHARES) -> Iterator[Found]:
    """The spec with the butterfly and with random blocks in the place of its layout; ``x`` is the share of pairs kept.

    The butterfly over n blocks keeps (log2 n + 1) / n of them; wider blocks make n smaller.
    """
    blocks = -(-task.shape.kv_len // _BLOCK)
    for series in _PATTERNS:
        spec, param = _with_pattern(task.spec, series)
        op = load_spec(spec, task.backend)
        clock, forecast = Clock(task.budget / len(_PATTERNS)), _Forecast()
        # The densest first: every other place takes turns with it.
        values: list[float] = [2**n for n in reversed(range(max(blocks - 1, 1).bit_length()))]
        if series != "butterfly":
            # Blocks on the diagonal are kept in any case.
            values = [max(0.0, (share * blocks - 1) / max(blocks - 1, 1)) for share in sorted(shares, reverse=True)]
        densest: dict[bool, Callable[[], object]] = {}
        for value in values:
            inputs = task.inputs(spec, task.shape)
            inputs = replace(inputs, params={**inputs.params, param: value})
            densest = densest or {
                backward: own_run(op, inputs, task.setting, backward=backward) for backward in (False, True)
            }
            if clock.left < 0:
                label = f"{series}, {param} = {value:g}"
                yield Absent(series, value, label, OWN, backward=False, reason=_SPENT)
                continue
            share = kept_share(spec, inputs, _MOST_COUNTED)
            place = Place(series, share, f"{series}, {share:.1%}")
            yield from measure(
                op,
                inputs,
                task.setting,
                place,
                kept_share=share,
                hbm=forecast.bytes(task, inputs, spec),
                seconds=task.budget / (len(_PATTERNS) * len(values)),
                beside=densest,
            )


def _with_pattern(spec: AttentionSpec, series: str) -> tuple[AttentionSpec, str]:
    """The spec with a pattern in the place of its layout, and the name of the param that says how much it keeps."""
    (pattern,) = parse_text(f"attention sweep {{ head_dim 16 {_PATTERNS[series]} }}").specs
    return replace(spec, layout=pattern.layout, params=(*spec.params, *pattern.params)), pattern.params[0].name


def totals_sweep(task: Task) -> Iterator[Found]:
    """One shape: flashgen and the peers, with flops and HBM bytes of those that the paper counts."""
    inputs = task.inputs(task.spec, task.shape)
    yield from measure(
        load_spec(task.spec, task.backend),
        inputs,
        task.setting,
        Place("", task.shape.kv_len, str(task.shape)),
        kept_share=kept_share(task.spec, inputs),
        hbm=kernel_bytes(task.spec, inputs, task.setting.element, task.target),
        seconds=task.budget,
    )


def proportional(points: Sequence[Point]) -> Mapping[Point, float]:
    """For each point of a sparsity sweep: how many times longer it takes than its share of the densest one's time."""
    found = {}
    for point in points:
        densest = max(each.kept_share for each in points if each.series == point.series)
        found[point] = point.ratio.median * densest / point.kept_share
    return found


def _lengths(shape: Shape, device: torch.device) -> torch.Tensor:
    """Lengths between half of the keys and all of them."""
    generator = torch.Generator().manual_seed(0)
    low, high = (shape.kv_len + 1) // 2, shape.kv_len + 1
    return torch.randint(low, high, (shape.batch,), generator=generator, dtype=torch.int32).to(device)


class _Forecast:
    """What a place will take, from the last one: work grows with the square of the length."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[float, float, float]] = {}
        self._counts_tiles = True

    def bytes(self, task: Task, inputs: Inputs, spec: AttentionSpec) -> PassBytes | None:
        """HBM bytes, as long as tiles are counted in a moment."""
        if not self._counts_tiles:
            return None
        start = time.perf_counter()
        found = kernel_bytes(spec, inputs, task.setting.element, task.target)
        self._counts_tiles = time.perf_counter() - start < _MOST_COUNTING
        return found

    def learn(self, found: Found) -> None:
        if isinstance(found, Point):
            at, seconds, _ = self._known.get(found.who, (0.0, 0.0, 0.0))
            total = found.seconds.median + (seconds if at == found.x else 0.0)
            self._known[found.who] = (found.x, total, found.first_call_seconds or 0.0)

    def seconds(self, who: str, length: int) -> float:
        if who not in self._known:
            return 0.0
        at, seconds, first = self._known[who]
        return first + _CALLS * seconds * (length / at) ** 2
