"""What a mod cannot do, and what to write instead."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import NoReturn

from flashgen.diagnostics import nearest, quoted_list
from flashgen.flex.places import refuse

# What Python asks of a value to decide by it, and how the user put it.
DECISIONS: Mapping[str, str] = MappingProxyType(
    {
        "__bool__": "a Python condition ('if', 'and', 'or', 'not', 'while', 'assert', min, max)",
        "__int__": "int()",
        "__float__": "float(), or a function of Python's math,",
        "__index__": "a Python index ('range', a slice, a list)",
        "__len__": "len()",
        "__iter__": "a loop",
        "item": "'.item()'",
        "tolist": "'.tolist()'",
        "__array__": "NumPy",
        "numpy": "NumPy",
        "__array_wrap__": "NumPy",
        "__format__": "a text",
        "__repr__": "a text",
        "__contains__": "'in'",
        "nonzero": "'.nonzero()'",
    }
)
_INSTEAD_OF_NUMPY = "write torch's functions instead of NumPy's, and capture arrays as tensors: torch.from_numpy(x)"
INSTEAD: Mapping[str, str] = MappingProxyType(
    {
        "__bool__": "write torch.where(condition, x, y), and '&', '|', '~' for 'and', 'or', 'not'",
        "__int__": "write x.int()",
        "__float__": "write x.float(), and torch's functions instead of math's",
        "__index__": "for a list of numbers, capture a tensor and index it: torch.tensor([…])[h]",
        "__format__": "leave it out: a mod is run once, without numbers",
        "__repr__": "leave it out: a mod is run once, without numbers",
        "item": "leave it out: a value without dimensions is a number here",
        "__array__": _INSTEAD_OF_NUMPY,
        "__array_wrap__": _INSTEAD_OF_NUMPY,
        "numpy": _INSTEAD_OF_NUMPY,
    }
)
MISSING: Mapping[str, str] = MappingProxyType(
    {
        "expm1": "write torch.exp(x) - 1",
        "stack": "write the values one by one: a mod computes one number for one pair",
        "cat": "write the values one by one: a mod computes one number for one pair",
        "any": "write '|' between the conditions",
        "all": "write '&' between the conditions",
        "sum": "write '+' between the values",
        "gather": "index the tensor: t[h, kv_idx]",
        "index_select": "index the tensor: t[h, kv_idx]",
        "take": "index the tensor: t[h, kv_idx]",
        "nan_to_num": "write torch.where(torch.isnan(x), 0.0, x)",
        "isin": "compare with each value and write '|' between the conditions",
        "bucketize": "count the borders that are passed: (x > b0).int() + (x > b1).int()",
    }
)


def refuse_unknown(name: str, known: Iterable[str] = ()) -> NoReturn:
    """Refuse a function that the table of operators does not have."""
    shown = name.removeprefix("get:").strip("_") if name.startswith(("__", "get:")) else name
    if name == "__setitem__":
        refuse("E602", "a mod cannot assign to elements", hints=("write torch.where(condition, x, y)",))
    if shown in MISSING:
        refuse("E602", f"flashgen has no '{shown}' for a mod", hints=(MISSING[shown],))
    close = nearest(shown, [each for each in known if not each.startswith("_")], limit=3)
    hints = (f"did you mean {quoted_list(close)}?",) if close else ("docs/flex.md lists the functions",)
    refuse("E602", f"flashgen has no '{shown}' for a mod", hints=hints)
