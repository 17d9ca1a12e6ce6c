"""Tunings that are stored: what ``flashgen tune`` found, by device, spec and head dimension, for later plans.

    <cache>/tuned/<spec>-<digest>-<version>.json    every class of shapes of one spec and head dimension on one device

In: a ``Variant`` and the name of a device. Out: its ``Tuning``s; ``choice.py`` says which one a call goes by. A file of
another version of flashgen is never read and never overwritten: its name differs. A spec that pins tiles is another
spec, with tunings of its own, so that pins always win.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import filelock

from flashgen.analysis.variant import Variant
from flashgen.ir.fingerprint import canonical
from flashgen.plan.measured import ShapeClass, Tuning
from flashgen.store.cache import Cache, replace_file
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
        """The tunings in the folder of a cache, whether or not anything there is used."""
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

    def digest(self, spec_name: str) -> str:
        """Of all that this version knows of specs of a name, on any device: empty where it is nothing."""
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
