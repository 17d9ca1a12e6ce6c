"""From the text of a spec to its ``AttentionSpec``s, with all that is wrong with them on every target.

In: a file, a text, constants by name. Out: ``Checked``, and the ``Verdict`` of each target on a spec: whether it takes
the spec, or what it refuses and leaves out. Nothing is emitted: a target that plans every head dimension takes it. The
front end, and with it lark, is imported when a text is read that was not read before (``emit/recall.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashgen.analysis.bounds import prove_indices
from flashgen.analysis.index_checks import index_diagnostics, weight_diagnostics
from flashgen.analysis.variant import Variant, analyse
from flashgen.compiler.compiled import compiled
from flashgen.diagnostics import Diagnostic, Source, SpecError, in_reading_order, nearest, quoted_list
from flashgen.ir.spec import AttentionSpec
from flashgen.targets.protocol import AnyTarget

if TYPE_CHECKING:
    from flashgen.language import SpecFile


@dataclass(frozen=True)
class Verdict:
    """One target on one attention: why it refuses a head dimension, and what of the schedule means nothing there."""

    target: str
    attention: str
    refused: tuple[Diagnostic, ...] = ()
    left_out: tuple[Diagnostic, ...] = ()

    @property
    def takes(self) -> bool:
        """Whether kernels can be made for every head dimension."""
        return not self.refused


def verdicts_of(spec: AttentionSpec, targets: Sequence[AnyTarget]) -> list[Verdict]:
    """The verdict of each target."""
    variants = [analyse(spec, each) for each in spec.head_dims]
    return [_verdict(spec, variants, each) for each in targets]


def _verdict(spec: AttentionSpec, variants: Sequence[Variant], target: AnyTarget) -> Verdict:
    refused: dict[Diagnostic, None] = {}
    left_out: dict[Diagnostic, None] = {}
    for variant in variants:
        try:
            compiled(variant, target)
        except SpecError as error:
            refused |= dict.fromkeys(error.diagnostics)
            continue
        place = spec.schedule.span or spec.span
        left_out |= dict.fromkeys(Diagnostic("W506", each, place) for each in target.leaves_out(variant))
    return Verdict(target.name, spec.name, tuple(refused), tuple(left_out))


def warnings_of(verdicts: Sequence[Verdict]) -> tuple[Diagnostic, ...]:
    """Warnings of what some targets refuse or leave out, one for all targets that say the same."""
    refused = (replace(each, code="W505") for each in errors_of(verdicts))
    return (*refused, *_merged(verdicts, "left out by", lambda each: each.left_out))


def errors_of(verdicts: Sequence[Verdict]) -> tuple[Diagnostic, ...]:
    """The refusals as errors, for specs that no target takes, or a named one does not."""
    return _merged(verdicts, "refused by", lambda each: each.refused)


def _merged(
    verdicts: Sequence[Verdict], verb: str, said: Callable[[Verdict], Sequence[Diagnostic]]
) -> tuple[Diagnostic, ...]:
    """Each message once, with the targets that say so and the notes of the first of them."""
    found: dict[Diagnostic, dict[str, Diagnostic]] = {}
    for each in verdicts:
        for diagnostic in said(each):
            found.setdefault(replace(diagnostic, notes=(), hints=()), {})[each.target] = diagnostic
    merged = []
    for plain, by_target in found.items():
        first, *others = by_target.values()
        said_alike = all(other.notes == first.notes for other in others)
        notes = first.notes if said_alike else (*first.notes, "of the others: --json, or --target with one of them")
        message = f"{verb} {quoted_list(by_target, 'and')}: {plain.message}"
        merged.append(replace(first, message=message, notes=notes))
    return tuple(merged)


Constant = bool | int | float
CONSTANTS = ("constants", "{'window': 128}")


@dataclass(frozen=True)
class Checked:
    """A file without errors: its specs, every warning about them, and the verdicts of the targets that were asked."""

    specs: tuple[AttentionSpec, ...]
    warnings: tuple[Diagnostic, ...]
    sources: tuple[Source, ...]
    verdicts: tuple[Verdict, ...] = ()


def read_file(path: Path | str, constants: Mapping[str, Constant] | None = None) -> Checked:
    """The specs of a file, with what is wrong or deserves a warning whatever they are compiled for.

    Raises ``SpecError`` where there is an error.
    """
    from flashgen.language import parse_file

    return _checked(parse_file(path, by_name(constants, *CONSTANTS)))


def _checked(parsed: SpecFile) -> Checked:
    """The parsed specs with the diagnostics that need the analysis of every head dimension."""
    found: dict[Diagnostic, None] = dict.fromkeys(parsed.warnings)
    for spec in parsed.specs:
        found.update(dict.fromkeys(weight_diagnostics(spec)))
        for head_dim in spec.head_dims:
            found.update(dict.fromkeys(index_diagnostics(spec, prove_indices(spec, head_dim))))
    diagnostics = in_reading_order(found, parsed.sources)
    if any(diagnostic.severity == "error" for diagnostic in diagnostics):
        raise SpecError(diagnostics, parsed.sources)
    return Checked(parsed.specs, diagnostics, parsed.sources)


def read_text(text: str, constants: Mapping[str, Constant]) -> Checked:
    """``read_file`` for a text."""
    from flashgen.language import parse_text

    return _checked(parse_text(text, constants=constants))


def by_name(given: object, what: str, example: str) -> dict[str, Any]:
    """What a caller gives by name, nothing for None. Raises ``TypeError`` for what has no names."""
    found = {} if given is None else given
    if not isinstance(found, Mapping) or not all(isinstance(name, str) for name in found):
        raise TypeError(f"{what} are given by their names, as in {example}, not as {given!r}")
    return dict(found)


def did_you_mean(name: str, known: Iterable[str]) -> tuple[str, ...]:
    """The known names that an unknown one may stand for, in words."""
    close = nearest(name, known, limit=3)
    return (f"did you mean {quoted_list(close)}?",) if close else (f"known: {quoted_list(known, 'and')}",)
