"""How something is computed, and why: what the recipes of all targets are made of.

Stage 2, decide. In: nothing. Out: the types. A family decides once (its ``recipes.py``); what comes later reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

FORCED = "nothing else works"


@dataclass(frozen=True)
class Rule:
    """A rule of thumb about speed: its name, what it says, and the measurement that justifies it.

    ``measured`` says so where there is none. ``limit`` is its number, where it has one.
    """

    name: str
    says: str
    measured: str
    limit: int = 0


@dataclass(frozen=True)
class Decision:
    """One choice of a recipe: the question, what was chosen, why, what was measured, and the rule of thumb, if any.

    ``about`` is a pass and an element type (``forward, bf16``); empty where it holds for all.
    """

    question: str
    choice: str
    reason: str
    measured: str
    rule: str = ""
    about: str = ""

    @classmethod
    def by(cls, question: str, choice: str, rule: Rule) -> Decision:
        """A decision that follows a rule of thumb."""
        return cls(question, choice, rule.says, rule.measured, rule.name)

    def of(self, about: str) -> Decision:
        """The decision about a pass and an element type."""
        return replace(self, about=about)


def gathered(decisions: Iterable[Decision]) -> Mapping[Decision, str]:
    """Each choice once, with all that it is about: ``forward, f16 and bf16``."""
    found: dict[Decision, dict[str, list[str]]] = {}
    for each in decisions:
        name, _, element = each.about.partition(", ")
        elements = found.setdefault(each.of(""), {}).setdefault(name, [])
        elements += [element] if element else []
    return {each: "; ".join(_about(*of) for of in passes.items()) for each, passes in found.items()}


def _about(name: str, elements: Sequence[str]) -> str:
    return f"{name}, {' and '.join(filter(None, (', '.join(elements[:-1]), elements[-1])))}" if elements else name


def in_short(decisions: Iterable[Decision]) -> str:
    """The choices in one line."""
    return "; ".join(f"{each.question}: {each.choice}" for each in decisions)
