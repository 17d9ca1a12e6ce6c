"""What a generated package says of itself: written by ``flashgen build``, read at every import."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from flashgen.plan.plan import Tiles
from flashgen.version import __version__

FILE_NAME = "manifest.json"
SPEC_FILE_NAME = "spec.json"  # the parsed spec, constants and imports resolved
# Counts up when the files of a package or the kernels' arguments change their meaning.
FORMAT = 1


@dataclass(frozen=True)
class ManifestKernel:
    """One generated source: its file, its functions' prefix, and the tiles that it has by default."""

    file: str
    target: str
    symbol: str
    head_dim: str
    forward: Tiles
    backward: Tiles


@dataclass(frozen=True)
class Manifest:
    """A package: the operator's name, what identifies its spec, the generated sources."""

    name: str
    sha256: str
    kernels: tuple[ManifestKernel, ...]

    def to_json(self) -> str:
        """The text of the file; the same for the same manifest."""
        return json.dumps({"format": FORMAT, "flashgen": __version__, **asdict(self)}, indent=2) + "\n"

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """The manifest of a package; ``ImportError`` where it is damaged or another version's."""
        path = folder / FILE_NAME
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            if content.pop("format") == FORMAT:
                content.pop("flashgen")
                content["kernels"] = tuple(_kernel(entry) for entry in content["kernels"])
                return cls(**content)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ImportError(f"'{path}' cannot be read ({error}); {rebuild_hint(folder)}") from None
        writer = f"'{folder}' was written by flashgen {content.get('flashgen')}, this is {__version__}"
        raise ImportError(f"{writer}; {rebuild_hint(folder)}")


def rebuild_hint(folder: Path) -> str:
    """What to do about a package that does not work."""
    return f"run 'flashgen build' for its spec again to write '{folder.name}' anew"


def _kernel(entry: dict[str, Any]) -> ManifestKernel:
    tiles = {name: Tiles(**entry[name]) for name in ("forward", "backward")}
    return ManifestKernel(**{**entry, **tiles})
