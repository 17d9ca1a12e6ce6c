"""``op.explain`` on a CPU: what runs for one call, from the plan that the call takes.

In: a ``Call`` that was checked, what of it kernels are told, the plan. Out: an ``Explanation``.
"""

from __future__ import annotations

from dataclasses import replace

from flashgen.analysis.variant import Variant
from flashgen.plan.explanation import ExplainedKernel, ExplainedPass, Explanation
from flashgen.plan.measured import PASSES
from flashgen.runtime.asked import Asked
from flashgen.targets.cpu import cost as cpu_cost
from flashgen.targets.cpu.device import Cpu
from flashgen.targets.cpu.products import Products
from flashgen.targets.cpu.tiles import CpuJvpPlan, CpuPlan
from flashgen.targets.explained import placed, with_prediction


def explain_cpu(
    name: str, variant: Variant, device: Cpu, asked: Asked, plan: CpuPlan, symbol: str, reasons: tuple[str, ...] = ()
) -> Explanation:
    """The call on the CPU at hand."""
    own, threads = placed(variant, asked), asked.call.threads
    timed = replace(device, cores=min(device.cores, threads))
    found = []
    passes = plan.of_call(device, asked.element, asked.shape)
    for each_name, (products, tile) in passes.items():
        predicted = cpu_cost.pass_time(own, products, each_name, tile, timed, asked.shape)
        found.append(
            ExplainedPass(
                name=each_name,
                Br=tile.Br,
                Bc=tile.Bc,
                sram_bytes=tile.sram_bytes,
                multiplies=_cpu_products(products, device),
                warps=None,
                stages=None,
                kernels=(ExplainedKernel(f"{symbol}_{each_name}", threads),),
            )
        )
        found[-1] = with_prediction(found[-1], own, asked, predicted)
    titles = {products.of_pass(each) for each, (products, _) in passes.items()}
    others = {products.of_pass(each) for products in Products for each in PASSES} - titles
    return Explanation(
        name=name,
        backend="cpu",
        device=device.name,
        target="cpu",
        head_dim=str(variant.head_dim),
        element=str(asked.element),
        shape=asked.shape,
        passes=tuple(found),
        reasons=tuple(each for each in (*plan.reasons, *reasons) if each.partition(": ")[0] not in others),
        rejected=tuple(each for each in plan.rejected if each.pass_name in titles),
    )


def explain_jvp(device: Cpu, asked: Asked, plan: CpuJvpPlan, symbol: str) -> ExplainedPass:
    """The kernel of forward mode, were the call's tangents asked for."""
    products, tile = plan.of_call(device, asked.element, asked.shape)
    return ExplainedPass(
        name="jvp",
        Br=tile.Br,
        Bc=tile.Bc,
        sram_bytes=tile.sram_bytes,
        multiplies=_cpu_products(products, device),
        warps=None,
        stages=None,
        kernels=(ExplainedKernel(f"{symbol}_jvp", asked.call.threads),),
    )


def _cpu_products(products: Products, device: Cpu) -> str:
    if products is Products.VECTORS:
        return f"vectors of {device.lanes} lanes"
    parts = "" if products is Products.BFLOAT16 else ", numbers in three parts"
    return f"matrix registers{parts}"
