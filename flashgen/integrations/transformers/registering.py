"""``register``: makes a name of transformers mean flashgen's kernels."""

from __future__ import annotations

import functools
import inspect
import re
import sys
import warnings
from abc import ABCMeta
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

try:
    from transformers import AttentionInterface, AttentionMaskInterface, masking_utils
    from transformers.masking_utils import remap_positions_for_packed_sequence as _since_5_23  # noqa: F401
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel
    from transformers.utils import generic
except ImportError as error:
    raise ImportError(
        "flashgen.integrations.transformers needs transformers 5.23 or newer: pip install 'transformers>=5.23'"
    ) from error

from flashgen.integrations.transformers.calls import attention_forward
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
    ``set_attn_implementation`` is called (``teach_models``).

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
    if masking_utils.BlockMask is not _MadeMask:
        for kind in (masking_utils.BlockMask, LayerMask):
            _MadeMask.register(kind)
        masking_utils.BlockMask = _MadeMask
    if "flash" in name:
        _NOT_FLASH.add(name)
        _teach_the_predicate()


class _MadeMask(metaclass=ABCMeta):  # noqa: B024 - classes are registered with it
    """Masks that are made already, by ``isinstance``: transformers' own and flashgen's."""


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


_ATTENTION = re.compile(r"^class \w*Attention\w*\(.*\bnn\.Module\b", re.MULTILINE)
_TABLE = re.compile(r"\w+_CLASSES")


# A model that does not use the interface has attention code of its own, and would silently run that. It is known by the
# source of its classes, as in transformers' own ``set_attn_implementation``: there is an attention module, and no use
# of the table of functions.


def teach_models() -> None:
    """Make models that do not go through the interface refuse our names, where they are made and where they are told.

    ``PreTrainedModel.get_correct_attn_implementation`` is what both ask; ``set_attn_implementation`` does not where it
    is about to leave a model as it was, with a line in the log.
    """
    corrected: Any = PreTrainedModel.get_correct_attn_implementation
    set_: Any = PreTrainedModel.set_attn_implementation
    if hasattr(set_, "__flashgen__"):
        return

    @functools.wraps(corrected)
    def checked(model: Any, requested_attention: Any, *others: Any, **options: Any) -> Any:
        _check(type(model), requested_attention)
        return corrected(model, requested_attention, *others, **options)

    @functools.wraps(set_)
    def checked_everywhere(model: Any, attn_implementation: Any, *others: Any, **options: Any) -> Any:
        asked = {id(config): name for config, name in _asked(model.config, attn_implementation)}
        for each in model.modules():
            if isinstance(each, PreTrainedModel):
                _check(type(each), asked.get(id(each.config), asked[id(model.config)]))
        return set_(model, attn_implementation, *others, **options)

    checked_everywhere.__flashgen__ = True  # type: ignore[attr-defined]
    PreTrainedModel.get_correct_attn_implementation = checked
    PreTrainedModel.set_attn_implementation = checked_everywhere


def _asked(config: Any, implementation: Any) -> Iterator[tuple[Any, Any]]:
    """Each config inside a config, with the implementation that it is to have; None: unchanged."""
    of_parts = implementation if isinstance(implementation, Mapping) else None
    yield config, implementation if of_parts is None else of_parts.get("")
    for key in config.sub_configs:
        part = getattr(config, key, None)
        if part is not None:
            yield from _asked(part, implementation if of_parts is None else of_parts.get(key))


def _check(kind: type, name: Any) -> None:
    """Raise ``ValueError`` where a name is ours and the model has attention of its own."""
    if not isinstance(name, str) or ALL_ATTENTION_FUNCTIONS.get(name) is not attention_forward:
        return
    if _has_own_attention(kind):
        sdpa = " or 'sdpa'" if kind._supports_sdpa else ""  # type: ignore[attr-defined]
        raise ValueError(
            f"{kind.__name__} does not go through transformers' attention interface: attn_implementation='{name}' does "
            f"not reach its attention. Use attn_implementation='eager'{sdpa}; where it is a part of a model, a dict "
            f"says what each part takes: attn_implementation={{'text_config': '{name}', 'vision_config': 'eager'}}"
        )
    _fill_tables(kind, name)


@functools.cache
def _has_own_attention(kind: type) -> bool:
    """Whether a class, or a base class, has attention code that does not use the interface.

    Classes without readable source, as in a notebook, count as using it.
    """
    for each in filter(_is_model, kind.__mro__):
        try:
            source = inspect.getsource(sys.modules[each.__module__])
        except (KeyError, OSError, TypeError):
            continue
        if _ATTENTION.search(source) is not None and "ALL_ATTENTION_FUNCTIONS" not in source:
            return True
    return False


def _is_model(kind: type) -> bool:
    return issubclass(kind, PreTrainedModel) and kind is not PreTrainedModel


def _fill_tables(kind: type, name: str) -> None:
    """Parts of models that choose a class by implementation (SAM, GIT) keep their own attention, with a warning."""
    for each in filter(_is_model, kind.__mro__):
        names = getattr(sys.modules.get(each.__module__), "__dict__", {})
        for classes in [x for key, x in names.items() if _TABLE.fullmatch(key) and isinstance(x, dict)]:
            own = classes.get("sdpa", classes.get("eager"))
            if name not in classes and isinstance(own, type) and issubclass(own, nn.Module):
                classes[name] = own
                warnings.warn(
                    f"{kind.__name__}: '{name}' does not reach its layers of {own.__name__}, which keep attention of "
                    "their own",
                    stacklevel=2,
                )
