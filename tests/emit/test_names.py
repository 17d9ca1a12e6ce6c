"""No name of a user meets one of ours, a keyword, a macro, or what is made of another name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import flashgen
from flashgen.analysis.variant import analyse
from flashgen.compiler.building import build_file, package_files
from flashgen.compiler.compiled import compiled
from flashgen.emit.text import pascal_case
from flashgen.ir.shape import Shape
from flashgen.ir.spec import AttentionSpec
from flashgen.ir.types import ElementType
from flashgen.language import parse_text
from flashgen.language.names import FUNCTIONS
from flashgen.targets.cpu.device import GENERIC_CPU
from flashgen.targets.cpu.target import CpuTarget
from flashgen.verification.verify import verify_case
from tests.emit.syntax import assert_compiles_for_cpus, assert_compiles_for_gpus
from tests.numeric.helpers import failures
from tests.slices import one_of

_WORDS = """
    alignas alignof auto bool char char8_t concept const constexpr decltype default delete double enum
    explicit extern float friend goto inline int long mutable namespace new noexcept nullptr operator private
    register requires short signed sizeof static struct switch template this throw typedef typeid typename
    union unsigned using virtual void volatile wchar_t xor bitand compl NULL NAN INFINITY HUGE_VAL M_PI M_E
    INT32_MAX INT32_MIN INT_MAX UINT64_MAX FLT_MAX EOF RAND_MAX CHAR_BIT EXIT_FAILURE SEEK_SET BUFSIZ stdin
    stdout errno offsetof va_list size_t int32_t uint64_t __LINE__ __FILE__ __COUNTER__ __cplusplus __x
    _Bool _Complex __global__ __device__ threadIdx blockIdx blockDim warpSize dim3 float2 half atomicAdd clock
    memcpy printf malloc free linux unix std fg omp Br Bc W PAIR INPUTS FG_INLINE FG_DEVICE Arguments Launch
    Head Row Column Diagonals Task Scratch weight rows columns row column place total bins bound sink_score
    kept safe inverse near step ahead begin offset origin distance diagonals visit tile keep make_row
    run held exponent near_exponent shift less known extreme element several bounded
    make_head values u x r c d a t n e p qq kk lo hi tile_rows T t0 t_2 x_total a_dim_0 x_at of_t grad seen_t
    stride_0 Slope SLOPE slope sink count name main

    _x __x_ ___x x_ _ __ _X _Atomic _Generic _Static_assert _Noreturn _Thread_local restrict __restrict__ __attribute__
    __asm__ asm __inline __func__ __FUNCTION__ __DATE__ __VA_ARGS__ __has_include _Pragma __builtin_expect __GNUC__
    __x86_64__ __linux__ i386 static_assert PATH_MAX NAME_MAX SSIZE_MAX O_RDONLY O_CREAT S_IRUSR SIGINT SIGTERM
    EINTR ENOENT ENOMEM STDIN_FILENO WNOHANG MAP_FAILED CLOCKS_PER_SEC TMP_MAX FILE DIR stderr signal exit abort fabs
    fmaf expf logf tanhf sqrtf powf lround uint8_t intptr_t ptrdiff_t uint int8 co_await co_yield consteval constinit
    thread_local export char16_t final override module nullptr_t reinterpret_cast static_cast
    __host__ __shared__ __constant__ __managed__ __forceinline__ __launch_bounds__ __syncthreads __syncwarp
    __shfl_sync __ballot_sync __popc __ldg __expf __CUDA_ARCH__ __CUDACC__ __NVCC__ __half __nv_bfloat16 gridDim
    dim3_ uint3 cudaStream_t nvcuda wmma mma bfloat16 half2 atomicCAS __float_as_int __cvta_generic_to_shared
    Tensor SymInt Scalar Device Layout Generator Optional str list tuple dict default_ device memory_format
    requires_grad out other input output alpha beta dim keepdim size needs d_o d_lse lse_parts generator torch op
    path forward backward none cls type object super property print match case found captured Path Literal_ overload
    BaseOp flashgen __init__ __call__ __class__ __dict__ __slots__ __name__ __file__ tensor_ param_ tensor_x param_x
    inf_ nan NaN exp log tanh floor hash sqrt softcap_ window where_
"""
WORDS = [word for word in _WORDS.split() if word != "const"]  # a word of the language
PARTS = [WORDS[n::10] for n in range(10)]  # a spec for each, which has at most 40 of them
LONG = "n" * 200


def declared(names: list[str], form: str) -> tuple[str, str]:
    """Declarations of tensors and params with these names, and the sum of what they hold."""
    declarations, terms = [], []
    for number, name in enumerate(names):
        if form == "param":
            declarations.append(f"param {name}: f32 = 0.5{' grad' if number % 3 else ''}")
            terms.append(name)
        else:
            declarations.append(f"tensor {name}: f32[H, Nq + Nk] grad")
            read = ("{0}[h, i]", "{0}[h, j]", "{0}[h, i - j + Nk]", "{0}[h, 0]", "{0}[h, i + j] + {0}[h, j]")[
                number % 5
            ]
            terms.append(read.format(name))
    return "\n".join(declarations), balanced(terms)


def balanced(terms: list[str]) -> str:
    """A sum that is not deep."""
    if len(terms) < 8:
        return " + ".join(terms)
    half = len(terms) // 2
    return f"({balanced(terms[:half])}) + ({balanced(terms[half:])})"


def spec_of(names: list[str], form: str, name: str = "names") -> AttentionSpec:
    """A spec with everything called so."""
    declarations, total = declared(names, form)
    return parse_text(f"attention {name} {{ head_dim 16 dtype f32 {declarations} score s + 0.01 * ({total}) }}").specs[
        0
    ]


def test_there_are_many_words() -> None:
    assert len(WORDS) == len(set(WORDS)) >= 233


@pytest.mark.parametrize("form", ["param", "tensor"])
@pytest.mark.parametrize("part", range(len(PARTS)))
def test_words_compile(part: int, form: str) -> None:
    spec = spec_of([*PARTS[part], LONG], form, name=PARTS[part][-1])
    assert_compiles_for_cpus(spec)
    assert_compiles_for_gpus(spec)


# No tensor can be called so: what is gone before anything is generated may.
_WORDS_OF_PYTHON = "None True False class lambda async await yield pass raise global nonlocal del try is in"


def test_what_is_gone_before_code_is_made_may_have_any_name() -> None:
    of_python = _WORDS_OF_PYTHON.split()
    lets = "\n".join(f"let {name} = s * {n + 1}" for n, name in enumerate((*WORDS[::2], *of_python)))
    consts = "\n".join(f"const {name} = {n + 1}" for n, name in enumerate(WORDS[1::2]))
    functions = [name for name in WORDS if name not in FUNCTIONS]
    defs = "\n".join(f"def {name}_(x) = x + {n + 1}" for n, name in enumerate(functions))
    total = balanced([*WORDS, *of_python])
    calls = balanced([f"{name}_({n})" for n, name in enumerate(functions)])
    code = f"{defs}\nattention names {{ head_dim 16 dtype f32\n{lets}\n{consts}\nscore s + {total}\nmask i < {calls} }}"
    (spec,) = parse_text(code).specs
    assert_compiles_for_cpus(spec)
    assert_compiles_for_gpus(spec)


_NAMES_OF_ATTENTIONS = """
    path torch op self forward backward none NULL Tensor int float double str out default device memory_format _ __
    _x __x x_ namespace template typename operator new delete std fg main Literal overload BaseOp flashgen spec manifest
    print type object super match case numpy sys os _1 threadIdx errno __COUNTER__x asm kernel attention_
"""
ATTENTIONS = _NAMES_OF_ATTENTIONS.split()


@pytest.mark.parametrize("part", one_of(8, range(8)))
def test_attentions_compile(part: int) -> None:
    for name in ATTENTIONS[part::8]:
        spec = spec_of(["slope"], "tensor", name)
        assert_compiles_for_cpus(spec)
        assert_compiles_for_gpus(spec)


@pytest.mark.parametrize(
    "names", [pytest.param(ATTENTIONS[::30], id="some"), pytest.param(ATTENTIONS, id="all", marks=pytest.mark.slow)]
)
def test_packages_are_imported_and_registered(names: list[str], tmp_path: Path) -> None:
    """On the meta device, where operators are called and differentiated, and nothing is compiled."""
    for name in names:
        spec = parse_text(f"attention {name} {{ head_dim 16 dtype f32 tensor w: f32[H] grad score s + w[h] }}").specs[0]
        made = compiled(analyse(spec, spec.head_dims[0]), CpuTarget(GENERIC_CPU))
        folder = tmp_path / "packages" / name
        for file, content in package_files(spec, [(made.source, made.packed())]).items():
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / file).write_bytes(content)
    code = """
import importlib, sys, torch
q, w = (torch.empty(shape, device="meta", requires_grad=True) for shape in ((1, 2, 8, 16), (2,)))
for name in sys.argv[1:]:
    op = getattr(importlib.import_module("packages." + name), name)
    op(q, q, q, w=w).sum().backward()
    assert q.grad is not None and w.grad is not None and name in repr(op), name
    q.grad = w.grad = None
"""
    run(tmp_path, code, *names)


def test_a_package_takes_any_name_and_gives_its_gradient(tmp_path: Path) -> None:
    """Python spells names that begin with two underscores differently in the body of a class."""
    names = ["__x", "__", "_x", "x_", "___x", "__x_", "__class__", "found", "found_0", "self_", "Tensor", "Literal"]
    declarations = "".join(f"tensor {name}: f32[H] grad " for name in names)
    total = balanced([f"{name}[h] * {n + 1}" for n, name in enumerate(names)])
    file = tmp_path / "path.attn"
    file.write_text(
        f"attention path {{ head_dim 16 dtype f32 {declarations} param __p: f32 = 0.5 grad score s * __p * ({total}) }}"
    )
    build_file(file, output=tmp_path / "packages", targets=("cpu",))
    code = """
import sys, torch
from packages.path import path
torch.manual_seed(0)
q, k, v = (torch.randn(1, 2, 20, 16, requires_grad=True) for _ in range(3))
given = {name: torch.randn(2, requires_grad=True) for name in sys.argv[1:]}
given["__p"] = torch.tensor(0.3, requires_grad=True)
inputs = [q, k, v, *given.values()]
ours = torch.autograd.grad(path(q, k, v, **given).square().sum(), inputs)
theirs = torch.autograd.grad(path.reference(q, k, v, **given).square().sum(), inputs)
for name, one, other in zip("q k v".split() + list(given), ours, theirs, strict=True):
    torch.testing.assert_close(one, other.to(one.dtype), rtol=1e-3, atol=1e-3, msg=lambda text: name + ": " + text)
try:
    path(q, k, v)
except TypeError as error:
    assert "'__x'" in str(error), error
"""
    run(tmp_path, code, *names)


def run(folder: Path, code: str, *arguments: str) -> None:
    """Python code in a process of its own that sees the packages of ``folder``."""
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_what_a_mask_reads_may_have_any_name() -> None:
    """Ranges of what the mask reads have members and variables of their own."""
    names = ("near", "rows", "NAN", "threadIdx", "of_near", "double", "point_near")
    tensors = " ".join(f"tensor {name}: i32[B, Nq + Nk]" for name in names)
    mask = " and ".join(f"{name}[b, i] <= {name}[b, j]" for name in names)
    spec = parse_text(f"attention masked {{ head_dim 16 dtype f32 {tensors} mask {mask} }}").specs[0]
    assert_compiles_for_cpus(spec)
    assert_compiles_for_gpus(spec)


@pytest.mark.parametrize("backend", [None, "emulator"])
def test_names_made_of_others_are_other_names(backend: str | None) -> None:
    """Each has a suffix or a prefix that something of ours once had."""
    op = flashgen.loads(
        "attention path { head_dim 16 dtype f32 param x: f32 = 0.3 grad param x_at: f32 = 0.2 grad "
        "param x_total: f32 = 0.1 grad param weight: f32 = 0.7 grad tensor t: f32[H, Nq + Nk] grad "
        "tensor t_2: f32[H] grad tensor t_dim_0: f32[Nk] grad tensor rows: f32[Nq + Nk] grad tensor __x: f32[H] grad "
        "score s * weight + x * x_at + x_total * t[h, i] + t[h, j] * t_2[h] + t_dim_0[j] + rows[i - j + Nk] + __x[h] }",
        backend=backend,
    )
    case = verify_case(op, op.spec.head_dims[0], ElementType.F32, Shape(1, 2, 1, 20, 30))
    assert not failures(case), failures(case)


@pytest.mark.parametrize("name", ["path", "tensor_", "base_op", "literal", "none", "_", "__", "_3d", "overload", "int"])
def test_classes_have_names_of_their_own(name: str) -> None:
    found = pascal_case(name)
    assert found.isidentifier()
    assert found not in {"Path", "Tensor", "Literal", "BaseOp", "None", name}
