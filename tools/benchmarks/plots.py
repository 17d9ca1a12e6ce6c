"""Sweeps as figures for a paper: run time, memory and HBM bytes, with units, a legend and where they were measured.

In: a ``Sweep`` and a path. Out: a PNG, SVG or PDF.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from flashgen.picture.plotting import COLORS, MARKERS, figure
from tools.benchmarks.sweep import OWN, Point, Sweep
from tools.benchmarks.traffic import standard_bytes

_PASSES = ((False, "forward"), (True, "forward + backward"))
_MS, _MIB = 1e3, 2.0**-20
_NAMES = {
    "standard": "standard attention",
    "rabe_staats": "Rabe and Staats",
    "sdpa": "SDPA",
    "flex": "FlexAttention",
    "dense": "dense, PyTorch",
    "block_sparse": "flashgen, block-sparse",
}
_WIDTH, _HEIGHT = 3.1, 3.0

Line = tuple[str, Sequence[Point]]


def save_plot(sweep: Sweep, path: Path) -> None:
    """Raises ``PlottingMissing`` without matplotlib, ``ValueError`` for a suffix that is no format, ``OSError``."""
    panels = _PANELS[sweep.kind](sweep)
    with figure(path, _WIDTH * len(panels), _HEIGHT + 0.55) as drawn:
        axes = drawn.subplots(1, len(panels), squeeze=False)[0]
        for own, panel in zip(axes, panels, strict=True):
            panel(own)
        handles = _legend(axes)
        _add_legend(drawn, handles, min(max(1, len(handles)), len(panels) + 1))
        drawn.supxlabel(caption(sweep), fontsize=6.5, x=0.01, ha="left")


def _add_legend(drawn: Any, handles: Mapping[str, Any], columns: int) -> None:
    """Above the panels, in as many columns as fit the figure's width."""
    while True:
        legend = drawn.legend(handles.values(), handles.keys(), loc="outside upper center", ncols=columns)
        if columns == 1 or legend.get_window_extent().width <= 0.98 * drawn.bbox.width:
            return
        legend.remove()
        columns -= 1


def _legend(axes: Iterable[Any]) -> dict[str, Any]:
    """What each line is called; those with error bars, which are the measured ones, first."""
    found: dict[str, Any] = {}
    for own in axes:
        for handle, label in zip(*own.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    return dict(sorted(found.items(), key=lambda item: not getattr(item[1], "has_yerr", False)))


def caption(sweep: Sweep) -> str:
    """Where and how it was measured, in a line or two."""
    shapes = {(point.shape.batch, point.shape.heads, point.shape.kv_heads) for point in sweep.points}
    batch = "; ".join(f"B {b}, H {h}, Hkv {kv}" for b, h, kv in sorted(shapes))
    if sweep.kind != "length" and sweep.points:
        shape = sweep.points[0].shape
        batch += f", Nq {shape.q_len}, Nk {shape.kv_len}"
    options = "".join(f", {option}" for option in sweep.options)
    rounds = [point.rounds for point in sweep.points] or [0]
    return (
        f"{sweep.spec_name}: {batch}, D {sweep.head_dim}, {sweep.element}{options}\n{sweep.device}; "
        f"medians and quartiles of {_span(rounds)} rounds{f'; {sweep.of_code}' if sweep.of_code else ''}"
    )


def _span(numbers: Sequence[int]) -> str:
    low, high = min(numbers), max(numbers)
    return f"{low}" if low == high else f"{low} to {high}"


def _length(sweep: Sweep) -> list[Callable[[Any], None]]:
    lines = _by(sweep.points, lambda point: _NAMES.get(point.who, point.who))

    def times(backward: bool, title: str) -> Callable[[Any], None]:
        def draw(axes: Any) -> None:
            axes.set_title(title)
            axes.set_ylabel("run time (ms)")
            _draw_times(axes, lines, backward=backward)
            _lengths(axes, sweep)

        return draw

    def memory(axes: Any) -> None:
        axes.set_title("memory, forward + backward")
        axes.set_ylabel("peak beyond the inputs (MiB)")
        for number, (name, points) in enumerate(lines):
            known = [(p.x, p.memory_bytes * _MIB) for p in points if p.backward and p.memory_bytes]
            _line(axes, number, name, known)
        _lengths(axes, sweep)

    return [*(times(backward, title) for backward, title in _PASSES), memory]


def _lengths(axes: Any, sweep: Sweep) -> None:
    axes.set_xlabel("N (tokens)")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    places = sorted({point.x for point in sweep.points})[:: 2 if len({p.x for p in sweep.points}) > 6 else 1]
    axes.set_xticks(places, [f"{x / 1024:g}k" if x >= 1024 else f"{x:g}" for x in places])
    axes.minorticks_off()
    _label_decades(axes.yaxis)


def _blocks(sweep: Sweep) -> list[Callable[[Any], None]]:
    swept = [point for point in sweep.points if point.series != "planner"]
    chosen = [point for point in sweep.points if point.series == "planner"]
    places = sorted({point.x for point in swept})

    def ready(axes: Any, title: str, unit: str) -> None:
        axes.set_title(title)
        axes.set_ylabel(unit)
        axes.set_xlabel("$B_r = B_c$")
        axes.set_xscale("log", base=2)
        axes.set_xticks(places, [f"{x:g}" for x in places])
        axes.minorticks_off()
        axes.set_ylim(bottom=0)

    def times(axes: Any) -> None:
        _draw_times(axes, [(title, _of(swept, backward)) for backward, title in _PASSES], backward=None)
        for number, (backward, _) in enumerate(_PASSES):
            for point in _of(chosen, backward):
                label = f"planner: {point.label}"
                style = {"marker": "*", "markersize": 9, "linestyle": "none", "markeredgecolor": "black"}
                y = point.seconds.median * _MS
                axes.plot(point.x, y, color=COLORS[number], label=label, markeredgewidth=0.5, **style)
        ready(axes, "run time", "run time (ms)")

    def traffic(axes: Any) -> None:
        for number, (backward, title) in enumerate(_PASSES):
            known = [(p.x, p.hbm_bytes * _MIB) for p in _of(swept, backward) if p.hbm_bytes]
            _line(axes, number, title, known)
            if sweep.points:
                bytes_ = standard_bytes(sweep.points[0].shape, sweep.head_dim, sweep.element)
                y = bytes_.of(backward=backward) * _MIB
                axes.axhline(y, color=COLORS[number], linestyle=":", label=f"standard attention, {title}")
        ready(axes, f"HBM traffic, predicted for {sweep.target}", "bytes moved (MiB)")

    return [times, traffic]


def _sparsity(sweep: Sweep) -> list[Callable[[Any], None]]:
    lines = _by(sweep.points, lambda point: f"{point.series}, {point.who}" if point.who != OWN else point.series)

    def percent(axes: Any) -> None:
        axes.set_xlabel("pairs kept (%)")
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)

    def times(backward: bool, title: str) -> Callable[[Any], None]:
        def draw(axes: Any) -> None:
            axes.set_title(title)
            axes.set_ylabel("run time (ms)")
            _draw_times(axes, lines, backward=backward, scale=100)
            own = [p for p in sweep.points if p.backward == backward and p.who == OWN]
            if own:
                densest = max(own, key=lambda point: point.kept_share)
                x, y = 100 * densest.kept_share, densest.seconds.median * _MS
                axes.plot([0, x], [0, y], color="#888888", linestyle="--", linewidth=1, label="proportional")
            percent(axes)

        return draw

    def traffic(axes: Any) -> None:
        axes.set_title(f"HBM, both passes, predicted for {sweep.target}")
        axes.set_ylabel("bytes moved (MiB)")
        for number, (name, points) in enumerate(lines):
            known = [(100 * p.x, p.hbm_bytes * _MIB) for p in points if p.backward and p.hbm_bytes]
            _line(axes, number, name, known)
        percent(axes)

    return [*(times(backward, title) for backward, title in _PASSES), traffic]


def _totals(sweep: Sweep) -> list[Callable[[Any], None]]:
    names = list(dict.fromkeys(point.who for point in sweep.points))
    values: dict[str, Callable[[Point], float | None]] = {
        "matrix products (GFLOP)": lambda point: None if point.flops is None else point.flops * 1e-9,
        "HBM bytes (GB)": lambda point: None if point.hbm_bytes is None else point.hbm_bytes * 1e-9,
        "run time (ms)": lambda point: point.seconds.median * _MS,
    }

    def panel(title: str, value: Callable[[Point], float | None]) -> Callable[[Any], None]:
        def draw(axes: Any) -> None:
            axes.set_title(title)
            axes.set_axisbelow(True)
            for number, (backward, label) in enumerate(_PASSES):
                known = {point.who: found for point in _of(sweep.points, backward) if (found := value(point))}
                places = [names.index(who) + 0.4 * (number - 0.5) for who in known]
                axes.bar(places, known.values(), width=0.38, color=COLORS[number], label=label)
            axes.set_xticks(range(len(names)), [_NAMES.get(name, name).replace(" ", "\n", 1) for name in names])
            axes.tick_params(axis="x", labelsize=7)

        return draw

    return [panel(title, value) for title, value in values.items()]


_PANELS: dict[str, Callable[[Sweep], list[Callable[[Any], None]]]] = {
    "length": _length,
    "blocks": _blocks,
    "sparsity": _sparsity,
    "totals": _totals,
}


def _draw_times(axes: Any, lines: Iterable[Line], *, backward: bool | None, scale: float = 1) -> None:
    """Medians with the quartiles as bars."""
    for number, (name, points) in enumerate(lines):
        shown = sorted((p for p in points if backward in (None, p.backward)), key=lambda p: p.x)
        if not shown:
            continue
        middle = [p.seconds.median * _MS for p in shown]
        low = [(p.seconds.median - p.seconds.low) * _MS for p in shown]
        high = [(p.seconds.high - p.seconds.median) * _MS for p in shown]
        style = {"color": COLORS[number % len(COLORS)], "marker": MARKERS[number % len(MARKERS)]}
        axes.errorbar([scale * p.x for p in shown], middle, yerr=(low, high), label=name, elinewidth=0.8, **style)


def _line(axes: Any, number: int, name: str, places: Sequence[tuple[float, float]]) -> None:
    if places:
        xs, ys = zip(*sorted(places), strict=True)
        axes.plot(xs, ys, color=COLORS[number % len(COLORS)], marker=MARKERS[number % len(MARKERS)], label=name)


def _by(points: Sequence[Point], name: Callable[[Point], str]) -> list[Line]:
    """The points of each name, in the order in which names appear."""
    names = dict.fromkeys(name(point) for point in points)
    return [(each, [point for point in points if name(point) == each]) for each in names]


def _of(points: Sequence[Point], backward: bool) -> list[Point]:
    return [point for point in points if point.backward == backward]


def _label_decades(axis: Any) -> None:
    """Plain numbers at 1, 2 and 5 of each decade of a logarithmic axis, however short it is."""
    axis.set_major_locator(importlib.import_module("matplotlib.ticker").LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter("{x:g}")
