"""Layouts are declared once: what Python counts is what sources have, and a compiler holds them to it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from flashgen.analysis.variant import Variant, analyse
from flashgen.compiler.pipeline import target_named
from flashgen.compiler.reading import read_file
from flashgen.targets.gpu import model
from flashgen.targets.gpu.emit import emit_cuda
from flashgen.targets.gpu.layouts import backward_layout, forward_layout, query_layout
from flashgen.targets.gpu.model import Layout, Part, Words, printed
from flashgen.targets.gpu.primitives import C_TYPES
from flashgen.targets.gpu.tiles import GpuPlan
from flashgen.toolchains.nvrtc import created, find_nvrtc
from tests.cuda.helpers import emitted_types, of_type
from tests.cuda.nvrtc import needs_nvrtc

GALLERY = ("causal", "packed_documents", "random_blocks", "gaussian_regression", "t5", "mla")
STRUCT = re.compile(r"^template <> struct (\w+)<([\w:, ]+)>(?: : \1<([\w:, ]+)>)? \{(.*?)\};", re.MULTILINE | re.DOTALL)
CONSTANT = re.compile(r"\b(\w+) = (\d+)")


def constants(source: str) -> dict[tuple[str, str], Mapping[str, int]]:
    """The structs of a source by name and template arguments."""
    found: dict[tuple[str, str], Mapping[str, int]] = {}
    for name, arguments, base, body in STRUCT.findall(source):
        own = {constant: int(value) for constant, value in CONSTANT.findall(body)}
        found[name, arguments] = own or found.get((name, base), {})
    return found


def variants(specs: Path, name: str) -> Iterator[Variant]:
    for spec in read_file(specs / f"{name}.attn").specs:
        yield analyse(spec, spec.head_dims[0])


def layouts(variant: Variant, plan: GpuPlan) -> Iterator[tuple[tuple[str, str], Layout, int]]:
    """What a source is to print, and the bytes that the plan has for it."""
    for each in plan.elements:
        c_type = C_TYPES[each.element]
        yield (
            ("ForwardMemory", c_type),
            forward_layout(plan.recipe, each.element, each.forward),
            each.forward.sram_bytes,
        )
        for with_dq in (True, False) if plan.recipe.one_pass else (False,):
            layout = backward_layout(plan.recipe, each.element, each.backward, with_dq=with_dq)
            size = each.backward.sram_bytes if with_dq else each.backward.keys_sram_bytes
            yield ("BackwardMemory", f"{c_type}, {str(with_dq).lower()}"), layout, size
        yield (
            ("QueryMemory", c_type),
            query_layout(plan.recipe, each.element, each.queries),
            each.queries.sram_bytes,
        )


@pytest.mark.parametrize("target", ["sm_75", "sm_80", "sm_90a"])
@pytest.mark.parametrize("name", GALLERY)
def test_sources_have_what_python_counts(specs: Path, name: str, target: str) -> None:
    for variant in variants(specs, name):
        plan = target_named(target).plan(variant)
        assert isinstance(plan, GpuPlan)
        said = constants(emitted_types(plan))
        for place, layout, size in layouts(variant, plan):
            assert layout.bytes == size == said[place]["bytes"]
            assert sum(layout.buffers.values()) == max(layout.offsets[each.name] + each.size for each in layout.parts)
            for part in layout.parts:
                if part.size:
                    assert said[place][part.name] == layout.offsets[part.name], (place, part)
                    assert said[place][f"{part.name}_bytes"] == part.size, (place, part)


@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
def test_every_part_is_asserted(specs: Path, target: str) -> None:
    """A part that a block has is one whose bytes a compiler compares with what lies there."""
    for name in GALLERY:
        for variant in variants(specs, name):
            plan = target_named(target).plan(variant)
            assert isinstance(plan, GpuPlan)
            source = "".join(emitted_types(plan).split())
            for (struct, _), layout, _ in layouts(variant, plan):
                for part in layout.parts:
                    if part.size:
                        asserted = f"static_assert(Memory::{part.name}_bytes == {part.holds}".replace(" ", "")
                        assert asserted in source, (name, struct, part.name)


def test_no_template_counts_bytes(repository: Path) -> None:
    """Where something lies is a constant that was printed; no template adds sizes up to find it."""
    for path in sorted((repository / "templates" / "cuda").glob("*.jinja")):
        text = path.read_text(encoding="utf-8")
        for place in re.findall(r"memory \+ (\w+)", text):
            assert place in ("Memory", "place"), f"{path.name}: memory + {place}"
        assert "offsets[" not in text, f"{path.name}: a slot by its number"


@needs_nvrtc
def test_a_wrong_size_does_not_compile(specs: Path) -> None:
    """What is printed is checked by the compiler, too: one byte more of K is an error that names it."""
    nvrtc, _ = find_nvrtc()
    variant = next(variants(specs, "causal"))
    plan = target_named("sm_80").plan(variant)
    assert isinstance(plan, GpuPlan)
    source = emit_cuda(of_type(plan), "forward")
    wrong = re.sub(r"K_bytes = (\d+)", lambda found: f"K_bytes = {int(found[1]) + 16}", source.text, count=1)
    program = created(nvrtc, replace(source, text=wrong))
    with pytest.raises(nvrtc.NVRTCError):
        nvrtc.compileProgram(program, ("-arch=sm_80", "-std=c++17"))
    assert "K: what the plan counts" in nvrtc.getProgramLog(program)


def test_parts_are_aligned_and_shared_structs_printed_once() -> None:
    part = Part("A", "a", 12, "sizeof(A)")
    layout = Layout((part, Part("NONE", "none", 0, "0", 8), Part("B", "b", 8, "sizeof(B)", 8)))
    assert layout.offsets == {"A": 0, "NONE": 12, "B": 16}
    assert layout.bytes == 24
    assert layout.buffers == {"a": 12, "b": 12}
    assert Layout((part,), Part("O", "o", 64, "64")).bytes == 64
    code = printed("M", "what", "class T", {"int": layout, "float": layout})
    assert "template <> struct M<float> : M<int> {};" in code.structs
    assert "NONE" not in code.structs + code.assertions


def test_notes_have_names_of_their_own() -> None:
    """No word means two things: each kind of block has a struct of what it keeps."""
    produced, own = model.PRODUCER_TILES_OF_QUERIES, model.TILES_OF_QUERIES
    for words in (produced, own, model.TILES_OF_KEYS):
        assert len({name for name, _ in words.names}) == len(words.names)
    place = len(model.PLACE_OF_QUERIES.names)
    assert max(place + len(produced.names), place + len(own.names), len(model.TILES_OF_KEYS.names)) <= model.NOTES
    assert Words((("a", "first"), ("b", "second"))).struct("S", "Base") == (
        "struct S : Base {\n  int a;  // first\n  int b;  // second\n};"
    )
