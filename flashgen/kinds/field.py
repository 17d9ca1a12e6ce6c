"""Members of ``struct Arguments``, in which a kernel is told of a call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal as OneOf

from flashgen.kinds.operand import Operand

FieldKind = OneOf["const pointer", "pointer", "i32", "i64", "u32", "u64", "f32"]
_C_TYPES = {"i32": "int32_t", "i64": "int64_t", "u32": "uint32_t", "u64": "uint64_t", "f32": "float"}


@dataclass(frozen=True)
class Field:
    """One member of ``struct Arguments``; ``element`` is the C type behind a pointer.

    ``varies``: calls of the same shapes, strides and types may differ in it.
    """

    name: str
    kind: FieldKind
    comment: str = ""
    element: str = "void"
    varies: bool = False

    @property
    def declaration(self) -> str:
        """In C++."""
        if self.kind in _C_TYPES:
            return f"{_C_TYPES[self.kind]} {self.name}"
        return f"{self.kind.removesuffix('pointer')}{self.element}* {self.name}"


def operand_field(each: Operand) -> Field:
    """The pointer to the rows of an operand."""
    comment = f"{each.shape}, {each.says}" if each.says else each.shape
    return Field(each.name, "pointer" if each.is_written else "const pointer", comment, each.c_type, varies=True)
