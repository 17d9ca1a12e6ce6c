"""``op.explain`` on a CPU: what runs for one call, from the plan that the call takes.

In: an ``ExplainedCall``, and the plan. Out: an ``Explanation``.
"""

from __future__ import annotations

from dataclasses import replace

from flashgen.analysis.variant import Variant
from flashgen.hosts.explained_call import ExplainedCall, with_mask_of_call, with_prediction
from flashgen.plan.explanation import ExplainedKernel, ExplainedPass, Explanation
from flashgen.plan.measured import PASSES
from flashgen.plan.plan import Tiles
from flashgen.targets.cpu import cost as cpu_cost
from flashgen.targets.cpu.device import Cpu
from flashgen.targets.cpu.products import Products
from flashgen.targets.cpu.tiles import CpuPlan


def explain_cpu(
    name: str,
    variant: Variant,
    device: Cpu,
    call: ExplainedCall,
    plan: CpuPlan,
    symbol: str,
    reasons: tuple[str, ...] = (),
) -> Explanation:
    """The call on the CPU at hand."""
    own, threads = with_mask_of_call(variant, call), call.threads
    timed = replace(device, cores=min(device.cores, threads))
    found = []
    passes = plan.of_call(device, call.element, call.shape)
    for each_name, (products, tile) in passes.items():
        predicted = cpu_cost.pass_time(own, products, each_name, tile, timed, call.shape)
        found.append(with_prediction(_told(each_name, products, tile, device, symbol, threads), own, call, predicted))
    titles = {products.of_pass(each) for each, (products, _) in passes.items()}
    others = {products.of_pass(each) for products in Products for each in PASSES} - titles
    why = [each for each in (*plan.reasons, *reasons) if each.partition(": ")[0] not in others]
    told = call.explanation(name, "cpu", device.name, "cpu", found, why)
    return replace(told, rejected=tuple(each for each in plan.rejected if each.pass_name in titles))


def explain_jvp(device: Cpu, call: ExplainedCall, plan: CpuPlan, symbol: str) -> ExplainedPass:
    """The kernel of forward mode, were the call's tangents asked for, or that of its backward pass."""
    ((name, (products, tile)),) = plan.of_call(device, call.element, call.shape).items()
    return _told(name, products, tile, device, symbol, call.threads)


def _told(name: str, products: Products, tile: Tiles, device: Cpu, symbol: str, threads: int) -> ExplainedPass:
    return ExplainedPass(
        name=name,
        Br=tile.Br,
        Bc=tile.Bc,
        sram_bytes=tile.sram_bytes,
        multiplies=_cpu_products(products, device),
        warps=None,
        stages=None,
        kernels=(ExplainedKernel(f"{symbol}_{name}", threads),),
    )


def _cpu_products(products: Products, device: Cpu) -> str:
    if products is Products.VECTORS:
        return f"vectors of {device.lanes} lanes"
    if products is Products.PAIRS:
        return f"vectors of {device.lanes} lanes, bfloat16 in pairs"
    parts = "" if products is Products.BFLOAT16 else ", numbers in three parts"
    return f"matrix registers{parts}"
