"""``flashgen.nn.MultiheadAttention`` beside PyTorch's."""

# Parameters are attributes of a module, which mypy takes for modules.
# mypy: disable-error-code="operator,union-attr,call-overload,assignment"

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import flashgen
from flashgen.nn import MultiheadAttention
from flashgen.nn.multihead import masked_op

PLAIN = "attention plain_heads { head_dim 64 }"
ALIBI = "attention alibi_heads { head_dim 16 tensor slope: f32[H] grad score s - slope[h] * (i - j) mask causal }"


@pytest.fixture(scope="module")
def plain() -> flashgen.op.op.AttentionOp:
    return flashgen.loads(PLAIN)


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def twins(op: Any, **arguments: Any) -> tuple[nn.MultiheadAttention, MultiheadAttention]:
    """PyTorch's and ours, with the same state."""
    theirs = nn.MultiheadAttention(32, 2, **arguments)
    ours = MultiheadAttention(32, 2, spec=op, **arguments)
    with torch.no_grad():
        theirs.out_proj.weight.normal_()
        if theirs.in_proj_bias is not None:
            theirs.in_proj_bias.normal_()
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def compare(theirs: nn.MultiheadAttention, ours: MultiheadAttention, *inputs: Tensor, **arguments: Any) -> None:
    wanted, _ = theirs(*inputs, need_weights=False, **arguments)
    found, weights = ours(*inputs, **arguments)
    assert weights is None
    assert found.shape == wanted.shape
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    towards = random(*wanted.shape)
    for x in (theirs, ours):
        x.zero_grad()
    wanted.backward(towards)
    found.backward(towards)
    mine = dict(ours.named_parameters())
    for name, x in theirs.named_parameters():
        torch.testing.assert_close(mine[name].grad, x.grad, rtol=1e-4, atol=1e-4, msg=name)


@pytest.mark.parametrize("arguments", [{}, {"batch_first": True}, {"bias": False}, {"kdim": 24, "vdim": 20}], ids=str)
def test_it_is_pytorchs_where_the_spec_is_plain(plain: Any, arguments: dict[str, Any]) -> None:
    theirs, ours = twins(plain, **arguments)
    compare(theirs, ours, random(5, 3, 32), *(random(5, 3, arguments.get(name, 32)) for name in ("kdim", "vdim")))
    if "kdim" not in arguments:
        x = random(5, 3, 32)
        compare(theirs, ours, x, x, x)


@pytest.mark.parametrize("sizes", [(0, 5, 7), (3, 0, 7), (3, 5, 0)], ids=str)
def test_with_nothing_in_it(sizes: tuple[int, int, int]) -> None:
    batch, q_len, kv_len = sizes
    theirs, ours = twins(flashgen.loads(PLAIN, backend="reference"), batch_first=True)
    inputs = random(batch, q_len, 32), *(random(batch, kv_len, 32) for _ in range(2))
    torch.testing.assert_close(ours(*inputs)[0], theirs(*inputs, need_weights=False)[0])


def test_without_a_batch(plain: Any) -> None:
    compare(*twins(plain), random(5, 32), random(7, 32), random(7, 32))


@pytest.mark.parametrize("dims", [2, 3])
@pytest.mark.parametrize("kind", [torch.bool, torch.float32])
def test_masks_are_pytorchs(plain: Any, dims: int, kind: torch.dtype) -> None:
    theirs, ours = twins(plain, batch_first=True)
    x = random(3, 6, 32)
    pairs = random(6, 6) if dims == 2 else random(6, 6, 6)
    padding = torch.zeros(3, 6, dtype=torch.bool)
    padding[1, 4:] = True
    if kind is torch.bool:
        pairs = (pairs > 0.5) & ~torch.eye(6, dtype=torch.bool)
        pairs[..., 0] = False
    else:
        padding = torch.zeros(3, 6).masked_fill(padding, -torch.inf)
    compare(theirs, ours, x, x, x, attn_mask=pairs, key_padding_mask=padding)


def test_is_causal_keeps_keys_up_to_the_query(plain: Any) -> None:
    theirs, ours = twins(plain)
    x = random(6, 2, 32)
    causal = torch.ones(6, 6, dtype=torch.bool).triu(1)
    wanted, _ = theirs(x, x, x, attn_mask=causal, is_causal=True, need_weights=False)
    torch.testing.assert_close(ours(x, x, x, is_causal=True)[0], wanted, rtol=1e-4, atol=1e-5)


def test_learned_values_get_gradients_with_masks_too_and_heads_may_be_grouped() -> None:
    layer = MultiheadAttention(64, 4, batch_first=True, spec=flashgen.loads(ALIBI), kv_heads=2)
    assert layer.in_proj_weight.shape == (128, 64)
    x = random(2, 7, 64)
    plain, _ = layer(x, x, x)
    kept, _ = layer(x, x, x, key_padding_mask=torch.zeros(2, 7, dtype=torch.bool))
    torch.testing.assert_close(kept, plain)
    kept.square().sum().backward()
    assert bool(layer.attention.slope.grad.any())


def test_a_state_of_pytorchs_leaves_what_the_spec_learns() -> None:
    layer = MultiheadAttention(32, 2, spec=flashgen.loads(ALIBI, backend="reference"), initial={"slope": 0.3})
    theirs = nn.MultiheadAttention(32, 2)
    for whole, state in (
        (layer, theirs.state_dict()),
        (nn.ModuleDict({"a": layer}), nn.ModuleDict({"a": theirs}).state_dict()),
    ):
        whole.load_state_dict(state)
        assert torch.equal(layer.in_proj_weight, theirs.in_proj_weight)
        assert layer.attention.slope.tolist() == pytest.approx([0.3, 0.3])
    saved = layer.state_dict()
    layer.attention.slope.data.zero_()
    layer.load_state_dict(saved)
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "in_proj_bias"'):
        layer.load_state_dict({name: x for name, x in theirs.state_dict().items() if name != "in_proj_bias"})


def test_dropout_is_that_of_training_alone(plain: Any) -> None:
    layer = MultiheadAttention(32, 2, 0.5, spec=plain)
    x = random(6, 2, 32)
    assert not torch.equal(layer(x, x, x)[0], layer(x, x, x)[0])
    layer.eval()
    torch.testing.assert_close(layer(x, x, x)[0], twin_without_dropout(layer, plain)(x, x, x)[0])


def test_no_rate_is_the_modules_own(plain: Any) -> None:
    layer, x = MultiheadAttention(32, 2, 0.5, spec=plain), random(6, 2, 32)
    assert not torch.equal(layer(x, x, x, dropout_p=None)[0], layer(x, x, x, dropout_p=0.0)[0])
    layer.eval()
    assert torch.equal(layer(x, x, x, dropout_p=None)[0], layer(x, x, x)[0])


def test_changed_ops_stay_on_the_backend_of_the_op() -> None:
    layer = MultiheadAttention(32, 2, 0.5, spec=flashgen.loads(PLAIN, backend="reference"))
    assert layer.attention.op.backends == ("reference",)
    assert masked_op(layer._op_name, (("key_padding_mask", 2, True),), False).backends == ("reference",)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("name", ["key_padding_mask", "attn_mask", "is_causal"])
def test_masks_of_a_form_that_a_compiled_graph_meets_first(name: str) -> None:
    text = PLAIN.replace("plain_heads", f"plain_{name}")  # whose ops nobody made
    layer = MultiheadAttention(32, 2, batch_first=True, spec=flashgen.loads(text, backend="reference"))
    x = random(2, 6, 32)
    masks: dict[str, Any] = {"key_padding_mask": torch.arange(6) > torch.tensor([[3], [5]]), "attn_mask": random(6, 6)}
    given: dict[str, Any] = {name: masks.get(name, True)}
    compiled: Any = torch.compile(layer, backend="eager", fullgraph=True)
    found = compiled(x, x, x, **given)[0]
    torch.testing.assert_close(found, layer(x, x, x, **given)[0])


def twin_without_dropout(layer: MultiheadAttention, op: Any) -> MultiheadAttention:
    other = MultiheadAttention(32, 2, spec=op)
    other.load_state_dict(layer.state_dict())
    return other


def test_a_layer_is_copied_and_pickled(plain: Any) -> None:
    layer, x = MultiheadAttention(32, 2, spec=plain), random(6, 2, 32)
    padding = torch.zeros(2, 6, dtype=torch.bool)
    truth = layer(x, x, x, padding)[0]
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(other(x, x, x, padding)[0], truth)


def test_what_is_wrong_is_named(plain: Any) -> None:
    layer, x = MultiheadAttention(32, 2, spec=plain), random(6, 2, 32)
    with pytest.raises(ValueError, match="need_weights"):
        layer(x, x, x, need_weights=True)
    with pytest.raises(ValueError, match=r"'attn_mask' has shape \[5, 6\]; \[6, 6\] or \[4, 6, 6\] is expected"):
        layer(x, x, x, attn_mask=torch.zeros(5, 6))
    with pytest.raises(TypeError, match=r"'key_padding_mask' is torch.int64"):
        layer(x, x, x, key_padding_mask=torch.zeros(2, 6, dtype=torch.int64))
    with pytest.raises(ValueError, match="add_zero_attn is not supported"):
        MultiheadAttention(32, 2, add_zero_attn=True, spec=plain)
    with pytest.raises(ValueError, match="num_heads must divide embed_dim"):
        MultiheadAttention(32, 3, spec=plain)
    with pytest.raises(ValueError, match=r"'key' has shape \[6, 2, 33\]; its last dimension must be 32"):
        layer(x, random(6, 2, 33), x)
    with pytest.raises(TypeError, match="'value' must be a tensor, not NoneType"):
        layer(x, x, None)
    with pytest.raises(TypeError, match="'num_heads' must be an int, not float"):
        MultiheadAttention(32, 2.0, spec=plain)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="kv_heads 0; num_heads must divide"):
        MultiheadAttention(32, 2, spec=plain, kv_heads=0)
    with pytest.raises(TypeError, match="'attn_mask' must be a tensor, not list"):
        layer(x, x, x, attn_mask=[[True]])
    with pytest.raises(TypeError, match=r"'dropout' is '0\.1'; a drop probability is a number"):
        MultiheadAttention(32, 2, "0.1", spec=plain)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"'dropout' is 1\.5"):
        MultiheadAttention(32, 2, 1.5, spec=plain)


@pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype stage:UserWarning")
def test_in_the_layers_of_an_encoder_that_makes_nested_tensors() -> None:
    op = flashgen.loads(PLAIN, backend="reference")
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 2, 48, batch_first=True), 2).eval()
    x, padding = random(3, 9, 32), torch.arange(9) > torch.tensor([[7], [5], [3]])
    with torch.no_grad():
        wanted = encoder(x, src_key_padding_mask=padding)
        for layer in encoder.layers:
            ours = MultiheadAttention(32, 2, batch_first=True, spec=op)
            ours.load_state_dict(layer.self_attn.state_dict())
            layer.self_attn = ours.eval()
        torch.testing.assert_close(encoder(x, src_key_padding_mask=padding), wanted, rtol=1e-4, atol=1e-5)
    nested = torch.nested.nested_tensor([x[0], x[1, :5]])
    with pytest.raises(ValueError, match="a nested tensor is taken in the strided layout, for query, key and value"):
        ours(nested, x, x)


@pytest.mark.parametrize("training", [True, False])
def test_in_an_encoder_layer_of_pytorch(training: bool, plain: Any) -> None:
    """Which would take the projections and compute plain attention by itself, where it may."""
    torch.manual_seed(0)
    theirs = nn.TransformerEncoderLayer(32, 2, 48, dropout=0.0, batch_first=True).train(training)
    ours = copy.deepcopy(theirs)
    ours.self_attn = MultiheadAttention(32, 2, batch_first=True, spec=plain)
    ours.load_state_dict(theirs.state_dict())
    x, padding = random(2, 9, 32), torch.arange(9) > torch.tensor([[8], [5]])
    causal = nn.Transformer.generate_square_subsequent_mask(9) < 0
    with torch.set_grad_enabled(training):
        for given in ({}, {"src_mask": causal, "is_causal": True}, {"src_key_padding_mask": padding}):
            kept = ~padding if "src_key_padding_mask" in given else torch.ones(2, 9, dtype=torch.bool)
            torch.testing.assert_close(ours(x, **given)[kept], theirs(x, **given)[kept], rtol=1e-4, atol=1e-5)
        of_spec = copy.deepcopy(theirs)
        of_spec.self_attn = MultiheadAttention(32, 2, batch_first=True, spec=flashgen.loads(ALIBI))
        assert not torch.allclose(of_spec.train(training)(x), theirs(x))
