"""Diagnostics of index proofs, and of weights: errors when a spec is checked, refusals when an op is called.

Stage: analyse (``index_diagnostics``) and call time (``check_index``). In: index proofs. Out: diagnostics; a sentence.
A call is refused only where an index surely leaves its dimension, or where boxes as small as the search allows do not
show that it stays inside. Does NOT prove anything over all sizes (``bounds.py``).
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from flashgen.analysis.bounds import Conditions, IndexProof, IndexStatus, number_range, uncertain
from flashgen.analysis.prover import SIZE_OF, symbol_ranges
from flashgen.analysis.ranging import bounds
from flashgen.diagnostics.diagnostic import Diagnostic, Source, Span
from flashgen.ir.expr import Expr, Literal, Load, Symbol, SymbolKind, walk
from flashgen.ir.interval import FloatRange, IntRange
from flashgen.ir.spec import AttentionSpec
from flashgen.ir.text import text

_UNBOUNDED = 2**28  # an end beyond this comes from unknown sizes or values, and says nothing to a reader
_MAX_BOXES = 2000


# When a spec is checked -----------------------------------------------------------------------------------------------


def index_diagnostics(spec: AttentionSpec, proofs: Iterable[IndexProof]) -> tuple[Diagnostic, ...]:
    """A warning for each clamped index, an error for each that is outside."""
    return tuple(
        _diagnostic(spec, proof) for proof in proofs if proof.status in (IndexStatus.CLAMPED, IndexStatus.OUTSIDE)
    )


def _diagnostic(spec: AttentionSpec, proof: IndexProof) -> Diagnostic:
    written = _written(proof, spec.sources)
    label = f"{_range_text(proof.found)}, the dimension has {_entries(proof.extent)}"
    notes = _definition(written.text, spec, proof.load.span)
    tensor = proof.load.tensor
    if proof.status is IndexStatus.OUTSIDE:
        return Diagnostic("E211", f"index is outside '{tensor}'", written.span, label, notes)
    message = f"index may fall outside '{tensor}'; the load is clamped"
    hint = f"if no pair that the mask keeps can reach it, write {_clamped(written.text, proof)} and the warning goes"
    return Diagnostic("W501", message, written.span, label, notes, (hint,))


def _range_text(found: IntRange) -> str:
    low, high = found.lo > -_UNBOUNDED, found.hi < _UNBOUNDED
    if low and high:
        return f"is {found.lo}" if found.is_point else f"is in [{found.lo}, {found.hi}]"
    if low:
        return f"is at least {found.lo}"
    return f"is at most {found.hi}" if high else "has no known bounds"


def _entries(extent: Expr) -> str:
    if isinstance(extent, Literal):
        return "1 entry" if extent.value == 1 else f"{extent.value} entries"
    return f"{text(extent)} entries"


def _clamped(written: str, proof: IndexProof) -> str:
    extent = proof.extent
    last = str(int(extent.value) - 1) if isinstance(extent, Literal) else f"{text(extent)} - 1"
    if proof.found.lo >= 0:
        return f"min({written}, {last})"
    inside = isinstance(extent, Literal) and proof.found.hi < extent.value
    return f"max({written}, 0)" if inside else f"clamp({written}, 0, {last})"


def _definition(written: str, spec: AttentionSpec, use: Span | None) -> tuple[str, ...]:
    """The place of the ``let`` behind an index that is a single name."""
    for statement in spec.statements:
        name = re.match(r"(?:let\s+)?([A-Za-z_]\w*)\s*=", statement.text)
        if statement.keyword == "let" and name is not None and name[1] == written:
            file = "" if use is None or use.file == statement.span.file else f" of {statement.span.file}"
            return (f"'{written}' is defined at line {statement.span.line}{file}",)
    return ()


# The index as the user wrote it ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _WrittenIndex:
    text: str
    span: Span | None


def _written(proof: IndexProof, sources: Sequence[Source]) -> _WrittenIndex:
    """The index as the source has it, where the load stands there with its brackets; else the index printed anew."""
    span = proof.load.span
    parts = [] if span is None else _parts(proof.load, span, sources)
    if len(parts) == len(proof.load.indices):
        return parts[proof.dimension]
    return _WrittenIndex(text(proof.position), proof.position.span if span is None else span)


def _parts(load: Load, span: Span, sources: Sequence[Source]) -> list[_WrittenIndex]:
    """The indices between the brackets of ``t[…, …]`` at ``span``, if that is the text there."""
    source = next((each for each in sources if each.name == span.file), None)
    if source is None:
        return []
    starts = [0, *(at + 1 for at, character in enumerate(source.text) if character == "\n")]
    first, end = starts[span.line - 1] + span.column - 1, starts[span.end_line - 1] + span.end_column - 1
    code = source.text[:end]
    opening = re.compile(rf"{re.escape(load.tensor)}\s*\[").match(code, first)
    if opening is None or not code.endswith("]"):
        return []
    parts, depth, start = [], 0, opening.end()
    for at in range(start, end):
        depth += (code[at] in "([") - (code[at] in ")]")
        if (code[at] == "," and depth == 0) or at == end - 1:
            parts.append(_part(code[start:at], start, span.file, starts))
            start = at + 1
    return parts


def _part(code: str, start: int, file: str, starts: Sequence[int]) -> _WrittenIndex:
    """One index, without the space around it; ``starts`` are the offsets at which lines begin."""
    first = start + len(code) - len(code.lstrip())
    end = start + len(code.rstrip())
    line, end_line = bisect_right(starts, first), bisect_right(starts, end)
    span = Span(file, line, first - starts[line - 1] + 1, end_line, end - starts[end_line - 1] + 1)
    return _WrittenIndex(" ".join(code.split()), span)


# When an op is called -------------------------------------------------------------------------------------------------


def check_index(
    proof: IndexProof, sizes: Mapping[str, int], params: Mapping[str, float] = MappingProxyType({})
) -> str | None:
    """What is wrong with an index that is checked at call time, for these sizes (B H Hkv Nq Nk) and values of params.

    None: nothing is wrong, or the proof needs a param that is not known, and the kernel clamps.
    """
    if proof.status is not IndexStatus.CALL_TIME or min(sizes[name] for name in SIZE_OF.values()) == 0:
        return None
    if not all(param.name in params for param in proof.params):
        return None
    contexts = proof.contexts if proof.guarded else (frozenset[Expr](),)
    whole = symbol_ranges(sizes) | {param: number_range(param, params[param.name]) for param in proof.params}
    box = uncertain(proof.position, proof.extent, contexts, whole, _MAX_BOXES)
    if box is None:
        return None
    return _refusal(proof, {**sizes, **params}, Conditions(contexts, {**whole, **box}), box)


def _refusal(
    proof: IndexProof, known: Mapping[str, float], conditions: Conditions, box: Mapping[Expr, IntRange]
) -> str:
    found, extent = conditions.range(proof.position), conditions.range(proof.extent)
    symbols = [node for node in walk(proof.position, proof.extent) if isinstance(node, Symbol)]
    names = [SIZE_OF.get(node.name, "") if node.kind is SymbolKind.INDEX else node.name for node in symbols]
    at = [f"{node.name} = {box[node].lo}" for node in symbols if node in box]
    facts = at + [f"{name} = {known[name]}" for name in dict.fromkeys(names) if name in known]
    return (
        f"index '{text(proof.position)}' of tensor '{proof.load.tensor}' {_range_text(found)}, but dimension "
        f"{proof.dimension} of it has {extent.lo} entries ({', '.join(facts)}); if the nearest "
        f"entry is meant, write {_clamped(text(proof.position), proof)}"
    )


def weight_diagnostics(spec: AttentionSpec) -> tuple[Diagnostic, ...]:
    """An error where the sum that weights are divided by is below 0 (or 0), so that its logarithm is NaN.

    Weights that are below 0 for some scores only are allowed (specs/LANGUAGE.md, section 7).
    """
    weight = spec.weights.weight
    if weight is None or not spec.weights.form.is_sum:
        return ()
    found = bounds(weight, symbol_ranges(None))
    if not isinstance(found, FloatRange) or found.hi > 0 or found.lo == 0:
        return ()
    word = spec.weights.form.word
    message = f"'{word}' divides by the sum of its weights, but '{text(weight)}' is never above 0"
    hints = (f"its weights are 0 or more, as in {word}(exp(s)); normalize2 takes those of either sign",)
    return (Diagnostic("E310", message, weight.span, f"is at most {found.hi + 0.0:g}", hints=hints),)
