"""Specs that go to another process: what is equal there is what was equal here."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys

from flashgen.language import parse_text

TEXT = "attention a { head_dim 64  tensor slope: f32[H]  score softcap(s, 5) - slope[h] * (i - j)  mask causal }"
COMPARE = """
import pickle, sys
from flashgen.language import parse_text
found, own = pickle.loads(sys.stdin.buffer.read()), parse_text(sys.argv[1]).specs[0]
assert found.score == own.score and {found.score: 1}[own.score] and found.mask == own.mask
"""


def test_a_process_that_hashes_otherwise() -> None:
    sent = pickle.dumps(parse_text(TEXT).specs[0])
    for seed in ("1", "2"):
        subprocess.run(
            [sys.executable, "-c", COMPARE, TEXT],
            input=sent,
            env={**os.environ, "PYTHONHASHSEED": seed},
            check=True,
        )
