"""What a compiler instantiates of the CPU headers for one spec."""

from __future__ import annotations

import subprocess
from pathlib import Path

from flashgen.toolchains.cpp import find_compiler

_WITHOUT = """
struct Without : Spec {{
  static void {name}() = delete;
}};
template struct Forward<Without, ForwardTile<Without, VectorProducts>>;
template struct Backward<Without, BackwardTile<Without, VectorProducts>>;
"""


def works_without(text: str, name: str, folder: Path, holds: str = "true") -> bool:
    """Whether both passes compile where ``Spec`` has no member of this name, and ``holds`` is true of them."""
    source = folder / "without.cpp"
    asserted = f"using Scratch = ForwardTile<Without, VectorProducts>::Scratch;\nstatic_assert({holds});\n"
    source.write_text(text + _WITHOUT.format(name=name) + asserted)
    command = [*find_compiler().command, "-std=c++17", "-fopenmp", "-march=native", "-fsyntax-only", str(source)]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0
