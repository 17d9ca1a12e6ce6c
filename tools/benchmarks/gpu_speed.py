"""Times on a GPU: flashgen beside PyTorch's flash backend and compiled FlexAttention, in one run, taking turns.

In: a report to write to. Out: its tables. bfloat16, forward and forward with backward, in the shapes of
FlashAttention's own benchmarks: 16k tokens in all, 2048 channels.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

import flashgen

cuda: Any = torch.cuda

TOKENS, CHANNELS = 16384, 2048
WINDOW, CAP, REACH = 1024, 50.0, 128

SPECS: Mapping[str, str] = {
    "plain": "",
    "causal": "mask causal",
    "alibi": "tensor slope: f32[H]  score s - slope[h] * (i - j)  mask causal",
    "softcap_window": f"score softcap(s, {CAP})  mask causal and window_left({WINDOW})",
    "documents": "tensor doc: i32[B, Nk]  mask causal and same_document(doc)",
    "relative_bias": f"const reach = {REACH}  tensor table: f32[H, 2 * reach + 1] grad  "
    "score s + table[h, clamp(i - j, -reach, reach) + reach]",
}
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Setting:
    """One row of a table."""

    variant: str
    length: int
    head_dim: int

    @property
    def batch(self) -> int:
        """Sequences, so that there are as many tokens in every row."""
        return max(TOKENS // self.length, 1)

    @property
    def heads(self) -> int:
        """Heads, so that there are as many channels in every row."""
        return CHANNELS // self.head_dim


@functools.cache
def operator(variant: str) -> Any:
    """The op of a variant, for bfloat16 alone: half the time to compile."""
    return flashgen.loads(
        f"attention bench_{variant} {{ head_dim 64, 128  dtype bf16  {SPECS[variant]} }}", backend="cuda"
    )


def captured(setting: Setting) -> dict[str, Tensor]:
    """The tensors that a variant reads."""
    generator = torch.Generator("cuda").manual_seed(1)
    heads, length = setting.heads, setting.length
    match setting.variant:
        case "alibi":
            return {"slope": 2.0 ** (-8.0 * torch.arange(1, heads + 1, device="cuda") / heads)}
        case "documents":
            ends = torch.rand(setting.batch, length, generator=generator, device="cuda") < 8 / length
            return {"doc": ends.cumsum(1).to(torch.int32)}
        case "relative_bias":
            table = torch.randn(heads, 2 * REACH + 1, generator=generator, device="cuda")
            return {"table": table.requires_grad_()}
    return {}


def flex(setting: Setting, tensors: Mapping[str, Tensor]) -> Attention:
    """FlexAttention, compiled; its block mask is made outside the time."""
    batch, length = setting.batch, setting.length
    slope, doc, table = (tensors.get(name) for name in ("slope", "doc", "table"))

    def scores(s: Tensor, _b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        match setting.variant:
            case "alibi":
                assert slope is not None
                return s - slope[h] * (i - j)
            case "softcap_window":
                return CAP * torch.tanh(s / CAP)
            case _:
                assert table is not None
                return s + table[h, torch.clamp(i - j, -REACH, REACH) + REACH]

    def keep(b: Tensor, _h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        kept = i >= j
        if setting.variant == "softcap_window":
            return kept & (i - j < WINDOW)
        if doc is not None:
            return kept & (doc[b, i] == doc[b, j])
        return kept

    masked = setting.variant not in ("plain", "relative_bias")
    by_batch = batch if doc is not None else None
    mask = create_block_mask(keep, by_batch, None, length, length, device="cuda", _compile=True) if masked else None
    score_mod = scores if setting.variant in ("alibi", "softcap_window", "relative_bias") else None
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda q, k, v: compiled(q, k, v, score_mod=score_mod, block_mask=mask)


def sdpa(backend: SDPBackend, *, is_causal: bool) -> Attention:
    """PyTorch's own kernels, one backend of them."""

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(q, k, v, is_causal=is_causal)

    return attention


def candidates(setting: Setting) -> tuple[dict[str, Attention], dict[str, Tensor]]:
    """What is timed against what."""
    op, tensors = operator(setting.variant), captured(setting)
    found: dict[str, Attention] = {"flashgen": lambda q, k, v: op(q, k, v, **tensors)}
    if setting.variant in ("plain", "causal"):
        is_causal = setting.variant == "causal"
        found["flash"] = sdpa(SDPBackend.FLASH_ATTENTION, is_causal=is_causal)
        found["cudnn"] = sdpa(SDPBackend.CUDNN_ATTENTION, is_causal=is_causal)
    else:
        found["flex"] = flex(setting, tensors)
    return found, tensors


def measure(setting: Setting, *, rounds: int = 7, target: float = 0.02) -> dict[str, dict[str, Any]]:
    """Milliseconds of each candidate, forward and with backward, and errors against flashgen's own result."""
    shape = (setting.batch, setting.heads, setting.length, setting.head_dim)
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v, d_o = (torch.randn(shape, generator=generator, device="cuda").bfloat16() for _ in range(4))
    found, tensors = candidates(setting)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)] + [x for x in tensors.values() if x.requires_grad]
    result: dict[str, dict[str, Any]] = {}
    for name, backward in (("forward", False), ("both", True)):
        calls: dict[str, Callable[[], object]] = {}
        outputs: dict[str, list[Tensor]] = {}
        for candidate, attention in found.items():
            call = _call(attention, leaves, d_o, backward=backward)
            try:
                outputs[candidate] = [x.float() for x in call()]
                call()
                calls[candidate] = call
            except Exception as error:
                result.setdefault(candidate, {})[f"{name}_error"] = f"{type(error).__name__}: {str(error)[:300]}"
        for candidate, milliseconds in medians(calls, rounds, target).items():
            result.setdefault(candidate, {})[name] = milliseconds
        for candidate, own in outputs.items():
            if candidate != "flashgen" and "flashgen" in outputs:
                distances = [float((a - b).norm() / b.norm()) for a, b in zip(outputs["flashgen"], own, strict=True)]
                result[candidate][f"{name}_distance"] = distances
        del outputs
    return result


def _call(attention: Attention, leaves: list[Tensor], d_o: Tensor, *, backward: bool) -> Callable[[], list[Tensor]]:
    if backward:
        return lambda: list(torch.autograd.grad(attention(*leaves[:3]), leaves, d_o))

    def forward() -> list[Tensor]:
        with torch.no_grad():
            return [attention(*leaves[:3])]

    return forward


def medians(calls: Mapping[str, Callable[[], object]], rounds: int, target: float) -> dict[str, float]:
    """Medians of rounds in which all take turns; ``target`` seconds of work each turn."""
    inner = {}
    for name, call in calls.items():
        inner[name] = max(1, min(50, int(target * 1e3 / mean_milliseconds(call, 2))))
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            samples[name].append(mean_milliseconds(call, inner[name]))
    return {name: statistics.median(values) for name, values in samples.items()}


def mean_milliseconds(call: Callable[[], object], count: int) -> float:
    """Of a call, the mean of so many in a row."""
    start, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
    start.record()
    for _ in range(count):
        call()
    end.record()
    cuda.synchronize()
    return float(start.elapsed_time(end)) / count


def kept_share(setting: Setting) -> float:
    """The share of pairs that the mask keeps, about."""
    n = setting.length
    match setting.variant:
        case "plain" | "relative_bias":
            return 1.0
        case "softcap_window":
            w = min(WINDOW, n)
            return (w * (w + 1) / 2 + (n - w) * w) / n**2
        case "documents":
            doc = captured(setting)["doc"]
            counts = [float((torch.bincount(row.long()).double() ** 2).sum()) for row in doc]
            return sum(counts) / len(counts) / 2 / n**2
    return 0.5


def settings() -> list[Setting]:
    """The rows, those that matter most first."""
    rows = [
        Setting(variant, n, d) for n in (8192, 2048, 16384, 4096) for d in (128, 64) for variant in ("causal", "plain")
    ]
    others = ("alibi", "softcap_window", "documents", "relative_bias")
    rows[4:4] = [Setting(variant, 8192, d) for d in (128, 64) for variant in others]
    return rows + [Setting(variant, 2048, d) for d in (128, 64) for variant in others]


def speed(report: Any) -> None:
    """The tables of times."""
    rows, data = [], []
    for setting in settings():
        if report.seconds_left() < 45:
            break
        torch.compiler.reset()
        with contextlib.suppress(RuntimeError):
            cuda.empty_cache()
        try:
            found = measure(setting)
        except Exception as error:
            rows.append(
                (setting.variant, setting.length, setting.head_dim, f"{type(error).__name__}: {str(error)[:200]}")
            )
            continue
        data.append({"setting": setting.__dict__, "milliseconds": found})
        report.data["speed"] = data
        report.save()
        rows.append(_row(setting, found))
        print(*rows[-1], sep="  ", flush=True)
    columns = ["variant", "N", "D", "pass: flashgen ms (TFLOP/s); peer ms, × = peer / flashgen"]
    report.table(
        "Speed, bfloat16, 16k tokens, 2048 channels",
        columns,
        [(*row[:3], "; ".join(row[3:])) for row in rows],
        "Medians of rounds in which all take turns. FLOPs: 4 · kept pairs · D forward, 2.5 times that backward.",
    )


def _row(setting: Setting, found: Mapping[str, Mapping[str, Any]]) -> tuple[Any, ...]:
    flops = 4.0 * setting.batch * setting.heads * setting.length**2 * setting.head_dim * kept_share(setting)
    cells = []
    for name, factor in (("forward", 1.0), ("both", 3.5)):
        own = found.get("flashgen", {}).get(name)
        if own is None:
            cells.append(f"{name}: {found.get('flashgen', {}).get(f'{name}_error', 'nothing')}")
            continue
        cell = f"{name}: {own:.3f} ({flops * factor / own / 1e9:.0f})"
        for peer, times in found.items():
            if peer != "flashgen":
                other = times.get(name)
                cell += f", {peer} " + (f"{other:.3f} ×{other / own:.2f}" if other else "cannot")
                worst = max(times.get(f"{name}_distance", [0.0]))
                cell += f" (differs {worst:.0e})" if worst > 2e-2 else ""
        cells.append(cell)
    return (setting.variant, setting.length, setting.head_dim, *cells)


def overhead(report: Any) -> None:
    """Microseconds of the host for a call that the device needs no time for."""
    op = operator("causal")
    q, k, v, d_o = (torch.randn(1, 1, 16, 64, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    flash = sdpa(SDPBackend.FLASH_ATTENTION, is_causal=True)
    plain = functools.partial(scaled_dot_product_attention, is_causal=True)
    rows = []
    for name, attention in (("flashgen", op), ("sdpa", plain), ("sdpa, flash backend chosen", flash)):
        forward = _host_microseconds(_call(attention, leaves, d_o, backward=False))
        both = _host_microseconds(_call(attention, leaves, d_o, backward=True))
        rows.append((name, f"{forward:.1f}", f"{both:.1f}"))
    report.data["overhead"] = rows
    report.table(
        "Host time of a call, µs", ["", "forward", "forward and backward"], rows, "1×1×16×64, least of 5 medians."
    )


def _host_microseconds(call: Callable[[], object], count: int = 300) -> float:
    best = float("inf")
    for _ in range(5):
        samples = []
        for _ in range(count):
            start = time.perf_counter()
            call()
            samples.append(time.perf_counter() - start)
        cuda.synchronize()
        best = min(best, statistics.median(samples))
    return best * 1e6
