"""Names that a user may give and that mean something to somebody else: C++, CUDA, a macro, our own generated code.

In: a source of chance. Out: names, each at most once in a spec.
"""

from __future__ import annotations

import keyword
import random
from collections.abc import Iterable

from flashgen.ir.spec import OP_ARGUMENTS
from flashgen.language.names import BUILTINS, FUNCTIONS, WEIGHT_FORMS


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


WORDS_OF_THE_LANGUAGE = frozenset(
    _words(
        """
        attention def import head_dim dtype const param tensor let scale score mask layout select weights dropout
        schedule and or not if else true false
        """
    )
)
# Those of C++ and CUDA, what their headers define, and what a program there must not touch.
FOREIGN = _words(
    """
    alignas alignof asm auto case catch char class concept const_cast constexpr delete do double enum explicit
    export extern float friend goto inline int long mutable namespace new noexcept nullptr operator private
    protected public register reinterpret_cast requires short signed sizeof static static_assert struct switch
    template this throw try typedef typeid typename union unsigned using virtual void volatile wchar_t xor
    bitand compl co_await char8_t NAN INFINITY NULL M_PI INT32_MAX INT_MAX FLT_MAX EOF errno assert stdin stdout
    major minor unix linux i386 Complex main std fg omp abort exit printf malloc memcpy exp expf log logf tanh
    erf pow floor ceil round fabs sin cos y0 y1 j0 j1 yn jn gamma signgam index rindex div clock time read write
    environ isnan isinf threadIdx blockIdx blockDim gridDim warpSize __global__ __device__ __shared__
    __restrict__ __line__ __LINE__ __FILE__ __x _x _X x_ __ half __half bfloat16 float2 float4 int4 uint2 dim3
    cudaMalloc clock64 printf_ uint32_t int64_t size_t ptrdiff_t PAIR ROW COLUMN D_ DV W BR BC CHUNK MASK TRUE
    FALSE DEBUG
    """
)
# What generated code calls its own things, and endings that it adds to a user's name.
OURS = _words(
    """
    weight rows columns row column tile tiles stage lane warp block threads thread batch heads group head keep
    derivative distance launch arguments Arguments workspace scratch element elements field offset stride length
    first last begin end d_o d_lse dq dk dv delta visit visits lists keys queries forward backward sums counts
    path file flashgen Launch Layout score_ mask_ total result value values grad_ grad block_ q_len kv_len
    dropout_threshold seed_ a u s_ b_ h_ i_ j_ t t_2 t_1 x x_total x_at x_dim_0 x_2 a_dim_0 a_total param_x
    tensor_x grad_x b_total_ h_total_ q_total_ Q K V O L P S T N M dp ds dot_ lo hi c p n w r g
    """
)
PLAIN = ("slope", "bias", "table", "pair", "ids", "gate", "temperature", "width", "length_of", "near")
_ATTENTIONS = ("drawn", "path", "main", "double", "std", "t", "_", "__init__", "Attention", "op", "torch", "flashgen_")


def _legal(names: Iterable[str]) -> tuple[str, ...]:
    taken = WORDS_OF_THE_LANGUAGE | BUILTINS | OP_ARGUMENTS | set(WEIGHT_FORMS) | set(FUNCTIONS)
    return tuple(dict.fromkeys(each for each in names if each not in taken and not keyword.iskeyword(each)))


class Names:
    """Deals names out. ``nasty`` is the share that somebody else has a meaning for."""

    def __init__(self, chance: random.Random, nasty: float, taken: Iterable[str] = ()) -> None:
        self._chance = chance
        self._nasty = nasty
        self._taken = set(taken)
        self._plain, self._foreign, self._ours = map(_legal, (PLAIN, FOREIGN, OURS))

    def fresh(self) -> str:
        """A name that nothing has yet."""
        pool = self._chance.choice((self._foreign, self._ours)) if self._chance.random() < self._nasty else self._plain
        name = self._chance.choice(pool)
        while name in self._taken:
            name = (
                f"{name}_{self._chance.randrange(2, 9)}" if self._chance.random() < 0.5 else self._chance.choice(pool)
            )
        self._taken.add(name)
        return name

    def attention(self) -> str:
        """The name of an attention block."""
        names = (each for each in (*_ATTENTIONS, *FOREIGN) if not keyword.iskeyword(each))
        pool = [each for each in names if each not in WORDS_OF_THE_LANGUAGE | BUILTINS]
        return self._chance.choice(pool) if self._chance.random() < self._nasty else "drawn"
