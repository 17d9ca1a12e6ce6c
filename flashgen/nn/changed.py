"""The ops of changed specs: made once for a spec, a backend and a change.

In: an op, by its name, and how a call changes its spec. Out: the op of the changed spec, on the same backend. It is
asked for by names and numbers alone, so that ``torch.compile`` traces nothing of making it.
"""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import torch

from flashgen.nn.masks import Form, masked
from flashgen.op.loading import load_spec
from flashgen.op.op import BaseOp

# The ops, by names that changes have here. Attributes, as torch.compile looks at each when it is asked for.
_OPS = SimpleNamespace()
_NAMES: dict[tuple[Any, ...], str] = {}
_ORIGINS: dict[str, BaseOp] = {}
_LOCK = threading.Lock()


def origin_name(op: BaseOp) -> str:
    """The name by which ``changed_op`` knows an op; the same in every process."""
    return _ORIGINS.setdefault(op.name, op).name


def changed_op(origin: str, masks: tuple[tuple[str, int, bool], ...], causal: bool) -> BaseOp:
    """The op of a spec with the masks of a call, each a ``Form``.

    Raises ``ValueError`` where the spec has a tensor of a mask's name.
    """
    op: BaseOp = getattr(_OPS, _made(origin, masks, causal))
    return op


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _made(origin: str, masks: tuple[tuple[str, int, bool], ...], causal: bool) -> str:
    """The name among ``_OPS`` of the op."""
    with _LOCK:
        name = _NAMES.get((origin, masks, causal))
        if name is None:
            op = _ORIGINS[origin]
            changed = op.of_spec(masked(op.spec, (Form(*each) for each in masks), causal=causal), load_spec)
            name = _NAMES[origin, masks, causal] = f"op{len(_NAMES)}"
            setattr(_OPS, name, changed)
        return name
