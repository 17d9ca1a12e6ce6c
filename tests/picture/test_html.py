"""What notebooks show: well-formed, escaped, with the same picture as elsewhere, and never a traceback."""

from __future__ import annotations

import base64
import io
import re
import sys
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pytest
from PIL import Image

import flashgen
from flashgen.compiler.pipeline import compile_spec
from flashgen.flex import create_block_mask
from flashgen.flex.drawing import picture_of
from flashgen.ir.expr import literal
from flashgen.ir.shape import Shape
from flashgen.ir.spec import AttentionSpec
from flashgen.op.op import AttentionOp, OpParts
from flashgen.picture import mask as usual
from flashgen.picture.paint import PALETTE, paint, size_of
from flashgen.plan.notebook import Plans
from flashgen.targets.cpu.device import GENERIC_CPU
from flashgen.targets.cpu.target import CpuTarget
from flashgen.targets.registry import GPUS

TEXT = (
    "attention shown { head_dim 16, 32 tensor bias: f32[H] grad param g: f32 = 1.0 score s * g + bias[h] mask j < i }"
)


class Tags(HTMLParser):
    """Fails where a tag is closed that is not open; ``text`` is what a person reads."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.text = ""
        self.feed(html)
        assert not self.open, self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        if tag not in ("img", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in ("img", "br"):
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture(scope="module")
def op() -> Any:
    return flashgen.loads(TEXT, backend="reference")


def shown_pixels(html: str) -> Any:
    (data,) = re.findall(r'src="data:image/png;base64,([^"]+)"', html)
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(data))).convert("RGB"))


def test_an_op(op: Any) -> None:
    html = op._repr_html_()
    found = Tags(html)
    assert {"img", "pre", "figcaption"} <= set(found.seen)
    assert "mask j < i" in found.text
    assert "mask j &lt; i" in html
    assert "on reference" in found.text
    assert "Nq 1024, Nk 1024" in found.text
    assert repr(op) == f"<{op.name}: head_dim 16 or 32; bias: f32[H] grad, g: f32 = 1.0; on reference>"


@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
def test_plans_of_gpus(op: Any, target: str) -> None:
    kernels = compile_spec(op.spec, GPUS[target])
    plans = Plans(op.spec, {each.variant.head_dim: each.plan for each in kernels})
    found = Tags(plans._repr_html_())
    assert f"on {target}" in found.text
    assert "queries, f32" in found.text
    assert kernels[0].plan.reasons[0] in found.text
    assert repr(plans).count(f"on '{target}': forward, ") == len(op.spec.head_dims)


def test_plans_of_a_cpu(op: Any) -> None:
    (first, *_) = kernels = compile_spec(op.spec, CpuTarget(GENERIC_CPU))
    plans = Plans(op.spec, {each.variant.head_dim: each.plan for each in kernels})
    found = Tags(plans._repr_html_())
    tile = first.plan.forward
    assert f"tiles of {tile.Br} × {tile.Bc}" in found.text
    assert found.text.count("rejected (") <= 2
    assert f"forward {tile.Br} × {tile.Bc}; backward " in repr(first.plan)


def test_no_plan(op: Any) -> None:
    assert op.plan == {}
    assert repr(op.plan) == "{}"
    assert "there is no plan" in op.plan._repr_html_()


def test_a_mask_has_its_own_picture() -> None:
    mask = create_block_mask(lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & (q_idx < 200), None, None, 300, 500)
    html = mask._repr_html_()
    picture = picture_of(mask)
    assert (shown_pixels(html) == PALETTE[paint(picture, *size_of(picture, 256))]).all()
    assert "&lt;lambda&gt;" in html
    assert "BlockMask(shape=(1, 1, 300, 500)" in Tags(html).text


def test_without_matplotlib_and_pillow(op: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("matplotlib", "PIL", "PIL.Image"):
        monkeypatch.setitem(sys.modules, name, None)
    assert "<img " in op._repr_html_()


def test_what_cannot_be_drawn_says_why(op: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def data_dependent(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return q_idx >= kv_idx if q_idx < 3 else kv_idx >= 0

    found = Tags(create_block_mask(data_dependent, None, None, 64, 64)._repr_html_())
    assert "no picture: " in found.text
    assert "img" not in found.seen
    assert "no picture: no pairs" in create_block_mask(data_dependent, None, None, 0, 64)._repr_html_()
    monkeypatch.setattr(usual, "_MOST_ELEMENTS", 1)
    reads = flashgen.loads(
        "attention reads { head_dim 16 tensor length: i32[B] mask j < length[b] }", backend="reference"
    )
    monkeypatch.setattr(usual, "DEFAULT_SHAPE", Shape(4, 8, 8, 64, 64))
    assert "the tensor 'length' would have 4 elements" in Tags(reads._repr_html_()).text


def test_an_op_without_a_text(op: Any) -> None:
    """A spec that was made of nodes has no statements to quote."""
    from dataclasses import replace

    bare: AttentionSpec = replace(op.spec, statements=(), mask=literal(True))
    shown = AttentionOp(OpParts(bare, {"cpu": None}, backend="reference"))
    assert "head_dim 16, 32" in Tags(shown._repr_html_()).text
