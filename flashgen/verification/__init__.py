"""Whether an operator computes what its spec says: its results against the float64 reference, as data."""

from flashgen.verification.inputs import Inputs, random_inputs, roomy
from flashgen.verification.verify import Case, Row, default_shapes, verify

__all__ = ["Case", "Inputs", "Row", "default_shapes", "random_inputs", "roomy", "verify"]
