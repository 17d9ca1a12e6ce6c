"""Whether an operator computes what its spec says: its results against the float64 reference, as data."""

from flashgen.verification.inputs import Inputs, accepts, fitting, random_inputs, refusal
from flashgen.verification.verify import Case, Row, default_shapes, verify

__all__ = ["Case", "Inputs", "Row", "accepts", "default_shapes", "fitting", "random_inputs", "refusal", "verify"]
