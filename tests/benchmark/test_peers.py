"""A peer that is timed computes the same attention; one that cannot says why."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from flashgen.compiler.pipeline import check_file
from flashgen.ir.shape import Shape
from flashgen.language import parse_text
from flashgen.verification import Inputs, fitting, random_inputs
from flashgen.verification.verify import dense
from tools.benchmarks.flex import flex_peer
from tools.benchmarks.peer import Inexpressible
from tools.benchmarks.peers import PEERS, kept_share

SPECS = Path(__file__).resolve().parents[2] / "specs"


def arguments(name: str, shape: Shape) -> Inputs:
    (spec,) = check_file(SPECS / f"{name}.attn").specs
    return random_inputs(spec, fitting(spec, shape), spec.head_dims[0], torch.float32)


@pytest.mark.parametrize(
    "name",
    [
        "packed_documents",
        *(
            pytest.param(each, marks=pytest.mark.slow)
            for each in ("causal", "t5", "alibi", "softcap", "cosine", "gaussian_regression")
        ),
        pytest.param("sparse_fixed", marks=pytest.mark.slow),
    ],
)
def test_flex_computes_what_the_spec_says(name: str) -> None:
    (spec,) = check_file(SPECS / f"{name}.attn").specs
    given = arguments(name, Shape(2, 4, 2, 200, 200))
    peer = flex_peer(spec, given)
    with torch.no_grad():
        o = peer.run(given.q, given.k, given.v, given.named)
    expected, _ = dense(spec, given.q, given.k, given.v, given.named, torch.float64)
    torch.testing.assert_close(o.double(), expected, rtol=1e-4, atol=1e-5)
    assert peer.first_call_seconds is not None


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("bert", "dropout"),
        ("gpt_oss", "sinks"),
        ("relu_attention", "softmax weights only"),
        ("exp_kernel", "softmax weights only"),
        ("random_blocks", "hash"),
    ],
)
def test_flex_says_what_it_cannot(name: str, reason: str) -> None:
    (spec,) = check_file(SPECS / f"{name}.attn").specs
    with pytest.raises(Inexpressible, match=reason):
        flex_peer(spec, arguments(name, Shape(1, 2, 2, 64, 64)))


@pytest.mark.parametrize(("mask", "share"), [("true", 1.0), ("causal", 65 / 128), ("i == j", 1 / 64), ("h == 0", 0.5)])
def test_the_share_of_kept_pairs(mask: str, share: float) -> None:
    (spec,) = parse_text(f"attention a {{ head_dim 16  mask {mask} }}").specs
    given = random_inputs(spec, Shape(2, 2, 1, 64, 64), spec.head_dims[0], torch.float32)
    assert kept_share(spec, given) == pytest.approx(share)


def test_peers_are_named() -> None:
    from tools.benchmarks.command import DEFAULT_PEERS, PEER_NAMES

    assert set(PEER_NAMES) == set(PEERS)
    assert set(DEFAULT_PEERS) <= set(PEERS)
