"""Calls through doors: what a spec is as mods, what doors cannot say, and that a planted mistake of a door is found."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest
from torch import Tensor

from flashgen.diagnostics import SpecError
from flashgen.ir.spec import AttentionSpec
from flashgen.language import parse_text
from tests.cli.helpers import flashgen_process
from tools.fuzz import doors
from tools.fuzz.doors import draw_through_doors, flash_options
from tools.fuzz.draws import CallDraw, Case, Machine
from tools.fuzz.judge import judge
from tools.fuzz.mods import NotExpressibleError, mods_text

TILED = Machine("tiled")
CALL = CallDraw(0, "f32", (2, 4, 2, 13, 17), seed=3, deterministic=True, door="flex")
BODY = """
    head_dim 16
    tensor slope: f32[H] grad
    tensor near: bf16[9] grad
    param width: i32 = 5
    score softcap(s, 3.0) - slope[h] * abs(i - j) + near[clamp(i - j, -4, 4) + 4]
    mask (i - j < width or hkv == 1) and j % 7 != 3
    layout block 4: I >= J or b == 1
"""
FLASH = "param scaling: f32 = 0.3  param left: i32 = 5  mask {}  scale scaling  score s"


def spec_of(body: str) -> AttentionSpec:
    (spec,) = parse_text(f"attention drawn {{ head_dim 16 {body.replace('head_dim 16', '')} }}").specs
    return spec


def test_a_spec_as_mods() -> None:
    assert mods_text(spec_of("mask i - j < 5 and i >= j")) == (
        "def mask_mod(b, h, q_idx, kv_idx):\n"
        "    x0 = q_idx - kv_idx\n"
        "    x1 = torch.tensor(5)\n"
        "    x2 = x0 < x1\n"
        "    x3 = q_idx >= kv_idx\n"
        "    x4 = x2 & x3\n"
        "    return x4\n"
    )


@pytest.mark.parametrize("door", ["flex", "nn"])
def test_doors_give_what_the_op_gives(door: str, tmp_path: Path) -> None:
    calls = tuple(
        CallDraw(0, dtype, (2, 4, 2, 13, 17), seed=3, deterministic=True, door=door) for dtype in ("f32", "bf16")
    )
    verdict = judge(Case(f"attention drawn {{ {BODY} }}", calls, TILED), tmp_path)
    assert (verdict.findings, verdict.refused) == ((), "")
    assert verdict.kinds == (f"through {door}, f32", f"through {door}, bf16")
    assert verdict.results == 2 * len(("o", "lse", "dq", "dk", "dv", "dslope", "dnear"))


def test_a_door_that_says_something_else_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = vars(doors)["flex_attention"]

    def wrong(q: Tensor, *others: object, **options: object) -> object:
        return real(q.nextafter(q + 1), *others, **options)

    monkeypatch.setattr(doors, "flex_attention", wrong)
    verdict = judge(Case(f"attention drawn {{ {BODY} }}", (CALL,), TILED), tmp_path)
    assert "other bits through flex" in {each.kind for each in verdict.findings}


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("score dot", "a mod does not know 'dot'"),
        ("mask hash(i, j) % 2 == 0", "PyTorch has no 'hash'"),
        ("dropout 0.1", "dropout"),
        ("weights sigmoid(s)", "weights other than a softmax"),
    ],
)
def test_what_mods_cannot_say(body: str, reason: str) -> None:
    with pytest.raises(NotExpressibleError, match=reason):
        mods_text(spec_of(body))


def test_which_specs_are_calls_of_flash_attention() -> None:
    corner = "i + Nk - Nq"
    assert flash_options(spec_of(FLASH.format(f"j <= {corner} and j >= {corner} - left")))
    assert not flash_options(spec_of(FLASH.format(f"j >= {corner} - left")))
    for mask in ("causal and j >= i - left", f"j > {corner} - left"):
        with pytest.raises(NotExpressibleError, match="FlashAttention"):
            flash_options(spec_of(FLASH.format(mask)))


def test_what_is_drawn_goes_through_every_door() -> None:
    drawn = [draw_through_doors(seed, Machine("cpu")) for seed in range(40)]
    assert {call.door for each in drawn for call in each.calls} == {"flex", "flash", "nn"}
    assert drawn[3] == draw_through_doors(3, Machine("cpu"))
    said = {"flash": flash_options, "flex": mods_text}
    for each in drawn:
        if (say := said.get(each.calls[0].door)) is not None:
            with contextlib.suppress(SpecError):  # a name that Python keeps for itself, now and then
                (spec,) = parse_text(each.case.text).specs
                say(spec)


def test_random_specs_through_doors(seed: int) -> None:
    """To repeat a failure: the command that the message begins with."""
    arguments = ["--doors", "--backend", "tiled", "--count", "3", "--seed", str(seed)]
    done = flashgen_process("fuzz", *arguments, "--jobs", "1", "--attempts", "0", "--json", seconds=280)
    assert done.code == 0, f"flashgen fuzz {' '.join(arguments)}\n{done.stderr}"
    assert json.loads(done.stdout)["specs"] == 3
