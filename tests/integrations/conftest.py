"""Tests that need other libraries: `make test-integrations` runs them in an environment that has these."""

from __future__ import annotations

from importlib.util import find_spec

# tests/conftest.py says so at the head of a run.
collect_ignore_glob = [] if find_spec("transformers") else ["*.py"]
