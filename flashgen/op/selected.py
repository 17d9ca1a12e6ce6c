"""Makes the bits that kernels read in the place of lists of key blocks (``analysis/selection.py``).

In: captured tensors, and the sizes of the whole problem. Out: tensors of bits on the same device, the same from run to
run. The host does not wait for the lists. A number that no block has is left out.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch.compiler import is_compiling

from flashgen.analysis.selection import TILE, WORD, Selection, selection_of
from flashgen.ir.expr import Load, walk
from flashgen.ir.spec import AttentionSpec, Select
from flashgen.op.tensor_kinds import Layout, lies_in_memory, packed_layout
from flashgen.reference.evaluate import Evaluator, Guard

# Has the host look at the numbers of a selection, and name one that no block has.
CHECK_SELECTION = "FLASHGEN_CHECK_SELECTION"
_AT_ONCE = 1 << 22  # numbers
_MOST_KEPT, _MOST_KNOWN = 1 << 21, 64
_KNOWN: dict[tuple[object, ...], Tensor] = {}  # which lists tiles have, by all that it follows from


def lowered_tensors(spec: AttentionSpec, tensors: Mapping[str, Tensor], sizes: Mapping[str, int]) -> dict[str, Tensor]:
    """The captured tensors of ``lowered(spec)`` by name; tensors that only other conditions read may be missing."""
    found = selection_of(spec)
    return dict(tensors) if found is None else read_by_kernels(found, tensors, sizes)


def read_by_kernels(
    found: Selection, tensors: Mapping[str, Tensor], sizes: Mapping[str, int], *, in_memory: bool = True
) -> dict[str, Tensor]:
    """What kernels read, in the order of ``found.tensors``. Not ``in_memory``: bits are on meta, as others lie."""
    listed = tensors[found.select.tensor]
    blocks, bits = -(-sizes["Nk"] // found.select.block), _layout_of_bits(found, listed, sizes)
    tiles = None if found.tiles is None else _layout_of_tiles(found, sizes)
    if not in_memory:
        laid = (torch.empty_strided(*each, device="meta") for each in (bits, tiles) if each is not None)
        made = {each.name: x for each, x in zip(found.made, laid, strict=True)}
    else:
        check_listed_blocks(found.select, listed, sizes)
        made = {found.bits.name: _bits(listed, blocks, bits)}
        if found.tiles is not None and tiles is not None:
            made[found.tiles.name] = _tiles(found, tensors, sizes, blocks, tiles)
    known = {**tensors, **made}
    return {each.name: known[each.name] for each in found.tensors if each.name in known}


def check_selection(spec: AttentionSpec, tensors: Sequence[Tensor], sizes: Mapping[str, int]) -> None:
    """``check_listed_blocks`` for the formula, which reads lists as they are."""
    if spec.select is not None:
        listed = [each.name for each in spec.tensors].index(spec.select.tensor)
        check_listed_blocks(spec.select, tensors[listed], sizes)


def check_listed_blocks(select: Select, listed: Tensor, sizes: Mapping[str, int]) -> None:
    """Raise ``ValueError`` for a number that no block has, if ``CHECK_SELECTION`` is set: it waits for the device."""
    if os.environ.get(CHECK_SELECTION, "").strip() in ("", "0"):
        return
    blocks = -(-sizes["Nk"] // select.block)
    outside = (listed < -1) | (listed >= blocks)
    if outside.any():
        place = outside.nonzero()[0].tolist()
        raise ValueError(
            f"tensor '{select.tensor}' names block {int(listed[tuple(place)])} at {place}; there are {blocks} "
            f"blocks of {select.block} keys, and -1 is none"
        )


def _layout_of_bits(found: Selection, listed: Tensor, sizes: Mapping[str, int]) -> Layout:
    """[…, words] of lists […, numbers]: those of neighbours, which kernels read together, lie side by side."""
    (*outer, side), words = (1, *listed.shape[:-1]), -(-sizes["Nk"] // (WORD * found.select.block))
    strides = (*packed_layout(*outer, side * words)[1][:-1], 1, side)
    return (*listed.shape[:-1], words), strides[-listed.dim() :]


def _layout_of_tiles(found: Selection, sizes: Mapping[str, int]) -> Layout:
    """[axes of the selection, tiles of keys]; behind each row is the place of numbers that no block has."""
    extents = {"b": sizes["B"], "h": sizes["H"], "hkv": sizes["Hkv"], "i": -(-sizes["Nq"] // TILE)}
    rows, columns = [extents[axis] for axis in found.axes], -(-sizes["Nk"] // found.columns)
    return (*rows, columns), packed_layout(*rows, columns + 1)[1]


def _bits(listed: Tensor, blocks: int, layout: Layout) -> Tensor:
    """[…, words] int32 of [..., numbers]: bit n % 32 of word n // 32 is set where n is among the numbers."""
    words, rows = layout[0][-1], listed.shape[:-1].numel()
    side, lists = listed.shape[-2] if listed.dim() > 1 else 1, listed.reshape(rows, listed.shape[-1])
    found = torch.zeros(rows * words, dtype=torch.int32, device=listed.device)
    for some in _pieces(*lists.shape) if words and listed.numel() else ():
        numbers = lists[some].sort(-1).values
        counts = (numbers >= 0) & (numbers < blocks)
        counts[:, 1:] &= numbers[:, 1:] != numbers[:, :-1]  # each once: sums of bits are their union
        numbers = torch.where(counts, numbers, 0).long()
        bits = torch.where(counts, torch.ones_like(numbers) << numbers % WORD, 0).to(torch.int32)
        row = torch.arange(some.start, some.stop, device=listed.device).unsqueeze(-1)
        places = (row // side * words + numbers // WORD) * side + row % side
        found.scatter_add_(0, places.flatten(), bits.flatten())
    return found.as_strided(*layout)


def _tiles(
    found: Selection, tensors: Mapping[str, Tensor], sizes: Mapping[str, int], blocks: int, layout: Layout
) -> Tensor:
    """[axes of the selection, tiles of keys]: whether any query of a tile reads a block of a tile of keys."""
    listed = tensors[found.select.tensor]
    columns, of_a_column = layout[0][-1], found.columns // found.select.block
    which = _lists_of_tiles(found, tensors, sizes)
    count = which.shape[:-1].numel()
    kept = torch.zeros((count, columns + 1), dtype=torch.bool, device=listed.device)
    if listed.numel() > 0 and which.numel() > 0:
        lists, numbers = listed.reshape(-1, listed.shape[-1]), which.reshape(count, -1)
        for some in _pieces(count, numbers.shape[1] * lists.shape[1]):
            rows = lists.index_select(0, numbers[some].flatten()).view(some.stop - some.start, -1)
            counts = (rows >= 0) & (rows < blocks)
            kept[some].scatter_(-1, torch.where(counts, rows.long() // of_a_column, columns), value=True)
    return kept.as_strided(*layout)


def _lists_of_tiles(found: Selection, tensors: Mapping[str, Tensor], sizes: Mapping[str, int]) -> Tensor:
    """[…, n] int64 over the axes of the selection: the numbers of the lists that the queries of a tile have.

    They follow from the sizes but for indices that read tensors, and are kept: to compute them takes some twenty
    launches, and waits for the device.
    """
    listed = tensors[found.select.tensor]
    reads = any(isinstance(node, Load) for node in walk(*found.select.indices))
    if reads or is_compiling() or not lies_in_memory((listed,)):
        return _find_lists_of_tiles(found, tensors, sizes)
    key = (found, tuple(sorted(sizes.items())), tuple(listed.shape[:-1]), listed.device)
    which = _KNOWN.get(key)
    if which is None:
        with torch.inference_mode(mode=False):
            which = _find_lists_of_tiles(found, tensors, sizes)
        if which.numel() <= _MOST_KEPT:
            _KNOWN[key] = which
            while len(_KNOWN) > _MOST_KNOWN:
                _KNOWN.pop(next(iter(_KNOWN)), None)
    return which


def _find_lists_of_tiles(found: Selection, tensors: Mapping[str, Tensor], sizes: Mapping[str, int]) -> Tensor:
    listed = tensors[found.select.tensor]
    shape = (*listed.shape[:-1], 1)
    numbers = torch.arange(listed.shape[:-1].numel(), device=listed.device).view(shape)
    names = {"b": "B", "h": "H", "hkv": "Hkv", "i": "Nq"}
    lengths = [sizes[names[axis]] for axis in found.axes]
    which = _lists(found, tensors, sizes, numbers)[..., 0].expand(lengths)
    if found.axes[-1:] != ("i",) or lengths[-1] == 0:
        return which.unsqueeze(-1)
    tiles = -(-lengths[-1] // TILE)
    rest = which[..., -1:].expand(*lengths[:-1], tiles * TILE - lengths[-1])  # what is there already
    which = torch.cat((which, rest), -1).view(*lengths[:-1], tiles, TILE)
    for alike in (64, 32, 16, 8, 4, 2):  # neighbours that share a list
        groups = which.view(*which.shape[:-1], TILE // alike, alike)
        if lies_in_memory((which,)) and bool((groups == groups[..., :1]).all()):
            return groups[..., 0]
    return which


def numbers_of_queries(
    spec: AttentionSpec, tensors: Mapping[str, Tensor], sizes: Mapping[str, int], params: Mapping[str, float]
) -> Tensor:
    """[B, Hkv, Nq, numbers]: the list of each query, where heads that share keys share it."""
    found = selection_of(spec)
    assert found is not None, "keys are selected"
    assert "h" not in found.axes, "a list is of a key/value head"
    listed = tensors[found.select.tensor]
    rows = torch.arange(listed.shape[:-1].numel(), device=listed.device).view(*listed.shape[:-1], 1)
    which = _lists(found, tensors, sizes, rows, params)[..., 0]
    lengths = {"b": sizes["B"], "hkv": sizes["Hkv"], "i": sizes["Nq"]}
    which = which.view([size if axis in found.axes else 1 for axis, size in lengths.items()]).expand(*lengths.values())
    return listed.reshape(-1, listed.shape[-1])[which]


def _pieces(count: int, width: int) -> Iterator[slice]:
    """Slices of so many rows of a width, so that temporary tensors stay small."""
    step = max(1, _AT_ONCE // max(1, width))
    for start in range(0, count, step):
        yield slice(start, min(start + step, count))


_NUMBERS = "numbers of lists"  # no name of a tensor: indices may read the lists themselves


def _lists(
    found: Selection,
    tensors: Mapping[str, Tensor],
    sizes: Mapping[str, int],
    numbers: Tensor,
    params: Mapping[str, float] | None = None,
) -> Tensor:
    """The ``numbers``, one a list, of each query's list, over the axes that the list depends on."""
    device = numbers.device

    def positions(name: str, axis: int) -> Tensor:
        shape = [1, 1, 1, 1]
        shape[axis] = sizes[name]
        return torch.arange(sizes[name], device=device).view(shape)

    symbols = {"b": positions("B", 0), "i": positions("Nq", 2)}
    if "h" in found.axes:
        symbols["h"] = positions("H", 1)
        symbols["hkv"] = symbols["h"] // max(1, sizes["H"] // max(1, sizes["Hkv"]))
    else:
        symbols["hkv"] = positions("Hkv", 1)
    symbols |= {name: torch.tensor(value, device=device) for name, value in sizes.items()}
    known = {**tensors, _NUMBERS: numbers}
    own = {name: torch.tensor(value, device=device) for name, value in (params or {}).items()}
    lists = Evaluator(symbols, own, known, torch.float32, Guard()).listed(_NUMBERS, found.select.indices)
    lists = lists.reshape((1,) * (5 - lists.dim()) + lists.shape)  # [b, h, i, j, numbers]
    axes = {"b": 0, "h": 1, "hkv": 1, "i": 2}
    others = [axis for axis in (0, 1, 2, 3) if axis not in {axes[each] for each in found.axes}]
    for axis in reversed(others):
        lists = lists.select(axis, 0)
    return lists
