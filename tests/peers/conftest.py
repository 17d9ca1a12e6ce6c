"""`make test-integrations` runs the tests of models, in an environment that has transformers."""

from __future__ import annotations

from importlib.util import find_spec

# tests/conftest.py says so at the head of a run.
collect_ignore = [] if find_spec("transformers") else ["test_transformers.py"]
