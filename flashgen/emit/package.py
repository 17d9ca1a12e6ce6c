"""Stage 4c: everything that ``flashgen build`` writes for one spec, as file names and texts.

In: a spec, its kernels' sources and plans, binaries for GPUs. Out: the files of ``generated/<name>/``: the operator
module, the sources, the binaries, a copy of the spec, and a manifest that says what is what. The same bytes on every
machine; binaries, for the same version of their compiler.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath

from flashgen.emit.environment import environment
from flashgen.emit.kernel_source import KernelSource
from flashgen.emit.text import pascal_case, spec_digest, spec_lines
from flashgen.ir.serialize import spec_to_data
from flashgen.ir.spec import AttentionSpec, Param, Pointwise, Softmax
from flashgen.ir.text import text
from flashgen.ir.types import ElementType, ScalarType
from flashgen.plan.manifest import (
    FILE_NAME,
    SPEC_FILE_NAME,
    Manifest,
    ManifestBinary,
    ManifestGpuKernel,
    ManifestKernel,
)
from flashgen.plan.plan import Plan
from flashgen.version import __version__


@dataclass(frozen=True)
class _Argument:
    """A captured tensor or param in the signature of the generated function."""

    name: str
    annotation: str
    optional: bool
    description: str


@dataclass(frozen=True)
class GpuFiles:
    """One head dimension for one GPU architecture: what is written, and what the manifest says of it."""

    source: KernelSource
    image: bytes
    binary: ManifestBinary
    kernels: tuple[ManifestGpuKernel, ...]


def package_files(
    spec: AttentionSpec, kernels: Sequence[tuple[KernelSource, Plan]], gpu: Sequence[GpuFiles] = ()
) -> Mapping[str, bytes]:
    """The files of the package by name."""
    texts = {
        "__init__.py": _module(spec),
        _spec_file(spec): spec.sources[0].text,
        SPEC_FILE_NAME: json.dumps(spec_to_data(_portable(spec)), indent=1, ensure_ascii=False) + "\n",
        FILE_NAME: _manifest(spec, kernels, gpu),
    }
    texts |= {
        source.file_name: source.text for source in (*(source for source, _ in kernels), *(each.source for each in gpu))
    }
    return {name: text.encode() for name, text in texts.items()} | {each.binary.file: each.image for each in gpu}


def _portable(spec: AttentionSpec) -> AttentionSpec:
    """The spec with its sources under their own names alone: where they lay is no matter of the package."""
    names = {source.name: PurePath(source.name).name for source in spec.sources}
    return replace(
        spec,
        sources=tuple(replace(source, name=names[source.name]) for source in spec.sources),
        statements=tuple(
            replace(each, span=replace(each.span, file=names.get(each.span.file, each.span.file)))
            for each in spec.statements
        ),
    )


def _spec_file(spec: AttentionSpec) -> str:
    return f"{spec.name}.attn"


def _manifest(spec: AttentionSpec, kernels: Sequence[tuple[KernelSource, Plan]], gpu: Sequence[GpuFiles]) -> str:
    return Manifest(
        name=spec.name,
        sha256=spec_digest(spec),
        kernels=tuple(
            ManifestKernel(
                source.file_name, source.target, source.symbol, str(source.head_dim), plan.forward, plan.backward
            )
            for source, plan in kernels
        ),
        gpu_kernels=tuple(kernel for each in gpu for kernel in each.kernels),
        binaries=tuple(each.binary for each in gpu),
    ).to_json()


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
