"""Whether an operator computes what its spec says: its results against the float64 reference, as data."""

from flashgen.verification.f8 import F8Case, F8Row, verify_f8
from flashgen.verification.inputs import Inputs, accepts, fitting, random_inputs, refusal
from flashgen.verification.verify import Case, Row, default_shapes, verify

__all__ = [
    "Case",
    "F8Case",
    "F8Row",
    "Inputs",
    "Row",
    "accepts",
    "default_shapes",
    "fitting",
    "random_inputs",
    "refusal",
    "verify",
    "verify_f8",
]
