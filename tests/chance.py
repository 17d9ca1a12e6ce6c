"""What tests draw by chance: the same in every run, so that a change answers for what it changes and nothing else.

``make test-random`` draws other things; its header says by which seed, ``make test-random SEED=...`` draws them again.
"""

from __future__ import annotations

import os
import zlib

SEED = int(os.environ.get("FLASHGEN_TEST_SEED", "0"))


def seed_of(name: str) -> int:
    """31 bits, for a test's or a module's name."""
    return zlib.crc32(f"{SEED} {name}".encode()) >> 1
