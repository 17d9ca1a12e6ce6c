"""The generated C++: what is placed where, and that a compiler has nothing to say about it."""

from __future__ import annotations

import platform
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from flashgen.analysis.tangent import with_slopes, with_tangent
from flashgen.analysis.variant import Variant, analyse
from flashgen.emit.kernel_source import KernelSource
from flashgen.language import parse_text
from flashgen.targets.cpu.device import GENERIC_CPU
from flashgen.targets.cpu.emit import emit_cpu
from flashgen.targets.cpu.model import buffers
from flashgen.targets.cpu.plan import plan_cpu
from flashgen.targets.cpu.products import FEWEST_ROWS, OF_TANGENTS, Products
from flashgen.toolchains.cpp import REQUIRED_FLAGS, find_compiler
from tests.emit.instantiated import works_without

EVERYTHING = """
attention everything {
    head_dim 40/24
    dropout  0.1
    param    gain: f32 = 1.0 grad
    tensor   slope: f32[H] grad
    tensor   gate: f32[B, H, Nk] grad
    tensor   table: f32[32, H] grad
    tensor   valid: bool[B, Nk]
    score    gain * (s - 0.01 * sqdist) - slope[h] * abs(i - j) + gate[b, h, j] + table[clamp(i - j, 0, 31), h]
    mask     causal and valid[b, j]
}
"""


def emitted(text: str) -> KernelSource:
    """The source of the only head dimension of a spec."""
    spec = parse_text(text).specs[0]
    variant = analyse(spec, spec.head_dims[0])
    return emit_cpu(variant, plan_cpu(variant, GENERIC_CPU))


def section(source: str, opening: str) -> str:
    """The struct or function that begins with ``opening``."""
    start = source.index(opening)
    line = source[source.rindex("\n", 0, start) + 1 : start]
    return source[start : source.index(f"\n{line[: len(line) - len(line.lstrip())]}}}", start)]


def test_the_same_bytes_every_time() -> None:
    assert emitted(EVERYTHING) == emitted(EVERYTHING)


def test_values_are_placed_at_their_level() -> None:
    text = emitted(EVERYTHING).text
    assert "float of_slope;  // slope[h]" in section(text, "struct Head {")
    text = text[text.index("struct Spec : ") :]
    assert "float of_gate;  // gate[b, h, j]" in section(text, "struct Column {")
    assert "bool of_valid;  // valid[b, j]" in section(text, "struct Column {")
    assert "of_table" not in section(text, "struct Row {")
    score = section(text, "FG_INLINE fg::VecF score(")
    assert "r." not in score
    assert "return ((t0 - d.of_slope) + c.of_gate) + d.of_table;" in score
    diagonals = section(text, "FG_INLINE Diagonals make_diagonals(")
    assert "x.of_slope" in diagonals
    assert "fg::rows(a.tensor_table" in diagonals


def test_a_full_tile_runs_no_mask() -> None:
    source = emitted("attention plain { head_dim 64 }")
    assert "fg::ranges::point(true)" in section(source.text, "static FG_INLINE fg::ranges::Bool keep_range(")
    assert "if (masked)" in source.whole


def test_the_scale_folds_into_the_base_2_exponent() -> None:
    text = emitted("attention plain { head_dim 64 }").text
    assert "constexpr float SCORE_FACTOR = 0.18033688f;" in text
    assert "constexpr float SCALE = 0.125f;" in text
    assert "FG_INLINE fg::VecF score(" not in text


def test_the_header_shows_the_spec_and_the_plan() -> None:
    text = emitted(EVERYTHING).whole
    assert "//     mask causal and valid[b, j]" in text
    assert "// Plan, for a core with 512 KiB of L2" in text
    assert not re.search(r"/(home|usr|tmp)/", text)


def test_nothing_of_python_leaks_into_the_source() -> None:
    text = emitted(EVERYTHING).whole
    code = re.sub(r"//.*", "", text)
    assert not re.search(r"\b(None|True|False|Undefined)\b", code)
    assert all(line == line.rstrip() for line in text.splitlines())


@pytest.mark.parametrize("name", ["everything", "gpt_oss", "sigmoid_attention", "relu2_normalized"])
def test_compilers_have_nothing_to_say(name: str, specs: Path, tmp_path: Path) -> None:
    text = EVERYTHING if name == "everything" else (specs / f"{name}.attn").read_text()
    source = emitted(text)
    (tmp_path / source.file_name).write_text(source.whole)
    command = [
        *find_compiler().command,
        "-std=c++17",
        "-O1",
        "-fsyntax-only",
        "-Wall",
        "-Wextra",
        "-fopenmp",
        "-march=native",
    ]
    # Hooks take every input of a pair, and few use all of them.
    command += [
        "-fwrapv",
        "-Wno-unused-parameter",
        "-Wno-unused-function",
        "-Wno-unknown-pragmas",
        "-Werror",
        source.file_name,
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# What a scratch holds beside the working set: columns, where operands and diagonals lie, and what only first and last
# steps touch.
EDGES = {
    "VectorProducts": {
        "forward": ("columns", "o", "-o.at", "q", "-q.turned", "k", "-k.copy", "v", "-v.copy"),
        "backward": (
            *("columns", "dq", "q", "-q.copy", "-q.turned", "d_o", "-d_o.copy", "-d_o.turned"),
            *("k", "-k.copy", "v", "-v.copy"),
        ),
    },
    "PairProducts": {
        "forward": ("columns", "o", "-o.at", "q", "-q.turned", "k", "-k.copy", "v", "-v.copy", "-v.features"),
        "backward": (
            *("columns", "dq", "q", "-q.turned", "-q.rows", "d_o", "-d_o.turned", "-d_o.rows"),
            *("k", "-k.copy", "-k.features", "v", "-v.copy"),
        ),
    },
    "MatrixProducts": {
        "forward": ("columns", "o", "-o.at", "q", "-q.features", "k", "-k.copy", "v", "-v.copy", "-v.features"),
        "backward": (
            *("columns", "dq", "q", "-q.features", "-q.rows", "d_o", "-d_o.features", "-d_o.rows"),
            *("k", "-k.copy", "-k.features", "v", "-v.copy"),
        ),
    },
}
TILES = {
    "forward": "ForwardTile",
    "backward": "BackwardTile",
    "jvp": "ForwardModeTile",
    "jvp_backward": "ForwardModeBackwardTile",
}
COUNTED = {
    "VectorProducts": Products.VECTORS,
    "PairProducts": Products.PAIRS,
    "MatrixProducts<1>": Products.BFLOAT16,
    "MatrixProducts<3>": Products.SPLIT,
}


@pytest.mark.parametrize("kind", COUNTED)
@pytest.mark.parametrize("head_dim", ["40/24", *(pytest.param(each, marks=pytest.mark.slow) for each in ("64", "128"))])
def test_the_planner_counts_the_bytes_that_the_templates_keep(head_dim: str, kind: str, tmp_path: Path) -> None:
    tensors = "tensor t: f32[B, H, Nk] grad tensor near: f32[64] grad"
    body = f"head_dim {head_dim} {tensors} score s + t[b, h, j] + near[clamp(i - j, 0, 63)] - log1p(abs(i - j))"
    spec = parse_text(f"attention a {{ {body} }}").specs[0]
    variant = analyse(spec, spec.head_dims[0])
    moving, back = with_tangent(variant), with_slopes(variant)
    edges = EDGES[kind.partition("<")[0]]
    forward, backward = edges["forward"], edges["backward"]

    def of_tangents(edges: Sequence[str]) -> list[str]:
        return [f"{'-t_' if each[0] == '-' else 't_'}{each.lstrip('-')}" for each in edges]

    check_bytes(variant, emit_cpu(variant, plan_cpu(variant, GENERIC_CPU)).whole, kind, edges, tmp_path)
    if COUNTED[kind] not in OF_TANGENTS:
        return
    both = {"jvp": (*forward, *of_tangents(forward[1:]))}
    check_bytes(moving, emit_cpu(moving, plan_cpu(moving, GENERIC_CPU)).whole, kind, both, tmp_path)
    rows = [each for each in backward if each.lstrip("-")[0] in "qkv"]
    again = {"jvp_backward": (*backward, *of_tangents(rows))}
    check_bytes(back, emit_cpu(back, plan_cpu(back, GENERIC_CPU)).whole, kind, again, tmp_path)


def check_bytes(variant: Variant, text: str, kind: str, edges: Mapping[str, Sequence[str]], folder: Path) -> None:
    """The scratch of each pass, but for its edges, is what the planner counts."""
    kernel = folder / "kernel.cpp"
    kernel.write_text(text)
    main = folder / "main.cpp"
    lines = [f'#include "{kernel.name}"', "#include <cstdio>", "int main() {"]
    for name, of_pass in edges.items():
        tile = f"{TILES[name]}<Spec, {kind}>"
        sizes = (*of_pass, "diagonals", "-diagonals.values")
        outside = " ".join(f"{'+' if edge[0] == '-' else '-'} long(sizeof(S::{edge.lstrip('-')}))" for edge in sizes)
        printed = f"{tile}::BR, {tile}::BC, long(sizeof(S)) {outside}"
        lines.append(f'  {{ using S = {tile}::Scratch; std::printf("%d %d %d %ld\\n", W, {printed}); }}')
    main.write_text("\n".join([*lines, "}", ""]))
    program = folder / "main"
    compiler = find_compiler().command
    imitated = ["-DFLASHGEN_MATRIX_PRODUCTS=2", "-DFLASHGEN_PAIR_PRODUCTS=2"]
    flags = ["-std=c++17", "-fopenmp", "-march=native", "-fwrapv", *imitated]
    subprocess.run([*compiler, *flags, str(main), "-o", str(program)], check=True, capture_output=True)
    printed = subprocess.run([str(program)], capture_output=True, text=True, check=True).stdout
    for line, name in zip(printed.splitlines(), edges, strict=True):
        lanes, Br, Bc, found = (int(each) for each in line.split())
        predicted = buffers(variant, COUNTED[kind], name, Br, Bc, lanes)
        # dK and dV of the tile's keys lie outside the scratch.
        inside = sum(size for buffer, size in predicted.items() if buffer.partition(",")[0] not in ("dK", "dV"))
        aligned = 256 if name.startswith("jvp") else 128  # of twice as many operands
        assert abs(found - inside) <= aligned, f"{predicted}: alignment takes less"


def test_the_planner_and_kernels_split_the_same_calls() -> None:
    assert f"#define FLASHGEN_FEWEST_ROWS {FEWEST_ROWS}\n" in emitted("attention a { head_dim 64 }").whole


@pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64", "aarch64", "arm64"), reason="its instruction is not known"
)
def test_compilers_keep_what_asks_for_the_next_tile(tmp_path: Path) -> None:
    """A function that does nothing but prefetch may be left out by a compiler, with nothing to tell it by but time."""
    source = tmp_path / "kernel.cpp"
    source.write_text(emitted("attention a { head_dim 64  mask causal }").whole)
    command = [*find_compiler().command, *REQUIRED_FLAGS, "-S", str(source), "-o", "-"]
    command.remove("-shared")
    assembly = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    asked = re.findall(r"^\s+(?:prefetch\w*|prfm)\s", assembly, flags=re.MULTILINE)
    assert len(asked) >= 2, "each block of rows of the products has one"


def test_a_window_asks_for_the_keys_of_the_next_tile(tmp_path: Path) -> None:
    """Without it each tile of rows waits for the first keys of its window, which no tile before has read."""
    (tmp_path / "kernel.cpp").write_text(emitted("attention a { head_dim 64  mask causal and window_left(256) }").whole)
    source, program = Path(__file__).with_name("lines_asked_for.cpp"), tmp_path / "program"
    flags = [*(flag for flag in REQUIRED_FLAGS if flag != "-shared"), "-march=native", f"-I{tmp_path}"]
    subprocess.run([*find_compiler().command, *flags, "-O1", str(source), "-o", str(program)], check=True)
    of_k, of_v, of_q, stray = subprocess.run([program], capture_output=True, text=True, check=True).stdout.split()
    assert {of_k, of_v, of_q} == {"1.000000"}, "shares of the lines that the next tile reads first"
    assert stray == "0"


def test_scores_that_are_multiples_of_the_product_are_not_stored(tmp_path: Path) -> None:
    """Exponents multiply them, in masked tiles as in others, so that both give the same bits."""
    plain, squared = (
        emitted(f"attention a {{ head_dim 64 {body} mask causal }}") for body in ("", "score s - 0.1 * s * s")
    )
    for source in (plain, squared):
        weights = section(source.whole, "static void pairs(")
        assert weights.count("exp2_bounded(fg::load(s + j * ld) * Spec::SCORE_FACTOR - offset)") == 1
    assert "fg::VecF score(" not in plain.text
    assert works_without(plain.whole, "score", tmp_path)
    assert works_without(squared.whole, "unknown", tmp_path)
    assert not works_without(squared.whole, "score", tmp_path)


def test_bounded_scores_have_no_maximum(tmp_path: Path) -> None:
    """A cap of 55 is 79.3 in base 2, one of 56 is 80.8: from there on rows have maxima."""
    capped, beyond = (
        emitted(f"attention a {{ head_dim 64 score softcap(s, {cap}) mask causal }}").whole for cap in (55.0, 56.0)
    )
    assert "exp2_normal(score(" in section(capped, "static void pairs(")
    assert works_without(capped, "MOST_GROWTH", tmp_path, "sizeof(Scratch::row_max) == 0")
    assert works_without(beyond, "unknown", tmp_path, "sizeof(Scratch::row_max) > 0")
    assert not works_without(beyond, "MOST_GROWTH", tmp_path)


def test_products_run_beside_the_longer_loop() -> None:
    """A tanh takes less time than to weigh a pair, a logarithm more."""
    short, long = (emitted(f"attention a {{ head_dim 64 score s + {f}(s) }}").text for f in ("tanh", "log1p"))
    assert "slow_scores = true" not in short
    assert "slow_scores = true" in long
