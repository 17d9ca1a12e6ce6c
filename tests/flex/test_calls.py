"""What is compiled, and when: equal mods once, other values and lengths never again."""

from __future__ import annotations

import argparse
import enum
import functools
import gc
import importlib
import math
import subprocess
import sys
import warnings
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from flashgen.diagnostics import SpecError
from flashgen.flex import AuxRequest, attention, captured, create_block_mask, flex_attention, from_mods, ops, to_spec
from tests.flex.helpers import assert_close, gradients, inputs, judged

SLOPES = torch.rand(4)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """What was compiled meanwhile; nothing is known before."""
    ops.family.cache_clear()
    ops.compiled.cache_clear()
    ops._TRACES.clear()
    ops._KNOWN.clear()
    found: list[Any] = []
    make: Any = vars(ops)["load_spec"]

    def load_spec(spec: Any, *more: Any) -> Any:
        found.append(spec)
        return make(spec, *more)

    monkeypatch.setattr(ops, "load_spec", load_spec)
    yield found
    ops.family.cache_clear()
    ops.compiled.cache_clear()


def check(mod: Any, mask: Any = None, **shape: int) -> None:
    q, k, v = (x.detach() for x in inputs(**shape))
    mask_of = None if mask is None else create_block_mask(mask, None, None, q.shape[2], k.shape[2])
    gqa = q.shape[1] != k.shape[1]
    mine = flex_attention(q, k, v, mod, mask_of, enable_gqa=gqa, backend="reference")
    assert_close(mine, judged(q, k, v, mod, mask)[0])


def bias(slopes: torch.Tensor, cap: float, reach: int) -> Any:
    def mod(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        near = torch.clamp(q - kv, -reach, reach)
        return cap * torch.tanh((score + slopes[h] * near) / cap)

    return mod


def test_equal_mods_compile_once(compiled: list[Any]) -> None:
    for cap, reach in ((5.0, 3), (7.5, 3), (2.0, 11), (5.0, 3)):
        check(bias(torch.rand(4), cap, reach))

    def another(s: Any, b: Any, h: Any, i: Any, j: Any, *, table: Any = SLOPES, most: float = 3.0, w: int = 2) -> Any:
        low, high = -w, w
        return most * ((s + table[h] * (i - j).clamp(low, high)) / most).tanh()

    check(another)
    assert len(compiled) == 1


def test_a_trace_is_used_again_and_a_changed_number_noticed(
    compiled: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    traced: list[Any] = []
    make: Any = vars(ops)["trace"]

    def trace(*args: Any) -> Any:
        traced.append(args)
        return make(*args)

    monkeypatch.setattr(ops, "trace", trace)
    for cap in (5.0, 6.0, 7.0):
        check(bias(torch.rand(4), cap, 3))
    assert len(traced) == 1

    def counted(n: int) -> Any:
        def mod(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
            for _ in range(n):
                score = score * 1.5
            return score

        return mod

    for n in (1, 2, 1, 2):
        check(counted(n))
    assert len(traced) == 3  # one for each number that Python asked for
    assert len(compiled) == 3


def test_other_lengths_compile_nothing(compiled: list[Any]) -> None:
    for length in (24, 37, 64):
        documents = (torch.arange(length) // 9).expand(2, -1)
        relative = torch.randn(2 * length - 1)

        def mod(s: Any, b: Any, h: Any, q: Any, kv: Any, table: Any = relative) -> Any:
            return s + table[q - kv + table.shape[0] // 2]

        check(mod, lambda b, h, q, kv, ids=documents: ids[b, q] == ids[b, kv], q_len=length, kv_len=length)
    assert len(compiled) == 1


def test_a_table_that_happens_to_be_as_long_stays_one(compiled: list[Any]) -> None:
    """A buffer of 64 entries, longer than what is read, keeps its length when the lengths reach it."""
    ids = torch.arange(64) // 9
    for length in (24, 37, 64, 30):
        check(None, lambda b, h, q, kv: ids[q] == ids[kv], q_len=length, kv_len=length)
    assert len(compiled) == 1


def test_values_that_python_decides_by_belong_to_the_trace(compiled: list[Any]) -> None:
    class Layer:
        window = 4
        causal = True

        def mask(self, b: Any, h: Any, q: Any, kv: Any) -> Any:
            keep = (q - kv).abs() < self.window if self.window > 0 else q >= 0
            return keep & (q >= kv) if self.causal else keep

    layer = Layer()
    for layer.window in (4, 9, -1):
        check(None, layer.mask)
    layer.causal = False
    layer.window = 6
    check(None, layer.mask)
    assert len(compiled) == 3


class Config:
    window = 4

    @classmethod
    def near(cls, q: Any, kv: Any) -> Any:
        return (q - kv).abs() < cls.window


def test_what_a_class_holds_is_read_anew() -> None:
    table = {"reach": 4}
    lookup = table.get
    for Config.window in (4, 9):
        table["reach"] = Config.window
        check(None, lambda b, h, q, kv: (q - kv).abs() < Config.window)
        check(None, lambda b, h, q, kv, near=Config.near: near(q, kv))
        check(None, lambda b, h, q, kv: (q - kv).abs() < lookup("reach", 0))


REACH = 4


class Kind(enum.Enum):
    NEAR = 1
    FAR = 2

    def reach(self) -> int:
        return REACH if self is Kind.NEAR else 20


class Chosen:
    """Objects that are told by their identity, here and by a class."""

    default = Config()

    def __init__(self) -> None:
        self.kind, self.config = Kind.NEAR, Chosen.default

    def mask(self, b: Any, h: Any, q: Any, kv: Any) -> Any:
        reach = self.kind.reach() if self.kind is Kind.NEAR and self.config is Chosen.default else 1
        return (q - kv).abs() < reach


def test_values_that_a_mod_reads_past_its_closure_are_read_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    import tests.flex.test_calls as here

    def of_a_type(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (q - kv).abs() < (REACH if type(REACH) is int else 1)

    def of_a_text(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (q - kv).abs() < globals()["REACH"]

    def of_an_import(b: Any, h: Any, q: Any, kv: Any) -> Any:
        from tests.flex.test_calls import REACH as reach  # noqa: N811

        return (q - kv).abs() < reach

    def of_an_enum(b: Any, h: Any, q: Any, kv: Any, kind: Any = Kind.NEAR) -> Any:
        return (q - kv).abs() < kind.reach()

    for reach in (4, 9):
        monkeypatch.setattr(here, "REACH", reach)
        for mask in (of_a_type, of_a_text, of_an_import, of_an_enum, Chosen().mask):
            check(None, mask)


def test_captured_powers_that_are_no_longer_ints() -> None:
    def power(n: int, m: int) -> Any:
        return lambda s, b, h, q, kv: s + (n**m) * kv * 0.1

    for n, m in ((2, 2), (2, -1), (2, 3), (0, 2)):
        check(power(n, m))
    with pytest.raises(SpecError, match=r"E604.*4294967296 does not fit in 32 bits"):
        check(power(2, 32))
    with pytest.raises(SpecError, match=r"E606.*ZeroDivisionError"):
        check(power(0, -1))


class Slots:
    __slots__ = ("factor",)

    def __init__(self, factor: float) -> None:
        self.factor = factor


class Named(NamedTuple):
    factor: float


def _factor(held: Any) -> Any:
    return held.factor


def _item(held: Any) -> Any:
    return held[0]


@pytest.mark.parametrize(
    ("hold", "read"),
    [
        *((lambda x: SimpleNamespace(factor=x), _factor), (lambda x: argparse.Namespace(factor=x), _factor)),
        *((Slots, _factor), (Named, _factor), (lambda x: SimpleNamespace(factor=np.float64(x)), _factor)),
        *((lambda x: [np.float32(x)], _item), (lambda x: (np.int64(x),), _item)),
    ],
)
def test_another_number_compiles_nothing_wherever_it_is(hold: Any, read: Any, compiled: list[Any]) -> None:
    for number in (2.0, 3.0, 5.0):

        def mod(s: Any, b: Any, h: Any, q: Any, kv: Any, held: Any = hold(number)) -> Any:  # noqa: B008
            return s * read(held) + kv * (read(held) / 4)

        check(mod)
    assert len(compiled) == 1


def test_attributes_of_functions(compiled: list[Any]) -> None:
    def mod(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return s * helper.factor + kv * mod.slope  # type: ignore[attr-defined]

    def helper() -> None: ...

    for factor, slope in ((1.0, 0.1), (5.0, 0.3)):
        helper.factor, mod.slope = factor, slope  # type: ignore[attr-defined]
        check(mod)
    assert len(compiled) == 1


class Switch:
    """False, and three entries long."""

    def __bool__(self) -> bool:
        return False

    def __len__(self) -> int:
        return 3

    def __str__(self) -> str:
        return "off"


class Odd:
    """What its attributes are changes while a mod runs, or is asked for in odd ways."""

    def __init__(self) -> None:
        self.n, self.calls, self.switch = 3, 0, Switch()

    def by_type(self, s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return s * 2 if type(self.n) is int else s

    def set_twice(self, s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        self.k = 2.0
        first = s * self.k
        self.k = self.n * 1.0
        return first + q * self.k * 0.1 + kv * self.k * 0.2

    def loop(self, s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        for self.k in (1.0, 2.0, 3.0):
            s = s + self.k * kv * 0.1
        return s

    @property
    def following(self) -> int:
        self.calls += 1
        return self.calls

    def counted(self, s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return s * (self.following % 2) + kv * (self.following % 2) * 0.1

    def truth(self, s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return s * 3 if self.switch else s

    def words(self, s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return s * 3 if f"{self.switch}" == "off" == str(self.switch) else s

    def __call__(self, s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return s * 2 if type(self.n) is int else s


@pytest.mark.parametrize("name", ["by_type", "set_twice", "loop", "counted", "truth", "words", "__call__"])
def test_odd_objects(name: str) -> None:
    q, k, v = (x.detach() for x in inputs())
    layer = Odd()
    mine = flex_attention(q, k, v, layer if name == "__call__" else getattr(layer, name), backend="reference")
    layer.calls = 0
    assert_close(mine, judged(q, k, v, getattr(Odd(), name))[0])
    assert type(vars(layer).get("k", 0.0)) is float


def test_a_captured_slice(compiled: list[Any]) -> None:
    table = torch.randn(8, 4)
    for part in (slice(0, 4), slice(4, 8), slice(1, None)):
        check(lambda s, b, h, q, kv, part=part: s + table[part][q % 4, h])
    assert len(compiled) == 2


def test_whether_there_are_gradients_is_asked_anew() -> None:
    def mod(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s * 2 if torch.is_grad_enabled() else s

    q, k, v = inputs()
    for _ in range(2):
        with torch.no_grad():
            plain = flex_attention(q, k, v, mod, backend="reference")
        assert_close(plain, judged(q, k, v)[0])
        assert_close(flex_attention(q, k, v, mod, backend="reference"), judged(q, k, v, lambda s, *_: s * 2)[0])


def test_a_module_of_the_users_with_a_name_of_pythons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's own 'this' is a poem that nobody imports."""
    monkeypatch.delitem(sys.modules, "this", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "this.py").write_text("reach = 4\ndef near(q, kv):\n    return (q - kv).abs() < reach\n", "utf-8")
    captured._is_library.cache_clear()
    this: Any = importlib.import_module("this")
    for this.reach in (4, 9):
        check(None, lambda b, h, q, kv: this.near(q, kv))
        check(None, lambda b, h, q, kv, near=this.near: near(q, kv))
    monkeypatch.undo()
    captured._is_library.cache_clear()


def test_a_captured_number_that_a_small_type_has_no_longer(compiled: list[Any]) -> None:
    ids = torch.arange(24, dtype=torch.uint8)
    for border in (5, 17):
        check(None, lambda b, h, q, kv, border=border: ids[kv] > border)
    assert len(compiled) == 1
    border = 256
    with pytest.raises(SpecError, match="256 as"):
        check(None, lambda b, h, q, kv: ids[kv] > border)


def test_grouped_heads_mixed_dimensions_scale_and_lse() -> None:
    q, k, _ = inputs(kv_heads=2, q_len=9, kv_len=24)
    v = torch.randn(2, 2, 24, 5, requires_grad=True)

    def mod(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s + 0.1 * h

    for scale in (None, 0.3, 1.7):
        mine = flex_attention(q, k, v, mod, scale=scale, enable_gqa=True, return_lse=True, backend="reference")
        theirs = judged(q, k, v, mod, scale=scale)
        for x, y in zip((*mine, *gradients(mine, [q, k, v])), (*theirs, *gradients(theirs, [q, k, v])), strict=True):
            assert_close(x, y, 1e-4)
    o, aux = flex_attention(q, k, v, mod, enable_gqa=True, return_aux=AuxRequest(lse=True), backend="reference")
    assert_close(aux.lse, judged(q, k, v, mod)[1])
    assert o.shape == (2, 4, 9, 5)


@pytest.mark.parametrize("backend", ["cpu", "emulator", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_maxima_of_rows(backend: str, dtype: torch.dtype) -> None:
    """In natural units, of kept pairs, after mod and scale; of equal scores and large ones, too."""
    q, k, v = (x.detach().to(dtype) for x in inputs(kv_heads=2, d=32))
    q[:, :, 8:12] *= 300
    k[:, :, 3:7] = k[:, :, 3:4]
    bias = torch.linspace(-2, 3, 24)

    def mod(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s + bias[j] * h

    def mask_mod(b: Any, h: Any, i: Any, j: Any) -> Any:
        return (j <= i) & (i != 5)

    mask = create_block_mask(mask_mod, None, None, 24, 24)
    for scale, score_mod in ((None, mod), (0.7, None)):
        call = functools.partial(flex_attention, q, k, v, score_mod, mask, scale, enable_gqa=True, backend=backend)
        o, aux = call(return_aux=AuxRequest(max_scores=True))
        assert torch.equal(o, call())
        assert aux.lse is None
        scores = q.double() @ k.double().repeat_interleave(2, 1).transpose(-1, -2) * (scale or 32**-0.5)
        scores += (bias * torch.arange(4)[:, None])[:, None].double() if score_mod else 0
        n = torch.arange(24)
        truth = scores.masked_fill(~mask_mod(0, 0, n[:, None], n), -math.inf).amax(-1)
        torch.testing.assert_close(aux.max_scores.double(), truth, rtol=1e-6, atol=2e-5)
        assert aux.max_scores.dtype is torch.float32


def test_maxima_have_no_gradients_and_lse_beside_them_has() -> None:
    q, k, v = inputs()
    request = AuxRequest(lse=True, max_scores=True)
    o, aux = flex_attention(q, k, v, return_aux=request, backend="reference")
    assert o.requires_grad
    assert aux.lse.requires_grad
    assert not aux.max_scores.requires_grad
    assert_close(aux.lse, judged(q, k, v)[1])


def test_options_of_tuned_code_are_taken_and_told_once() -> None:
    q, k, v = inputs()
    attention._TOLD.clear()
    given: dict[str, Any] = {"BLOCK_M": 64, "bwd_BLOCK_N1": 32, "waves_per_eu": 2, "BACKEND": "TRITON"}
    with pytest.warns(UserWarning, match="BACKEND, BLOCK_M, bwd_BLOCK_N1, waves_per_eu steer kernels") as told:
        found = flex_attention(q, k, v, kernel_options=given, backend="reference")
    assert told[0].filename == __file__
    assert torch.equal(found, flex_attention(q, k, v, backend="reference"))
    harmless = {"PRESCALE_QK": True, "ROWS_GUARANTEED_SAFE": True, "BACKEND": "AUTO"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for again in (given, {"BLOCK_M": "wide"}, harmless):
            flex_attention(q, k, v, kernel_options=again, backend="reference")
    with pytest.warns(UserWarning, match="kernel_options: BLOKC_M steer"):
        flex_attention(q, k, v, kernel_options={"BLOKC_M": 3}, backend="reference")


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_keys_and_values_of_8_bits_beside_queries_of_more(backend: str, dtype: torch.dtype) -> None:
    q, k, v = (x.detach().bfloat16() for x in inputs(q_len=8, d=16))
    scales = k.abs().amax((-2, -1)).float() / 448
    keys, values = (k / scales[..., None, None]).to(dtype), v.to(dtype)

    def mod(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s * scales[b, h]

    call = functools.partial(flex_attention, score_mod=mod, backend=backend)
    o = call(q, keys, values)
    assert o.dtype is torch.bfloat16
    assert torch.equal(o, call(q, keys.bfloat16(), values.bfloat16()))
    assert torch.equal(call(q, k, values), call(q, k, values.bfloat16()))


def test_o_lies_as_the_query() -> None:
    q, k, v = (x.detach().transpose(1, 2).contiguous().transpose(1, 2) for x in inputs())
    o = flex_attention(q, k, v, backend="reference")
    assert o.stride() == q.stride()
    assert o.transpose(1, 2).reshape(2, 24, -1).data_ptr() == o.data_ptr()


def test_rows_without_a_key_are_zero() -> None:
    q, k, v = inputs()
    mask = create_block_mask(lambda b, h, i, j: (i >= 5) & (j <= i), None, None, 24, 24)
    o, lse = flex_attention(q, k, v, None, mask, return_lse=True, backend="reference")
    assert (o[:, :, :5] == 0).all()
    assert (lse[:, :, :5] == -math.inf).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types_on_kernels(dtype: torch.dtype) -> None:
    slopes = torch.rand(4, dtype=dtype, requires_grad=True)

    def mod(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return s + slopes[h].float() * (kv - q)  # PyTorch would round the product otherwise

    q, k, v = (x.detach().to(dtype) for x in inputs())
    o = flex_attention(q, k, v, mod, deterministic=True)
    assert o.dtype == dtype
    assert_close(o, judged(q, k, v, mod)[0], 2e-2)
    o.float().sum().backward()
    assert slopes.grad is not None
    assert slopes.grad.dtype == dtype


def test_tensors_that_only_a_mask_reads_need_no_gradient() -> None:
    border = torch.randn(24, requires_grad=True)
    check(None, lambda b, h, q, kv: border[kv] > border[q] - 0.5)


def test_from_mods_gives_the_op_and_what_is_captured() -> None:
    slopes, window = torch.rand(4, requires_grad=True), 6
    op, captured = from_mods(
        score_mod=lambda s, b, h, q, kv: s - slopes[h] * (q - kv),
        mask_mod=create_block_mask(lambda b, h, q, kv: (q >= kv) & (q - kv < window), None, None, 24, 24),
        head_dim=8,
        backend="reference",
    )
    assert captured["slopes"] is slopes
    assert captured["window"] == 6
    q, k, v = inputs()
    op(q, k, v, **captured).sum().backward()
    assert slopes.grad is not None


def test_the_text_has_the_users_names_and_numbers() -> None:
    cap, documents = 20.0, torch.zeros(2, 24, dtype=torch.long)

    def capped(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return cap * torch.tanh(score / cap)

    def packed(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (documents[b, q] == documents[b, kv]) & (q >= kv)

    assert to_spec(score_mod=capped, mask_mod=packed) == (
        "attention capped_packed {\n"
        "    head_dim 64\n"
        "    param cap: f32 = 20.0\n"
        "    tensor documents: i64[B, Nk]\n"
        "    score tanh(s / cap) * cap\n"
        "    mask documents[b, i] == documents[b, j] and i >= j\n"
        "}\n"
    )


@pytest.mark.filterwarnings("ignore")
def test_dynamo_is_not_imported_for_an_eager_call() -> None:
    code = """
import sys, torch
from flashgen.diagnostics import SpecError
from flashgen.flex import create_block_mask, flex_attention
q = torch.rand(1, 1, 8, 16)
flex_attention(q, q, q, lambda s, b, h, i, j: s + (i - j), backend="reference")
assert "torch._dynamo" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors() -> None:
    rows = [torch.randn(3, n, 4, 8) for n in (5, 11, 3)]
    q, k, v = (torch.nested.nested_tensor([x[n] for x in rows], layout=torch.jagged).transpose(1, 2) for n in range(3))
    table, reach = torch.randn(4, 40), 3

    def mod(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s + table[h, i - j + 20] + table[0, j] + reach * i * 0.1

    found = flex_attention(q, k, v, mod, backend="reference")
    for o, x in zip(found.unbind(), rows, strict=True):
        q_alone, k_alone, v_alone = (each.transpose(0, 1)[None] for each in x)
        assert_close(o, judged(q_alone, k_alone, v_alone, mod)[0][0])
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 11, 11)
    with pytest.raises(ValueError, match="'query' or 'key' is nested; use create_nested_block_mask"):
        flex_attention(q, k, v, mod, mask, backend="reference")
    with pytest.raises(SpecError, match="E604"):
        flex_attention(q, k, v, lambda s, b, h, i, j: s + i * 500_000_000, backend="reference")


def test_tensors_without_values() -> None:
    q, k, v = (x.detach() for x in inputs())
    with FakeTensorMode() as mode:
        q, k, v = (mode.from_tensor(x) for x in (q, k, v))
        o = flex_attention(q, k, v, lambda s, b, h, i, j: s + 0.1 * (i - j), backend="reference")
    assert o.shape == q.shape


def test_torch_compile_breaks_the_graph_and_is_right() -> None:
    q, k, v = (x.detach() for x in inputs())
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 24, 24)

    def block(q: torch.Tensor) -> torch.Tensor:
        return flex_attention(q.sin(), k, v, bias(SLOPES, 5.0, 3), mask, backend="reference").cos()  # type: ignore[no-any-return]

    torch._dynamo.reset()
    assert_close(torch.compile(block, backend="eager")(q), block(q), 1e-6)
    op, captured = from_mods(score_mod=bias(SLOPES, 5.0, 3), mask_mod=mask, head_dim=8, backend="reference")
    whole = torch.compile(lambda q: op(q.sin(), k, v, **captured).cos(), backend="eager", fullgraph=True)
    assert_close(whole(q), block(q), 1e-6)


def test_what_a_mod_holds_is_noticed_where_it_changes_in_place() -> None:
    """Mods that are, with all that they capture, the very objects of the last call are not looked at again."""
    q, k, v = inputs()
    bias, factor, other = torch.rand(4), 2.0, torch.rand(4)

    def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor, shift: float = 0.5) -> Tensor:
        return score * factor + bias[h] + shift

    def again() -> None:
        o = flex_attention(q, k, v, score_mod, backend="reference")
        assert_close(o, judged(q, k, v, score_mod)[0])

    for _ in range(2):
        again()
    factor = 0.25
    again()
    bias = other
    again()
    score_mod.__defaults__ = (-1.0,)
    again()
    bias.requires_grad_()
    o = flex_attention(q, k, v, score_mod, backend="reference")
    (given,) = torch.autograd.grad(o.square().sum(), bias)
    assert_close(given, torch.autograd.grad(judged(q, k, v, score_mod)[0].square().sum(), bias)[0])
    score_mod.__code__ = (lambda score, b, h, i, j, shift=0.5: score - shift + factor * bias[h]).__code__
    again()


def test_a_mod_that_vanishes_takes_with_it_what_it_captures() -> None:
    q, k, v = inputs()

    def call() -> weakref.ref[Tensor]:
        bias = torch.rand(4)

        def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return score + bias[h]

        for _ in range(2):
            flex_attention(q, k, v, score_mod, backend="reference")
        return weakref.ref(bias)

    kept = call()
    gc.collect()
    assert kept() is None
