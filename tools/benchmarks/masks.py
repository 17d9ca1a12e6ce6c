"""Masks and layouts cost what they keep: tiles visited, time against the kept fraction, a million tokens of documents.

    python -m tools.benchmarks.masks [tightness] [sparsity] [documents]

Times are the CPU time of one thread, which other work on the machine disturbs least; ratios are taken within a round.
Tiles are counted by the emitted C++ and CUDA of the masks in ``tests/masks/catalogue.py``.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import flashgen
from flashgen.ir.operators import OPERATORS
from flashgen.op.op import AttentionOp
from tests.masks.catalogue import MASKS, Mask
from tests.masks.device import TILES as DEVICE_TILES
from tests.masks.device import DeviceMasks
from tests.masks.measure import TILES, Masks, Problem, intervals, problems_of, tensors_of
from tools.benchmarks.report import publish

ROOT = Path(__file__).resolve().parents[2]
D = 64
GOAL = 1.25  # of the time that is proportional to what is kept


# Tiles ----------------------------------------------------------------------------------------------------------------


def tightness(folder: Path) -> None:
    """The tiles that are visited, over the fewest that hold a kept pair; the same for FULL tiles."""
    masks = Masks(MASKS, folder)
    device = DeviceMasks(masks, folder)
    rows = []
    for number, mask in enumerate(MASKS):
        rng = np.random.default_rng(0)
        most = 0
        # Tiles that hold a kept pair and FULL ones: by brute force, as CPUs and ranges find them; the same for GPUs.
        visited, full = np.zeros((2, 3), dtype=np.int64)
        on_device = np.zeros((2, 2), dtype=np.int64)
        for problem in problems_of(mask):
            tensors = tensors_of(problem, rng)
            most = max(most, intervals(masks.keep(number, problem, tensors)))
            for size in TILES:
                counts = masks.count(number, problem, *size, tensors)
                each = (counts.exact, counts.visits, counts.ranges)
                visited += [np.sum(classes > 0) for classes in each]
                full += [np.sum(classes == 2) for classes in each]
                if size in DEVICE_TILES:
                    found = device.classes(number, problem, *size, tensors)
                    on_device += [[np.sum(x > 0), np.sum(x == 2)] for x in (counts.exact, found)]
        ratios, fulls = (
            (_over(cpu, least), _over(gpu, least_on_device), _over(ranges, least))
            for (least, cpu, ranges), (least_on_device, gpu) in zip((visited, full), on_device.T, strict=True)
        )
        rows.append([mask.name, str(most), str(visited[0]), *ratios, str(full[0]), *fulls, mask.loose or ""])
    publish(
        "tightness",
        "python -m tools.benchmarks.masks tightness",
        ["mask", "intervals a row", "tiles that keep a pair", "visited ×, CPU", "GPU", "by ranges", "FULL tiles",
         "found ×, CPU", "GPU", "by ranges", "why ranges may leave something open"],
        rows,
        f"Over {len(problems_of(MASKS[0]))} problems, two of them shards that begin inside tiles, at tiles of "
        f"{', '.join(f'{rows} × {columns}' for rows, columns in TILES)}; those of GPUs are multiples of 16. Where "
        "ranges leave a tile open CPU kernels look at pairs, GPU kernels at ranges over pieces of it, unless the mask "
        "reads a captured tensor.",
    )  # fmt: skip


def _over(found: int, least: int) -> str:
    return f"{found / least:.2f}" if least else "1.00" if found == 0 else "∞"


# Time against the kept fraction ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Layout:
    name: str
    block: int
    condition: str
    keeps: Callable[[int, int], bool]

    def fraction(self, length: int) -> float:
        """The share of pairs that it keeps."""
        blocks = range(length // self.block)
        return sum(self.keeps(i, j) for i in blocks for j in blocks) / len(blocks) ** 2


def _random(share: int) -> _Layout:
    drawn = OPERATORS["hash"].meaning
    return _Layout(
        "random blocks", 64, f"hash(I, J, 3) % 1024 < {share}", lambda i, j: drawn(None, i, j, 3) % 1024 < share
    )


def _butterfly(block: int) -> _Layout:
    condition = "I == J or popcount(I ^ J) == 1"
    return _Layout("butterfly", block, condition, lambda i, j: i == j or (i ^ j).bit_count() == 1)


LAYOUTS = (_random(256), _random(128), _random(64), _butterfly(512), _butterfly(256), _butterfly(128), _butterfly(64))


def sparsity() -> None:
    """The time of every layout over what its kept fraction of the time with every block kept is."""
    rows = []
    blocks = sorted({each.block for each in LAYOUTS})
    for length in (8192, 16384):
        dense = _passes(_op("mask true"), length)
        whole = {block: _passes(_op(f"layout block {block}: I == I"), length) for block in blocks}
        layouts = [(each, _passes(_op(f"layout block {each.block}: {each.condition}"), length)) for each in LAYOUTS]
        for number, name in enumerate(("forward", "forward+backward")):
            found: dict[_Layout, list[tuple[float, float, float]]] = {each: [] for each in LAYOUTS}
            for _ in range(5):
                without = _cpu_time(dense[number])
                every = {block: _cpu_time(passes[number]) for block, passes in whole.items()}
                for layout, passes in layouts:
                    seconds = statistics.median(_cpu_time(passes[number]) for _ in range(3))
                    share = every[layout.block] * layout.fraction(length)
                    found[layout].append((seconds, seconds / share, without / seconds))
            for layout, measured in found.items():
                low, middle, high = np.quantile([ratio for _, ratio, _ in measured], (0.25, 0.5, 0.75))
                milliseconds = 1e3 * statistics.median(seconds for seconds, _, _ in measured)
                fraction = layout.fraction(length)
                rows.append([
                    layout.name, str(layout.block), str(length), name, f"1/{1 / fraction:.1f}", f"{milliseconds:.1f}",
                    f"{middle:.2f} ({low:.2f}–{high:.2f})", "yes" if middle <= GOAL else "**no**",
                    f"{statistics.median(gain for _, _, gain in measured):.1f}",
                ])  # fmt: skip
    publish(
        "sparsity",
        "python -m tools.benchmarks.masks sparsity",
        [
            *("layout", "block", "N", "pass", "kept", "CPU time (ms)", "× of proportional (quartiles)"),
            *(f"at most {GOAL}", "× as fast as without a layout"),
        ],
        rows,
        f"B 1, H 1, D {D}, float32, one thread. Proportional: the time of the same kernel with every block kept in the "
        "same round, times the kept fraction of the pairs. Without a layout tiles are larger, and on CPUs with matrix "
        "registers what blocks of fewer than 128 multiply in vectors is multiplied there: the last column.",
    )


def _op(statements: str) -> AttentionOp:
    return flashgen.loads(f"attention measured {{ head_dim {D} dtype f32\n {statements} }}")


def _passes(op: AttentionOp, length: int, **captured: Any) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Forward alone, and forward with backward."""
    q, k, v, d_o = (torch.randn(1, 1, length, D) for _ in range(4))
    for x in (q, k, v):
        x.requires_grad_()

    def forward() -> Any:
        with torch.no_grad():
            return op(q, k, v, **captured)

    def both() -> Any:
        return torch.autograd.grad(op(q, k, v, **captured), (q, k, v), d_o)

    return forward, both


def _cpu_time(run: Callable[[], Any]) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start


# A million tokens of documents ----------------------------------------------------------------------------------------

DOCUMENT = 512
DOCUMENTS = "tensor doc: i32[B, Nk]\n    mask causal and same_document(doc)"
LENGTHS = (2**18, 2**19, 2**20)


def documents(folder: Path) -> None:
    """Each length in a process of its own, so that the peak of its memory is its own."""
    masks = Masks((Mask("documents", "mask causal and same_document(doc)", ("doc",)),), folder, "-O2")
    rows = []
    for length in LENGTHS:
        command = [sys.executable, "-m", "tools.benchmarks.masks", "one-length", str(length)]
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
        found = json.loads(done.stdout)
        doc = np.repeat((np.arange(length) // DOCUMENT).astype(np.int32)[None], 2, axis=0)
        planned = min(
            masks.seconds_to_plan(0, Problem(length, length), found["Br"], found["Bc"], {"doc": doc}) for _ in range(3)
        )
        for name in ("forward", "forward+backward"):
            whole, apart = found[name]
            ratio = statistics.median(a / b for a, b in zip(whole, apart, strict=True))
            rows.append([
                f"{length:,}", name, f"{statistics.median(whole):.2f}", f"{statistics.median(apart):.2f}",
                f"{ratio:.2f}", "yes" if ratio < 3 else "**no**",
                f"{1e3 * planned:.1f}" if name == "forward" else "",
                "" if name == "forward" else f"{found['bytes'] / 1e6:.0f}",
            ])  # fmt: skip
    publish(
        "documents",
        "python -m tools.benchmarks.masks documents",
        ["tokens", "pass", "CPU time (s)", "document by document (s)", "×", "under 3", "finding the tiles (ms)",
         "peak memory beyond the inputs (MB)"],
        rows,
        f"Documents of {DOCUMENT} tokens, B 1, H 1, D {D}, float32, one thread. Document by document: a call of the "
        "causal kernel for each. Finding the tiles: the tree of ranges and the visits of every query tile.",
    )  # fmt: skip


def one_length(length: int) -> None:
    """Measures one length and prints the figures for ``documents``."""
    torch.set_num_threads(1)
    doc = (torch.arange(length) // DOCUMENT).to(torch.int32)[None]
    op, single = _op(DOCUMENTS), _op("mask causal")
    _passes(op, 2048, doc=doc[:, :2048])[1]()  # what libraries take once
    inputs = [torch.randn(1, 1, length, D) for _ in range(4)]
    before = _peak()
    leaves, d_o = [x.requires_grad_() for x in inputs[:3]], inputs[3]
    torch.autograd.grad(op(*leaves, doc=doc), leaves, d_o)
    grown = _peak() - before

    def whole_forward() -> None:
        with torch.no_grad():
            op(*leaves, doc=doc)

    def whole() -> None:
        torch.autograd.grad(op(*leaves, doc=doc), leaves, d_o)

    def apart(*, backward: bool) -> None:
        for first in range(0, length, DOCUMENT):
            part = slice(first, first + DOCUMENT)
            own = [x.detach()[:, :, part].requires_grad_(backward) for x in leaves]
            o = single(*own)
            if backward:
                torch.autograd.grad(o, own, d_o[:, :, part])

    forward, both = [], []
    for _ in range(3):
        forward.append((_cpu_time(whole_forward), _cpu_time(lambda: apart(backward=False))))
        both.append((_cpu_time(whole), _cpu_time(lambda: apart(backward=True))))
    tiles = op.plan[op.spec.head_dims[0]].forward
    figures = {
        "forward": list(zip(*forward, strict=True)),
        "forward+backward": list(zip(*both, strict=True)),
        "bytes": grown,
        "Br": tiles.Br,
        "Bc": tiles.Bc,
    }
    print(json.dumps(figures))


def _peak() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def main() -> None:
    """The sections that are named, or all."""
    if sys.argv[1:2] == ["one-length"]:
        one_length(int(sys.argv[2]))
        return
    wanted = sys.argv[1:] or ["tightness", "sparsity", "documents"]
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        if "tightness" in wanted:
            tightness(Path(folder))
        if "sparsity" in wanted:
            sparsity()
        if "documents" in wanted:
            documents(Path(folder))


if __name__ == "__main__":
    main()
