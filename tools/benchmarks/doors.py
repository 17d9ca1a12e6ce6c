"""Times of what users call: causal attention through every door, beside PyTorch's own choice and other libraries; whole
models of transformers; and the host's time for a short call.

    python -m tools.benchmarks.gpu_check OUT --only doors,door_calls,door_models      on a GPU
    python -m tools.benchmarks.doors OUT                                              what doors add to a call, on a CPU

In: a report to write to. Out: its tables; bfloat16. Tensors lie as models have them, [B, N, H, D], and o is read as
[B, N, H·D]. What cannot be timed (a library that is not installed, a call that is refused) says why in its row.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import flashgen
import flashgen.nn
from flashgen.flash import flash_attn_func, flash_attn_varlen_func
from flashgen.flex import create_block_mask, flex_attention
from flashgen.op.node import ENVIRONMENT_VARIABLE as NODE
from flashgen.tuning.tune import Times, paired_times
from tools.benchmarks.gpu_batches import by_many, replay, warmed
from tools.benchmarks.gpu_peers import DEVICE, Attention, flash4, flex, inputs, sdpa
from tools.benchmarks.gpu_rows import DOORS, FLASH4_AT_HAND, Row
from tools.benchmarks.host_time import microseconds, nobody
from tools.benchmarks.report import Report

Call = Callable[[], Any]
PASSES = ("forward", "with backward")
ON_GPU = DEVICE == "cuda"
WAIT: Callable[[], object] = torch.cuda.synchronize if ON_GPU else nobody
CAPTURED = 4096  # a call of so many tokens, or fewer, is replayed as a graph, so that the host's pace is not measured
ROUNDS = 5
SETTLE = 0.1  # seconds, of a GPU's clock


# -- doors: [B, N, H, D] in and out ------------------------------------------------------------------------------------


@functools.cache
def operator(text: str) -> Any:
    """One op a text."""
    return flashgen.loads(text, backend=DEVICE)


def transposed(attention: Callable[..., Tensor]) -> Attention:
    """What takes and gives [B, H, N, D]."""
    return lambda *x: attention(*(each.transpose(1, 2) for each in x)).transpose(1, 2)


def own_flex(row: Row) -> Attention:
    """flashgen.flex, with a block mask."""
    mask = create_block_mask(lambda _b, _h, i, j: i >= j, None, None, row.length, row.length)
    return transposed(functools.partial(flex_attention, block_mask=mask, enable_gqa=True))


def ragged(row: Row, varlen: Callable[..., Tensor]) -> Attention:
    """The sequences one behind the other."""
    starts = torch.arange(0, row.batch * row.length + 1, row.length, dtype=torch.int32, device=DEVICE)
    lengths, shape = (starts, starts, row.length, row.length), (row.batch, row.length)
    return lambda *x: varlen(*(each.flatten(0, 1) for each in x), *lengths).view(*shape, row.heads, -1)


def own_transformers(row: Row) -> Attention:
    """The attention function that a causal layer of transformers calls."""
    registered()
    attention = importlib.import_module("transformers").AttentionInterface()["flashgen"]
    layer: Any = nn.Module()
    layer.is_causal, scaling = True, row.head_dims[0] ** -0.5
    return lambda *x: attention(layer, *(each.transpose(1, 2) for each in x), None, scaling=scaling)[0]


def registered() -> None:
    """flashgen is an attention of transformers."""
    importlib.import_module("flashgen.integrations.transformers").register()


def own_module(row: Row) -> Attention:
    """flashgen.nn."""
    return transposed(flashgen.nn.Attention(operator(row.spec), heads=row.heads, kv_heads=row.kv_heads))


OP, BY_HEADS, RAGGED, FLASH_RAGGED = "op", "op, tensors in [B, H, N, D]", "op.varlen", "flash, varlen"
OWN: Mapping[str, Callable[[Row], Attention]] = {
    OP: lambda row: transposed(operator(row.spec)),
    BY_HEADS: lambda row: operator(row.spec),
    "flex": own_flex,
    "flash": lambda _: functools.partial(flash_attn_func, causal=True),
    RAGGED: lambda row: ragged(row, operator(row.spec).varlen),
    FLASH_RAGGED: lambda row: ragged(row, functools.partial(flash_attn_varlen_func, causal=True)),
    "transformers": own_transformers,
    "nn": own_module,
}
PYTORCH = "PyTorch's choice"
PEERS: Mapping[str, Callable[[Row], Attention]] = {
    PYTORCH: lambda row: transposed(sdpa(row, None)),
    "FlexAttention": lambda row: transposed(flex(row, {})),
    "FlexAttention, FLASH": lambda row: transposed(flex(row, {}, {"BACKEND": "FLASH"})),
    "FlashAttention-4": lambda row: transposed(flash4(row)),
}
ALL = {**OWN, **PEERS}
DISTINCT = (OP, "flex", "flash", RAGGED, FLASH_RAGGED, "transformers", "FlexAttention")  # what keeps kernels on disk
BESIDE = {FLASH_RAGGED: RAGGED}  # with what a door is compared; the others with the op


def calls_of(row: Row, name: str) -> dict[str, Call]:
    """The passes of one attention."""
    attention, (*x, d_o) = ALL[name](row), inputs(row)
    if name == BY_HEADS:
        return passes(attention, x, d_o)
    as_models = [each.transpose(1, 2).contiguous() for each in x]
    return passes(lambda *x: attention(*x).flatten(2), as_models, d_o.transpose(1, 2).flatten(2))


def passes(attention: Attention, x: Sequence[Tensor], d_o: Tensor) -> dict[str, Call]:
    """Forward, and forward with backward; both give lists of tensors."""
    leaves = [each.clone().requires_grad_() for each in x]

    def forward() -> list[Tensor]:
        with torch.no_grad():
            return [attention(*x)]

    return dict(zip(PASSES, (forward, lambda: list(torch.autograd.grad(attention(*leaves), leaves, d_o))), strict=True))


# -- times -------------------------------------------------------------------------------------------------------------


def reason(error: Exception) -> str:
    """Why something cannot be timed."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"


def in_turns(makers: Mapping[str, Callable[[], Call]], rounds: int, budget: float) -> dict[str, Times | str]:
    """Times of what can be called, and of what cannot why."""
    found: dict[str, Times | str] = {}
    ready: dict[str, Call] = {}
    for name, make in makers.items():
        try:
            ready[name] = make()
        except Exception as error:
            found[name] = reason(error)
            WAIT()
    settle = SETTLE if ON_GPU else 0.0
    timed = paired_times(ready, rounds=rounds, budget=budget, wait=WAIT, settle=settle) if ready else ()
    return found | {each.name: each for each in timed}


def measure(row: Row, rounds: int = ROUNDS) -> dict[str, dict[str, Any]]:
    """Of each attention and pass the milliseconds, and how far its result is from the op's; or why there is none."""
    measured: dict[str, dict[str, Any]] = {name: {} for name in ALL}
    for part in PASSES:
        wanted: list[Tensor] = []

        def make(name: str, part: str = part, wanted: list[Tensor] = wanted) -> Call:
            call = calls_of(row, name)[part]
            result = [x.float() for x in call()]
            if name == OP:
                wanted += result
            elif name != BY_HEADS and wanted:
                pairs = zip(result, wanted, strict=True)
                measured[name][f"{part} differs"] = max(float((a - b).norm() / b.norm()) for a, b in pairs)
            return replay(call) if ON_GPU and row.length <= CAPTURED else _warmed(call)

        for name, times in in_turns({name: functools.partial(make, name) for name in ALL}, rounds, 8.0).items():
            measured[name][part] = times if isinstance(times, str) else 1e3 * times.seconds.median
    return measured


def _warmed(call: Call) -> Call:
    return warmed(call) if ON_GPU else call


def doors(report: Any, rows: Sequence[Row] = DOORS, rounds: int = ROUNDS) -> None:
    """Every door beside the op and beside PyTorch's own choice."""
    if ON_GPU and "FLASHGEN_PREPARED" not in os.environ:
        by_many(_prepare, [(row, name) for row in rows for name in DISTINCT], report.text)
    table: list[tuple[str, ...]] = []
    data = report.data.setdefault("doors", [])
    for row in rows:
        if report.seconds_left() < 20:
            table.append((row.size, "not run", *[""] * (3 * len(PASSES))))
            continue
        torch.compiler.reset()
        found = measure(row, rounds)
        data.append({"size": row.size, "milliseconds": found})
        report.save()
        for name in found:
            table.append((row.size, name, *(cell for part in PASSES for cell in _cells(name, found, part))))
            print(*table[-1], sep="  ", flush=True)
        if ON_GPU:
            torch.cuda.empty_cache()
    columns = ["B×H×N×D", "through", *(f"{part}{more}" for part in PASSES for more in (" (ms)", " / op", " × PyTorch"))]
    report.table("Doors, causal", columns, table, _REMARK)


_REMARK = (
    f"Medians of {ROUNDS} rounds in turns. / op: its time over the op's (varlen: over op.varlen's). × PyTorch: the "
    "time of PyTorch's choice over its own. Tensors lie as [B, N, H, D], and o is read as [B, N, H·D], but where said."
)


def _cells(name: str, found: Mapping[str, Mapping[str, Any]], part: str) -> tuple[str, str, str]:
    own, op, peer = found[name][part], found[BESIDE.get(name, OP)][part], found[PYTORCH][part]
    if isinstance(own, str):
        return f"cannot: {own}", "", ""
    off = found[name].get(f"{part} differs", 0.0)
    remark = "" if off < 2e-2 else f", differs by {off:.0e}"
    ratios = (own / op if isinstance(op, float) else None, peer / own if isinstance(peer, float) else None)
    return f"{own:.3f}{remark}", *("" if each is None else f"{each:.3f}" for each in ratios)  # type: ignore[return-value]


def _prepare(job: tuple[Row, str]) -> str:
    """Compile what a row needs; what another row of other lengths has compiled is found."""
    row, name = job
    try:
        for call in calls_of(row, name).values():
            call()
            WAIT()
    except Exception as error:
        return f"{name}, {row.size}: {reason(error)}"
    return ""


# -- short calls -------------------------------------------------------------------------------------------------------


def door_calls(report: Any, seconds: float = 2.0) -> None:
    """The host's time for a call that the device needs no time for, through every door: microseconds above the op's."""
    row = Row("causal", "mask causal", (64, 64), 16, 1, 2, 1)
    os.environ.setdefault(NODE, "1")  # as calls are after the first thousand
    torch.compiler.reset()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    calls: dict[str, dict[str, Call]] = {}
    table: dict[str, list[str]] = {}
    for name in (*(name for name in OWN if name != BY_HEADS), PYTORCH):
        try:
            calls[name] = calls_of(row, name)
            for call in calls[name].values():
                call()
        except Exception as error:
            table[name] = [f"cannot: {reason(error)}", *[""] * (2 * len(PASSES) - 1)]
            calls.pop(name, None)
    found = {part: microseconds({name: own[part] for name, own in calls.items()}, seconds, WAIT) for part in PASSES}
    torch.set_num_threads(threads)
    for name in calls:
        each = [(found[part][name], found[part][name] - found[part][BESIDE.get(name, OP)]) for part in PASSES]
        table[name] = [cell for total, above in each for cell in (f"{total:.1f}", f"{above:+.1f}")]
    report.data["door_calls"] = found
    columns = ["through", *(f"{part}{more}" for part in PASSES for more in (" (µs)", ", above the op"))]
    rows = [(name, *cells) for name, cells in table.items()]
    report.table("Short calls through doors", columns, rows, f"{row.size} on {DEVICE}; the least of many means.")


# -- whole models ------------------------------------------------------------------------------------------------------

FLASH4 = "flash_attention_4"
IMPLEMENTATIONS = ("flashgen", "sdpa", "flex_attention", FLASH4)
COMPILED, OTHERS = ("flashgen", "flex_attention"), ("sdpa", "flex_attention")
TOKENS, DOCUMENT = 16384, 2048
SIZES: dict[str, Any] = {
    "vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 4,
    "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128, "max_position_embeddings": TOKENS,
}  # fmt: skip
_ALTERNATING = ["sliding_attention", "full_attention"]
MODELS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "Llama": ("LlamaConfig", {}),
    "Llama, packed": ("LlamaConfig", {}),
    "Gemma 2": ("Gemma2Config", {"sliding_window": 4096, "attn_logit_softcapping": 50.0}),
    "gpt-oss": ("GptOssConfig", {
        "num_attention_heads": 32, "head_dim": 64, "sliding_window": 128, "intermediate_size": 1024,
        "num_local_experts": 4, "num_experts_per_tok": 1,
    }),
}  # fmt: skip


def model_of(name: str, sizes: Mapping[str, Any]) -> Any:
    """A model with random weights, ready for training."""
    transformers = importlib.import_module("transformers")
    config, own = MODELS[name]
    kinds = {} if config == "LlamaConfig" else {"layer_types": _ALTERNATING * (sizes["num_hidden_layers"] // 2)}
    torch.manual_seed(0)
    made = getattr(transformers, config)(**{**sizes, **{key: own[key] for key in own}, **kinds})
    with torch.device(DEVICE):
        return transformers.AutoModelForCausalLM.from_config(made).to(torch.bfloat16).train()


def tokens(name: str, count: int, document: int, vocabulary: int) -> dict[str, Any]:
    """One sequence, or documents in one row, which positions tell apart."""
    ids = torch.randint(0, vocabulary, (1, count), device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(1))
    given = {"input_ids": ids, "labels": ids, "use_cache": False}
    if name.endswith("packed"):
        given["position_ids"] = (torch.arange(count, device=DEVICE) % document)[None]
    return given


def steps(model: Any, given: Mapping[str, Any], implementation: str) -> Call:
    """A step of training without the optimizer's part."""

    def step() -> Tensor:
        model.set_attn_implementation(implementation)
        model.zero_grad(set_to_none=True)
        loss: Tensor = model(**given).loss
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    return step


def door_models(
    report: Any,
    sizes: Mapping[str, Any] = SIZES,
    count: int = TOKENS,
    document: int = DOCUMENT,
    rounds: int = ROUNDS,
) -> None:
    """Tokens a second in training, and memory, of models of transformers by their attention."""
    registered()
    if ON_GPU and "FLASHGEN_PREPARED" not in os.environ:
        by_many(_prepare_model, [(name, each) for name in MODELS for each in COMPILED], report.text)
    table: list[tuple[str, ...]] = []
    data = report.data.setdefault("door_models", [])
    for name in MODELS:
        if report.seconds_left() < 20:
            table.append((name, "", *_cannot("out of time")))
            continue
        torch.compiler.reset()
        try:
            found = _measured_model(name, sizes, count, document, rounds)
        except Exception as error:
            table.append((name, "", *_cannot(reason(error))))
            continue
        data.append({"model": name, "tokens": count, "by": found})
        report.save()
        for implementation, each in found.items():
            table.append((name, implementation, *_model_cells(each, found)))
            print(*table[-1], sep="  ", flush=True)
    columns = ["model", "attention", "tokens a second", *(f"× {each}" for each in OTHERS), "memory (GB)", "loss"]
    said = (
        f"{sizes['num_hidden_layers']} layers of {sizes['hidden_size']}, {count} tokens; forward and backward of a step"
    )
    report.table("Models of transformers", columns, table, said)


def _measured_model(
    name: str, sizes: Mapping[str, Any], count: int, document: int, rounds: int
) -> dict[str, dict[str, Any]]:
    model, given = model_of(name, sizes), tokens(name, count, document, sizes["vocab_size"])
    found: dict[str, dict[str, Any]] = {each: {} for each in IMPLEMENTATIONS}

    def make(implementation: str) -> Call:
        if implementation == FLASH4 and not FLASH4_AT_HAND:  # transformers would look for it in the network
            raise ModuleNotFoundError("flash-attn-4 is not installed")
        step, own = steps(model, given, implementation), found[implementation]
        own["loss"] = float(step().detach())
        if ON_GPU:
            torch.cuda.reset_peak_memory_stats()
            step()
            own["bytes"] = torch.cuda.max_memory_allocated()
        return step

    makers = {each: functools.partial(make, each) for each in IMPLEMENTATIONS}
    for implementation, times in in_turns(makers, rounds, 8.0).items():
        own = found[implementation]
        if isinstance(times, str):
            own["error"] = times
        else:
            own["tokens a second"] = count / times.seconds.median
    if ON_GPU:
        torch.cuda.empty_cache()
    return found


def _model_cells(own: Mapping[str, Any], found: Mapping[str, Mapping[str, Any]]) -> tuple[str, ...]:
    rate = own.get("tokens a second")
    if rate is None:
        return _cannot(own["error"])
    peers = [found[each].get("tokens a second") for each in OTHERS]
    gigabytes = f"{own['bytes'] / 1e9:.2f}" if "bytes" in own else ""
    return f"{rate:,.0f}", *(f"{rate / peer:.3f}" if peer else "" for peer in peers), gigabytes, f"{own['loss']:.4f}"


def _cannot(reason: str) -> tuple[str, ...]:
    return f"cannot: {reason}", *[""] * (len(OTHERS) + 2)


def _prepare_model(job: tuple[str, str]) -> str:
    """Compile what the layers of a model need: the same lengths, few weights."""
    name, implementation = job
    try:
        registered()
        few = {**SIZES, "vocab_size": 128, "num_hidden_layers": 2}
        steps(model_of(name, few), tokens(name, TOKENS, DOCUMENT, 128), implementation)()
        WAIT()
    except Exception as error:
        return f"{name}, {implementation}: {reason(error)}"
    return ""


SECTIONS: Mapping[str, Callable[[Any], None]] = {"doors": doors, "door_calls": door_calls, "door_models": door_models}


def main() -> None:
    """What doors add to a call."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="the folder for report.md and report.json")
    parser.add_argument("--seconds", type=float, default=2.0, help="for each pass")
    given = parser.parse_args()
    door_calls(Report(given.out, time.monotonic() + 600), given.seconds)


if __name__ == "__main__":
    main()
