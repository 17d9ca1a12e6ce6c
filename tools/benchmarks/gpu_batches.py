"""Times on a GPU of what serving and long sequences take: caches, pages, 8 bits, ragged batches, selected keys, head
dimensions above 256.

In: a report to write to. Out: its tables; bfloat16. Peers take turns with flashgen in one run. Calls of caches are
timed as replays of a captured graph, as servers run them, so that the host's pace is not measured.
"""

from __future__ import annotations

import concurrent.futures
import functools
import multiprocessing
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

import flashgen
from tools.benchmarks.gpu_speed import medians, sdpa

cuda: Any = torch.cuda
WORKERS = 14
DECODER = "attention bench_decoder { head_dim 128  dtype bf16, f8e4m3  mask causal }"
LATENT = "attention bench_latent { head_dim 576/512  dtype bf16  mask causal }"
LONG = "attention bench_long { head_dim 128  dtype bf16  mask causal }"
DOCUMENTS = (
    "attention bench_packed { head_dim 128  dtype bf16  tensor doc: i32[B, Nk]  mask causal and same_document(doc) }"
)
LARGE = "attention bench_large { head_dim 160, 192/128, 256, 320, 512, 576/512  dtype bf16  mask causal }"
CHOSEN = """
attention bench_selected {
    head_dim 128  dtype bf16
    tensor idx: i32[B, Hkv, Nq, 16]
    select 64: idx[b, hkv, i, :]
    mask causal
}
"""
CHOSEN_BLOCKS = """
attention bench_selected_blocks {
    head_dim 128  dtype bf16
    tensor idx: i32[B, Hkv, ceildiv(Nq, 64), 16]
    select 64: idx[b, hkv, i // 64, :]
    mask causal
}
"""


@dataclass(frozen=True)
class Cache:
    """A row of the table of caches: sizes of one decoding call."""

    batch: int
    rows: int
    heads: tuple[int, int] = (32, 8)
    head_dims: tuple[int, int] = (128, 128)
    queries: int = 1

    @property
    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Of q, the keys and the values."""
        (h, hkv), (d, dv) = self.heads, self.head_dims
        return (self.batch, h, self.queries, d), (self.batch, hkv, self.rows, d), (self.batch, hkv, self.rows, dv)

    def bytes_read(self, size: int = 2) -> int:
        """Of keys and values."""
        return sum(torch.Size(shape).numel() * size for shape in self.shapes[1:])

    @property
    def name(self) -> str:
        """As a table has it."""
        (h, hkv), (d, dv) = self.heads, self.head_dims
        dims = d if d == dv else f"{d}/{dv}"
        return f"B {self.batch}, {self.rows // 1024}k rows, {h}/{hkv} heads of {dims}, Nq {self.queries}"


ROWS = (
    Cache(1, 8192), Cache(8, 8192), Cache(64, 8192), Cache(1, 32768), Cache(8, 32768), Cache(64, 32768),
    Cache(1, 131072), Cache(8, 131072), Cache(64, 131072), Cache(8, 32768, (64, 8)), Cache(8, 32768, queries=4),
    Cache(8, 32768, (32, 32)),
)  # fmt: skip
LATENT_ROWS = tuple(Cache(b, n, (16, 1), (576, 512)) for b, n in ((8, 32768), (64, 8192)))


def in_turns(calls: Mapping[str, Callable[[], object]], *, graphs: bool, rounds: int = 5) -> dict[str, float | str]:
    """Milliseconds of each, or the error of what cannot."""
    ready: dict[str, Callable[[], object]] = {}
    found: dict[str, float | str] = {}
    for name, call in calls.items():
        try:
            ready[name] = replay(call) if graphs else warmed(call)
        except Exception as error:
            found[name] = f"{type(error).__name__}: {str(error)[:160]}"
    return found | medians(ready, rounds, 0.01)


def warmed(call: Callable[[], object]) -> Callable[[], object]:
    """The call, after two of it."""
    for _ in range(2):
        call()
    cuda.synchronize()
    return call


def replay(call: Callable[[], object]) -> Callable[[], object]:
    """A call as a captured graph."""
    beside = cuda.Stream()
    beside.wait_stream(cuda.current_stream())
    with cuda.stream(beside):
        for _ in range(3):
            call()
    cuda.current_stream().wait_stream(beside)
    graph = cuda.CUDAGraph()
    with cuda.graph(graph):
        kept = call()

    def again() -> object:
        graph.replay()
        return kept, call  # what it reads has to live: the next capture gives back memory that nobody holds

    return again


def tensors(shapes: Sequence[Sequence[int]], seed: int = 0) -> list[Tensor]:
    """Normal numbers in bfloat16."""
    generator = torch.Generator("cuda").manual_seed(seed)
    made = []
    for shape in shapes:
        x = torch.empty(*shape, device="cuda", dtype=torch.bfloat16)
        made.append(x.normal_(generator=generator))
    return made


def pages_of(x: Tensor, page: int, order: Tensor) -> Tensor:
    """A cache as pages in a random order: page ``order[n]`` is the n-th of all sequences'."""
    b, h, n, d = x.shape
    pages = x.view(b, h, n // page, page, d).transpose(1, 2).reshape(-1, h, page, d)
    return torch.empty_like(pages).index_copy_(0, order, pages)


@functools.cache
def copy_rate() -> float:
    """Bytes a second, read and written, of a plain copy of 2 GiB."""
    source, target = (torch.empty(2**30, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    (milliseconds,) = medians({"copy": lambda: torch.neg(source, out=target)}, 5, 0.02).values()
    return 2 * source.numel() * source.element_size() / milliseconds * 1e3


def cached_calls(row: Cache, op: Any) -> dict[str, Callable[[], object]]:
    """flashgen on a dense cache, on pages, on 8 bits, beside its peers."""
    q, k, v = tensors(row.shapes)
    lengths = torch.full((row.batch,), row.rows, dtype=torch.int32, device="cuda")
    grouped = row.heads[0] != row.heads[1]
    calls: dict[str, Callable[[], object]] = {"flashgen": lambda: op.decode(q, k, v, lengths)}
    room = cuda.mem_get_info()[0]
    if row.bytes_read() * 2.2 < room:
        for page in (16, 64):
            count = row.rows // page
            order = torch.randperm(row.batch * count, device="cuda")
            table = order.view(row.batch, count).int()
            k_pages, v_pages = pages_of(k, page, order), pages_of(v, page, order)
            calls[f"pages of {page}"] = lambda k=k_pages, v=v_pages, t=table: op.decode(q, k, v, lengths, block_table=t)  # type: ignore[misc]
            if row.bytes_read() * 3.2 > room:
                break
    if row.head_dims[1] == 128 and row.bytes_read() * 0.6 < cuda.mem_get_info()[0]:
        k8, v8 = k.to(torch.float8_e4m3fn), v.to(torch.float8_e4m3fn)
        calls["8 bits"] = lambda: op.decode(q, k8, v8, lengths)
    if row.head_dims[0] != row.head_dims[1]:
        return calls
    mask = (
        None
        if row.queries == 1
        else torch.ones(row.queries, row.rows, dtype=torch.bool, device="cuda").tril(row.rows - row.queries)
    )
    for name, backend in (("flash", SDPBackend.FLASH_ATTENTION), ("cudnn", SDPBackend.CUDNN_ATTENTION)):

        def peer(backend: SDPBackend = backend) -> Tensor:
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=grouped)

        calls[name] = peer
    if row.batch <= 8 and row.rows < 131072:  # it takes ten seconds to compile each
        compiled = torch.compile(flex_attention, dynamic=False)
        nq, n = row.queries, row.rows
        block = (
            create_block_mask(lambda _b, _h, i, j: i + (n - nq) >= j, None, None, nq, n, device="cuda")
            if nq > 1
            else None
        )
        calls["flex"] = lambda: compiled(q, k, v, block_mask=block, enable_gqa=grouped)
    return calls


def caches(report: Any) -> None:
    """``op.decode`` beside a copy, PyTorch's backends and compiled FlexAttention."""
    _prepared(report, [("cache", row) for row in (*LATENT_ROWS, *ROWS)])
    table: list[tuple[str, ...]] = []
    data = []
    for row in (*ROWS, *LATENT_ROWS):
        if report.seconds_left() < 40 or row.bytes_read() * 1.1 > cuda.mem_get_info()[0]:
            table.append((row.name, "not run", "", "", ""))
            continue
        torch.compiler.reset()
        op = operator(LATENT if row.head_dims[1] == 512 else DECODER)
        try:
            found = in_turns(cached_calls(row, op), graphs=True)
        except Exception as error:
            found = {"flashgen": f"{type(error).__name__}: {str(error)[:300]}"}
        cuda.empty_cache()
        data.append({"row": row.name, "milliseconds": found})
        report.data["caches"] = data
        report.save()
        table.append(_cached_row(row, found))
        print(*table[-1], sep="  ", flush=True)
    columns = ["call", "flashgen ms", "rate of a copy", "pages, 8 bits: × flashgen", "peers: × flashgen"]
    report.table(
        "Decoding, bfloat16, replayed graphs",
        columns,
        table,
        f"A plain copy of 2 GiB: {copy_rate() / 1e12:.2f} TB/s, read and written.",
    )


def _cached_row(row: Cache, found: Mapping[str, float | str]) -> tuple[str, ...]:
    own = found.get("flashgen")
    if not isinstance(own, float):
        return (row.name, str(own), "", "", "")
    rate = row.bytes_read() / own * 1e3
    share = f"{rate / copy_rate():.2f} ({rate / 1e12:.2f} TB/s)"
    forms, peers = [], []
    for name, value in found.items():
        if name == "flashgen":
            continue
        text = f"{name} {own / value:.2f}" if isinstance(value, float) else f"{name} {value}"
        if name.startswith(("pages", "8")):
            forms.append(text)
        else:
            peers.append(
                f"{name} {value:.3f} ×{value / own:.2f}" if isinstance(value, float) else f"{name}: cannot ({value})"
            )
    return (row.name, f"{own:.4f}", share, "; ".join(forms), "; ".join(peers))


def both(call: Callable[..., Tensor], leaves: Sequence[Tensor], d_o: Tensor) -> dict[str, Callable[[], object]]:
    """A call's forward, and its forward with backward."""
    own = [x.clone().requires_grad_() for x in leaves]

    def forward() -> object:
        with torch.no_grad():
            return call(*own)

    return {"forward": forward, "both": lambda: torch.autograd.grad(call(*own), own, d_o)}


def ragged(report: Any) -> None:
    """``op.varlen`` beside the dense call of equal lengths, and beside the same batch as packed documents."""
    _prepared(report, [("ragged", LONG), *_calls(DOCUMENTS, LONG)])
    dense, packed = operator(LONG), operator(DOCUMENTS)
    table = []
    for name, lengths in (
        ("8 sequences of 2,048", [2048] * 8),
        ("64 sequences of 256", [256] * 64),
        ("mixed, 16,384 in all", [4096, 37, 1000, 2048, 1, 3500, 600, 2502, 900, 1700]),
    ):
        total, heads = sum(lengths), 16
        starts = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
        q, k, v, d_o = tensors([(total, heads, 128)] * 4)
        calls: dict[str, Callable[[], object]] = {}

        def rows(q: Tensor, k: Tensor, v: Tensor, starts: Tensor = starts, longest: int = max(lengths)) -> Tensor:
            return dense.varlen(q, k, v, starts, starts, longest, longest)  # type: ignore[no-any-return]

        def add(name: str, made: Mapping[str, Callable[[], object]], calls: dict[str, Any] = calls) -> None:
            calls.update({f"{name} {form}": call for form, call in made.items()})

        add("ragged", both(rows, (q, k, v), d_o))
        if len(set(lengths)) == 1:
            four = [x.view(len(lengths), lengths[0], heads, 128).transpose(1, 2) for x in (q, k, v, d_o)]
            add("dense", both(dense, four[:3], four[3]))
        document = torch.repeat_interleave(
            torch.arange(len(lengths), device="cuda"), torch.tensor(lengths, device="cuda")
        )[None].int()
        one = [x.transpose(0, 1)[None] for x in (q, k, v, d_o)]
        add("packed", both(lambda q, k, v, doc=document: packed(q, k, v, doc=doc), one[:3], one[3]))
        found = in_turns(calls, graphs=False)
        for form in ("forward", "both"):
            own = found[f"ragged {form}"]
            cells = [
                f"{peer} {value:.3f} ×{value / own:.2f}"
                for peer in ("dense", "packed")
                if isinstance(value := found.get(f"{peer} {form}"), float) and isinstance(own, float)
            ]
            table.append((name, form, f"{own:.3f}" if isinstance(own, float) else own, "; ".join(cells)))
            print(*table[-1], sep="  ", flush=True)
    report.data["ragged"] = table
    report.table("Ragged batches, causal, 16 heads of 128", ["batch", "", "op.varlen ms", "peers"], table)


def selected(report: Any) -> None:
    """``select`` at 32k keys, 16 blocks of 64 for each query or block of queries, beside the causal kernel."""
    _prepared(report, _calls(CHOSEN, CHOSEN_BLOCKS, LONG))
    causal = operator(LONG)
    n, heads, groups = 32768, 32, 2
    q, d_o = tensors([(1, heads, n, 128)] * 2)
    k, v = tensors([(1, groups, n, 128)] * 2, seed=1)
    generator = torch.Generator("cuda").manual_seed(2)
    table = []
    for name, text, lists in (
        ("a list for each query", CHOSEN, n),
        ("a list for each 64 queries", CHOSEN_BLOCKS, n // 64),
    ):
        last = torch.arange(lists, device="cuda")[:, None] * (n // lists) // 64
        idx = (torch.rand(1, groups, lists, 16, generator=generator, device="cuda") * (last + 1)).int()
        op = operator(text)
        calls = {
            f"own {f}": c for f, c in both(lambda q, k, v, op=op, idx=idx: op(q, k, v, idx=idx), (q, k, v), d_o).items()
        }
        calls |= {f"causal {f}": c for f, c in both(causal, (q, k, v), d_o).items()}
        found = in_turns(calls, graphs=False, rounds=3)
        for form in ("forward", "both"):
            own, peer = found[f"own {form}"], found[f"causal {form}"]
            times = f"{peer / own:.2f}" if isinstance(own, float) and isinstance(peer, float) else ""
            table.append((name, form, str(own), str(peer), times))
            print(*table[-1], sep="  ", flush=True)
    report.data["selected"] = table
    report.table("Selected keys, 32k, 32/2 heads of 128", ["", "", "select ms", "causal ms", "×"], table)


def large_dims(report: Any) -> None:
    """TFLOP/s of head dimensions above 256, beside 256."""
    dims = ((160, 160), (192, 128), (256, 256), (320, 320), (512, 512), (576, 512))
    _prepared(report, [("call", (LARGE, *each, part)) for each in dims for part in ("forward", "both")])
    op = operator(LARGE)
    table = []
    for d, dv in dims:
        n, heads, batch = 8192, 8, 2
        q, k = tensors([(batch, heads, n, d)] * 2)
        v, d_o = tensors([(batch, heads, n, dv)] * 2, seed=1)
        calls = both(op, (q, k, v), d_o)
        if d <= 256:
            peer = sdpa(SDPBackend.CUDNN_ATTENTION, is_causal=True)
            calls |= {f"cudnn {form}": call for form, call in both(peer, (q, k, v), d_o).items()}
        found = in_turns(calls, graphs=False, rounds=3)
        work = batch * heads * n * n / 2 * 2 * (d + dv)
        back = batch * heads * n * n / 2 * 2 * (3 * d + 2 * dv)
        cells = [
            f"{own:.3f} ({flops / own / 1e9:.0f})" if isinstance(own := found[form], float) else str(own)
            for form, flops in (("forward", work), ("both", work + back))
        ]
        for n, form in enumerate(("forward", "both")):
            own, other = found[form], found.get(f"cudnn {form}")
            if isinstance(own, float) and isinstance(other, float):
                cells[n] += f", cudnn ×{other / own:.2f}"
        table.append((f"{d}/{dv}", *cells))
        print(*table[-1], sep="  ", flush=True)
    report.data["large_dims"] = table
    report.table("Head dimensions, causal, 2×8×8192, ms (TFLOP/s)", ["D/Dv", "forward", "both"], table)


_OPS: dict[str, Any] = {}


def operator(text: str) -> Any:
    """One op a text."""
    if text not in _OPS:
        _OPS[text] = flashgen.loads(text, backend="cuda")
    return _OPS[text]


def _prepare(job: tuple[str, Any]) -> str:
    """Compile what a row needs, on a batch of one; the kernels lie in the cache after that."""
    kind, value = job
    try:
        if kind == "cache":
            row = Cache(1, value.rows, value.heads, value.head_dims, value.queries)
            op = operator(LATENT if row.head_dims[1] == 512 else DECODER)
            for name, call in cached_calls(row, op).items():
                if name in ("flashgen", "8 bits") or name.startswith("pages"):
                    call()
        elif kind == "call":
            text, d, dv, part = value
            q, k = tensors([(1, 2, 8192, d)] * 2)
            v, d_o = tensors([(1, 2, 8192, dv)] * 2)
            named = {}
            if "idx" in text:
                count = 8192 if text == CHOSEN else 128
                named["idx"] = torch.zeros(1, 2, count, 16, dtype=torch.int32, device="cuda")
            if "doc" in text:
                named["doc"] = torch.zeros(1, 8192, dtype=torch.int32, device="cuda")
            both(lambda q, k, v: operator(text)(q, k, v, **named), (q, k, v), d_o)[part]()
        else:
            q, k, v, d_o = tensors([(8192, 2, 128)] * 4)
            starts = torch.tensor([0, 4096, 8192], dtype=torch.int32, device="cuda")
            own = [x.requires_grad_() for x in (q, k, v)]
            torch.autograd.grad(operator(value).varlen(*own, starts, starts), own, d_o)
        cuda.synchronize()
    except Exception as error:
        return f"{kind} {value}: {type(error).__name__}: {str(error)[:200]}"
    return ""


def _prepared(report: Any, jobs: Sequence[tuple[str, Any]]) -> None:
    """Every kernel of a table."""
    by_many(_prepare, jobs, report.text)


def by_many(prepare: Callable[[Any], str], jobs: Sequence[Any], say: Callable[[str], object]) -> None:
    """Compile by several processes at once; ``prepare`` says of a job why it failed."""
    workers = min(len(jobs), os.cpu_count() or 1, WORKERS)
    with concurrent.futures.ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        failed = [line for line in pool.map(prepare, jobs) if line]
    if failed:
        say("\n".join(["What did not compile:", "", *failed]))


def _calls(*texts: str) -> list[tuple[str, Any]]:
    return [("call", (text, 128, 128, part)) for text in texts for part in ("forward", "both")]


SECTIONS: Mapping[str, Callable[[Any], None]] = {
    "caches": caches,
    "ragged": ragged,
    "selected": selected,
    "large_dims": large_dims,
}
