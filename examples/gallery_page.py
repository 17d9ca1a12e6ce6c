"""The page of the gallery, docs/gallery.md: for each spec in specs/ its formula, its picture and its text.

    python examples/gallery_page.py

The first comment line of a spec and the lines of its source are taken from the file; the formulas stand here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "gallery.md"

# By what they are for: the output of a query, its weights P or their mask, as LaTeX.
FORMULAS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "Plain": {
            "plain": r"O_i = \sum_j \mathrm{softmax}_j(q_i \cdot k_j / \sqrt{D})\, v_j",
            "causal": r"O_i = \sum_{j \le i} \mathrm{softmax}_j(q_i \cdot k_j / \sqrt{D})\, v_j",
            "mla": r"P_{ij} = \mathrm{softmax}_{j \le i}(q_i \cdot k_j / \sqrt{192}), \quad v_j \in \mathbb{R}^{128}",
        },
        "Positions": {
            "alibi": r"P_{ij} = \mathrm{softmax}_{j \le i}(s_{ij} - m_h (i - j))",
            "alibi_fixed": r"P_{ij} = \mathrm{softmax}_{j \le i}(s_{ij} - 2^{-8 (h + 1) / H} (i - j))",
            "evoformer": r"P_{ij} = \mathrm{softmax}_{j:\, \mathrm{valid}_{bj}}(s_{ij} + \mathrm{pair}_{hij})",
            "forgetting": (
                r"P_{ij} = \mathrm{softmax}_{j \le i}(s_{ij} + F_i - F_j), \quad F_i = \sum_{t \le i} \log f_t"
            ),
            "kerple": r"P_{ij} = \mathrm{softmax}_{j \le i}(s_{ij} - a_h \log(1 + b_h (i - j)))",
            "relative_bias": r"P_{ij} = \mathrm{softmax}_j(s_{ij} + t_{h,\, \mathrm{clamp}(i - j, -r, r)})",
            "swin": r"P_{ij} = \mathrm{softmax}_j(s_{ij} + t_{h,\, y_i - y_j,\, x_i - x_j})",
            "t5": r"P_{ij} = \mathrm{softmax}_{j \le i}(q_i \cdot k_j + t_{h,\, \mathrm{bucket}(i - j)})",
        },
        "Scores and scales": {
            "cosine": r"P_{ij} = \mathrm{softmax}_j(\cos(q_i, k_j) / t)",
            "gaussian_regression": (
                r"O_i = \sum_j \mathrm{softmax}_j\left(-\frac{\Vert q_i - k_j \Vert^2}{2 \ell^2}\right) v_j"
            ),
            "gemma2_local": r"P_{ij} = \mathrm{softmax}_{i - 4096 < j \le i}(c \tanh(s_{ij} / c))",
            "logn": r"P_{ij} = \mathrm{softmax}_{j \le i}(s_{ij} \max(\log(i + 1) / \log n, 1))",
            "softcap": r"P_{ij} = \mathrm{softmax}_{j \le i}(c \tanh(s_{ij} / c))",
        },
        "Other weights than a softmax": {
            "exp_kernel": r"P_{ij} = \frac{\exp(s_{ij})}{\sum_{j' \le i} \exp(s_{ij'})}",
            "gpt_oss": r"P_{ij} = \frac{\exp(s_{ij})}{\exp(\mathrm{sink}_h) + \sum_{i - 128 < j' \le i} \exp(s_{ij'})}",
            "hstu": r"P_{ij} = \mathrm{silu}(s_{ij} + b_{h,\, i - j}) / N_k, \quad j \le i",
            "relu2_normalized": (
                r"P_{ij} = \frac{\mathrm{relu}(s_{ij})^2 + \varepsilon}"
                r"{\sum_{j' \le i} (\mathrm{relu}(s_{ij'})^2 + \varepsilon)}"
            ),
            "relu_attention": r"P_{ij} = \mathrm{relu}(s_{ij}) / N_k",
            "sigmoid_attention": r"P_{ij} = \mathrm{sigmoid}(s_{ij} + \beta), \quad j \le i",
        },
        "Windows and patterns": {
            "chunked": r"j \le i, \quad \lfloor i / c \rfloor = \lfloor j / c \rfloor",
            "dilated": r"0 \le i - j \le 2048, \quad (i - j) \bmod 4 = 0",
            "longformer": r"|i - j| \le 256 \ \mathrm{or}\ i < g \ \mathrm{or}\ j < g",
            "neighborhood_2d": r"|\hat{y}_i - y_j| \le 3, \quad |\hat{x}_i - x_j| \le 3",
            "sliding_window": r"0 \le i - j < 4096",
            "sparse_fixed": (
                r"j \le i, \quad \lfloor i / l \rfloor = \lfloor j / l \rfloor \ \mathrm{or}\ j \bmod l \ge l - c"
            ),
            "sparse_strided": r"j \le i, \quad i - j < l \ \mathrm{or}\ (i - j) \bmod l = 0",
            "streaming_llm": r"j \le i, \quad j < 4 \ \mathrm{or}\ i - j < 1020",
        },
        "Blocks": {
            "bigbird": (
                r"|I - J| \le 1 \ \mathrm{or}\ I = 0 \ \mathrm{or}\ J = 0 \ \mathrm{or}\ \mathrm{random}_{0.1}(I, J)"
            ),
            "block_sparse": r"\mathrm{keep}_{h I J}",
            "random_blocks": r"I = J \ \mathrm{or}\ \mathrm{random}_{0.25}(I, J), \quad j \le i",
            "sparse_butterfly": (
                r"I = J \ \mathrm{or}\ \mathrm{popcount}(I \oplus J) = 1 \ \mathrm{or}\ I = 0 \ \mathrm{or}\ J = 0"
            ),
        },
        "Selected keys": {
            "lightning_indexer": r"j \in \mathrm{top}_{b i}, \quad j \le i",
            "nsa_selected": r"\lfloor j / 64 \rfloor \in \mathrm{idx}_{b h i}, \quad j \le i",
        },
        "Padding, documents, caches": {
            "bert": r"\mathrm{valid}_{bj}",
            "cross_attention": r"j < \mathrm{length}_b",
            "decode": r"j \le i + N_k - N_q",
            "medusa": r"j' < 0 \ \mathrm{or}\ \mathrm{tree}_{i j'}, \quad j' = j - (N_k - N_q)",
            "packed_documents": r"j \le i, \quad \mathrm{doc}_{bi} = \mathrm{doc}_{bj}",
            "prefix_lm": r"j \le i \ \mathrm{or}\ j < \mathrm{length}_b",
        },
    }
)

HEAD = """# Gallery

Published variants of attention, each with its formula, mask, source and spec. They come with the package:
`flashgen.load("alibi")`, `flashgen plan alibi`. $s_{ij}$ is $q_i \\cdot k_j / \\sqrt{D}$ unless the spec has a `scale`.
A formula that is a condition says which pairs are kept; the weights are a softmax of their scores.

Queries go downwards, keys to the right, as in `flashgen show`: dark blue tiles are FULL, light blue and sand are kept
and masked pairs of PARTIAL tiles, grey is EMPTY and never visited.
"""


@dataclass(frozen=True)
class Entry:
    """What a spec's file says of it: the name, what it computes, where that comes from, and its text without both."""

    name: str
    computes: str
    source: str
    text: str


def entry(file: Path) -> Entry:
    """Read ``# name: what it computes``, the comment below, which names the source, and the spec."""
    comment, text = re.split(r"^(?=attention )", file.read_text(encoding="utf-8"), maxsplit=1, flags=re.MULTILINE)
    first, *rest = [line.removeprefix("# ") for line in comment.splitlines()]
    name, _, computes = first.partition(": ")
    return Entry(name, computes, " ".join(rest), text)


def page(specs: Path) -> str:
    """The text of the page. Raises ``KeyError`` for a formula without a spec."""
    entries = {file.stem: entry(file) for file in sorted(specs.glob("*.attn"))}
    names = [name for group in FORMULAS.values() for name in group]
    if missing := set(entries) - set(names):
        raise SystemExit(f"examples/gallery_page.py has no formula for {', '.join(sorted(missing))}")
    links = (f"| {group} | {', '.join(f'[{name}](#{name})' for name in found)} |" for group, found in FORMULAS.items())
    parts = [HEAD, "| for | specs |\n|---|---|\n" + "\n".join(links) + "\n"]
    for group, found in FORMULAS.items():
        parts.append(f"## {group}\n")
        parts += [_section(entries[name], formula) for name, formula in found.items()]
    return "\n".join(parts)


def _section(shown: Entry, formula: str) -> str:
    # A formula says it better than the first line, which is one of text, wherever that is a formula, too.
    sentence = "" if re.match(r"(softmax|P_|o_)", shown.computes) else f"{_sentence(shown.computes)}\n\n"
    return (
        f"### {shown.name}\n\n{sentence}$${formula}$$\n\n![{shown.name}](gallery/{shown.name}.png)\n\n"
        f"{shown.source}\n\n```attn\n{shown.text}```\n"
    )


def _sentence(text: str) -> str:
    """With a capital letter and a full stop; what is code stays as it is."""
    text = text if re.match(r"\w+\[", text) else text[0].upper() + text[1:]
    return f"{text}."


if __name__ == "__main__":
    PAGE.write_text(page(ROOT / "specs"), encoding="utf-8")
