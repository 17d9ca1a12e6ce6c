"""The table of devices: what ships with flashgen, and what users add in a file of the same form.

In: ``devices.toml`` beside this module, and ``devices.toml`` in the user's configuration folder. Out: ``Cpu`` and
``Gpu`` by name. Every figure stands under the source that gives it; a file that says something else is refused with
what is wrong (``DeviceFileError``).
"""

from __future__ import annotations

import functools
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import platformdirs

from flashgen.diagnostics import nearest, quoted_list
from flashgen.targets.cpu.device import GENERIC_CPU, MIB, Cpu
from flashgen.targets.gpu.architecture import KIB
from flashgen.targets.gpu.product import Gpu
from flashgen.targets.gpu.target import GpuTarget
from flashgen.targets.registry import ARCHITECTURES

FILE_NAME = "devices.toml"
ENVIRONMENT_VARIABLE = "FLASHGEN_CONFIG_DIR"

_REQUIRED, _OPTIONAL = True, False
_GPU_FIGURES = {
    "multiprocessors": _REQUIRED,
    "clock_mhz": _REQUIRED,
    "l2_mib": _REQUIRED,
    "memory_gb_per_s": _REQUIRED,
    "tensor_16_tflops": _REQUIRED,
    "fma_f32_tflops": _REQUIRED,
    "tensor_tf32_tflops": _OPTIONAL,
    "l2_bytes_per_clock": _OPTIONAL,
    "shared_kib_per_block": _OPTIONAL,
}
_CPU_FIGURES = {
    "cores": _REQUIRED,
    "lanes": _REQUIRED,
    "l1_kib": _REQUIRED,
    "l2_kib": _REQUIRED,
    "clock_mhz": _REQUIRED,
    "memory_gb_per_s": _REQUIRED,
    "fma_per_clock": _OPTIONAL,
    "pairs_per_clock": _OPTIONAL,
    "matrix_per_clock": _OPTIONAL,
}
_WHOLE = frozenset(
    {
        *("multiprocessors", "shared_kib_per_block"),
        *("cores", "lanes", "fma_per_clock", "pairs_per_clock", "matrix_per_clock", "l1_kib", "l2_kib"),
    }
)
_MOST = 1e9


class DeviceFileError(Exception):
    """A file of devices that cannot be used; the message says where, what was expected and what came."""


@dataclass(frozen=True)
class DeviceTable:
    """Every device by name."""

    cpus: Mapping[str, Cpu]
    gpus: Mapping[str, Gpu]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of products; architectures and ``local`` are devices too."""
        return (*self.cpus, *self.gpus)


def user_file() -> Path:
    """Where users' own devices are looked for; the file need not be there."""
    chosen = os.environ.get(ENVIRONMENT_VARIABLE)
    if chosen:
        return Path(chosen).expanduser() / FILE_NAME
    return Path(platformdirs.user_config_dir("flashgen", appauthor=False)) / FILE_NAME


def known_devices(own: Path | None = None) -> DeviceTable:
    """What ships with flashgen, then the user's own, which may replace it. ``DeviceFileError`` for a wrong file."""
    shipped = _shipped()
    path = own or user_file()
    if not path.is_file():
        return shipped
    added = read_devices(path, is_own=True)
    return DeviceTable(
        MappingProxyType({**shipped.cpus, **added.cpus}), MappingProxyType({**shipped.gpus, **added.gpus})
    )


@functools.cache
def _shipped() -> DeviceTable:
    """Read once: the file is a part of the package."""
    found = read_devices(Path(__file__).with_name(FILE_NAME))
    return DeviceTable(MappingProxyType({GENERIC_CPU.name: GENERIC_CPU, **found.cpus}), found.gpus)


def product_of(target: GpuTarget) -> Gpu:
    """A product to take the clocks and bandwidths of an architecture from: the first of the next one in the table.

    It keeps the name and the shared memory of the architecture that was asked for.
    """
    shipped = _shipped().gpus.values()
    distance = {gpu.name: abs(gpu.target.capability - target.capability) for gpu in shipped}
    nearest_one = min(shipped, key=lambda gpu: (gpu.target.name != target.name, distance[gpu.name]))
    return replace(nearest_one, name=target.name, target=target)


def board_of(target: GpuTarget, reported: str) -> Gpu:
    """The product that a board says it is; of one that the table does not have, figures as of ``product_of``.

    It keeps the name and the shared memory of the target, too.
    """
    own = next((gpu for gpu in _shipped().gpus.values() if gpu.reported == reported), None)
    return product_of(target) if own is None else replace(own, name=target.name, target=target)


def read_devices(path: Path, *, is_own: bool = False) -> DeviceTable:
    """The devices of one file."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DeviceFileError(f"'{path}' cannot be read: {error.strerror or error}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise DeviceFileError(f"'{path}' is not TOML: {error}") from None
    for kind in content:
        if kind not in ("cpu", "gpu"):
            raise DeviceFileError(f"'{path}': '{kind}' is unknown; devices stand under [cpu.NAME] and [gpu.NAME]")
    try:
        gpus = {name: _gpu(name, entry, is_own=is_own) for name, entry in _entries(content, "gpu").items()}
        cpus = {name: _cpu(name, entry) for name, entry in _entries(content, "cpu").items()}
    except DeviceFileError as error:
        raise DeviceFileError(f"'{path}': {error}") from None
    return DeviceTable(MappingProxyType(cpus), MappingProxyType(gpus))


def _entries(content: Mapping[str, Any], kind: str) -> Mapping[str, Mapping[str, Any]]:
    entries = content.get(kind, {})
    if not isinstance(entries, dict) or not all(isinstance(entry, dict) for entry in entries.values()):
        raise DeviceFileError(f"'{kind}' holds tables: write [{kind}.NAME]")
    for name in entries:
        if name == "local" or name in ARCHITECTURES or name != name.strip().lower() or not name:
            raise DeviceFileError(
                f"[{kind}.{name}]: choose another name, in lower case; 'local' and architectures are taken"
            )
    return entries


def _gpu(name: str, entry: Mapping[str, Any], *, is_own: bool) -> Gpu:
    where = f"[gpu.{name}]"
    figures, sources, texts = _figures(where, entry, _GPU_FIGURES, {"name", "target", "reported"})
    target = ARCHITECTURES.get(texts.get("target", ""))
    if target is None:
        known = tuple(ARCHITECTURES)
        given = f"'{texts['target']}' is not" if "target" in texts else "'target' is missing; it names"
        raise DeviceFileError(f"{where}: {given} an architecture; known: {', '.join(known)}")
    if "shared_kib_per_block" in figures:
        target = target.with_sram(int(figures["shared_kib_per_block"]) * KIB)
    tf32 = figures.get("tensor_tf32_tflops")
    return Gpu(
        name=name,
        product=texts.get("name", name),
        reported=texts.get("reported", texts.get("name", name)),
        target=target,
        sms=int(figures["multiprocessors"]),
        clock_hz=figures["clock_mhz"] * 1e6,
        l2_bytes=int(figures["l2_mib"] * MIB),
        l2_bytes_per_clock=figures.get("l2_bytes_per_clock"),
        bandwidth=figures["memory_gb_per_s"] * 1e9,
        tensor_16=figures["tensor_16_tflops"] * 1e12,
        tensor_tf32=None if tf32 is None else tf32 * 1e12,
        fma=figures["fma_f32_tflops"] * 1e12,
        sources=MappingProxyType(sources),
        is_own=is_own,
    )


def _cpu(name: str, entry: Mapping[str, Any]) -> Cpu:
    figures, sources, texts = _figures(f"[cpu.{name}]", entry, _CPU_FIGURES, {"name"})
    return Cpu(
        name=name,
        cores=int(figures["cores"]),
        lanes=int(figures["lanes"]),
        l1_bytes=int(figures["l1_kib"]) * KIB,
        sram_bytes=int(figures["l2_kib"]) * KIB,
        source=f"{texts.get('name', name)}; {'; '.join(dict.fromkeys(sources.values()))}",
        clock_hz=figures["clock_mhz"] * 1e6,
        fma_per_clock=int(figures.get("fma_per_clock", 2)),
        bandwidth=figures["memory_gb_per_s"] * 1e9,
        pairs_per_clock=int(figures.get("pairs_per_clock", 0)),
        matrix_per_clock=int(figures.get("matrix_per_clock", 0)),
    )


def _figures(
    where: str, entry: Mapping[str, Any], known: Mapping[str, bool], texts: set[str]
) -> tuple[dict[str, float], dict[str, str], dict[str, str]]:
    """Figures with their sources, and texts: from the table itself and from each [[….figures]] in it."""
    own = {key: value for key, value in entry.items() if key not in ("figures", *texts)}
    sections = entry.get("figures", [])
    if not isinstance(sections, list) or not all(isinstance(section, dict) for section in sections):
        raise DeviceFileError(f"{where}: 'figures' are tables: write [[{where[1:-1]}.figures]]")
    figures: dict[str, float] = {}
    sources: dict[str, str] = {}
    for section in [*([own] if own else []), *sections]:
        source = section.get("source")
        if not isinstance(source, str) or not source.strip():
            raise DeviceFileError(f"{where}: figures without a 'source': say who gives them, if only \"measured\"")
        for key, value in section.items():
            if key == "source":
                continue
            if key not in known:
                close = nearest(key, (*known, *texts), limit=1)
                hint = f"; did you mean {quoted_list(close)}?" if close else f"; known: {', '.join(known)}"
                raise DeviceFileError(f"{where}: '{key}' is unknown{hint}")
            if key in figures:
                raise DeviceFileError(f"{where}: '{key}' is given twice")
            figures[key] = _number(where, key, value)
            sources[key] = source
    missing = [key for key, required in known.items() if required and key not in figures]
    if missing:
        raise DeviceFileError(f"{where}: {quoted_list(missing, 'and')} missing")
    found = {key: entry[key] for key in texts if key in entry}
    if not all(isinstance(value, str) for value in found.values()):
        raise DeviceFileError(f"{where}: {quoted_list(sorted(found), 'and')} are texts")
    return figures, sources, found


def _number(where: str, key: str, value: object) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < float(str(value)) < _MOST or (key in _WHOLE and not isinstance(value, int)):
        kind = "a whole number" if key in _WHOLE else "a number"
        raise DeviceFileError(f"{where}: '{key}' is {value!r}; it has to be {kind} above 0")
    return float(str(value))
