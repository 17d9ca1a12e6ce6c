"""Importing a generated op reads its spec: the front end has to start fast."""

import subprocess
import sys

CHILD = """
import sys, time
start = time.process_time()
from flashgen.language import parse_file
parse_file("specs/t5.attn")
print(time.process_time() - start, "torch" in sys.modules)
"""


def test_a_fresh_process_reads_a_spec_quickly_and_without_torch(repository: object) -> None:
    runs = [
        subprocess.run([sys.executable, "-c", CHILD], cwd=str(repository), capture_output=True, text=True, check=True)
        for _ in range(3)
    ]
    times, torch = zip(*(run.stdout.split() for run in runs), strict=True)
    assert set(torch) == {"False"}
    assert min(map(float, times)) < 1.5  # about 0.3 on an idle machine; tables of the grammar are a third of it


def test_nothing_is_built_at_import() -> None:
    code = "import flashgen.language, flashgen.language.parser as p; print(p.grammar.cache_info().currsize)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "0"
