"""Specs to generated packages: ``flashgen build``.

In: spec files, targets. Out: a folder for each attention, with sources and, for targets that are named, binaries; a
``BuildResult`` that says what changed and what was left out. Nothing here imports torch.

The files of ``generated/<name>/`` are the operator module, the sources, their headers in ``include``, the binaries, a
copy of the spec, and a manifest that says what is what. They are the same bytes on every machine; binaries, for one
version of their compiler.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import Any

from flashgen.compiler.compiled import CompiledKernel, assembled, compiled
from flashgen.compiler.package import folder as package_folder
from flashgen.compiler.package.folder import FolderRefused
from flashgen.compiler.package.manifest import FILE_NAME, INCLUDE, SPEC_FILE_NAME, Manifest, digest
from flashgen.compiler.pipeline import compile_spec, target_named
from flashgen.compiler.reading import Constant, read_file
from flashgen.diagnostics import SpecError
from flashgen.emit.environment import environment
from flashgen.emit.kernel_source import KernelSource
from flashgen.emit.text import pascal_case, spec_digest, spec_lines
from flashgen.ir.serialize import spec_to_data
from flashgen.ir.spec import AttentionSpec, CapturedTensor, Param
from flashgen.ir.text import text
from flashgen.ir.types import ElementType, ScalarType
from flashgen.plan.packed import Packed
from flashgen.plan.plan import ANY_CALLS, USUAL_CALLS, CallKind
from flashgen.store.gallery import spec_file
from flashgen.targets.protocol import AnyTarget
from flashgen.toolchains.cpp import CompilerMissing
from flashgen.version import __version__

_NO_BINARIES = (
    "binaries for GPUs, which are compiled when a call needs them; "
    "`flashgen build --target {targets}` makes them now, in about 10 seconds a head dimension and target"
)
_NOT_DETERMINISTIC = (
    "binaries for gradients with deterministic=True, which are compiled when a call needs them; "
    "`flashgen build --deterministic` makes them now"
)
# What a package holds where nobody says which targets.
USUAL_TARGETS = ("cpu", "sm_80", "sm_90a")


@dataclass(frozen=True)
class BuildResult:
    """One generated package; ``changed`` are the files that were not yet as they are to be.

    ``rejected`` are sentences about tiles of GPU kernels that were passed over because registers spilled; ``refusal``
    says why the folder would not be written, where that was asked (``check``). ``left`` are sentences about what was
    left out, and how to get it. ``size`` is that of all files, in bytes.
    """

    name: str
    folder: Path
    files: tuple[Path, ...]
    changed: tuple[Path, ...]
    seconds: float
    rejected: tuple[str, ...] = ()
    refusal: str | None = None
    left: tuple[str, ...] = ()
    size: int = 0


def build_file(
    path: Path | str,
    *,
    output: Path = Path("generated"),
    targets: Sequence[str] | None = None,
    constants: Mapping[str, Constant] | None = None,
    check: bool = False,
    force: bool = False,
    deterministic: bool = False,
) -> tuple[BuildResult, ...]:
    """Write ``output/<name>/`` for every spec of a file and compile it into the cache.

    Only a folder that flashgen wrote is written, and only files that are as it wrote them; ``force`` replaces others of
    the same names. With ``check`` nothing is written; ``changed`` then names the files that differ. Binaries for GPUs
    have the kernels of calls with ``deterministic=True`` where ``deterministic`` is set here, too. Where there is no
    compiler the package is written all the same, without binaries. Raises ``SpecError``, ``FolderRefused``,
    ``CompileFailed``, ``OSError``.
    """
    how = {"check": check, "force": force, "deterministic": deterministic}
    return tuple(build_files([spec_file(path)], output=output, targets=targets, constants=constants, **how))


def build_files(
    paths: Sequence[Path | str],
    *,
    output: Path = Path("generated"),
    targets: Sequence[str] | None = None,
    constants: Mapping[str, Constant] | None = None,
    check: bool = False,
    force: bool = False,
    deterministic: bool = False,
) -> Iterator[BuildResult]:
    """``build_file`` for several files, none of which may hold an attention of a name that another has."""
    wanted = [target_named(each) for each in (USUAL_TARGETS if targets is None else targets)]
    specs: dict[str, tuple[AttentionSpec, Path | str]] = {}
    for path in dict.fromkeys(paths):
        for spec in read_file(path, constants).specs:
            if spec.name in specs:
                raise FolderRefused(
                    f"'{specs[spec.name][1]}' and '{path}' both hold an attention '{spec.name}', and both would be "
                    f"written to '{output / spec.name}'; build them into different folders with -o"
                )
            specs[spec.name] = spec, path
    calls = None if targets is None else ANY_CALLS if deterministic else USUAL_CALLS
    packages = [_package(spec, output / spec.name, wanted, calls) for spec, _ in specs.values()]
    refusals = (package_folder.compare(each.folder, each.files).refusal(force=force) for each in packages)
    refusal = None if check else next((each for each in refusals if each is not None), None)
    if refusal is not None:
        raise FolderRefused(refusal)
    for package in packages:
        if check:
            found = package_folder.compare(package.folder, package.files)
            yield _result(package, found, package.seconds, force=force)
        else:
            yield _write(package, force=force)


@dataclass(frozen=True)
class _Package:
    """A package before it is written; ``kernels`` are its sources and what their targets say of them."""

    name: str
    folder: Path
    files: Mapping[str, bytes]
    kernels: Sequence[tuple[CompiledKernel[Any, Any], Packed]]
    left: Sequence[str]
    seconds: float


def _package(spec: AttentionSpec, folder: Path, wanted: Sequence[AnyTarget], calls: CallKind | None) -> _Package:
    start = time.perf_counter()
    kernels, left = _kernels(spec, wanted, calls)
    files = package_files(spec, [(kernel.source, packed) for kernel, packed in kernels])
    return _Package(spec.name, folder, files, kernels, left, time.perf_counter() - start)


def _write(package: _Package, *, force: bool) -> BuildResult:
    start = time.perf_counter()
    found = package_folder.write(package.folder, package.files, force=force)
    # The cache is filled for the machine at hand, so that the import finds everything there.
    for target in dict.fromkeys(kernel.target for kernel, _ in package.kernels if kernel.target.device is not None):
        with contextlib.suppress(CompilerMissing):
            target.compile([kernel.source for kernel, _ in package.kernels if kernel.target == target])
    return _result(package, found, package.seconds + time.perf_counter() - start, force=force)


def _result(package: _Package, found: package_folder.Comparison, seconds: float, *, force: bool) -> BuildResult:
    return BuildResult(
        name=package.name,
        folder=package.folder,
        files=tuple(package.folder / name for name in package.files),
        changed=tuple(package.folder / name for name in (*found.write, *found.remove)),
        seconds=seconds,
        rejected=tuple(
            f"{source.file}: {lost.pass_name}, {lost.reason}"
            for source in (packed.described for _, packed in package.kernels if packed.described is not None)
            for lost in source.rejected
            if "spills" in lost.reason
        ),
        refusal=found.refusal(force=force),
        left=tuple(package.left),
        size=sum(map(len, package.files.values())),
    )


def _kernels(
    spec: AttentionSpec, wanted: Sequence[AnyTarget], calls: CallKind | None
) -> tuple[Sequence[tuple[CompiledKernel[Any, Any], Packed]], Sequence[str]]:
    """Every head dimension for every target, and sentences about what was left out.

    Texts take milliseconds and nothing but flashgen. Binaries that a package ships take NVRTC and seconds, so that they
    are made where targets were named: for these ``calls``. Where none was named there are no calls, and a target is
    left out where it refuses the spec, unless all do.
    """
    kernels: list[tuple[CompiledKernel[Any, Any], Packed]] = []
    left: dict[str, None] = {}
    refused: list[SpecError] = []
    for target in wanted:
        try:
            made = [part for kernel in compile_spec(spec, target) for part in kernel.parts()]
            kernels += _packed(made, target, left, calls)
        except SpecError as error:
            if calls is not None:
                raise
            refused.append(error)
            left[f"'{spec.name}' for {target.name}: {error.diagnostics[0].message}"] = None
    if refused and not kernels:
        raise refused[0]
    if all(packed.described is None for _, packed in kernels):  # what a schedule says for GPUs is of no use to anybody
        left |= dict.fromkeys(each for kernel, _ in kernels for each in kernel.target.leaves_out(kernel.variant))
    elif calls is None:
        left[_NO_BINARIES.format(targets=",".join(dict.fromkeys(kernel.target.name for kernel, _ in kernels)))] = None
    return kernels, tuple(left)


def _packed(
    kernels: Sequence[CompiledKernel[Any, Any]], target: AnyTarget, left: dict[str, None], calls: CallKind | None
) -> Sequence[tuple[CompiledKernel[Any, Any], Packed]]:
    """The kernels that go into the package: with binaries, those that compiling did not find fault with."""
    if calls is not None and target.ships_binaries:
        try:
            made = assembled([compiled(each.variant, target, part=each.part) for each in kernels], calls)
        except CompilerMissing as error:
            what = "libraries for CPUs" if target.device is not None else "binaries for GPUs"
            left[f"{what}, which are compiled when a call needs them: {error}"] = None
        else:
            found = [(each.kernel, each.kernel.packed(each.binary)) for each in made]
            kinds = {image.described.deterministic for _, packed in found for image in packed.binaries}
            if False in kinds and True not in kinds:
                left[_NOT_DETERMINISTIC] = None
            # What was tuned here runs here, and is not what a package ships.
            return (
                found if target.device is None else [(own, each) for own, (_, each) in zip(kernels, found, strict=True)]
            )
    return [(each, each.packed()) for each in kernels]


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
