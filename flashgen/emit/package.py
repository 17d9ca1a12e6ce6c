"""Stage 4c: everything that ``flashgen build`` writes for one spec, as file names and texts.

In: a spec, its kernels' sources and plans. Out: the files of ``generated/<name>/``: the operator module, the sources,
a copy of the spec, and a manifest that says what is what. The same bytes on every machine.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from flashgen.emit.environment import environment
from flashgen.emit.kernel_source import KernelSource
from flashgen.emit.text import pascal_case, spec_lines
from flashgen.ir.spec import AttentionSpec, Param, Pointwise, Softmax
from flashgen.ir.text import text
from flashgen.ir.types import ElementType, ScalarType
from flashgen.plan.plan import Plan
from flashgen.version import __version__

MANIFEST = "manifest.json"
# Counts up when the files of a package or the kernels' arguments change their meaning.
FORMAT = 1


@dataclass(frozen=True)
class ManifestKernel:
    """One generated source of a package."""

    file: str
    target: str
    symbol: str


@dataclass(frozen=True)
class Manifest:
    """What a generated package says of itself."""

    name: str
    spec: str
    imports: Mapping[str, str]
    constants: Mapping[str, bool | int | float]
    kernels: tuple[ManifestKernel, ...]


@dataclass(frozen=True)
class _Argument:
    """A captured tensor or param in the signature of the generated function."""

    name: str
    annotation: str
    optional: bool
    description: str


def spec_digest(spec: AttentionSpec) -> str:
    """sha256 of what the spec says: its text, its imports' texts and the constants in force."""
    content = {
        "name": spec.name,
        "sources": [source.text for source in spec.sources],
        "constants": [[name, repr(value)] for name, value in spec.constants],
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def package_files(spec: AttentionSpec, kernels: Sequence[tuple[KernelSource, Plan]]) -> Mapping[str, str]:
    """The files of the package by name."""
    files = {"__init__.py": _module(spec), _spec_file(spec): spec.sources[0].text, MANIFEST: _manifest(spec, kernels)}
    return files | {source.file_name: source.text for source, _ in kernels}


def _spec_file(spec: AttentionSpec) -> str:
    return f"{spec.name}.attn"


def _manifest(spec: AttentionSpec, kernels: Sequence[tuple[KernelSource, Plan]]) -> str:
    content = {
        "format": FORMAT,
        "flashgen": __version__,
        "name": spec.name,
        "sha256": spec_digest(spec),
        "spec": _spec_file(spec),
        "imports": {source.name: source.text for source in spec.sources[1:]},
        "constants": dict(spec.constants),
        "kernels": [
            {
                "file": source.file_name,
                "target": source.target,
                "symbol": source.symbol,
                "head_dim": {"qk": source.head_dim.qk, "v": source.head_dim.v},
                "tiles": {"forward": _tile(plan, "forward"), "backward": _tile(plan, "backward")},
            }
            for source, plan in kernels
        ],
    }
    return json.dumps(content, indent=2) + "\n"


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a package; ``ImportError`` where it is damaged or another version's."""
    path = folder / MANIFEST
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["format"] != FORMAT:
            writer = f"'{folder}' was written by flashgen {content['flashgen']}, this is {__version__}"
            raise ImportError(f"{writer}; {rebuild_hint(folder)}")
        return Manifest(
            name=content["name"],
            spec=content["spec"],
            imports=content["imports"],
            constants=content["constants"],
            kernels=tuple(ManifestKernel(each["file"], each["target"], each["symbol"]) for each in content["kernels"]),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ImportError(f"'{path}' cannot be read ({error}); {rebuild_hint(folder)}") from None


def rebuild_hint(folder: Path) -> str:
    """What to do about a package that does not work."""
    return f"run 'flashgen build' for its spec again to write '{folder.name}' anew"


def _tile(plan: Plan, which: str) -> dict[str, int]:
    tile = plan.forward if which == "forward" else plan.backward
    return {"Br": tile.Br, "Bc": tile.Bc, "sram_bytes": tile.sram_bytes}


def _module(spec: AttentionSpec) -> str:
    dtypes = spec.dtypes or (ElementType.F32, ElementType.BF16, ElementType.F16)
    return (
        environment()
        .get_template("op/module.py.jinja")
        .render(
            name=spec.name,
            class_name=pascal_case(spec.name),
            version=__version__,
            digest=spec_digest(spec)[:16],
            spec_file=_spec_file(spec),
            spec_lines=spec_lines(spec),
            arguments=tuple(
                [
                    _Argument(
                        tensor.name,
                        "Tensor",
                        False,
                        f"{tensor.element}[{', '.join(text(each) for each in tensor.shape)}]{_receives(tensor.grad)}.",
                    )
                    for tensor in spec.tensors
                ]
                + [_param(param) for param in spec.params]
            ),
            dropout=spec.dropout is not None,
            softmax=isinstance(spec.weights, Softmax),
            pointwise=isinstance(spec.weights, Pointwise),
            head_dims=" or ".join(str(each) for each in spec.head_dims),
            dtypes=" or ".join(str(each) for each in dtypes),
        )
    )


def _param(param: Param) -> _Argument:
    number = "float" if param.type is ScalarType.FLOAT else "int"
    default = "" if param.default is None else f"; by default {text(param.default)}"
    return _Argument(
        param.name,
        f"{number} | Tensor{'' if param.default is None else ' | None'}",
        param.default is not None,
        f"a number or a 0-dim tensor{_receives(param.grad)}{default}.",
    )


def _receives(grad: bool) -> str:
    return ", receives a gradient" if grad else ""
