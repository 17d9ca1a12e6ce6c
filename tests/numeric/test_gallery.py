"""Every spec of the gallery, forward and every gradient, over odd lengths, against the float64 reference."""

from __future__ import annotations

import pytest

from flashgen.ir.shape import Shape
from flashgen.ir.types import ElementType
from flashgen.language import parse_file
from flashgen.verification import accepts, fitting
from flashgen.verification.verify import verify_case
from tests.numeric.helpers import GALLERY, SPECS, dtypes, failures, operator
from tests.slices import only

# Learned slopes and a mask, a learned table, lists of keys.
QUICK = ("alibi", "relative_bias", "nsa_selected")
LENGTHS = (1, 3, 113, 203, 1023)
# Fewer queries than keys, one query over a cache, groups of query heads, one key/value head for all.
UNEVEN = (
    Shape(1, 2, 2, 77, 203),
    Shape(2, 4, 2, 1, 130),
    Shape(1, 6, 2, 65, 65),
    Shape(2, 3, 1, 33, 97),
)
MORE_QUERIES = Shape(1, 2, 1, 203, 77)
SEVERAL_HEAD_DIMS = [name for name in GALLERY if len(parse_file(SPECS / f"{name}.attn").specs[0].head_dims) > 1]


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", only(QUICK, GALLERY))
def test_lengths(name: str, length: int) -> None:
    """All element types up to 203; at 1023 the first, with one head."""
    op = operator(name)
    is_long = length > 1000
    shape = fitting(op.spec, Shape(1, 1, 1, length, length) if is_long else Shape(1, 2, 2, length, length))
    for dtype in dtypes(op.spec)[:1] if is_long else dtypes(op.spec):
        case = verify_case(op, op.spec.head_dims[0], dtype, shape, seed=length)
        assert case.ok, failures(case)


@pytest.mark.parametrize("name", only((), SEVERAL_HEAD_DIMS))
def test_other_head_dims(name: str) -> None:
    op = operator(name)
    for head_dim in op.spec.head_dims[1:]:
        for shape in (*(Shape(1, 2, 2, length, length) for length in LENGTHS[:4]), *UNEVEN):
            for dtype in dtypes(op.spec):
                case = verify_case(op, head_dim, dtype, fitting(op.spec, shape), seed=shape.q_len)
                assert case.ok, failures(case)


@pytest.mark.parametrize("shape", UNEVEN, ids=str)
@pytest.mark.parametrize("name", only(QUICK, GALLERY))
def test_uneven_lengths_and_groups(name: str, shape: Shape) -> None:
    op = operator(name)
    for dtype in dtypes(op.spec):
        case = verify_case(op, op.spec.head_dims[0], dtype, fitting(op.spec, shape), seed=1)
        assert case.ok, failures(case)


@pytest.mark.parametrize("name", only(QUICK, GALLERY))
def test_more_queries_than_keys(name: str) -> None:
    """Right, or refused where a captured tensor has an entry for each key and is read at each query."""
    op = operator(name)
    if accepts(op.spec, MORE_QUERIES):
        case = verify_case(op, op.spec.head_dims[0], dtypes(op.spec)[0], MORE_QUERIES)
        assert case.ok, failures(case)
    else:
        with pytest.raises(ValueError, match="|".join(tensor.name for tensor in op.spec.tensors)):
            verify_case(op, op.spec.head_dims[0], dtypes(op.spec)[0], MORE_QUERIES)


@pytest.mark.parametrize("name", only(QUICK, GALLERY))
def test_float32_is_as_accurate_as_pytorch(name: str) -> None:
    """In float32 too, errors are at most twice PyTorch's own, or of the size of a few rounding steps."""
    op = operator(name)
    if ElementType.F32 not in dtypes(op.spec):
        pytest.skip("not generated for float32")
    shape = fitting(op.spec, Shape(2, 4, 2, 203, 203))
    case = verify_case(op, op.spec.head_dims[0], ElementType.F32, shape)
    for row in case.rows:
        assert row.error <= max(2 * row.baseline, 1e-6), row
