"""Which tiles a call takes: those measured near its shape, else those that the model predicts, else the planner's own.

In: a ``Variant``, the device, an element type, a shape. Out: ``Pins``, which ``compiled`` takes. Tunings are read once,
when an op is made, so that a call takes the same plan as long as its op lives. ``flashgen tune`` leaves one ``Tuning``
for each class of shapes. A call takes the nearest tuning, unless a size is more than a factor of four away. Without a
tuning GPUs ask the model (their ``family.py``). CPUs have one plan for all lengths: another plan is another library,
seconds to compile, and gains in short calls alone (``tools/benchmarks/README.md``, "Tiles by length").

    <cache>/tuned/<spec>-<digest>-<version>.json    every class of shapes of one spec and head dimension on one device

A file of another version of flashgen is never read and never overwritten: its name differs. A spec that pins tiles is
another spec, with tunings of its own, so that pins always win.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic

import filelock

from flashgen.analysis.variant import Variant
from flashgen.compiler.compiled import compiled, with_reasons
from flashgen.diagnostics import SpecError
from flashgen.ir.fingerprint import canonical
from flashgen.ir.shape import Shape
from flashgen.ir.types import ElementType
from flashgen.plan.measured import PLANNERS_OWN, Pins, ShapeClass, Tuning
from flashgen.store.cache import Cache, replace_file
from flashgen.targets.families import family_of
from flashgen.targets.protocol import BinaryT, Device, PlanT, Target
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
        store = cls.beside(Cache.default().usable())
        return cls(Cache(store.root).usable().root) if store.root.exists() else store

    @classmethod
    def beside(cls, cache: Cache) -> TunedStore:
        """The tunings in the folder of a cache, even if the cache is not used."""
        return cls(cache.root / _FOLDER)

    def tunings(self, variant: Variant, device: str) -> Mapping[ShapeClass, Tuning]:
        """What this version knows of a variant on a device; nothing where a file is damaged."""
        found = self._read(self._path(variant, device)) if self.may_know(variant) else None
        return {each.shape_class: each for each in (found.tunings or ())} if found else {}

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
        with filelock.FileLock(path.with_suffix(".lock"), timeout=_LOCK_SECONDS):
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

    def digest(self, spec_name: str) -> str:
        """A digest of all tunings of this version for specs of a name, on any device; empty where there are none."""
        paths = sorted(self.root.glob(f"{spec_name}-*-{__version__}.json"))
        contents = b"".join(path.read_bytes() for path in paths)
        return hashlib.sha256(contents).hexdigest()[:16] if contents else ""

    def may_know(self, variant: Variant) -> bool:
        """Whether there is any file of a spec of this name: cheap, where the digest is not."""
        return next(self.root.glob(f"{variant.spec.name}-*.json"), None) is not None

    def _path(self, variant: Variant, device: str) -> Path:
        identity = f"{device}\n{canonical(variant.spec)}\n{variant.head_dim}"
        digest = hashlib.sha256(identity.encode()).hexdigest()[:16]
        return self.root / f"{variant.spec.name}-{digest}-{__version__}.json"

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
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None


def reasons(tuning: Tuning, device: str) -> tuple[str, ...]:
    """What a tuning changes about a plan, in a sentence a pass."""
    when = time.strftime("%Y-%m-%d", time.localtime(tuning.time))
    where = f"tuned on '{device}' at {tuning.shape} in {tuning.shape_class.element}, {when}"
    found = []
    for name, each in tuning.passes.items():
        if each.winner is None:
            found.append(f"{name}: B_r × B_c = {each.planner}, {where}: no other tile was faster")
        else:
            gain = f"{each.loss:.1%} faster than the planner's {each.planner}"
            found.append(f"{name}: B_r × B_c = {each.tile}, {where}: {gain}")
    return tuple(found)


@dataclass(frozen=True)
class TileChoices(Generic[PlanT, BinaryT]):
    """The tiles of one head dimension on one device, by element type and shape. ``by_length``: the model is asked."""

    variant: Variant
    device: Device
    tunings: tuple[tuple[Tuning, Pins], ...] = ()
    remarks: tuple[str, ...] = ()
    by_length: bool = True
    _known: dict[tuple[ShapeClass, int], Pins] = field(default_factory=dict, compare=False, repr=False)

    @property
    def target(self) -> Target[PlanT, BinaryT]:
        """The target of the device."""
        return family_of(self.device).target(self.device)

    def usual(self, element: ElementType | None = None) -> Pins:
        """The tiles where no shape is given: those tuned last, else the planner's own."""
        known = [(tuning.time, pins) for tuning, pins in self.tunings if self._is_for(tuning, element)]
        if known:
            return max(known, key=lambda each: each[0])[1]
        return replace(PLANNERS_OWN, reasons=self.remarks)

    def of_call(self, element: ElementType, shape: Shape) -> Pins:
        """The tiles of a call of this shape, remembered for its class."""
        key = (ShapeClass.of(shape, element), shape.heads // max(shape.kv_heads, 1))
        if key not in self._known:
            self._known[key] = self._of_class(*key)
        return self._known[key]

    def _of_class(self, shape_class: ShapeClass, group: int) -> Pins:
        element = shape_class.element
        near = [
            (tuning.shape_class.element is not element, distance, -tuning.time, n)
            for n, (tuning, _) in enumerate(self.tunings)
            if self._is_for(tuning, element) and (distance := tuning.shape_class.distance(shape_class)) is not None
        ]
        if near:
            return self.tunings[min(near)[-1]][1]
        if self.by_length:
            try:
                found = family_of(self.device).by_length(self.device, self.variant, element)
            except SpecError:  # compiling raises it again
                found = None
            if found is not None:
                return found.of_class(shape_class, group)
        return replace(PLANNERS_OWN, reasons=self.remarks)

    def _is_for(self, tuning: Tuning, element: ElementType | None) -> bool:
        return not self.device.tiles_by_element or element in (None, tuning.shape_class.element)


def tile_choices(variant: Variant, device: Device, identity: str | None = None) -> TileChoices[Any, Any]:
    """The choices on a device; tunings are those under ``identity``, by default the device's own."""
    family = family_of(device)
    identity = family.identity(device) if identity is None else identity
    store = TunedStore.default()
    if identity is None or not store.may_know(variant):
        return TileChoices(variant, device)
    known = sorted(store.tunings(variant, identity).values(), key=lambda each: each.time)
    found, remarks = [], []
    for tuning in known:
        pins = replace(Pins.of(tuning), reasons=reasons(tuning, identity))
        if not device.tiles_by_element:
            pins = replace(pins, element=None)
        try:
            compiled(variant, family.target(device), pins)
        except SpecError as error:
            remarks.append(f"tuned tiles are not used, as the planner refuses them: {error.diagnostics[0].message}")
            continue
        if tuning.passes:
            found.append((tuning, pins))
    older = () if known else store.of_other_versions(variant, identity)
    if older:
        kept = f"tuned tiles of flashgen {', '.join(older)} are kept and not used by {__version__}"
        remarks.append(f"{kept}: run `flashgen tune` again")
    return TileChoices(variant, device, tuple(found), tuple(remarks))


def planned(variant: Variant, device: Device) -> Any:
    """The plan where no shape is given, with tuned tiles where they were measured on the machine at hand."""
    choices = tile_choices(variant, device)
    pins = choices.usual()
    return with_reasons(compiled(variant, choices.target, pins).plan, pins)


def planned_at(variant: Variant, device: Device, shape: Shape) -> Any:
    """The plan of calls of one shape, for each element type that has tiles of its own."""
    choices = tile_choices(variant, device)
    target, own = choices.target, compiled(variant, choices.target).plan
    by_element = {each: choices.of_call(each, shape) for each in own.elements_apart}
    plans = {each: with_reasons(compiled(variant, target, pins).plan, pins) for each, pins in by_element.items()}
    return own.joined({each: (plan, plan) for each, plan in plans.items()})
