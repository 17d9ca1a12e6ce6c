"""A figure's legend lies within the figure, however long its names are."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize("length", [3, 30, 45])
def test_a_legend_is_not_cut_off(length: int) -> None:
    figure_module = pytest.importorskip("matplotlib.figure")
    from tools.benchmarks.plots import _add_legend

    drawn = figure_module.Figure(figsize=(6.6, 3.4), layout="constrained")
    axis = drawn.add_subplot()
    handles = {f"{number} {'x' * length}": axis.plot([0, 1], [0, number])[0] for number in range(5)}
    _add_legend(drawn, handles, 3)
    (legend,) = drawn.legends
    assert legend.get_window_extent().width <= drawn.bbox.width
