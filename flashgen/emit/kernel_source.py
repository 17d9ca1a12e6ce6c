"""KernelSource: one generated source file, ready for a compiler."""

from dataclasses import dataclass

from flashgen.ir.spec import HeadDim


@dataclass(frozen=True)
class KernelSource:
    """Self-contained text. ``symbol`` prefixes its exported functions; ``defines`` are the plan's macros."""

    file_name: str
    target: str
    symbol: str
    head_dim: HeadDim
    text: str
    defines: tuple[tuple[str, str], ...]

    @property
    def name(self) -> str:
        """That of the file in a generated package, less its suffix."""
        return self.file_name.rpartition(".")[0]
