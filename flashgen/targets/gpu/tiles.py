"""GpuPlan: how one variant runs on one GPU architecture, for every element type, and why."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, fields, replace

from flashgen.ir.types import ElementType
from flashgen.kinds.kind import PassName
from flashgen.plan.plan import Plan, Tiles
from flashgen.targets.gpu.recipe import Recipe
from flashgen.targets.gpu.schedules import AnyBackward, AnyForward, AnyQueries, Schedule

# What reasons and rejections call the tiles of a pass, and which of them a kernel goes through.
TILES_OF: Mapping[PassName, tuple[str, ...]] = {"forward": ("forward",), "backward": ("backward", "queries")}
OF_KERNEL = {"forward": "forward", "backward": "backward", "keys": "backward", "queries": "queries"}


@dataclass(frozen=True)
class ElementPlan:
    """The tiles of every pass for one element type of q, k, v and o."""

    element: ElementType
    forward: AnyForward
    backward: AnyBackward
    queries: AnyQueries

    @property
    def passes(self) -> Mapping[str, Schedule]:
        """By what reasons call them."""
        return {"forward": self.forward, "backward": self.backward, "queries": self.queries}

    def of_kernel(self, kernel: str) -> Schedule | None:
        """The tiles that a kernel goes through; None for those that stream rows."""
        return self.passes[OF_KERNEL[kernel]] if kernel in OF_KERNEL else None


@dataclass(frozen=True, repr=False)
class GpuPlan(Plan):
    """The decisions for one head dimension on the architecture of this name, by element type.

    ``recipe``: that of the spec, before pins, which says what the kernels with these tiles do.
    """

    target: str
    recipe: Recipe = field(compare=False)
    elements: tuple[ElementPlan, ...]

    @property
    def device(self) -> str:
        """What the plan is for."""
        return self.target

    @property
    def symbol(self) -> str:
        """What the name of every kernel begins with."""
        variant = self.recipe.variant
        return f"{variant.spec.name}_d{str(variant.head_dim).replace('/', '_')}{variant.kind.mark}"

    @property
    def own(self) -> ElementPlan:
        """The tiles of a plan of one element type, as those of kernels are."""
        (found,) = self.elements
        return found

    @property
    def forward(self) -> Tiles:
        """The tile of the first element type, for tables that show one."""
        return self.elements[0].forward

    @property
    def backward(self) -> Tiles:
        """The same for the backward pass."""
        return self.elements[0].backward

    @property
    def passes(self) -> Mapping[str, Tiles]:
        """The tiles by the names of the passes, which the names of element types follow."""
        return {f"{name}, {each.element}": tiles for each in self.elements for name, tiles in each.passes.items()}

    def reasons_of(self, passes: Collection[PassName]) -> tuple[str, ...]:
        """The reasons of these passes, and those that speak of none."""
        others = tuple(each for name, tiles in TILES_OF.items() if name not in passes for each in tiles)
        return tuple(each for each in self.reasons if not each.startswith(others))

    @property
    def by_element(self) -> Mapping[ElementType, ElementPlan]:
        """The plans by element type."""
        return {each.element: each for each in self.elements}

    @property
    def elements_apart(self) -> tuple[ElementType, ...]:
        return tuple(self.by_element)

    def of_element(self, element: ElementType) -> Mapping[str, Tiles]:
        each = self.by_element.get(element)
        return {} if each is None else each.passes  # none: no tile fits

    def joined(self, plans: Mapping[ElementType, tuple[GpuPlan, GpuPlan]]) -> GpuPlan:
        found = tuple(plan for both in plans.values() for plan in both)
        return replace(
            self,
            elements=tuple(
                replace(backward.by_element[each], forward=forward.by_element[each].forward)
                for each, (forward, backward) in plans.items()
            ),
            reasons=tuple(dict.fromkeys(reason for plan in found for reason in plan.reasons)),
            rejected=tuple(dict.fromkeys(lost for plan in (self, *found) for lost in plan.rejected)),
            decisions=tuple(dict.fromkeys(each for plan in found for each in plan.decisions)),
        )

    def to_json(self) -> dict[str, object]:
        """The plan as plain data, for ``--json`` and manifests. The recipe is none: it follows from the spec."""
        shared = Plan(**{each.name: getattr(self, each.name) for each in fields(Plan)})
        elements = [asdict(each) | {"element": str(each.element)} for each in self.elements]
        return asdict(shared) | {"target": self.target, "elements": elements}
