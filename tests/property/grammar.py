"""Random specs: scores, masks, weights, layouts and captured tensors, drawn from a grammar of what the language allows.

Every spec that is drawn is legal, keeps its values in a range where float32 is accurate, and has no step in the score
(a comparison of floats), where two precisions could rightly disagree.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from hypothesis import strategies as st

# What a random spec may capture: its declaration, and ways to read it as a number of ordinary size.
FLOATS: Mapping[str, tuple[str, tuple[str, ...]]] = MappingProxyType(
    {
        "slope": ("tensor slope: f32[H] grad", ("slope[h]", "slope[H - 1 - h]", "slope[h] * float(abs(i - j)) / 64")),
        "row": ("tensor row: f32[B, Nq] grad", ("row[b, i]", "0.5 * row[b, Nq - 1 - i]")),
        "column": ("tensor column: bf16[B, H, Nk] grad", ("column[b, h, j]", "column[0, h, j]")),
        "pair": ("tensor pair: f32[H, Nq, Nk] grad", ("pair[h, i, j]", "pair[0, i, j]", "pair[h, 0, j]")),
        "every": ("tensor every: f32[B, H, Nq, Nk] grad", ("every[b, h, i, j]",)),
        "relative": ("tensor relative: f32[H, Nq + Nk] grad", ("relative[h, i - j + Nk]", "relative[hkv, i + j]")),
        "table": (
            "tensor table: f32[16, H] grad",
            ("table[clamp(i - j, 0, 15), h]", "table[(i + j) % 16, h]", "table[min(abs(i - j) // 3, 15), 0]"),
        ),
        "half": ("tensor half: f16[8] grad", ("half[(i - j) % 8]", "half[popcount(i ^ j) % 8]")),
        "plain": ("tensor plain: f32[B, Nk]", ("plain[b, j]", "cos(plain[b, j])")),
        "one": ("tensor one: f32[1, H] grad", ("one[0, h]",)),
    }
)
INTS: Mapping[str, tuple[str, tuple[str, ...]]] = MappingProxyType(
    {
        "kind": ("tensor kind: i32[B, max(Nq, Nk)]", ("kind[b, i] == kind[b, j]", "kind[b, j] <= kind[b, i]")),
        "valid": ("tensor valid: bool[B, Nk]", ("valid[b, j]", "(valid[b, j] or i == j)")),
        "long": ("tensor long: i64[H]", ("j < long[h] + 3", "(i + long[h]) % 3 != j % 3")),
    }
)
PARAMS: Mapping[str, tuple[str, tuple[str, ...]]] = MappingProxyType(
    {
        "warm": ("param warm: f32 = 0.7 grad", ("warm", "warm * warm", "sigmoid(warm)")),
        "cool": ("param cool: f32 = 0.4", ("cool",)),
        "width": ("param width: i32 = 9", ("float(width) / 16",)),
    }
)
READS = {
    read: (name, declaration)
    for group in (FLOATS, PARAMS)
    for name, (declaration, reads) in group.items()
    for read in reads
}
MASKS = (
    "causal",
    "causal_lower_right",
    "window_left(17)",
    "window(11)",
    "prefix(20)",
    "chunked(32)",
    "dilated(30, 3)",
    "sink_window(4, 16)",
    "global_tokens(5)",
    "strided(9)",
    "fixed(16, 4)",
    "j <= i + 5",
    "(i * 7 + j * 3) % 5 != 0",
    "hash(i, j, h) % 4 != 0",
    "hash(b, i // 8, j // 8) % 3 > 0",
    "(h % 2 == 0 or causal)",
    "i // 4 >= j // 8",
    "j < Nk - b",
    "(i & 3) != (j & 3)",
)
LAYOUTS = (
    "layout block 32: I >= J",
    "layout block 16: local_global(1, 1)",
    "layout block 64: butterfly(3)",
    "layout block 16: random_blocks(0.5, 7) or I == J",
    "layout block 24: (I + J + h) % 2 == 0",
)
WEIGHTS = (
    "softmax",
    "softmax",
    "softmax",
    "softmax(sink = {number})",
    "sigmoid(s)",
    "silu(s) / Nk",
    "tanh(s) / 8",
    "relu(s)",
    "exp(-abs(s))",
    "normalize(exp(s))",
    "normalize(softplus(s))",
    "normalize(sigmoid(s) + 0.1)",
    "normalize(exp(s) + s * s)",
)
HEAD_DIMS = ("16", "32", "64", "32/16", "16/48", "40")


@st.composite
def specs(draw: st.DrawFn, name: str = "drawn") -> str:
    """The text of one spec."""
    declarations: dict[str, str] = {}

    def number() -> str:
        read = draw(st.sampled_from(sorted(READS)))
        tensor, declaration = READS[read]
        declarations[tensor] = declaration
        wrapped = draw(st.sampled_from(("{}", "0.5 * {}", "sin({})", "tanh({})", "({} + 0.25)", "{} * cos(j * 0.1)")))
        return wrapped.format(read)

    def score() -> str:
        value = draw(st.sampled_from(("s", "s", "s", "0.2 * dot", "-sqdist / (4 * D)")))
        for _ in range(draw(st.integers(0, 3))):
            step = draw(
                st.sampled_from(
                    (
                        "{value} + {number}",
                        "{value} - {number}",
                        "{value} * (1 + 0.5 * tanh({number}))",
                        "5 * tanh({value} / 5)",
                        "softcap({value}, 3.0)",
                        "log1p(exp({value}))",
                        "min({value}, 4 + {number})",
                        "max({value}, {number} - 3)",
                        "({value} if (i + j) % 2 == 0 else 0.5 * ({value}))",
                        "where(i - j > 6, {value}, {value} + {number})",
                        "({value} if i >= j else -inf)",
                        "{value} - log(1 + abs(i - j)) * {number}",
                        "gelu({value})",
                        "{value} / sqrt(1 + ({number}) ** 2)",
                        "sin({value}) + 0.1 * ({value})",
                    )
                )
            )
            value = step.format(value=f"({value})", number=number() if "{number}" in step else "")
        return value

    def mask() -> str:
        parts = []
        for _ in range(draw(st.integers(0, 2))):
            if draw(st.integers(0, 3)) == 0:
                tensor = draw(st.sampled_from(sorted(INTS)))
                declarations[tensor], reads = INTS[tensor]
                parts.append(draw(st.sampled_from(reads)))
            else:
                parts.append(draw(st.sampled_from(MASKS)))
        joined = draw(st.sampled_from((" and ", " or "))).join(parts)
        return f"mask {joined}" if parts else ""

    head_dim = draw(st.sampled_from(HEAD_DIMS))
    score_text, mask_text = score(), mask()
    layout = draw(st.sampled_from(("", "", "", *LAYOUTS)))
    form = draw(st.sampled_from(WEIGHTS))
    weights = form.format(number=f"slope[h] + {draw(st.sampled_from(('0', '1', 'warm')))}") if "{" in form else form
    for tensor, (declaration, _) in (*FLOATS.items(), *PARAMS.items()):
        if f"{tensor}[" in weights or (tensor in PARAMS and tensor in weights):
            declarations[tensor] = declaration
    dropout = draw(st.sampled_from(("", "", "", "dropout 0.25")))
    scale = draw(st.sampled_from(("", "", "scale 0.3", "scale warm / 4")))
    if "warm" in scale:
        declarations["warm"] = PARAMS["warm"][0]
    schedule = draw(st.sampled_from(("", "", "schedule { Br = 16 Bc = 16 backward_Br = 32 backward_Bc = 8 }")))
    lines = [
        f"head_dim {head_dim}",
        *(declarations[key] for key in sorted(declarations)),
        scale,
        f"score {score_text}",
        mask_text,
        layout,
        f"weights {weights}",
        dropout,
        schedule,
    ]
    body = "\n".join(f"    {line}" for line in lines if line)
    return f"attention {name} {{\n{body}\n}}\n"
