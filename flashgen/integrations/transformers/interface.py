"""Which models use transformers' attention interface; others refuse our name when they are made, or are told to use it.

A model that does not use the interface has attention code of its own, and would silently run that. It is recognised by
the source of its classes, as in transformers' own ``set_attn_implementation``: there is an attention module, and no use
of the table of functions.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel

from flashgen.integrations.transformers.calls import attention_forward

_ATTENTION = re.compile(r"^class \w*Attention\w*\(.*\bnn\.Module\b", re.MULTILINE)
_TABLE = re.compile(r"\w+_CLASSES")


def teach_models() -> None:
    """Make models that do not go through the interface refuse our names, where they are made and where they are told.

    ``PreTrainedModel.get_correct_attn_implementation`` is what both ask; ``set_attn_implementation`` does not where it
    is about to leave a model as it was, with a line in the log.
    """
    if hasattr(PreTrainedModel.set_attn_implementation, "__flashgen__"):
        return
    _replace("get_correct_attn_implementation", _checked)
    _replace("set_attn_implementation", _checked_everywhere)


def _replace(name: str, around: Callable[..., Any]) -> None:
    original = getattr(PreTrainedModel, name)

    @functools.wraps(original)
    def method(model: Any, *arguments: Any, **options: Any) -> Any:
        return around(original, model, *arguments, **options)

    method.__flashgen__ = True  # type: ignore[attr-defined]
    setattr(PreTrainedModel, name, method)


def _checked(original: Callable[..., str], model: Any, requested_attention: Any, *others: Any, **options: Any) -> str:
    _check(type(model), requested_attention)
    return original(model, requested_attention, *others, **options)


def _checked_everywhere(
    original: Callable[..., None], model: Any, attn_implementation: Any, *others: Any, **options: Any
) -> None:
    asked = {id(config): name for config, name in _asked(model.config, attn_implementation)}
    for each in model.modules():
        if isinstance(each, PreTrainedModel):
            _check(type(each), asked.get(id(each.config), asked[id(model.config)]))
    original(model, attn_implementation, *others, **options)


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
