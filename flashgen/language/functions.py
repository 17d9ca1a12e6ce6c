"""The built-in functions by the names that the language gives them."""

from collections.abc import Mapping
from types import MappingProxyType

_SAME_NAME = (
    *("abs", "min", "max", "clamp", "where", "sign", "floor", "ceil", "round"),
    *("exp", "exp2", "log", "log2", "log1p", "sqrt", "rsqrt", "pow", "sin", "cos", "erf"),
    *("tanh", "sigmoid", "silu", "relu", "gelu", "softplus"),
    *("popcount", "hash", "ceildiv"),
)

# The name in the language to the operator of the IR. 'pow' is decided by the types, like '**'.
FUNCTIONS: Mapping[str, str] = MappingProxyType(
    {
        **{name: name for name in _SAME_NAME},
        "int": "to_int",
        "float": "to_float",
    }
)

# Arguments of each function: the smallest and the largest number; None: no limit.
_MORE: Mapping[str, tuple[int, int | None]] = MappingProxyType(
    {
        "min": (2, None),
        "max": (2, None),
        "hash": (1, None),
        "clamp": (3, 3),
        "where": (3, 3),
        "pow": (2, 2),
        "ceildiv": (2, 2),
    }
)


def arity(function: str) -> tuple[int, int | None]:
    """The smallest and the largest number of arguments."""
    return _MORE.get(function, (1, 1))


INFIX: Mapping[str, str] = MappingProxyType(
    {
        "or": "or",
        "and": "and",
        "<": "lt",
        "<=": "le",
        ">": "gt",
        ">=": "ge",
        "==": "eq",
        "!=": "ne",
        "|": "bitor",
        "^": "bitxor",
        "&": "bitand",
        "<<": "shl",
        ">>": "shr",
        "+": "add",
        "-": "sub",
        "*": "mul",
        "/": "div",
        "//": "floordiv",
        "%": "mod",
        "**": "pow",
    }
)
