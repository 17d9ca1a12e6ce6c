"""Manifests that are damaged: whatever of one is lost or another value, the import says so and names the place."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flashgen.compiler.package.manifest import Manifest
from flashgen.plan.packed import ManifestBinary, ManifestGpuKernel

OTHERS: tuple[object, ...] = (None, True, 7, "other", {})


@pytest.fixture(scope="module")
def manifest(repository: Path) -> Manifest:
    """Of one source of each kind, with everything that a manifest may say."""
    whole = Manifest.read(repository / "generated" / "alibi")
    return dataclasses.replace(
        whole,
        kernels=whole.kernels[:1],
        gpu_kernels=(ManifestGpuKernel("alibi_d64_forward_bf16", "sm_80", 255, 51200, 8, 16, 128),),
        gpu_sources=whole.gpu_sources[:1],
        binaries=(
            ManifestBinary("alibi_d64_cpu.so", "alibi_d64_cpu.cpp", "g++", features=("avx2",), tiles={"a": {"Br": 8}}),
            ManifestBinary("alibi_d64_backward_bf16_sm_80.cubin", "alibi_d64_backward_bf16_sm_80.cu", "NVRTC", False),
        ),
    )


def written(folder: Path, content: object) -> Path:
    (folder / "manifest.json").write_text(json.dumps(content))
    return folder


def places(content: Any, at: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Of every value inside."""
    for name, value in content.items() if isinstance(content, dict) else enumerate(content):
        yield (*at, name)
        if isinstance(value, dict | list):
            yield from places(value, (*at, name))


def shown(place: tuple[str | int, ...]) -> str:
    return "".join(f"[{each}]" if isinstance(each, int) else f".{each}" for each in place).lstrip(".")


def test_it_reads_what_it_wrote(manifest: Manifest, tmp_path: Path) -> None:
    assert Manifest.read(written(tmp_path, json.loads(manifest.to_json()))) == manifest


def refusal(folder: Path, content: Any, place: tuple[str | int, ...], *other: object) -> str:
    """What is said where a value is lost, or another."""
    damaged = inside = copy.deepcopy(content)
    *way, last = place
    for each in way:
        inside = inside[each]
    if other:
        (inside[last],) = other
    else:
        del inside[last]
    with pytest.raises(ImportError, match=r"manifest\.json' .*run 'flashgen build'") as caught:
        Manifest.read(written(folder, damaged))
    return str(caught.value)


def test_each_value_of_another_type_is_named(manifest: Manifest, tmp_path: Path) -> None:
    whole = json.loads(manifest.to_json())
    found = [place for place in places(whole) if place != ("format",)]
    assert len(found) > 100
    for place in found:
        assert f"'{shown(place)}" in refusal(tmp_path, whole, place, {"unknown": 0.5})


def test_each_field_that_is_lost_is_named(manifest: Manifest, tmp_path: Path) -> None:
    whole = json.loads(manifest.to_json())
    for place in places(whole):
        said = refusal(tmp_path, whole, place)
        is_optional = place[0] == "binaries" or place[-1] in ("gpu_sources", "dq_sent")
        is_field = isinstance(place[-1], str) and place[:-1] != ("files",)
        if is_field and not is_optional:
            assert f"'{shown(place)}' is missing" in said


def test_no_other_value_is_taken(manifest: Manifest, tmp_path: Path) -> None:
    """Of the right type, too: a tile that is not the one of the binary would read beside its buffers."""
    whole = json.loads(manifest.to_json())
    for place in places(whole):
        before = whole
        for each in place:
            before = before[each]
        for other in OTHERS:
            if (type(other), other) != (type(before), before):
                refusal(tmp_path, whole, place, other)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "7", "[" * 100_000, '{"a":' * 100_000, "\x00"])
def test_what_is_no_manifest(text: str, tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(ImportError, match=r"manifest\.json' cannot be read: .*run 'flashgen build'"):
        Manifest.read(tmp_path)


def test_another_version_is_named(manifest: Manifest, tmp_path: Path) -> None:
    older = {**json.loads(manifest.to_json()), "format": 8, "flashgen": "0.2.0", "of another version": 1}
    with pytest.raises(ImportError, match=r"written by flashgen 0\.2\.0, this is .*run 'flashgen build'"):
        Manifest.read(written(tmp_path, older))
