"""What a rule makes of a node: the format and recipe that it asks for, and whether the device can follow."""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from ..errors import PlanHardwareError
from ..hardware_db.capability import Device
from ..hardware_db.formats import keeps_wide, packs_weight
from ..hardware_db.narrow_weights import stores_weights
from ..hardware_db.schema import Choice, OpClass, natural_accumulator, recipe_accumulator
from .gemm import operand_nodes, takes_recipe
from .graph import root
from .rules import Rule
from .sensitivity import has_one_weight

# How a rule's format is scaled where the device's ladder does not say.
_DEFAULT_RECIPES = {
    "fp8_e4m3": "1x128/128x128",
    "fp8_e5m2": "1x128/128x128",
    "fp8_e4m3fnuz": "1x128/128x128",
    "fp8_e5m2fnuz": "1x128/128x128",
    "fp6_e2m3": "mx32/mx32",
    "fp6_e3m2": "mx32/mx32",
    "fp4_e2m1": "mx32/mx32",
    "int8": "row/row",
    "int4": "1x128/1x128",
    "fp16": "tensor/tensor",
}
# What int8 is in inference on CPUs, which have no kernels for the usual recipe.
_PACKED_INT8 = "dynamic/row"


def forced_choice(
    rule: Rule, node: fx.Node, key: str, op_class: OpClass, traced: str, device: Device,
    parameters: frozenset[fx.Node], *, training: bool,
) -> Choice:  # fmt: skip
    """A rule's format for a GEMM, in the recipe that the rule names, or the device has kernels for, or the ladder's, or
    the usual one.

    Raises PlanHardwareError unless the device can compute this GEMM so.
    """
    choice = _asked(rule, device, op_class)
    if choice.format == traced:
        return choice
    by_weight = has_one_weight([root(n, through_casts=True) in parameters for n in operand_nodes(node)[:2]])
    packs = by_weight and not training and traced == "fp32" and stores_weights(device, choice.format).ok
    if rule.recipe is None and choice.format == "int8" and packs and takes_recipe(node, _PACKED_INT8):
        choice = replace(choice, recipe=_PACKED_INT8)
    if rule.recipe is not None and not takes_recipe(node, rule.recipe):
        raise PlanHardwareError(
            f"{key}: {rule.recipe} cannot scale its operands. Let the rule's glob leave it out, or name no recipe."
        )
    if not keeps_wide(choice.recipe):
        require(device, key, op_class, choice.format, choice.accumulate)
    if not packs_weight(choice.recipe):
        return choice
    verdict = stores_weights(device, choice.format)
    if not verdict.ok:
        elsewhere = f"{rule.asked} is for CPUs, which {device.id} is not. Ask for {rule.format} alone."
        raise PlanHardwareError(f"{key}: {verdict.reason if keeps_wide(choice.recipe) else elsewhere}")
    if training:
        raise PlanHardwareError(
            f"{key}: {rule.asked} stores weights for inference, and this is a training step. Plan with training=False, "
            "or call the compiled model under torch.no_grad()."
        )
    if traced != "fp32":
        raise PlanHardwareError(
            f"{key}: {rule.asked} is for products in fp32, and this was written in {traced}. Plan the model in fp32."
        )
    if not by_weight:
        raise PlanHardwareError(
            f"{key}: {rule.asked} is for products by a parameter, and this has none. Let the rule's glob leave it out."
        )
    return choice


def _asked(rule: Rule, device: Device, op_class: OpClass) -> Choice:
    if rule.recipe is not None:
        accumulate = recipe_accumulator(rule.format, rule.recipe)
        return Choice(format=rule.format, recipe=rule.recipe, accumulate=accumulate)
    recipe, accumulate = _DEFAULT_RECIPES.get(rule.format, "none"), natural_accumulator(rule.format)
    ladder = (c for c in device.ladder(op_class) if c.format == rule.format)
    return next(ladder, Choice(format=rule.format, recipe=recipe, accumulate=accumulate))


def require(device: Device, key: str, op_class: OpClass, format_name: str, accumulate: str) -> None:
    """Raise PlanHardwareError with the verdict's text unless the device can do what is asked for a node."""
    verdict = device.supports(op_class, None, format_name, accumulate)
    if not verdict.ok:
        able = [c.format for c in device.ladder(op_class) if device.supports(op_class, None, c.format, c.accumulate).ok]
        raise PlanHardwareError(
            f"{key}: {device.id} cannot compute {op_class} in {format_name}: {verdict.reason.rstrip('.')}. "
            f"Ask for a format of its ladder ({', '.join(able)})."
        )
