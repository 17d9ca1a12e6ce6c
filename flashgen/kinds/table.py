"""Every kind of call, by its name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from flashgen.kinds.by_blocks import BY_BLOCKS
from flashgen.kinds.cached import CACHED, F8_CACHED
from flashgen.kinds.dense import DENSE
from flashgen.kinds.eight_bits import EIGHT_BITS
from flashgen.kinds.forward_mode import FORWARD_MODE, FORWARD_MODE_BACKWARD
from flashgen.kinds.kind import Kind
from flashgen.kinds.parts import PARTS
from flashgen.kinds.ragged import RAGGED
from flashgen.kinds.slices import SLICES

_KINDS = (
    DENSE, RAGGED, CACHED, F8_CACHED, PARTS, SLICES, BY_BLOCKS, EIGHT_BITS, FORWARD_MODE, FORWARD_MODE_BACKWARD
)  # fmt: skip
KINDS: Mapping[str, Kind] = MappingProxyType({each.name: each for each in _KINDS})
