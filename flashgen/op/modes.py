"""The modes of PyTorch that the reference runs under where an operator calls it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


def autograd_inside() -> contextlib.AbstractContextManager[None]:
    """Lets the reference use autograd inside an operator, where the dispatcher has left autograd behind."""
    exclude = torch._C._dispatch_tls_local_exclude_set()
    for key in ("AutogradFunctionality", "AutogradOther", "AutogradNestedTensor"):
        exclude = exclude.remove(getattr(torch._C.DispatchKey, key))
    include = torch._C._dispatch_tls_local_include_set()
    guard: contextlib.AbstractContextManager[None] = torch._C._ForceDispatchKeyGuard(include, exclude)
    return guard


@contextlib.contextmanager
def deterministic_algorithms(wanted: bool) -> Iterator[None]:
    """PyTorch's deterministic algorithms for the reference, which gathers and scatters by its operators."""
    before = torch.are_deterministic_algorithms_enabled()
    if before or not wanted:
        yield
        return
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
