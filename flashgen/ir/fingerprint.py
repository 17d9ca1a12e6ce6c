"""Names operators by what they compute, so that the same spec loaded twice is one operator of ``torch.library``.

In: a spec, the kind of its implementation, its generated sources. Out: hexadecimal digits, the same in every process
and on every machine where these three are the same.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import Protocol

from flashgen.ir.expr import Expr
from flashgen.ir.spec import AttentionSpec, HeadDim
from flashgen.ir.text import text
from flashgen.store.headers import Source

DIGITS = 16


class KernelText(Source, Protocol):
    """What an op keeps of each generated source: ``KernelSource`` and anything of the same shape."""

    @property
    def symbol(self) -> str:
        """What the names of its functions begin with."""

    @property
    def head_dim(self) -> HeadDim:
        """The head dimension that it is for."""

    @property
    def whole(self) -> str:
        """The text with its headers in the place of their includes."""


def fingerprint(spec: AttentionSpec, kind: str, sources: Sequence[KernelText]) -> str:
    """A hash over all that decides what an operator computes and how."""
    digest = hashlib.sha256(f"{kind} {canonical(spec)}".encode())
    for source in sources:
        digest.update(f"{source.name} {source.defines} {source.whole}".encode())
    return digest.hexdigest()[:DIGITS]


def operator_name(spec: AttentionSpec, backend: str | None, label: str = "", edited: Sequence[KernelText] = ()) -> str:
    """The name of a spec's torch operator, without the namespace, the same on every machine."""
    return f"{spec.name}_{fingerprint(spec, f'{backend} {label}', edited)}"


def canonical(value: object) -> str:
    """A spec as text: structure and values, without places."""
    if isinstance(value, Expr):
        return f"{value.type}:{text(value)}"
    if dataclasses.is_dataclass(value):
        names = [each.name for each in dataclasses.fields(value) if each.compare]
        return f"{type(value).__name__}({', '.join(f'{name}={canonical(getattr(value, name))}' for name in names)})"
    if isinstance(value, tuple):
        return f"({', '.join(canonical(each) for each in value)})"
    return repr(value)
