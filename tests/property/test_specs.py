"""Random specs, compiled and compared with the float64 reference, forward and every gradient."""

from __future__ import annotations

import hypothesis
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import flashgen
from flashgen.ir.shape import Shape
from flashgen.ir.types import ElementType
from flashgen.language import parse_text
from flashgen.runtime.op import AttentionOp, make_op
from flashgen.verification.verify import verify_case
from tests.property.grammar import specs

# Each part draws its own specs, so that processes share them out. A spec takes about four seconds to compile.
PARTS = 8
SPECS_A_PART = 4

# A failing spec is reported as it was drawn: shrinking it would compile hundreds.
GENERATE = settings(phases=[hypothesis.Phase.generate], suppress_health_check=list(hypothesis.HealthCheck))

SHAPES = st.builds(
    lambda batch, kv_heads, group, q_len, more: Shape(batch, kv_heads * group, kv_heads, q_len, q_len + more),
    st.integers(1, 2),
    st.integers(1, 2),
    st.integers(1, 3),
    st.sampled_from((1, 3, 16, 37, 70)),
    st.sampled_from((0, 0, 1, 45)),
)


def check(op: AttentionOp, text: str, shapes: list[Shape], *kinds: ElementType) -> None:
    for number, shape in enumerate(shapes):
        for kind in kinds:
            case = verify_case(op, op.spec.head_dims[0], kind, shape, seed=number)
            for row in case.rows:
                assert row.ok, f"{text}\n{kind} at {shape}: {row}"


@pytest.mark.parametrize("part", range(PARTS))
def test_random_specs_on_the_cpu(part: int) -> None:
    @hypothesis.seed(part)
    @settings(GENERATE, max_examples=SPECS_A_PART)
    @given(specs(), st.lists(SHAPES, min_size=2, max_size=2), st.sampled_from((ElementType.BF16, ElementType.F16)))
    def run(text: str, shapes: list[Shape], half: ElementType) -> None:
        check(flashgen.loads(text), text, shapes, ElementType.F32, half)

    run()


@settings(GENERATE, max_examples=60)
@given(specs(), st.lists(SHAPES, min_size=1, max_size=1))
def test_random_specs_where_there_is_no_compiler(text: str, shapes: list[Shape]) -> None:
    (spec,) = parse_text(text).specs
    check(make_op(spec, None), text, shapes, ElementType.F32)
