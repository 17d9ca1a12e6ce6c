"""Which tiles a call takes: what was measured near its shape, else what the model says of it, else the planner's own.

In: a ``Variant``, the device, an element type, a shape. Out: ``Pins``, which ``compiled`` takes. What is stored is read
once, when an op is made, so that a call takes the same plan as long as its op lives. ``flashgen tune`` leaves one
``Tuning`` for each class of shapes; the nearest one speaks for a call, unless a size is more than a factor of four
away. Elsewhere GPUs go by their ``by_shape.py``. CPUs have one plan for all lengths: another one is another library,
seconds to compile, and gains in short calls alone (``tools/benchmarks/README.md``, "Tiles by length").
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Generic

from flashgen.analysis.variant import Variant
from flashgen.compiler.compiled import compiled, with_reasons
from flashgen.compiler.tuned import TunedStore, reasons
from flashgen.diagnostics import SpecError
from flashgen.ir.shape import Shape
from flashgen.ir.types import ElementType
from flashgen.plan.measured import PLANNERS_OWN, Pins, ShapeClass, Tuning
from flashgen.targets.families import family_of
from flashgen.targets.protocol import BinaryT, Device, PlanT, Target
from flashgen.version import __version__


@dataclass(frozen=True)
class TileChoices(Generic[PlanT, BinaryT]):
    """The tiles of one head dimension on one device, by element type and shape. ``by_length``: the model is asked."""

    variant: Variant
    device: Device
    tunings: tuple[tuple[Tuning, Pins], ...] = ()
    remarks: tuple[str, ...] = ()
    by_length: bool = True
    _known: dict[tuple[ShapeClass, int], Pins] = field(default_factory=dict, compare=False, repr=False)

    @property
    def target(self) -> Target[PlanT, BinaryT]:
        """What is compiled for."""
        return family_of(self.device).target(self.device)

    def usual(self, element: ElementType | None = None) -> Pins:
        """Where no shape is given: what was tuned last, else the planner's own."""
        known = [(tuning.time, pins) for tuning, pins in self.tunings if self._is_for(tuning, element)]
        if known:
            return max(known, key=lambda each: each[0])[1]
        return replace(PLANNERS_OWN, reasons=self.remarks)

    def of_call(self, element: ElementType, shape: Shape) -> Pins:
        """What a call of this shape takes; remembered for its class."""
        key = (ShapeClass.of(shape, element), shape.heads // max(shape.kv_heads, 1))
        if key not in self._known:
            self._known[key] = self._of_class(*key)
        return self._known[key]

    def _of_class(self, shape_class: ShapeClass, group: int) -> Pins:
        element = shape_class.element
        near = [
            (tuning.shape_class.element is not element, distance, -tuning.time, n)
            for n, (tuning, _) in enumerate(self.tunings)
            if self._is_for(tuning, element) and (distance := tuning.shape_class.distance(shape_class)) is not None
        ]
        if near:
            return self.tunings[min(near)[-1]][1]
        if self.by_length:
            try:
                found = family_of(self.device).by_length(self.device, self.variant, element)
            except SpecError:  # said by whoever compiles
                found = None
            if found is not None:
                return found.of_class(shape_class, group)
        return replace(PLANNERS_OWN, reasons=self.remarks)

    def _is_for(self, tuning: Tuning, element: ElementType | None) -> bool:
        return not self.device.tiles_by_element or element in (None, tuning.shape_class.element)


def tile_choices(variant: Variant, device: Device, identity: str | None = None) -> TileChoices[Any, Any]:
    """The choices on a device; tunings are those under ``identity``, by default the device's own."""
    family = family_of(device)
    identity = family.identity(device) if identity is None else identity
    store = TunedStore.default()
    if identity is None or not store.may_know(variant):
        return TileChoices(variant, device)
    known = sorted(store.tunings(variant, identity).values(), key=lambda each: each.time)
    found, remarks = [], []
    for tuning in known:
        pins = replace(Pins.of(tuning), reasons=reasons(tuning, identity))
        if not device.tiles_by_element:
            pins = replace(pins, element=None)
        try:
            compiled(variant, family.target(device), pins)
        except SpecError as error:
            remarks.append(f"tuned tiles are not used, as the planner refuses them: {error.diagnostics[0].message}")
            continue
        if tuning.passes:
            found.append((tuning, pins))
    if not known:
        remarks += _unused(store.of_other_versions(variant, identity))
    return TileChoices(variant, device, tuple(found), tuple(remarks))


def planned(variant: Variant, device: Device) -> Any:
    """The plan where no shape is given, with tuned tiles where they were measured on the machine at hand."""
    choices = tile_choices(variant, device)
    pins = choices.usual()
    return with_reasons(compiled(variant, choices.target, pins).plan, pins)


def planned_at(variant: Variant, device: Device, shape: Shape) -> Any:
    """The plan of calls of one shape, for each element type that has tiles of its own."""
    choices = tile_choices(variant, device)
    target, own = choices.target, compiled(variant, choices.target).plan
    by_element = {each: choices.of_call(each, shape) for each in own.elements_apart}
    plans = {each: with_reasons(compiled(variant, target, pins).plan, pins) for each, pins in by_element.items()}
    return own.joined({each: (plan, plan) for each, plan in plans.items()})


def _unused(versions: tuple[str, ...]) -> tuple[str, ...]:
    if not versions:
        return ()
    old = ", ".join(versions)
    return (f"tuned tiles of flashgen {old} are kept and not used by {__version__}: run `flashgen tune` again",)
