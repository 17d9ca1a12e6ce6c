"""The scalar types of expressions and the element types of tensors."""

from enum import Enum


class ScalarType(Enum):
    """What an expression evaluates to: bool, 32-bit int, or 32-bit float."""

    BOOL = "bool"
    INT = "int"
    FLOAT = "float"

    @property
    def noun(self) -> str:
        """As a sentence has it."""
        return f"an {self}" if self is ScalarType.INT else f"a {self}"

    def __str__(self) -> str:
        return self.value


class ElementType(Enum):
    """What a tensor stores. The value is the language's own spelling."""

    F32 = "f32"
    F16 = "f16"
    BF16 = "bf16"
    F8E4M3 = "f8e4m3"
    I32 = "i32"
    I64 = "i64"
    BOOL = "bool"

    @property
    def bytes(self) -> int:
        """Size of one element in memory."""
        return {"f32": 4, "f16": 2, "bf16": 2, "f8e4m3": 1, "i32": 4, "i64": 8, "bool": 1}[self.value]

    @property
    def scalar(self) -> ScalarType:
        """The type that an element has in an expression; i64 has 32 bits there, as calls see to."""
        if self.is_floating:
            return ScalarType.FLOAT
        return ScalarType.BOOL if self is ElementType.BOOL else ScalarType.INT

    @property
    def is_floating(self) -> bool:
        """Whether the element type can carry a gradient."""
        return self in (ElementType.F32, ElementType.F16, ElementType.BF16)

    def __str__(self) -> str:
        return self.value
