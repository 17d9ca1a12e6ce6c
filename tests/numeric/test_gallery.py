"""Every spec of the gallery, forward and every gradient, over odd lengths, against the float64 reference."""

from __future__ import annotations

import pytest

from flashgen.ir.shape import Shape
from flashgen.verification.verify import verify_case
from tests.numeric.helpers import GALLERY, dtypes, failures, fitting, operator

LENGTHS = (1, 3, 113, 203, 1023)
# Queries fewer than keys, one query over a cache, groups of query heads, one key/value head for all.
UNEVEN = (
    Shape(1, 2, 2, 77, 203),
    Shape(2, 4, 2, 1, 130),
    Shape(1, 6, 2, 65, 65),
    Shape(2, 3, 1, 33, 97),
)
# Specs whose captured tensors have a row for each key and are read at each query cannot take more queries than keys.
READ_BY_QUERY = {"packed_documents", "forgetting", "hstu"}


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", GALLERY)
def test_lengths(name: str, length: int) -> None:
    op = operator(name)
    heads = 1 if length > 1000 else 2
    shape = fitting(op.spec, Shape(1, heads, heads, length, length))
    for head_dim in op.spec.head_dims:
        for dtype in dtypes(op.spec)[:1] if length > 1000 else dtypes(op.spec):
            case = verify_case(op, head_dim, dtype, shape, seed=length)
            assert case.ok, failures(case)


@pytest.mark.parametrize("shape", UNEVEN, ids=str)
@pytest.mark.parametrize("name", GALLERY)
def test_uneven_lengths_and_groups(name: str, shape: Shape) -> None:
    op = operator(name)
    for dtype in dtypes(op.spec):
        case = verify_case(op, op.spec.head_dims[-1], dtype, fitting(op.spec, shape), seed=1)
        assert case.ok, failures(case)


@pytest.mark.parametrize("name", [name for name in GALLERY if name not in READ_BY_QUERY])
def test_more_queries_than_keys(name: str) -> None:
    op = operator(name)
    case = verify_case(op, op.spec.head_dims[0], dtypes(op.spec)[0], fitting(op.spec, Shape(1, 2, 1, 203, 77)))
    assert case.ok, failures(case)


@pytest.mark.parametrize("name", sorted(READ_BY_QUERY & set(GALLERY)))
def test_more_queries_than_a_captured_tensor_has_entries_are_refused(name: str) -> None:
    op = operator(name)
    with pytest.raises(ValueError, match=op.spec.tensors[0].name):
        verify_case(op, op.spec.head_dims[0], dtypes(op.spec)[0], fitting(op.spec, Shape(1, 2, 1, 203, 77)))
