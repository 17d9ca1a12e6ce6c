"""The operators of the table by the names and signs that the language gives them."""

from collections.abc import Mapping
from types import MappingProxyType

from flashgen.ir.operators import OPERATORS

# The name in the language to the operator of the IR. 'pow' is decided by the types, like '**'.
FUNCTIONS: Mapping[str, str] = MappingProxyType({row.function: name for name, row in OPERATORS.items() if row.function})

# The sign or word between two operands. Of a sign that two rows share the first is meant, and types decide.
INFIX: Mapping[str, str] = MappingProxyType(
    {
        row.spelling: name
        for name, row in reversed(tuple(OPERATORS.items()))
        if row.arity == 2 and row.spelling != row.function
    }
)
