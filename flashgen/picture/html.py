"""What notebooks show: an op, its plans, a mask, each with the picture of the mask.

In: the thing. Out: HTML without scripts, styles of its own or files elsewhere; every text is escaped. It needs nothing
but NumPy. Where no picture can be drawn the reason stands in its place.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from flashgen.analysis.variant import analyse
from flashgen.compiler.compiled import compiled
from flashgen.emit.text import spec_lines
from flashgen.ir.spec import AttentionSpec, HeadDim
from flashgen.ir.text import spec_text
from flashgen.picture.mask import MaskPicture, caption, check_drawable, mask_picture, usual_shape
from flashgen.picture.paint import LEGEND, Color, paint, png, size_of
from flashgen.plan.notebook import Plans
from flashgen.targets.cpu.device import local_cpu
from flashgen.targets.cpu.target import CpuTarget

if TYPE_CHECKING:
    from flashgen.op.op import BaseOp

_PIXELS = 256


def of_op(op: BaseOp) -> str:
    """What an op computes and where it runs. Nothing is compiled for it: tiles are those of the CPU's plan."""
    spec = op.spec
    head_dim = spec.head_dims[0]

    def draw() -> MaskPicture:
        return _drawn(spec, head_dim, compiled(analyse(spec, head_dim), CpuTarget(local_cpu())).plan.forward)

    lines = "\n".join(spec_lines(spec)) if spec.statements else spec_text(spec)
    title = f"<b>{escape(spec.name)}</b> on {escape(' or '.join(op.backends))} <code>{escape(op.name)}</code>"
    return _beside(title, draw, f"<pre>{escape(lines)}</pre>")


def of_plans(plans: Plans) -> str:
    """The tiles of every pass, why these, and the mask in tiles of the forward pass."""
    if not plans:
        return "<div>no generated kernel runs: there is no plan</div>"
    head_dim, first = next(iter(plans.items()))
    title = f"<b>plan of {escape(plans.spec.name)}</b> on {escape(str(first.device))}"
    text = "".join(_table(each) for each in plans.values())
    return _beside(title, lambda: _drawn(plans.spec, head_dim, first.forward), text)


def of_mask(title: str, draw: Callable[[], MaskPicture]) -> str:
    """A mask alone."""
    return _beside(f"<code>{escape(title)}</code>", draw, "")


def _drawn(spec: AttentionSpec, head_dim: HeadDim, tile: Any) -> MaskPicture:
    shape = usual_shape(spec)
    check_drawable(spec, shape)
    return mask_picture(spec, head_dim, shape, tile.Br, tile.Bc, pixels=_PIXELS)


def _beside(title: str, draw: Callable[[], MaskPicture], text: str) -> str:
    """A picture on the left, a text on the right."""
    try:
        picture = _picture(draw())
    except Exception as error:  # a notebook would show a traceback of ours in the place of the user's thing
        picture = f"<div>no picture: {escape(str(error) or type(error).__name__)}</div>"
    right = f'<div style="min-width:0;overflow-x:auto">{text}</div>' if text else ""
    return f'<div>{title}<div style="display:flex;gap:1.5em;align-items:flex-start">{picture}{right}</div></div>'


def _picture(picture: MaskPicture) -> str:
    height, width = size_of(picture, _PIXELS)
    data = base64.b64encode(png(paint(picture, height, width))).decode()
    lines = [escape(line) for line in caption(picture)]
    image = (
        f'<img src="data:image/png;base64,{data}" width="{width}" height="{height}" alt="{"; ".join(lines)}" '
        'style="image-rendering:pixelated;max-width:none"/>'
    )
    legend = " ".join(f"{_swatch(color)}&nbsp;{escape(label)}" for color, label in LEGEND)
    below = "<br/>".join([*lines, legend])
    return f'<figure style="margin:0;font-size:85%">{image}<figcaption>{below}</figcaption></figure>'


def _swatch(color: Color) -> str:
    red, green, blue = color
    style = f"display:inline-block;width:.8em;height:.8em;border:1px solid #999;background:rgb({red},{green},{blue})"
    return f'<span style="{style}"></span>'


def _table(plan: Any) -> str:
    """One head dimension."""
    rows = "".join(
        f"<tr>{_cells([name, str(tile.Br), str(tile.Bc), f'{tile.sram_bytes / 1024:.1f}'])}</tr>"
        for name, tile in plan.passes.items()
    )
    head = _cells(["pass", "B_r", "B_c", f"KiB of {plan.sram_bytes / 1024:.0f}"], "th")
    reasons = "".join(f"<li>{escape(reason)}</li>" for reason in plan.reasons)
    rejected = "".join(
        f"<li>{escape(f'{each.pass_name} {each.Br} × {each.Bc}: {each.reason}')}</li>" for each in plan.rejected
    )
    folded = f"<details><summary>rejected ({len(plan.rejected)})</summary><ul>{rejected}</ul></details>"
    return (
        f"<div>head_dim {escape(plan.head_dim)}</div><table><tr>{head}</tr>{rows}</table>"
        f"<ul>{reasons}</ul>{folded if rejected else ''}"
    )


def _cells(texts: Sequence[str], kind: str = "td") -> str:
    return "".join(f"<{kind}>{escape(text)}</{kind}>" for text in texts)
