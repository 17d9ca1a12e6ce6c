"""What once failed, kept: a minimal ``.attn`` and its inputs beside it, as JSON.

In: a folder. Out: ``Kept`` entries, and the cases to judge again. An entry names the machines that it failed on; it is
right where all of them are.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.fuzz.draws import Build, CallDraw, Case, Machine, Ranks


@dataclass(frozen=True)
class Kept:
    """One entry: its spec, its calls, where it failed and how."""

    name: str
    text: str
    calls: tuple[CallDraw, ...]
    machines: tuple[Machine, ...]
    build: Build
    found: str

    @property
    def cases(self) -> tuple[Case, ...]:
        """To be judged: one for each machine."""
        return tuple(Case(self.text, self.calls, machine, self.build) for machine in self.machines)


def keep(folder: Path, case: Case, machines: tuple[Machine, ...], found: str) -> Path:
    """Write an entry; returns its ``.attn``."""
    data = {
        "found": found,
        "machines": [dataclasses.asdict(each) for each in machines],
        "build": dataclasses.asdict(case.build),
        "calls": [_changed(call) for call in case.calls],
    }
    inputs = json.dumps(data, indent=2) + "\n"
    digest = hashlib.sha256((case.text + inputs).encode()).hexdigest()
    name = f"{re.sub(r'[^A-Za-z0-9_]+', '_', found)}_{digest[:8]}"
    folder.mkdir(parents=True, exist_ok=True)
    spec = folder / f"{name}.attn"
    spec.write_text(case.text, encoding="utf-8")
    spec.with_suffix(".json").write_text(inputs, encoding="utf-8")
    return spec


def _changed(call: CallDraw) -> Mapping[str, Any]:
    """What is not as it is by default."""
    return {
        name: value
        for each, (name, value) in zip(dataclasses.fields(call), dataclasses.asdict(call).items(), strict=True)
        if each.default is dataclasses.MISSING or value != each.default
    }


def read(folder: Path) -> Iterator[Kept]:
    """Every entry; raises ``ValueError`` for a file that is none."""
    for spec in sorted(folder.glob("*.attn")):
        yield read_entry(spec)


def read_entry(spec: Path) -> Kept:
    """The entry of a ``.attn`` with its inputs beside it."""
    try:
        known = json.loads(spec.with_suffix(".json").read_text(encoding="utf-8"))
        return Kept(
            spec.stem,
            spec.read_text(encoding="utf-8"),
            tuple(_call(call) for call in known["calls"]),
            tuple(Machine(**each) for each in known["machines"]),
            Build(**{name: _tuples(each) for name, each in known["build"].items()}),
            known["found"],
        )
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"'{spec.with_suffix('.json')}' does not hold the inputs of a case: {error}") from None


def _call(known: Mapping[str, Any]) -> CallDraw:
    found = {name: _tuples(value) for name, value in known.items() if name != "ranks"}
    if "ranks" in known:
        found["ranks"] = Ranks(**{name: _tuples(value) for name, value in known["ranks"].items()})
    return CallDraw(**found)


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
