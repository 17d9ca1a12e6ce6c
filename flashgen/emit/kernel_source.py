"""KernelSource: one generated source file, ready for a compiler."""

from __future__ import annotations

from dataclasses import dataclass, replace

from flashgen.ir.spec import HeadDim
from flashgen.store.headers import Headers, in_one

PARTS = ("forward", "backward", "ragged_forward", "ragged_backward")


@dataclass(frozen=True)
class KernelSource:
    """A text, and ``headers`` that it includes. ``symbol`` prefixes its functions; ``defines`` are a plan's macros."""

    file_name: str
    target: str
    symbol: str
    head_dim: HeadDim
    text: str
    defines: tuple[tuple[str, str], ...]
    headers: Headers = ()

    @property
    def name(self) -> str:
        """That of the file in a generated package, less its suffix."""
        return self.file_name.rpartition(".")[0]

    @property
    def whole(self) -> str:
        """The text with its headers in the place of their includes."""
        return in_one(self.file_name, self.text, self.headers)

    def of_part(self, part: str, products: int = 0) -> KernelSource:
        """The source of a library of one of ``PARTS`` alone, and of calls that multiply in one way (``Products``)."""
        stem, _, suffix = self.file_name.rpartition(".")
        only = (("FLASHGEN_PART", str(1 + PARTS.index(part))), ("FLASHGEN_PRODUCTS", str(products)))
        return replace(self, file_name=f"{stem}_{part}.{suffix}", defines=(*self.defines, *only))
