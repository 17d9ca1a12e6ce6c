"""Runs an op on q, k and v of 8 bits: by kernels for them where there are some, else on numbers of more bits.

In: the positional arguments of the operators that end in ``_f8``: q [B, H, Nq, D], k [B, Hkv, Nk, D] and v
[B, Hkv, Nk, Dv] in ``float8_e4m3fn``, and what each is multiplied by, float32 [B, Hkv], or [0, 0] where by nothing;
the factor of q is that of its head's key/value head. Out: o [B, H, Nq, Dv] in bfloat16, lse [B, H, Nq]. There are no
gradients.

Hopper's kernels multiply 8 bits by 8 bits and apply factors to sums. Everywhere else q, k and v are multiplied by their
factors first, rounded to the type that ``wide_type`` says, and the op's own kernels run on that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from flashgen.hosts.kernel import Kernel
from flashgen.kinds.dense import DENSE
from flashgen.kinds.eight_bits import DESCALES, EIGHT_BITS
from flashgen.kinds.kind import Kind
from flashgen.op.call import Call, CallChecker, Rest
from flashgen.op.eight_bits import F8, factors_of, from_8_bits
from flashgen.op.engine import Attended, Engine, Rows, Tensors
from flashgen.op.layouts import laid
from flashgen.op.plain import NoMemoryError
from flashgen.op.values import address
from flashgen.reference.programs import Program

_ORDER_ON_CPUS = (torch.float32, torch.bfloat16, torch.float16)
_ORDER_ON_GPUS = (torch.bfloat16, torch.float16, torch.float32)


def factors_of_call(rows: Sequence[Tensor], given: Sequence[object]) -> tuple[Tensor, ...]:
    """The factors of q, k and v, as the operator takes them. Raises ``TypeError`` and ``ValueError``."""
    q, k, v = rows
    wanted = (q.shape[0], k.shape[1]) if q.dim() == k.dim() == 4 else (0, 0)  # which the call then refuses
    named = zip(DESCALES, given, zip("qkv", (q, k, v), strict=True), strict=True)
    return tuple(factors_of(name, each, of, wanted, q.device) for name, each, of in named)


def wide_type(dtypes: Sequence[torch.dtype], device: torch.device) -> torch.dtype:
    """Of the types that an op has kernels for, that which 8 bits are widened to where none takes these.

    On a CPU it is the exact one, on a GPU a fast one.
    """
    order = _ORDER_ON_CPUS if device.type == "cpu" else _ORDER_ON_GPUS
    return next(dtype for dtype in order if dtype in dtypes)


class F8Checker(CallChecker):
    """Turns calls of 8 bits into ``Call``s; their kernel is the one for 8 bits, None where there is none."""

    def _check_types(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        given = {name: x.dtype for name, x in (("q", q), ("k", k), ("v", v))}
        odd = next((name for name, dtype in given.items() if dtype is not F8), None)
        if odd is not None:
            narrow = next(name for name, dtype in given.items() if dtype is F8)
            raise TypeError(
                f"'{odd}' is {given[odd]}, but '{narrow}' is {F8}; q, k and v are of 8 bits all three, or none of them "
                "(op.decode takes k and v alone, as caches)"
            )
        if not self.spec.takes_f8:
            known = ", ".join(map(str, self.dtypes))
            raise TypeError(
                f"q, k and v are {F8}; '{self.spec.name}' is built for {known}: name f8e4m3 in its dtype statement, too"
            )
        self._check_device(q)


class F8Engine(Engine):
    """Forward of one spec on q, k and v of 8 bits."""

    kind: Kind = EIGHT_BITS
    checks: ClassVar[type[CallChecker]] = F8Checker

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._wide = Engine(*args, **{**options, "kind": DENSE})

    def attend(self, tensors: Tensors, rest: Rest, keeps_lse: bool = True) -> Attended:
        """``o`` in bfloat16, ``lse`` and its parts."""
        own, factors = tensors[: -len(DESCALES)], tensors[-len(DESCALES) :]
        call = self.checker.find(own, rest)
        kernel = call.kernel
        if kernel is None or call.is_empty:
            dtype = wide_type(self.checker.dtypes, call.device)
            wide = (from_8_bits(x, factor, dtype) for x, factor in zip(own[:3], factors, strict=True))
            o, lse, parts = self._wide.attend((*wide, *own[3:]), rest, keeps_lse)
            return laid(o, call.o).to(self.signature.o), lse, parts
        asked = call
        if call.may_copy:
            call, own = self._readable(kernel, call, own, rest)
        o, lse, parts = self._run_kernel(kernel, call, own, factors, keeps_lse=keeps_lse)
        return laid(o, asked.o), lse, parts

    def _run_kernel(
        self, kernel: Kernel, call: Call, tensors: Tensors, factors: Sequence[Tensor], *, keeps_lse: bool
    ) -> Attended:
        q, k, v = tensors[0], tensors[1], tensors[2]
        o = torch.empty_strided(*call.o, dtype=self.signature.o, device=call.device)
        lse = parts = None
        if self.signature.has_lse and keeps_lse:
            lse = torch.empty_strided(*call.lse, dtype=torch.float32, device=call.device)
            parts = lse.new_zeros(call.lse_parts[0])  # which the backward pass alone would read
        places = [x.data_ptr() for x in (q, k, v)]
        if 0 in places:
            raise NoMemoryError("q, k or v is zero in name alone")
        values: list[float] = [0, *places, o.data_ptr(), address(lse), 0, 0, 0, 0, 0, 0]
        captured = self._captured(call, tensors)  # kept until the kernel ran: it holds what stands for empty tensors
        drops = self._values.add(values, call, captured, self._values.no_gradients)
        values += [address(x if x.numel() else None) for x in factors]
        prepared = call.forward.get(drops)
        if prepared is None:
            prepared = call.forward[drops] = kernel.prepare("forward", (*values, *call.settled))
        self._workspaces.run(call, prepared, values)
        return o, lse, parts

    def gradients(self, d_o: Tensor, rows: Rows, tensors: Tensors, rest: Rest, needs: Sequence[bool]) -> list[Tensor]:  # noqa: ARG002
        """There are none. Raises ``RuntimeError``."""
        raise RuntimeError(
            f"'{self.spec.name}': q, k and v of 8 bits have no gradients; call it under torch.no_grad(), or train in "
            "bfloat16"
        )

    def derive(self, program: Program, values: Sequence[Any], rest: Rest) -> list[Tensor]:  # noqa: ARG002
        """There are none. Raises ``RuntimeError``."""
        raise RuntimeError(
            f"'{self.spec.name}': q, k and v of 8 bits have no derivatives, of neither mode: widen them, or call "
            "op.reference"
        )
