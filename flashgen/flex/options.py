"""What calls of FlexAttention ask for beside o: options of its kernels, lse, and the maxima of rows."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex

__all__ = ["AuxOutput", "AuxRequest", "check_aux", "check_options"]

if hasattr(torch_flex, "AuxRequest"):
    from torch.nn.attention.flex_attention import AuxOutput, AuxRequest
else:  # before PyTorch 2.9

    class AuxRequest(NamedTuple):  # type: ignore[no-redef]
        """What is wanted beside o."""

        lse: bool = False
        max_scores: bool = False

    class AuxOutput(NamedTuple):  # type: ignore[no-redef]
        """What was wanted; None: not this."""

        lse: Tensor | None = None
        max_scores: Tensor | None = None


_BACKENDS = ("AUTO", "TRITON", "TRITON_DECODE", "FLASH")
# Options that promise or prefer what changes no result here: rows without a key are 0 whatever is promised of them, and
# no scale is rounded into q.
_SILENT = frozenset(("PRESCALE_QK", "ROWS_GUARANTEED_SAFE", "BLOCKS_ARE_CONTIGUOUS", "WRITE_DQ", "USE_TMA", "BACKEND"))
_RESULTS = {"OUTPUT_LOGSUMEXP": "lse", "OUTPUT_MAX": "max_scores"}
_TOLD: set[str] = set()  # names that this process has been warned of


def check_options(options: object) -> None:
    """Take what steers FlexAttention's kernels, and tell once a process that it means nothing here.

    Raises ``TypeError`` and ``ValueError`` for what FlexAttention refuses, too.
    """
    if not isinstance(options, Mapping):
        raise TypeError(f"'kernel_options' must be a dict, not {type(options).__name__}")
    for name, field in _RESULTS.items():
        if name in options:
            raise ValueError(
                f"kernel_options: '{name}' is set by what a call asks for: return_aux=AuxRequest({field}=True)"
            )
    backend = options.get("BACKEND", "AUTO")
    if backend not in _BACKENDS:
        raise ValueError(f"kernel_options: 'BACKEND' is {backend!r}; FlexAttention has {', '.join(_BACKENDS)}")
    if "BACKEND" in options and options.get("FORCE_USE_FLEX_ATTENTION", False):
        raise ValueError(
            "kernel_options: 'BACKEND' and 'FORCE_USE_FLEX_ATTENTION' exclude each other; BACKEND is enough"
        )
    names = {str(name) for name in options if name not in _SILENT} | ({"BACKEND"} if backend != "AUTO" else set())
    if not names <= _TOLD:
        _TOLD.update(names)
        warnings.warn(
            f"kernel_options: {', '.join(sorted(names))} steer kernels of FlexAttention and mean nothing to flashgen, "
            "whose own are tuned by 'flashgen tune'",
            stacklevel=3,
        )


def check_aux(request: object, return_lse: bool) -> None:
    """Raise ``TypeError`` and ``ValueError`` where what is wanted beside o is not said as FlexAttention takes it."""
    if not isinstance(request, AuxRequest):
        raise TypeError(f"'return_aux' must be an AuxRequest, not {type(request).__name__}; AuxRequest(lse=True)")
    if return_lse:
        raise ValueError("return_lse and return_aux cannot be given both; use return_aux=AuxRequest(lse=True)")
