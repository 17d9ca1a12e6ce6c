"""What runs for one call, and why: ``op.explain`` returns it.

Stage 3, plan. In and out: plain data, for people (``str``) and machines (``to_json``).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from flashgen.ir.shape import Shape
from flashgen.plan.plan import Rejection

_KIB, _MB = 1024, 1e6


@dataclass(frozen=True)
class ExplainedKernel:
    """One kernel of a pass, as it is started.

    On a GPU ``blocks`` of ``threads`` threads with ``shared_bytes`` of shared memory each; ``registers`` of a thread
    and ``spill_bytes`` as the assembler said, None where none was asked (the emulator). On a CPU ``threads`` share the
    work, and the rest is 0 or None.
    """

    name: str
    threads: int
    blocks: int = 0
    shared_bytes: int = 0
    registers: int | None = None
    spill_bytes: int | None = None


@dataclass(frozen=True)
class ExplainedPass:
    """Forward or backward: its tiles, its kernels in their order, and what the model predicts of both.

    ``multiplies`` says with what: warps, warpgroups, vectors, matrix registers. ``sram_bytes`` is what the tile keeps
    in shared memory, or in a core's L2. ``hbm_bytes`` and ``seconds`` are None where nothing is predicted; ``at_most``:
    a mask reads captured tensors, so that both are the most that the call can take.
    """

    name: str
    Br: int
    Bc: int
    sram_bytes: int
    multiplies: str
    warps: int | None
    stages: int | None
    kernels: tuple[ExplainedKernel, ...]
    hbm_bytes: int | None = None
    seconds: float | None = None
    limited_by: str = ""
    at_most: bool = False

    def describe(self) -> str:
        """In lines."""
        stages = "" if self.stages is None else f", {self.stages} stage{'s' * (self.stages != 1)}"
        lines = [f"{self.name}: B_r × B_c = {self.Br} × {self.Bc} by {self.multiplies}{stages}"]
        lines[0] += f", {self.sram_bytes / _KIB:.0f} KiB"
        if self.seconds is not None and self.hbm_bytes is not None:
            most = "at most " if self.at_most else ""
            lines.append(
                f"  predicted: {most}{1e3 * self.seconds:.3g} ms, {most}{self.hbm_bytes / _MB:,.2f} MB to and from "
                f"memory; limited by {self.limited_by}"
            )
        for each in self.kernels:
            blocks = f"{each.blocks} blocks of " if each.blocks else ""
            shared = f", {each.shared_bytes / _KIB:.1f} KiB of shared memory" if each.shared_bytes else ""
            registers = ""
            if each.registers is not None:
                registers = f", {each.registers} registers, {each.spill_bytes} bytes spilled"
            lines.append(f"  {each.name}: {blocks}{each.threads} thread{'s' * (each.threads != 1)}{shared}{registers}")
        return "\n".join(lines)


@dataclass(frozen=True)
class Explanation:
    """What an op runs for a call. ``device`` is its name, ``target`` what kernels were generated for ("cpu", "sm_90a").

    ``passes`` is empty where no kernel runs; ``reasons`` then say what does. ``rejected`` are tiles that were passed
    over. ``derivatives`` say what computes tangents, derivatives of gradients, and the samples of ``torch.vmap``;
    ``jvp``: the kernel of tangents, ``jvp_backward`` that of its backward pass; None where there is none.
    """

    name: str
    backend: str
    device: str
    target: str
    head_dim: str
    element: str
    shape: Shape
    passes: tuple[ExplainedPass, ...]
    reasons: tuple[str, ...]
    rejected: tuple[Rejection, ...] = ()
    derivatives: tuple[str, ...] = ()
    jvp: ExplainedPass | None = None
    jvp_backward: ExplainedPass | None = None

    @property
    def forward(self) -> ExplainedPass:
        """The forward pass. Raises ``LookupError`` where no kernel runs."""
        return self._pass("forward")

    @property
    def backward(self) -> ExplainedPass:
        """The backward pass."""
        return self._pass("backward")

    def _pass(self, name: str) -> ExplainedPass:
        for each in self.passes:
            if each.name == name:
                return each
        raise LookupError(f"no kernel runs: {'; '.join(self.reasons)}")

    def to_json(self) -> dict[str, object]:
        """Plain data."""
        return asdict(self)

    def __str__(self) -> str:
        title = f"{self.name}, head dimension {self.head_dim}, {self.element}, B,H,Hkv,Nq,Nk = {self.shape}"
        lines = [f"{title}: {self.backend} on '{self.device}', {self.target}"]
        lines += [each.describe() for each in self.passes]
        lines += ["why", *(f"  {reason}" for reason in self.reasons)] if self.reasons else []
        lines += ["derivatives", *(f"  {each}" for each in self.derivatives)] if self.derivatives else []
        for each in (self.jvp, self.jvp_backward):
            lines += [f"  {line}" for line in each.describe().splitlines()] if each is not None else []
        if self.rejected:
            lines.append("passed over")
            lines += [f"  {each.pass_name} {each.Br} × {each.Bc}: {each.reason}" for each in self.rejected]
        return "\n".join(lines)
