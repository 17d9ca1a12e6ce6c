"""Masks of layers: from transformers' mask functions, padding and offsets to the mask of a spec.

In: the arguments of a mask function of ``AttentionMaskInterface``. Out: a ``LayerMask``: a condition in the language
over captured tensors and params. transformers composes masks of closures that its factories make; each factory is
recognised by the code of its closures. transformers evaluates any other function for every pair.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import CodeType
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import masking_utils
from transformers.utils.import_utils import is_tracing

from flashgen.op.layer import LOWER_RIGHT, conjunction

MaskFunction = Callable[..., Any]
# How captured values are declared, by their kinds.
_FORMS = {
    "keys": "tensor {}: bool[B, Nk]",
    "first": "tensor {}: i32[B]",
    "last": "tensor {}: i32[B]",
    "start": "tensor {}: i32[B]",
    "documents": "tensor {}: i32[B, Nk]",
    "positions": "tensor {}: i32[B, Nk]",
    "blocks": "tensor {}: i32[B, Nk]",
    "offset": "param {}: i32",
    "window": "param {}: i32",
    "chunk": "param {}: i32",
}
ELSEWHERE = "a model that changes its masks itself takes attn_implementation='sdpa'"


@dataclass(eq=False, repr=False)
class LayerMask:
    """Which pairs a layer keeps: ``condition``, in the language, over ``captured`` values, which are declared by
    ``declarations``.

    It is for ``shape`` [B, 1, Nq, Nk] and holds nothing of that size. It is neither a tensor nor FlexAttention's
    ``BlockMask``: models that ask for these go other ways around a mask. Attention that is a model's own gets the
    matrix where what it does says which it wants: ``repeat`` that of bools, a sum with scores the one that is added to
    them. What else only a matrix can do is refused.
    """

    shape: tuple[int, int, int, int]
    condition: str
    declarations: tuple[str, ...]
    captured: Mapping[str, Any]
    kinds: frozenset[str]
    matrix: Callable[[], Tensor]
    _kept: Tensor | None = None

    ndim: ClassVar = 4

    @property
    def device(self) -> torch.device | None:
        """Where what is captured lies; None where nothing is."""
        return next((x.device for x in self.captured.values() if isinstance(x, Tensor)), None)

    def to(self, device: torch.device | str, *_: Any, **__: Any) -> LayerMask:
        """The mask with its captured values on another device."""
        moved = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in self.captured.items()}
        return replace(self, captured=moved, matrix=lambda: self.dense().to(device), _kept=None)

    def contiguous(self) -> LayerMask:
        return self

    def dense(self) -> Tensor:
        """The matrix of bools, true where a pair is kept, made when it is asked for."""
        if self._kept is None:
            self._kept = self.matrix()
        return self._kept

    def repeat(self, *sizes: Any) -> Tensor:
        """The matrix of bools, repeated."""
        return self.dense().repeat(*sizes)

    def __add__(self, scores: Any) -> Tensor:
        """Scores of a model's own attention, with the least number added where a pair is not kept: an eager mask."""
        if not (isinstance(scores, Tensor) and scores.is_floating_point()):
            self._refuse()
        added = torch.zeros((), dtype=scores.dtype, device=scores.device)
        total: Tensor = scores + torch.where(self.dense().to(scores.device), added, torch.finfo(scores.dtype).min)
        return total

    __radd__ = __add__

    def __repr__(self) -> str:
        return f"LayerMask(shape={self.shape}, keeps={self.condition!r})"

    __str__ = __repr__

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"a mask of flashgen has no '{name}': it is a condition, no matrix and no list of blocks; {ELSEWHERE}"
        )

    def __getitem__(self, index: Any) -> Any:
        raise TypeError(
            f"a mask of flashgen cannot be indexed ([{index}]): it is a condition, no matrix ({self!r}); {ELSEWHERE}"
        )

    def _refuse(self, *_: Any) -> Any:
        raise TypeError(f"a mask of flashgen has no arithmetic: it is a condition, no matrix ({self!r}); {ELSEWHERE}")

    __sub__ = __rsub__ = __mul__ = __rmul__ = __and__ = __rand__ = __or__ = __ror__ = _refuse
    __invert__ = __neg__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse


def layer_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: MaskFunction = masking_utils.causal_mask_function,
    attention_mask: Tensor | None = None,
    **options: Any,
) -> LayerMask | Tensor:
    """The mask of a layer; transformers' dense one, [B, 1, Nq, Nk] bools, for a function that is none of its own.

    The arguments are those of ``transformers.masking_utils.sdpa_mask``. Under ``torch.compile`` a mask that
    transformers composes of closures is a graph break, as their code cannot be asked for in a graph.
    """
    is_plain = mask_function in (masking_utils.causal_mask_function, masking_utils.bidirectional_mask_function)
    if torch.compiler.is_dynamo_compiling() and not is_plain:
        return _outside(batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask, **options)  # type: ignore[no-any-return]
    writer = _MaskWriter(int(q_length), int(kv_length), q_offset, int(kv_offset))

    def matrix() -> Tensor:
        # A cache counts on in the offset that it gave; what was captured of it stays.
        offset = writer.captured["offset"] + kv_offset if "offset" in writer.captured else q_offset
        dense: Tensor = masking_utils.sdpa_mask(
            batch_size, q_length, kv_length, offset, kv_offset, mask_function, attention_mask,
            **{**options, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False},
        )  # fmt: skip
        return dense

    shape = (int(batch_size), 1, writer.q_length, writer.kv_length)
    try:
        condition = writer.condition(mask_function)
    except _UnknownFunctionError:
        return matrix()
    condition = writer.with_padding(condition, attention_mask, shape[0])
    return LayerMask(shape, condition, tuple(writer.declarations), writer.captured, frozenset(writer.kinds), matrix)


_outside: Any = torch.compiler.disable(layer_mask, reason="the masks of this model are made of closures")  # type: ignore[no-untyped-call]


class _UnknownFunctionError(Exception):
    """A mask function that no factory of transformers made."""


class _MaskWriter:
    """Writes the condition of one mask. Positions count from the first key that the layer holds."""

    def __init__(self, q_length: int, kv_length: int, q_offset: int | Tensor, kv_offset: int) -> None:
        self.q_length, self.kv_length = q_length, kv_length
        self.q_offset, self.kv_offset = q_offset, kv_offset
        self.declarations: list[str] = []
        self.captured: dict[str, Any] = {}
        self.kinds: set[str] = set()

    def capture(self, kind: str, value: Any) -> str:
        """Declare a captured value; returns its name."""
        count = sum(name.rstrip("0123456789") == kind for name in self.captured)
        name = f"{kind}{count or ''}"
        self.declarations.append(_FORMS[kind].format(name))
        self.captured[name] = value
        self.kinds.add(kind)
        return name

    def query(self) -> str:
        """Where query i stands among the keys."""
        if isinstance(self.q_offset, int) and self.q_offset - self.kv_offset == self.kv_length - self.q_length:
            return LOWER_RIGHT
        if "offset" not in self.captured:
            # A difference is a tensor of its own; a cache counts on in the one that it gave.
            self.capture("offset", self.q_offset - self.kv_offset)
        return "i + offset"

    def condition(self, function: MaskFunction, places: tuple[str, str] | None = None) -> str:
        """What a mask function keeps; ``places`` are its query and key, where they are no positions among the keys."""
        code = getattr(function, "__code__", None)
        for known, write in _WRITERS:
            if code is known:
                return write(self, places, **{name: _cell(function, name) for name in known.co_freevars})
        raise _UnknownFunctionError

    def with_padding(self, condition: str, attention_mask: Tensor | None, batch: int) -> str:
        """The condition without padded keys. Bounds let kernels skip tiles; ``keys`` has the holes between them."""
        if attention_mask is None:
            return condition
        if attention_mask.dim() != 2 or attention_mask.shape[0] != batch:
            raise ValueError(
                f"'attention_mask' has shape {list(attention_mask.shape)}; [B, Nk] = "
                f"[{batch}, {self.kv_offset + self.kv_length}] is expected, or 4-D"
            )
        keys = self.local(attention_mask.bool(), False)
        # Looked at once for a forward pass, as transformers' own masks do; a compiled graph cannot.
        if not is_tracing(keys) and bool(keys.all()):
            return condition
        first = self.capture("first", keys.int().argmax(-1).int())
        last = self.capture("last", (keys.shape[1] - keys.flip(-1).int().argmax(-1)).int())
        padding = f"{first}[b] <= j and j < {last}[b] and {self.capture('keys', keys)}[b, j]"
        return conjunction((condition, padding))

    def local(self, x: Tensor, missing: Any) -> Tensor:
        """The part of a tensor of positions that belongs to the keys of the layer."""
        lacking = self.kv_offset + self.kv_length - x.shape[1]
        if lacking > 0:
            x = pad(x, (0, lacking), value=missing)
        return x[:, self.kv_offset : self.kv_offset + self.kv_length]

    # -- transformers' functions: each takes what its closure holds ----------------------------------------------------

    def causal(self, places: tuple[str, str] | None) -> str:
        self.kinds.add("causal")
        query, key = places or (self.query(), "j")
        return f"{key} <= {query}"

    def bidirectional(self, places: tuple[str, str] | None) -> str:  # noqa: ARG002 - as all of them
        return "true"

    def sliding(self, places: tuple[str, str] | None, sliding_window: int) -> str:
        query, key = places or (self.query(), "j")
        return f"{key} > {query} - {self.capture('window', sliding_window)}"

    def sliding_bidirectional(self, places: tuple[str, str] | None, sliding_window: int) -> str:
        query, key = places or (self.query(), "j")
        return f"abs({query} - {key}) <= {self.capture('window', sliding_window)}"

    def chunked(self, places: tuple[str, str] | None, chunk_size: int, left_padding: Tensor) -> str:
        start = left_padding if places else left_padding - self.kv_offset
        query, key = places or (self.query(), "j")
        begin, chunk = self.capture("start", start.int()), self.capture("chunk", chunk_size)
        return f"({key} - {begin}[b]) // {chunk} == ({query} - {begin}[b]) // {chunk}"

    def blockwise(self, places: tuple[str, str] | None, block_sequence_ids: Tensor) -> str:
        if places:
            raise _UnknownFunctionError
        blocks = self.capture("blocks", self.local(block_sequence_ids.int(), -1))
        query = f"{blocks}[b, clamp({self.query()}, 0, Nk - 1)]"
        return f"{query} == {blocks}[b, j] and {query} >= 0"

    def padding(self, places: tuple[str, str] | None, padding_mask: Tensor) -> str:
        if places:
            raise _UnknownFunctionError
        return f"{self.capture('keys', self.local(padding_mask.bool(), False))}[b, j]"

    def packed(self, places: tuple[str, str] | None, packed_sequence_mask: Tensor) -> str:
        if places or self.q_length != self.kv_length:
            raise _UnknownFunctionError
        documents = self.capture("documents", packed_sequence_mask.int())
        return f"{documents}[b, i] == {documents}[b, j]"

    def remapped(self, places: tuple[str, str] | None, mask_function: MaskFunction, position_ids: Tensor) -> str:
        if places or self.q_length != self.kv_length:
            raise _UnknownFunctionError
        positions = self.capture("positions", position_ids.int())
        return self.condition(mask_function, (f"{positions}[b, i]", f"{positions}[b, j]"))

    def both(self, places: tuple[str, str] | None, mask_functions: tuple[MaskFunction, ...]) -> str:
        codes = [getattr(each, "__code__", None) for each in mask_functions]
        if _PACKED in codes and _REMAPPED in codes:
            # Inside a document positions differ as places do: where only differences count the places do.
            mask_functions = tuple(_unmapped(each) for each in mask_functions)
        return conjunction([self.condition(each, places) for each in mask_functions])

    def either(self, places: tuple[str, str] | None, mask_functions: tuple[MaskFunction, ...]) -> str:
        conditions = [self.condition(each, places) for each in mask_functions]
        return "true" if "true" in conditions else " or ".join(f"({each})" for each in conditions)


def _cell(function: Any, name: str) -> Any:
    return function.__closure__[function.__code__.co_freevars.index(name)].cell_contents


def _unmapped(function: Any) -> Any:
    """The function below a remapping of positions, where it goes by differences of positions alone."""
    if function.__code__ is not _REMAPPED:
        return function
    inner = _cell(function, "mask_function")
    return inner if _goes_by_differences(inner) else function


def _goes_by_differences(function: Any) -> bool:
    code = getattr(function, "__code__", None)
    if code in (_BOTH, _EITHER):
        return all(_goes_by_differences(each) for each in _cell(function, "mask_functions"))
    return code in _BY_DIFFERENCES


_IDS = torch.zeros(1, 1, dtype=torch.int32)


# All closures of a factory share their code.
_CAUSAL = masking_utils.causal_mask_function.__code__
_BIDIRECTIONAL = masking_utils.bidirectional_mask_function.__code__
_SLIDING = masking_utils.sliding_window_overlay(1).__code__
_SLIDING_BIDIRECTIONAL = masking_utils.sliding_window_bidirectional_overlay(1).__code__
_PACKED = masking_utils.packed_sequence_mask_function(_IDS).__code__
_REMAPPED = masking_utils.remap_positions_for_packed_sequence(masking_utils.causal_mask_function, _IDS).__code__
_BOTH, _EITHER = masking_utils.and_masks().__code__, masking_utils.or_masks().__code__
_BY_DIFFERENCES = (_CAUSAL, _BIDIRECTIONAL, _SLIDING, _SLIDING_BIDIRECTIONAL)
_WRITERS: tuple[tuple[CodeType, Callable[..., str]], ...] = (
    (_CAUSAL, _MaskWriter.causal),
    (_BIDIRECTIONAL, _MaskWriter.bidirectional),
    (_SLIDING, _MaskWriter.sliding),
    (_SLIDING_BIDIRECTIONAL, _MaskWriter.sliding_bidirectional),
    (masking_utils.chunked_overlay(1, _IDS).__code__, _MaskWriter.chunked),
    (masking_utils.blockwise_overlay(_IDS).__code__, _MaskWriter.blockwise),
    (masking_utils.padding_mask_function(_IDS).__code__, _MaskWriter.padding),
    (_PACKED, _MaskWriter.packed),
    (_REMAPPED, _MaskWriter.remapped),
    (_BOTH, _MaskWriter.both),
    (_EITHER, _MaskWriter.either),
)
