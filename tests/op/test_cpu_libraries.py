"""What a CPU's call asks the compiler for: one pass, and what calls of its type multiply with."""

from __future__ import annotations

from pathlib import Path

import pytest

from flashgen.emit.kernel_source import PARTS, KernelSource
from flashgen.hosts.cpu_backend import CpuProvider
from flashgen.hosts.kernel import ELEMENTS
from flashgen.ir.spec import HeadDim
from flashgen.ir.types import ElementType
from flashgen.language.front import parse_text
from flashgen.targets.cpu import device

VECTORS, BFLOAT16, IN_PARTS = 1, 2, 3  # of FLASHGEN_PRODUCTS


class Asked(Exception):  # noqa: N818 - reads as what happened
    pass


@pytest.mark.parametrize(
    ("has", "name", "element", "q_len", "products"),
    [
        ("_has_amx", "forward", ElementType.F32, 64, VECTORS),
        ("_has_amx", "forward", ElementType.F16, 4096, IN_PARTS),
        ("_has_amx", "backward", ElementType.BF16, 64, BFLOAT16),
        ("_has_amx", "ragged_forward", ElementType.F32, 64, IN_PARTS),
        ("_has_pairs", "forward", ElementType.F32, 4096, VECTORS),
        ("_has_pairs", "ragged_backward", ElementType.BF16, 64, BFLOAT16),
        ("", "backward", ElementType.BF16, 4096, VECTORS),
    ],
)
def test_a_call_asks_for_what_it_runs(
    has: str, name: str, element: ElementType, q_len: int, products: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for each in ("_has_amx", "_has_pairs"):
        monkeypatch.setattr(device, each, lambda _, there=each == has: there)

    def build(source: KernelSource) -> Path:
        raise Asked(dict(source.defines))

    (spec,) = parse_text("attention a { head_dim 16 }").specs
    values = {"batch": 1, "heads": 1, "kv_heads": 1, "q_len": q_len, "kv_len": q_len}
    kernel = CpuProvider(spec, build=build)(HeadDim(16, 16), 0)
    with pytest.raises(Asked) as asked:
        kernel.find(name, {**values, "element": ELEMENTS.index(element)})
    (defines,) = asked.value.args
    assert defines["FLASHGEN_PART"] == str(1 + PARTS.index(name))
    assert defines["FLASHGEN_PRODUCTS"] == str(products)
