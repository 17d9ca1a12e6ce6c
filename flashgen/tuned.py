"""Tunings that are stored: what ``flashgen tune`` found, by device, spec and head dimension, for later plans.

    <cache>/tuned/<spec>-<digest>-<version>.json    every class of shapes of one spec and head dimension on one device

In: a ``Variant`` and the name of a device. Out: its ``Tuning``s, and plans that use them. A file of another version of
flashgen is never read and never overwritten: its name differs. A spec that pins tiles is another spec, with tunings of
its own, so that pins always win.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import filelock

from flashgen.analysis.variant import Variant
from flashgen.cache import Cache, replace_file
from flashgen.diagnostics import SpecError
from flashgen.ir.spec import AttentionSpec
from flashgen.ir.types import ElementType
from flashgen.plan.devices import Device
from flashgen.plan.machine import cpu_identity
from flashgen.plan.measured import ShapeClass, Tuning
from flashgen.plan.plan import Plan
from flashgen.plan.planner import plan
from flashgen.runtime.fingerprint import canonical
from flashgen.version import __version__

_FOLDER = "tuned"
_LOCK_SECONDS = 60.0


@dataclass(frozen=True)
class TunedFile:
    """One stored file: whose tunings, of which version; ``tunings`` None where that version is not this one."""

    path: Path
    version: str
    spec_name: str
    head_dim: str
    device: str
    tunings: tuple[Tuning, ...] | None


class TunedStore:
    """A folder of tunings. Nothing is created before the first is stored."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @classmethod
    def default(cls) -> TunedStore:
        """Beside the compiled libraries."""
        return cls(Cache.default().root / _FOLDER)

    def tunings(self, variant: Variant, device: str) -> Mapping[ShapeClass, Tuning]:
        """What this version knows of a variant on a device; nothing where a file is damaged."""
        found = self._read(self._path(variant, device)) if self.may_know(variant) else None
        return {each.shape_class: each for each in (found.tunings or ())} if found else {}

    def latest(self, variant: Variant, device: str, element: ElementType | None = None) -> Tuning | None:
        """The one that was measured last, of an element type if one is given."""
        known = [each for each in self.tunings(variant, device).values() if each.passes]
        fitting = [each for each in known if element in (None, each.shape_class.element)]
        return max(fitting, key=lambda each: each.time, default=None)

    def of_other_versions(self, variant: Variant, device: str) -> tuple[str, ...]:
        """The versions that left tunings of the same variant on the same device, which this one does not use."""
        own = self._path(variant, device)
        stem = own.name.removesuffix(f"-{__version__}.json")
        others = sorted(self.root.glob(f"{stem}-*.json")) if self.may_know(variant) else []
        return tuple(path.name.removeprefix(f"{stem}-").removesuffix(".json") for path in others if path != own)

    def store(self, variant: Variant, device: str, tuning: Tuning) -> None:
        """Add or replace one class. Raises ``OSError`` where the folder cannot be written."""
        self.root.mkdir(parents=True, exist_ok=True)
        path = self._path(variant, device)
        with self._lock(path):
            tunings = {**self.tunings(variant, device), tuning.shape_class: tuning}
            content = {
                "flashgen": __version__,
                "spec": variant.spec.name,
                "head_dim": str(variant.head_dim),
                "device": device,
                "tunings": [each.to_json() for each in tunings.values()],
            }
            replace_file(path, json.dumps(content, indent=1).encode())

    def files(self) -> tuple[TunedFile, ...]:
        """Every file, of any version."""
        found = (self._read(path) for path in sorted(self.root.glob("*.json")))
        return tuple(each for each in found if each is not None)

    def clear(self) -> int:
        """Remove every file, of any version; how many there were."""
        paths = list(self.root.glob("*.json"))
        for path in (*paths, *self.root.glob("*.lock")):
            with contextlib.suppress(OSError):
                path.unlink()
        with contextlib.suppress(OSError):
            self.root.rmdir()
        return len(paths)

    def may_know(self, variant: Variant) -> bool:
        """Whether there is any file of a spec of this name: cheap, where the digest is not."""
        return next(self.root.glob(f"{variant.spec.name}-*.json"), None) is not None

    def _path(self, variant: Variant, device: str) -> Path:
        identity = f"{device}\n{canonical(variant.spec)}\n{variant.head_dim}"
        digest = hashlib.sha256(identity.encode()).hexdigest()[:16]
        return self.root / f"{variant.spec.name}-{digest}-{__version__}.json"

    @contextlib.contextmanager
    def _lock(self, path: Path) -> Iterator[None]:
        with filelock.FileLock(path.with_suffix(".lock"), timeout=_LOCK_SECONDS):
            yield

    def _read(self, path: Path) -> TunedFile | None:
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            version = str(content["flashgen"])
            tunings = None
            if version == __version__:
                tunings = tuple(Tuning.from_json(each) for each in content["tunings"])
            return TunedFile(
                path=path,
                version=version,
                spec_name=str(content["spec"]),
                head_dim=str(content["head_dim"]),
                device=str(content["device"]),
                tunings=tunings,
            )
        except (OSError, ValueError, KeyError, TypeError):
            return None


def planned(variant: Variant, device: Device) -> Plan:
    """The plan for a CPU, with tuned tiles where it is the machine at hand and they were measured on it."""
    chosen = plan(variant, device)
    tuning, remarks = _usable(variant, device)
    if tuning is None:
        return replace(chosen, reasons=(*chosen.reasons, *remarks)) if remarks else chosen
    found = plan(replace(variant, spec=tuned_spec(variant, tuning)), device)
    return replace(found, reasons=(*chosen.reasons, *remarks), rejected=chosen.rejected)


def adopted(variant: Variant, device: Device) -> Variant:
    """The variant with the tiles pinned that ``planned`` takes from a tuning; itself where it takes none."""
    tuning, _ = _usable(variant, device)
    return variant if tuning is None else replace(variant, spec=tuned_spec(variant, tuning))


def _usable(variant: Variant, device: Device) -> tuple[Tuning | None, tuple[str, ...]]:
    """What a plan for a CPU takes over, and what it says of that, or of what it does not take over."""
    store = TunedStore.default()
    if device.name != "local" or not store.may_know(variant):
        return None, ()
    identity = cpu_identity()
    tuning = store.latest(variant, identity)
    if tuning is None:
        return None, _unused(store.of_other_versions(variant, identity))
    try:
        plan(replace(variant, spec=tuned_spec(variant, tuning)), device)
    except SpecError as error:
        return None, (f"tuned tiles are not used, as the planner refuses them: {error.diagnostics[0].message}",)
    return tuning, reasons(tuning, identity)


def tuned_variant(variant: Variant, device: str, element: ElementType) -> Variant:
    """For a GPU: the variant with the tiles that were measured on it, for one element type; else itself."""
    tuning = TunedStore.default().latest(variant, device, element)
    if tuning is None or all(each.winner is None for each in tuning.passes.values()):
        return variant
    return replace(variant, spec=replace(tuned_spec(variant, tuning), dtypes=(element,)))


def tuned_spec(variant: Variant, tuning: Tuning) -> AttentionSpec:
    """The spec with the tiles of a tuning pinned; a pass that was not measured is left to the planner."""
    schedule, own = variant.spec.schedule, tuning.passes
    if "forward" in own:
        tile = own["forward"].tile
        schedule = replace(schedule, Br=tile.Br, Bc=tile.Bc, warps=tile.warps, stages=tile.stages)
    if "backward" in own:
        tile = own["backward"].tile
        schedule = replace(
            schedule,
            backward_Br=tile.Br,
            backward_Bc=tile.Bc,
            backward_warps=tile.warps,
            backward_stages=tile.stages,
        )
    return replace(variant.spec, schedule=schedule)


def reasons(tuning: Tuning, device: str) -> tuple[str, ...]:
    """What a tuning changes about a plan, in a sentence a pass."""
    when = time.strftime("%Y-%m-%d", time.localtime(tuning.time))
    where = f"tuned on '{device}' at {tuning.shape} in {tuning.shape_class.element}, {when}"
    found = []
    for name, each in tuning.passes.items():
        if each.winner is None:
            found.append(
                f"{name}: B_r × B_c = {each.planner}, {where}: none of {len(each.candidates)} others was faster"
            )
        else:
            gain = f"{each.loss:.1%} faster than the planner's {each.planner}"
            found.append(f"{name}: B_r × B_c = {each.tile}, {where}: {gain}")
    return tuple(found)


def _unused(versions: tuple[str, ...]) -> tuple[str, ...]:
    if not versions:
        return ()
    old = ", ".join(versions)
    return (f"tuned tiles of flashgen {old} are kept and not used by {__version__}: run `flashgen tune` again",)
