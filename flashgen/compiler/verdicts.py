"""The verdict of each target on a spec: whether it takes the spec, or what it refuses and leaves out, with the place.

In: an ``AttentionSpec``, targets. Out: a ``Verdict`` of each target; diagnostics. Nothing is emitted: a target that
plans every head dimension takes the spec.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from flashgen.analysis.variant import Variant, analyse
from flashgen.compiler.compiled import compiled
from flashgen.diagnostics import Diagnostic, SpecError, quoted_list
from flashgen.ir.spec import AttentionSpec
from flashgen.targets.protocol import AnyTarget


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
