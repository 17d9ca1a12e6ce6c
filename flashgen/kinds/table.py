"""Every kind of call, by its name: what the modules of this folder declare."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

from flashgen.kinds.dense import DENSE
from flashgen.kinds.kind import Kind


def _declared() -> Iterator[Kind]:
    for module in pkgutil.iter_modules([str(Path(__file__).parent)]):
        if module.name != Path(__file__).stem:
            found = vars(importlib.import_module(f"{__package__}.{module.name}"))
            yield from (each for each in found.values() if isinstance(each, Kind))


# The dense one first: the names of other operators begin with that of its own.
KINDS: Mapping[str, Kind] = MappingProxyType({each.name: each for each in (DENSE, *_declared())})
