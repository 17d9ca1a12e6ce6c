"""Backward at D 64 by warpgroups that weigh 128 queries at once."""

from __future__ import annotations

import contextlib
import re

import pytest

from flashgen.hosts.emulator.report import EmulatorError
from tests.cuda.helpers import planned
from tests.cuda.hopper import changed
from tests.cuda.hopper_backward import check_gradients_repeat, check_results_and_bytes, gradients

WHOLE, PARTS = 128, 64
CAUSAL = "head_dim 64  mask causal"
PLANTED = {
    "dS of the other warpgroup is not awaited": ("await_ds(n - 1);\n      start_dq", "start_dq"),
    "P of the tile before": ("put_dq(dq);\n    }\n    fg::wait_products<0>(dv, dk, p, ds);", "put_dq(dq);\n    }"),
    "dQ before it is there": ("fg::wait_products<2>(dq);", ""),
}


@pytest.mark.parametrize(
    ("text", "weighed"),
    [
        ("head_dim 64", WHOLE),
        (CAUSAL, WHOLE),
        ("head_dim 64/48  mask causal", WHOLE),
        ("head_dim 64  dropout 0.1", PARTS),
        ("head_dim 64  score softcap(s, 30)", PARTS),
        ("head_dim 64  param tau: f32 = 1.0 grad  score s * tau", PARTS),
        ("head_dim 128", PARTS),
    ],
)
def test_which_tiles_are_weighed_whole(text: str, weighed: int) -> None:
    (element,) = planned(f"attention plain {{ dtype bf16  {text} }}", "sm_90a")[1].elements
    assert element.backward.s_columns == weighed


@pytest.mark.parametrize("text", ["head_dim 64", CAUSAL])
def test_results_and_bytes(text: str) -> None:
    check_results_and_bytes("whole", text, (1, 2, 1, 300, 270), lambda tiles: tiles.s_columns == WHOLE)


def test_gradients_repeat() -> None:
    check_gradients_repeat("whole", CAUSAL)


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANTED)
def test_mistakes_show(name: str) -> None:
    old, new = PLANTED[name]
    op = changed(f"whole_{list(PLANTED).index(name)}", CAUSAL, "backward", re.escape(old), new)
    with contextlib.suppress(EmulatorError):
        assert not gradients(op) <= 0.01  # or none at all
