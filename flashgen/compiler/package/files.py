"""Stage 4c: everything that ``flashgen build`` writes for one spec, as file names and texts.

In: a spec, its kernels' sources and what their targets say of them, with or without binaries. Out: the files of
``generated/<name>/``: the operator module, the sources, their headers in ``include``, the binaries, a copy of the spec,
and a manifest that says what is what. The same bytes on every machine; binaries, for one version of their compiler.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import PurePath

from flashgen.compiler.package.manifest import FILE_NAME, INCLUDE, SPEC_FILE_NAME, Manifest, digest
from flashgen.emit.environment import environment
from flashgen.emit.kernel_source import KernelSource
from flashgen.emit.text import pascal_case, spec_digest, spec_lines
from flashgen.ir.serialize import spec_to_data
from flashgen.ir.spec import AttentionSpec, CapturedTensor, Param
from flashgen.ir.text import text
from flashgen.ir.types import ElementType, ScalarType
from flashgen.plan.packed import Packed
from flashgen.version import __version__


def package_files(spec: AttentionSpec, kernels: Sequence[tuple[KernelSource, Packed]]) -> Mapping[str, bytes]:
    """The files of the package by name."""
    texts = {
        "__init__.py": _module(spec),
        _spec_file(spec): spec.sources[0].text,
        SPEC_FILE_NAME: json.dumps(spec_to_data(_portable(spec)), indent=1, ensure_ascii=False) + "\n",
    }
    texts |= {source.file_name: source.text for source, _ in kernels}
    texts |= {f"{INCLUDE}/{name}": header for source, _ in kernels for name, header in source.headers}
    files = {name: text.encode() for name, text in texts.items()}
    packed = [each for _, each in kernels]
    files |= {image.described.file: image.content for each in packed for image in each.binaries}
    manifest = Manifest(
        name=spec.name,
        sha256=spec_digest(spec),
        kernels=tuple(each.kernel for each in packed if each.kernel is not None),
        gpu_kernels=tuple(kernel for each in packed for kernel in each.kernels),
        gpu_sources=tuple(each.described for each in packed if each.described is not None),
        binaries=tuple(image.described for each in packed for image in each.binaries),
        files={name: digest(content) for name, content in sorted(files.items())},
    )
    return {**files, FILE_NAME: manifest.to_json().encode()}


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


def _module(spec: AttentionSpec) -> str:
    names = [*(tensor.name for tensor in spec.tensors), *(param.name for param in spec.params)]
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
            arguments=[*map(_tensor, spec.tensors), *map(_param, spec.params)],
            private=any(name.startswith("__") and not name.endswith("__") for name in names),
            found=next(name for name in ("found", *(f"found_{n}" for n in range(len(names)))) if name not in names),
            dropout=spec.dropout is not None,
            exponential=spec.weights.form.exponential,
            has_lse=spec.weights.form.normalised,
            takes_f8=spec.takes_f8,
            head_dims=" or ".join(str(each) for each in spec.head_dims),
            dtypes=" or ".join(str(each) for each in dtypes),
        )
    )


def _tensor(tensor: CapturedTensor) -> dict[str, object]:
    """A captured tensor in the signature of the generated function."""
    shape = f"{tensor.element}[{', '.join(text(each) for each in tensor.shape)}]{_receives(tensor.grad)}."
    return {"name": tensor.name, "annotation": "Tensor", "optional": False, "description": shape}


def _param(param: Param) -> dict[str, object]:
    number = "float" if param.type is ScalarType.FLOAT else "int"
    default = "" if param.default is None else f"; by default {text(param.default)}"
    return {
        "name": param.name,
        "annotation": f"{number} | Tensor{'' if param.default is None else ' | None'}",
        "optional": param.default is not None,
        "description": f"a number or a 0-dim tensor{_receives(param.grad)}{default}.",
    }


def _receives(grad: bool) -> str:
    return ", receives a gradient" if grad else ""
