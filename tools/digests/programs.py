"""What the pieces of the sample are made of: programs through flashgen's own stages, as users' calls have them made.

In: a ``Piece``. Out: its entries: of each kernel or function the digest of its machine code, and what it takes. What is
asked of flashgen is imported here, because its modules move: a spec's op, providers of kernels, devices, the command
line. Packages of ``flashgen build`` would not do: of GPUs they have dense calls alone, with one choice of tiles, and of
CPUs a library that nobody runs where there is a compiler.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import re
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import flashgen
from flashgen.analysis.tangent import with_slopes
from flashgen.cli import main as command
from flashgen.hosts.cuda import CudaMachine
from flashgen.hosts.gpu_calls import kernel_variant, launches_of
from flashgen.hosts.gpu_provider import GpuProvider
from flashgen.kinds.dense import DENSE
from flashgen.kinds.forward_mode import FORWARD_MODE
from flashgen.kinds.kind import Kind
from flashgen.kinds.table import KINDS
from flashgen.targets.cpu.target import CpuTarget
from flashgen.targets.device_table import known_devices
from tools.digests.elf import function_digests, kernel_digests
from tools.digests.sample import BACKWARD, TEXTS, Piece

Entry = dict[str, Any]

# Of each target a product whose tiles are taken.
_PRODUCTS = {"sm_80": "a100", "sm_90a": "h200", "avx2": "zen3", "avx512": "skylake-sp"}
_MARCH = {"avx2": "-march=haswell", "avx512": "-march=skylake-avx512"}
_CODES = {"f32": 0, "bf16": 1, "f16": 2, "f8": 3}
_ASSEMBLED = re.compile(r"Function properties for (\w+)\n(?:.*\n){1,4}?.*Compile time = ([\d.]+) ms")


class Values(dict[str, float]):
    """Those of ``struct Arguments`` by name; what is not said is there: every gradient is asked for."""

    def __missing__(self, name: str) -> float:
        return 1.0


def entries_of(piece: Piece) -> dict[str, Entry]:
    """The entries of a piece by what follows its key; what a target refuses is one, with the sentence."""
    op = _op(piece.spec)
    if piece.head_dim >= len(op.spec.head_dims) or ("dropout" in piece.option and op.spec.dropout is None):
        return {}
    made = _plan if piece.kind == "plan" else _gpu if piece.where == "gpu" else _cpu
    try:
        return made(piece)
    except SystemExit as error:  # the command's
        return {"refused": {"digest": f"exit code {error.code}"}}
    except Exception as error:
        if not type(error).__module__.startswith("flashgen."):
            raise
        return {"refused": {"digest": f"{type(error).__name__}: {str(error).splitlines()[0]}"}}


@functools.lru_cache(maxsize=4)
def _op(name: str) -> Any:
    return (
        flashgen.loads(TEXTS[name], backend="reference") if name in TEXTS else flashgen.load(name, backend="reference")
    )


# -- predictions -------------------------------------------------------------------------------------------------------


def _plan(piece: Piece) -> dict[str, Entry]:
    """What ``flashgen plan`` predicts of every pass, head dimension and element type."""
    said = io.StringIO()
    with tempfile.TemporaryDirectory(prefix="digests-") as folder, contextlib.redirect_stdout(said):
        given = piece.spec
        if piece.spec in TEXTS:
            given = f"{folder}/{piece.spec}.attn"
            Path(given).write_text(TEXTS[piece.spec], encoding="utf-8")
        command(["plan", given, "--device", _PRODUCTS[piece.target], "--json"], standalone_mode=False)
    return {
        f"d{plan['head_dim'].replace('/', '_')} {each['pass']} {each['element']}": {
            "bytes": each["hbm_bytes"]["kernels"],
            "predicted_seconds": each["predicted_seconds"],
        }
        for plan in json.loads(said.getvalue())
        for each in plan["passes"]
    }


# -- GPUs --------------------------------------------------------------------------------------------------------------


def _gpu(piece: Piece) -> dict[str, Entry]:
    """The kernels of the program that a call has compiled, without a GPU: a board of whose driver nothing is asked."""
    kind = KINDS[piece.kind]
    head_dim = _op(piece.spec).spec.head_dims[piece.head_dim]
    if kind is not DENSE and _provider(piece.spec, piece.target, DENSE)(head_dim, 0).of(kind) is None:
        return {}
    name: Any = piece.name
    values, start = _values(piece), time.time()
    provider = _provider(piece.spec, piece.target, kind)
    made, _ = provider.of_call(head_dim, provider.machines(0), name, values)
    seconds, path = time.time() - start, made.binary(frozenset())
    launches = launches_of(made.plan, name, values).kernels
    taken = {each.name: each for each in made.resources}
    log = (path.parent / "compile.log").read_text(encoding="utf-8")
    assembled = {each: float(number) / 1e3 for each, number in _ASSEMBLED.findall(log)}
    is_new = path.stat().st_mtime >= start
    return {
        each: {
            "digest": digest,
            **_resources(taken.get(each), launches.get(each)),
            "assembler_seconds": assembled.get(each) if is_new else None,
            "program_seconds": seconds if is_new else None,
        }
        for each, digest in kernel_digests(path.read_bytes()).items()
    }


def _resources(taken: Any, launch: Any) -> Entry:
    """What the assembler said of a kernel, and what its launch says, where the call starts it."""
    found: Entry = {"shared_bytes": 0}
    if taken is not None:
        found = {name: getattr(taken, name) for name in ("registers", "spill_bytes", "stack_bytes", "shared_bytes")}
    if launch is not None:
        found |= {"shared_bytes": found["shared_bytes"] + launch.shared_bytes, "threads": launch.threads}
    return found


@functools.lru_cache(maxsize=32)
def _provider(spec: str, target: str, kind: Kind) -> GpuProvider:
    gpu = known_devices().gpus[_PRODUCTS[target]]
    driver: Any = SimpleNamespace(size=None)
    machine = CudaMachine("of the sample", gpu.target, gpu, driver.size, driver)
    return GpuProvider(_op(spec).spec, lambda _index: machine, kind=kind)


def _values(piece: Piece) -> Values:
    """Of a long call with heads in groups of four, so far as they decide what is compiled."""
    rows = 64 if piece.option == "many rows" else 4
    length, heads = (512, 8) if piece.option == "short" else (8192, 32)
    code = _CODES["bf16" if piece.kind == "cached, 8 bits" else piece.element]
    found = {
        "element": code,
        "key_element": _CODES["f8"] if piece.kind == "cached, 8 bits" else code,
        "batch": 1,
        "heads": heads,
        "kv_heads": heads // 4,
        "group_rows": rows,
        "q_len": length,
        "kv_len": length,
        "dropout_threshold": int("dropout" in piece.option),
        "deterministic": int("deterministic" in piece.option),
    }
    if piece.kind == "tangents":
        found |= {f"t_{each}": int(each == "q" or piece.option != "of q alone") for each in "qkv"}
    return Values(found)


# -- CPUs --------------------------------------------------------------------------------------------------------------


def _cpu(piece: Piece) -> dict[str, Entry]:
    """The functions of the library that a call has compiled, for a CPU that need not be the one at hand."""
    target = CpuTarget(known_devices().cpus[_PRODUCTS[piece.target]])
    with _compiler(piece.target):
        start = time.time()
        source = _source(piece, target)
        (binary,) = target.compile([source])
        seconds = None if binary.cached else time.time() - start
    digests = function_digests(binary.path)
    return {name: {"digest": digest, "program_seconds": seconds} for name, digest in digests.items()}


def _source(piece: Piece, target: CpuTarget) -> Any:
    """The text of a library. Dense calls and ragged batches share a text, parts of which are compiled."""
    spec = _op(piece.spec).spec
    head_dim = spec.head_dims[piece.head_dim]
    dense = kernel_variant(spec, head_dim)
    match piece.kind:
        case "dense" | "ragged":
            part = f"ragged_{piece.name}" if piece.kind == "ragged" else piece.name
            return target.emit(dense, target.plan(dense)).of_part(part)
        case "parts" | "slices":
            variant = kernel_variant(spec, head_dim, KINDS[piece.kind])
            return target.emit(variant, target.plan(variant))
    moving = with_slopes(dense) if piece.name == BACKWARD else kernel_variant(spec, head_dim, FORWARD_MODE)
    return target.emit(moving, target.plan(moving))


@contextlib.contextmanager
def _compiler(target: str) -> Iterator[None]:
    """The compiler that ``CXX`` names, or the usual one, told of another CPU as a user tells it."""
    before = os.environ.get("CXX")
    os.environ["CXX"] = f"{before or 'c++'} {_MARCH[target]}"
    try:
        yield
    finally:
        del os.environ["CXX"]
        os.environ |= {} if before is None else {"CXX": before}
