"""``register``: makes a name of transformers mean flashgen's kernels."""

from __future__ import annotations

import functools
import re
import sys
from abc import ABCMeta
from typing import Any

try:
    from transformers import AttentionInterface, AttentionMaskInterface, masking_utils
    from transformers.masking_utils import remap_positions_for_packed_sequence as _since_5_23  # noqa: F401
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    from transformers.utils import generic
except ImportError as error:
    raise ImportError(
        "flashgen.integrations.transformers needs transformers 5.23 or newer: pip install 'transformers>=5.23'"
    ) from error

from flashgen.integrations.transformers.calls import attention_forward
from flashgen.integrations.transformers.interface import teach_models
from flashgen.integrations.transformers.masks import LayerMask, layer_mask

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")
# Substrings by which transformers knows implementations of its own.
_OWN = ("sdpa", "flex_attention", "flash_attention", "eager", "paged")
# Registered names that contain "flash" and are no FlashAttention package.
_NOT_FLASH: set[str] = set()


def register(name: str = "flashgen") -> None:
    """Make ``attn_implementation=name`` run flashgen's kernels, for every model that uses transformers' interfaces.

    Registers an attention function and a mask function. May be called again, also for other names. Raises
    ``ValueError`` for a name that transformers or somebody else uses.

    transformers takes every name with "flash" in it for a FlashAttention package: it would import one, and refuse
    what these cannot do. The predicate by which it asks, ``is_flash_attention_requested``, is replaced by one that
    says no to the registered name and gives transformers' answer to all others.

    Models that do not go through the interface raise ``ValueError`` for the name, where they are made and where
    ``set_attn_implementation`` is called (``interface.py``).

    Masks may be made before a model is called, as ``generate`` does. ``masking_utils`` hands what it finds made through
    where it is a tensor or a ``BlockMask``; flashgen's masks are added to the latter name there, and nowhere else.
    """
    if not _NAME.fullmatch(name) or any(own in name for own in _OWN):
        raise ValueError(
            f"'{name}' cannot be registered: expected letters, digits, '_' and '-', and none of "
            f"{', '.join(repr(own) for own in _OWN)}, which mean transformers' own implementations"
        )
    for table, function in (
        (ALL_ATTENTION_FUNCTIONS, attention_forward),
        (masking_utils.ALL_MASK_ATTENTION_FUNCTIONS, layer_mask),
    ):
        if table.get(name, function) is not function:
            raise ValueError(f"'{name}' is registered already, for {table[name]!r}; choose another name")
    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, layer_mask)
    teach_models()
    _teach_the_masks()
    if "flash" in name:
        _NOT_FLASH.add(name)
        _teach_the_predicate()


class _MadeMask(metaclass=ABCMeta):  # noqa: B024 - classes are registered with it
    """Masks that are made already, by ``isinstance``: transformers' own and flashgen's."""


def _teach_the_masks() -> None:
    """Put the class above where ``masking_utils`` asks for a ``BlockMask``."""
    if masking_utils.BlockMask is not _MadeMask:
        for kind in (masking_utils.BlockMask, LayerMask):
            _MadeMask.register(kind)
        masking_utils.BlockMask = _MadeMask


def _teach_the_predicate() -> None:
    """Put our predicate wherever transformers' was imported; modules that are imported later take it from its home."""
    original: Any = generic.is_flash_attention_requested
    if hasattr(original, "__flashgen__"):
        return

    @functools.wraps(original)
    def is_flash_attention_requested(
        config: Any = None, requested_attention_implementation: str | None = None, version: Any = None
    ) -> bool:
        asked = requested_attention_implementation if config is None else config._attn_implementation
        if asked in _NOT_FLASH:
            return False
        answer: bool = original(config, requested_attention_implementation, version)
        return answer

    is_flash_attention_requested.__flashgen__ = True  # type: ignore[attr-defined]
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", {})
        for name in [name for name, value in list(names.items()) if value is original]:
            setattr(module, name, is_flash_attention_requested)
