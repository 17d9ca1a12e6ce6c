"""What a mod cannot do, and what to write instead."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import NoReturn

from flashgen.diagnostics import nearest, quoted_list
from flashgen.flex.places import refuse

_OF_NUMPY = "NumPy", "write torch's functions instead of NumPy's, and capture arrays as tensors: torch.from_numpy(x)"
_OF_TEXTS = "a text", "leave it out: a mod is run once, without numbers"
# What Python asks of a value to decide by it: how the user put it, and what to write instead.
DECISIONS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "__bool__": (
            "a Python condition ('if', 'and', 'or', 'not', 'while', 'assert', min, max)",
            "write torch.where(condition, x, y), and '&', '|', '~' for 'and', 'or', 'not'",
        ),
        "__int__": ("int()", "write x.int()"),
        "__float__": (
            "float(), or a function of Python's math,",
            "write x.float(), and torch's functions instead of math's",
        ),
        "__index__": (
            "a Python index ('range', a slice, a list)",
            "for a list of numbers, capture a tensor and index it: torch.tensor([…])[h]",
        ),
        "__len__": ("len()", ""),
        "__iter__": ("a loop", ""),
        "item": ("'.item()'", "leave it out: a value without dimensions is a number here"),
        "tolist": ("'.tolist()'", ""),
        **dict.fromkeys(("__array__", "numpy", "__array_wrap__"), _OF_NUMPY),
        **dict.fromkeys(("__format__", "__repr__"), _OF_TEXTS),
        "__contains__": ("'in'", ""),
        "nonzero": ("'.nonzero()'", ""),
    }
)
MISSING: Mapping[str, str] = MappingProxyType(
    {
        "expm1": "write torch.exp(x) - 1",
        **dict.fromkeys(("stack", "cat"), "write the values one by one: a mod computes one number for one pair"),
        "any": "write '|' between the conditions",
        "all": "write '&' between the conditions",
        "sum": "write '+' between the values",
        **dict.fromkeys(("gather", "index_select", "take"), "index the tensor: t[h, kv_idx]"),
        "nan_to_num": "write torch.where(torch.isnan(x), 0.0, x)",
        "isin": "compare with each value and write '|' between the conditions",
        "bucketize": "count the borders that are passed: (x > b0).int() + (x > b1).int()",
    }
)


def refuse_decision(name: str, *, hinted: bool = True) -> NoReturn:
    """Refuse an operation by which Python would decide on a value that only a kernel knows."""
    asked, instead = DECISIONS[name]
    hints = (instead,) if hinted and instead else ()
    refuse("E601", f"{asked} asks for a value that is known to the kernel alone, one for each pair", hints=hints)


def refuse_unknown(name: str, known: Iterable[str] = ()) -> NoReturn:
    """Refuse a function that is not in the table of operators."""
    shown = name.removeprefix("get:").strip("_") if name.startswith(("__", "get:")) else name
    if name == "__setitem__":
        refuse("E602", "a mod cannot assign to elements", hints=("write torch.where(condition, x, y)",))
    if shown in MISSING:
        refuse("E602", f"flashgen has no '{shown}' for a mod", hints=(MISSING[shown],))
    close = nearest(shown, [each for each in known if not each.startswith("_")], limit=3)
    hints = (f"did you mean {quoted_list(close)}?",) if close else ("docs/flex.md lists the functions",)
    refuse("E602", f"flashgen has no '{shown}' for a mod", hints=hints)
