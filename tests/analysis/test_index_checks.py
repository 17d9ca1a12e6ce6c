"""Index proofs of the specs in the language's contract, their diagnostics, and the check at call time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from flashgen.analysis.bounds import IndexProof, IndexStatus, clamped_dimensions, prove_indices
from flashgen.analysis.index_checks import check_index, index_diagnostics
from flashgen.diagnostics.render import render
from flashgen.ir.expr import Load, index, size
from flashgen.ir.spec import AttentionSpec, HeadDim
from flashgen.ir.types import ScalarType
from flashgen.ir.weights import POINTWISE, Weights
from flashgen.language.front import parse_text
from tests.ir.expressions import expr, spec
from tests.ir.values import evaluate

BARE, GUARDED, CALL_TIME, CLAMPED, OUTSIDE = IndexStatus

F32 = "f32"
SPECS: dict[str, tuple[AttentionSpec, list[IndexStatus]]] = {
    "alibi": (spec("s - slope[h] * (i - j)", "j <= i", tensors={"slope": (F32, ("H",))}), [BARE]),
    "packed_documents": (
        spec("s", "j <= i and doc[b, i] == doc[b, j]", tensors={"doc": ("i32", ("B", "Nk"))}),
        [BARE, CALL_TIME, BARE, BARE],
    ),
    "t5": (
        spec(
            "s + table[n if n < 16 else min(far, 31), h]",
            "j <= i",
            tensors={"table": (F32, ("32", "H"))},
            lets={"n": "max(i - j, 0)", "far": "16 + int(log(n / 16) / log(128 / 16) * 16)"},
        ),
        [BARE, BARE],
    ),
    "hstu": (
        spec("s + bias[h, i - j + Nk - 1]", "j <= i", tensors={"bias": (F32, ("H", "2 * Nk - 1"))}),
        [BARE, CALL_TIME],
    ),
    "swin": (
        spec(
            "s + table[dy * (2*side-1) + dx, h]",
            tensors={"table": (F32, ("(2*side-1) * (2*side-1)", "H"))},
            lets={"dy": "i // side - j // side + side - 1", "dx": "i % side - j % side + side - 1"},
            side=7,
        ),
        [CALL_TIME, BARE],
    ),
    "evoformer": (
        spec(
            "s + pair[b // rows, h, i, j]",
            "valid[b, j]",
            tensors={"pair": (F32, ("B // rows", "H", "Nq", "Nk")), "valid": ("bool", ("B", "Nk"))},
            rows=128,
        ),
        [BARE, BARE, CALL_TIME, BARE, BARE, BARE],
    ),
    "forgetting": (
        spec("s + F[b, h, i] - F[b, h, j]", "j <= i", tensors={"F": (F32, ("B", "H", "Nk"))}),
        [BARE, BARE, CALL_TIME, BARE, BARE, BARE],
    ),
    "gpt_oss": (
        spec(
            "s",
            "j <= i",
            tensors={"sink": (F32, ("H",))},
            weights=Weights(sink=expr("sink[h]", {"sink": (F32, ("H",))})),
        ),
        [BARE],
    ),
    "block layout": (
        spec("s", tensors={"lay": ("bool", ("H", "ceildiv(Nq, 64)", "(Nk + 63) // 64"))}, layout=(64, "lay[h, I, J]")),
        [BARE, BARE, BARE],
    ),
    "key bias": (spec("s + t[hkv, Nk - 1 - j]", tensors={"t": (F32, ("Hkv", "Nk"))}), [BARE, BARE]),
    "distance": (spec("s + t[abs(i - j)]", tensors={"t": (F32, ("max(Nq, Nk)",))}), [BARE]),
    "period": (spec("s + t[(i - j) % Nk]", tensors={"t": (F32, ("Nk",))}), [BARE]),
    "relative, exact": (spec("s + t[i - j + Nk - 1]", tensors={"t": (F32, ("Nq + Nk - 1",))}), [BARE]),
    "learned positions": (spec("s + t[j]", tensors={"t": (F32, ("512",))}), [CALL_TIME]),
    "bucket": (
        spec(
            "s + table[bucket, h]",
            "j <= i",
            tensors={"table": (F32, ("32", "H"))},
            lets={"bucket": "min(abs(i - j), 33)"},
        ),
        [CLAMPED, BARE],
    ),
    "in a branch": (
        spec("s + (t[j - i + 7] if 0 <= i - j < 8 else 0.0)", tensors={"t": (F32, ("8",))}),
        [GUARDED],
    ),
    "kept by the mask": (spec("s + t[i - j + w]", "abs(i - j) <= w", tensors={"t": (F32, ("2*w+1",))}, w=9), [GUARDED]),
    "causal distance": (spec("s + t[i - j]", "j <= i", tensors={"t": (F32, ("Nq",))}), [GUARDED]),
    "causal distance, keys": (spec("s + t[i - j]", "j <= i", tensors={"t": (F32, ("Nk",))}), [CALL_TIME]),
    "two branches": (
        spec("(t[i] if i < 8 else 0.0) + (t[i] if i < 9 else 0.0)", tensors={"t": (F32, ("8",))}),
        [CLAMPED],
    ),
    "an index from memory": (
        spec("s + t[ids[b, j]]", tensors={"ids": ("i32", ("B", "Nk")), "t": (F32, ("100",))}),
        [BARE, BARE, CLAMPED],
    ),
    "the size itself": (spec("s + t[H]", tensors={"t": (F32, ("H",))}), [OUTSIDE]),
    "a number": (spec("s + t[40]", tensors={"t": (F32, ("32",))}), [OUTSIDE]),
    "never taken": (spec("s + (t[40] if i < 0 else 0.0)", tensors={"t": (F32, ("32",))}), [GUARDED]),
}


def proofs_of(name: str) -> tuple[IndexProof, ...]:
    return prove_indices(SPECS[name][0], HeadDim(64, 64))


@pytest.mark.parametrize("name", SPECS)
def test_status(name: str) -> None:
    assert [proof.status for proof in proofs_of(name)] == SPECS[name][1]


def test_weights_are_read_too() -> None:
    tensors = {"t": (F32, ("Nk",))}
    proofs = prove_indices(
        spec("s", tensors=tensors, weights=Weights(POINTWISE, expr("s * t[j]", tensors))), HeadDim(64, 64)
    )
    assert [proof.status for proof in proofs] == [BARE]


def test_clamped_dimensions() -> None:
    proofs = proofs_of("bucket")
    assert clamped_dimensions(proofs[0].load, proofs) == (True, False)
    assert clamped_dimensions(Load(ScalarType.FLOAT, tensor="other", indices=(index("i"),)), proofs) == (True,)
    (distance,) = proofs_of("causal distance, keys")
    assert distance.guarded
    assert distance.clamp
    assert not any(proof.clamp for name in ("alibi", "hstu", "swin") for proof in proofs_of(name))


# What is said ---------------------------------------------------------------------------------------------------------


def test_the_warning_of_the_contract() -> None:
    written = SPECS["bucket"][0]
    found = render(index_diagnostics(written, proofs_of("bucket")), written.sources)
    assert found.strip() == (
        "test.attn:3:21: warning[W501]: index may fall outside 'table'; the load is clamped\n"
        "   3 |     score s + table[bucket, h]\n"
        "     |                     ^^^^^^ is in [0, 33], the dimension has 32 entries\n"
        "     = note: 'bucket' is defined at line 2\n"
        "     = help: if no pair that the mask keeps can reach it, write min(bucket, 31) and the warning goes"
    )


@pytest.mark.parametrize(
    ("name", "code", "label", "hint"),
    [
        (
            "an index from memory",
            "W501",
            "has no known bounds, the dimension has 100 entries",
            "clamp(ids[b, j], 0, 99)",
        ),
        ("the size itself", "E211", "is at least 1, the dimension has H entries", ""),
        ("a number", "E211", "is 40, the dimension has 32 entries", ""),
    ],
)
def test_diagnostics(name: str, code: str, label: str, hint: str) -> None:
    (found,) = index_diagnostics(SPECS[name][0], proofs_of(name))
    assert (found.code, found.label) == (code, label)
    assert hint in "".join(found.hints)
    assert found.span is not None


@pytest.mark.parametrize(
    "name", [name for name, (_, expected) in SPECS.items() if not {CLAMPED, OUTSIDE} & set(expected)]
)
def test_silence(name: str) -> None:
    assert index_diagnostics(SPECS[name][0], proofs_of(name)) == ()


# At call time ---------------------------------------------------------------------------------------------------------

SIZES = [
    {"B": B, "H": 4, "Hkv": 2, "Nq": Nq, "Nk": Nk}
    for B, Nq, Nk in (
        (2, 9, 9),
        (2, 9, 5),
        (2, 5, 9),
        (1, 49, 49),
        (256, 3, 3),
        (130, 3, 3),
        (2, 1, 1),
        (0, 3, 3),
        (2, 0, 4),
    )
]


@pytest.mark.parametrize("name", [name for name, (_, expected) in SPECS.items() if CALL_TIME in expected])
def test_call_time_against_brute_force(name: str) -> None:
    outcomes = set()
    for sizes in SIZES:
        for proof in proofs_of(name):
            if proof.status is CALL_TIME:
                message = check_index(proof, sizes)
                assert (message is None) == _stays_inside(proof, sizes), (sizes, message)
                outcomes.add(message is None)
    assert True in outcomes


def _stays_inside(proof: IndexProof, sizes: dict[str, int]) -> bool:
    extents = {"b": sizes["B"], "h": sizes["H"], "i": sizes["Nq"], "j": sizes["Nk"]}
    grid = np.meshgrid(*(np.arange(extent) for extent in extents.values()), indexing="ij", sparse=True)
    values: dict[Any, Any] = {index(name): each for name, each in zip(extents, grid, strict=True)}
    values |= {size(name): np.array(extent) for name, extent in sizes.items()}
    at, extent = evaluate(proof.position, values), evaluate(proof.extent, values)
    used = np.zeros((), dtype=bool)
    for context in proof.contexts if proof.guarded else (frozenset(),):
        held = np.ones((), dtype=bool)
        for condition in context:
            held = held & evaluate(condition, values)
        used = used | held
    shape = tuple(extents.values())
    return bool((((at >= 0) & (at < extent)) | ~used | np.zeros(shape, dtype=bool)).all())


def test_the_refusal_names_everything() -> None:
    proof = next(each for each in proofs_of("packed_documents") if each.status is CALL_TIME)
    sizes = {"B": 2, "H": 4, "Hkv": 4, "Nq": 128, "Nk": 64}
    assert check_index(proof, sizes) == (
        "index 'i' of tensor 'doc' is 127, but dimension 1 of it has 64 entries (i = 127, Nq = 128, Nk = 64); "
        "if the nearest entry is meant, write min(i, Nk - 1)"
    )


def test_an_index_on_a_line_of_its_own() -> None:
    text = """
attention far {
    head_dim 64
    tensor table: f32[8, H]
    score s + table[
        min(abs(i - j), 9),
        h]
}
"""
    file = parse_text(text)
    (warning,) = index_diagnostics(file.specs[0], prove_indices(file.specs[0], HeadDim(64, 64)))
    assert warning.span is not None
    assert (warning.span.line, warning.span.column, warning.span.end_column) == (6, 9, 27)
    assert "write min(min(abs(i - j), 9), 7) and" in warning.hints[0]
