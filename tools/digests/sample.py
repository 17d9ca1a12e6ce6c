"""The sample of programs whose machine code is compared: every kind of call, pass, element type, schedule and option.

In: the names of the gallery's specs. Out: ``Piece``s, each one program that a compiler makes, or figures of one call.
The quick sample has all of the gallery for Hopper and every kind of call, pass, element type and option; which of them
are of which target goes by turns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

FORWARD, BACKWARD, ALL = "forward", "backward", "all"
PASSES = (FORWARD, BACKWARD)
GPUS = ("sm_80", "sm_90a")
CPUS = ("avx2", "avx512")
USUAL = "usual"

# What a GPU's kernels take the rows of, and the passes that there are.
GPU_KINDS: Mapping[str, Sequence[str]] = {
    "dense": PASSES,
    "ragged": PASSES,
    "cached": (FORWARD,),
    "cached, 8 bits": (FORWARD,),
    "parts": PASSES,
    "slices": PASSES,
    "8 bits": (FORWARD,),
    "by blocks": (FORWARD,),
    "tangents": (FORWARD,),
    "tangents, backward": (BACKWARD,),
}
CPU_KINDS: Mapping[str, Sequence[str]] = {
    "dense": PASSES,
    "ragged": (ALL,),
    "parts": (ALL,),
    "slices": (ALL,),
    "tangents": (FORWARD,),
    "tangents, backward": (BACKWARD,),
}
# Kind, passes, option: beside the usual call of it.
OPTIONS: Sequence[tuple[str, Sequence[str], str]] = (
    ("dense", PASSES, "dropout"),
    ("dense", (BACKWARD,), "deterministic"),
    ("dense", PASSES, "short"),
    ("cached", (FORWARD,), "many rows"),
    ("tangents", (FORWARD,), "of q alone"),
    ("dense", (BACKWARD,), "dropout, deterministic"),
    ("ragged", PASSES, "dropout"),
    ("ragged", (BACKWARD,), "deterministic"),
)
_QUICK_OPTIONS = 5  # of these the first

# Of the gallery: one for each way that a score, a mask, weights or lists are computed.
EIGHT = (
    "alibi",
    "bert",
    "causal",
    "gaussian_regression",
    "gemma2_local",
    "gpt_oss",
    "nsa_selected",
    "packed_documents",
)
_SLOW = ("nsa_selected",)  # A program takes half a minute: the quick sample has only the kinds that few specs take.
# What the gallery has not: a schedule, warps that share rows, and everything that is captured at once.
TEXTS: Mapping[str, str] = {
    "pinned": "attention pinned { head_dim 64 dtype bf16 mask causal schedule { Br = 64 Bc = 64 backward_Br = 64 } }",
    "latent": "attention latent { head_dim 576/512  dtype bf16  mask causal }",
    "rich": """attention rich {
        head_dim 40
        param    gain: f32 = 1.0 grad
        tensor   gate: f32[B, H, Nk] grad
        tensor   table: f32[32, H] grad
        tensor   doc: i32[B, Nk]
        score    gain * s - 0.01 * sqdist + gate[b, h, j] + table[clamp(i - j, 0, 31), h]
        mask     causal and same_document(doc)
    }""",
}
_ELEMENTS = ("bf16", "f16", "f32")
_HEAD_DIMS = 3  # the most of a spec
HOST_CALLS = ("dense", "dense with backward", "decode", "varlen")


@dataclass(frozen=True)
class Piece:
    """One program. ``head_dim`` counts those of the spec; an empty ``target`` is that of no compiler: the host's time.

    Pieces that a spec has not, such as a third head dimension, have no entries.
    """

    target: str
    spec: str
    kind: str
    name: str
    element: str
    option: str = USUAL
    head_dim: int = 0
    quick: bool = False

    @property
    def key(self) -> str:
        """What its entries' keys begin with."""
        spec = f"{self.spec}#{self.head_dim + 1}" if self.head_dim else self.spec
        return "/".join((self.target, spec, self.kind, self.name, self.element, self.option))

    @property
    def where(self) -> str:
        """``gpu``, ``cpu`` or ``host``."""
        return "gpu" if self.target in GPUS else "cpu" if self.target in CPUS else "host"


def pieces(gallery: Sequence[str]) -> tuple[Piece, ...]:
    """All of them; none has the key of another."""
    specs = (*gallery, *TEXTS)
    every = (*_host(), *_gpu(specs), *_cpu(specs), *_plans(specs))
    found: dict[str, Piece] = {}
    for each in every:
        if each.key not in found or each.quick:
            found[each.key] = each
    return tuple(found.values())


def _host() -> Iterator[Piece]:
    for driver in ("cpu", "imitated"):
        for call in HOST_CALLS:
            yield Piece("host", "causal", call, ALL, "f32" if driver == "cpu" else "bf16", driver, quick=True)


def _plans(specs: Sequence[str]) -> Iterator[Piece]:
    for spec in specs:
        for target in (*GPUS, *CPUS):
            yield Piece(target, spec, "plan", ALL, ALL, quick=spec in (*EIGHT, *TEXTS) and target != "avx512")


def _gpu(specs: Sequence[str]) -> Iterator[Piece]:
    for n, spec in enumerate(specs):
        for t, target in enumerate(GPUS):
            for name in PASSES:
                yield Piece(target, spec, "dense", name, "bf16", quick=t == 1 or n % 3 == 0)
    for n, spec in enumerate(EIGHT):
        for t, target in enumerate(GPUS):
            for k, (kind, names) in enumerate(GPU_KINDS.items()):
                element = "f8" if kind == "8 bits" else "bf16"
                quick = (n + t + k) % 2 == 0 and spec not in _SLOW
                quick = quick or kind in ("8 bits", "by blocks")  # few take these
                yield from (Piece(target, spec, kind, name, element, quick=quick) for name in names)
            for k, (kind, names, option) in enumerate(OPTIONS):
                quick = k < _QUICK_OPTIONS and (n + t + k) % 2 == 0 and spec not in _SLOW
                yield from (Piece(target, spec, kind, name, "bf16", option, quick=quick) for name in names)
            for k, element in enumerate(("f16", "f32")):
                quick = (n + t + k) % 2 == 0 and spec not in _SLOW
                yield from (Piece(target, spec, "dense", name, element, quick=quick) for name in PASSES)
    for spec in specs:
        for target in GPUS:
            for kind in GPU_KINDS if spec in EIGHT else ("dense",):
                yield from _in_full(target, spec, kind, GPU_KINDS[kind], ("f8",) if kind == "8 bits" else _ELEMENTS)


def _cpu(specs: Sequence[str]) -> Iterator[Piece]:
    for n, spec in enumerate(specs):
        for t, target in enumerate(CPUS):
            for k, (kind, names) in enumerate(CPU_KINDS.items() if spec in EIGHT else [("dense", PASSES)]):
                quick = (n + t + k) % 2 == 0 and (n % 2 == 0 or spec in EIGHT)
                yield from (Piece(target, spec, kind, name, ALL, quick=quick) for name in names)
                yield from _in_full(target, spec, kind, names, (ALL,))


def _in_full(target: str, spec: str, kind: str, names: Sequence[str], elements: Sequence[str]) -> Iterator[Piece]:
    """At every head dimension, in every type of elements."""
    for head_dim in range(_HEAD_DIMS):
        for name in names:
            yield from (Piece(target, spec, kind, name, element, head_dim=head_dim) for element in elements)
