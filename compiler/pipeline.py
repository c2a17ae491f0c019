"""The way from a captured model to a plan, and what a plan may ask of a device. Used by backend, planner and report."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from typing import cast

import torch
from torch import fx

from ..errors import PlanHardwareError, PlanMismatchError
from ..hardware_db.capability import Device
from ..hardware_db.formats import get_format, is_dynamic, is_static, keeps_wide, packs_weight, split_recipe
from ..hardware_db.narrow_weights import stores_weights
from ..hardware_db.schema import OpClass, recipe_accumulator
from ..passes.cost import format_of
from ..passes.forced import require
from ..passes.graph import calls, float_dtype
from ..passes.keys import FPROP, NodeKey, key_of
from ..passes.plan import Decision, ModelInfo, PrecisionPlan, Prediction, fingerprint
from ..passes.plan_fields import GEMM_CLASSES
from ..passes.rules import Rule, nothing_follows
from ..passes.select_default import Selection, rules_without_a_node, select_default
from .capture import Capture
from .execution import predict_execution

log = logging.getLogger("dsmp")


def make_plan(
    capture: Capture, device: Device, *, rules: Sequence[Rule] = (), predict_memory: bool = True
) -> PrecisionPlan:
    """Decide for every node of a captured model on a device.

    A key that stands in several graphs (a module called on both sides of a graph break) gets one decision. Raises
    RuleError for a rule that matches no node, PlanHardwareError for a rule that the device cannot follow.
    """
    selections = [select_default(g.gm, device, parameters=g.parameters, rules=rules) for g in capture]
    plan = assemble_plan(capture.source, device, selections, rules)
    check_rules(plan)
    if not (predict_memory and capture.joint):
        return plan
    execution = predict_execution(capture, plan.by_key, device)
    saved = {"saved_bytes": execution.saved_bytes, "saved_bytes_fp32": execution.saved_bytes_fp32}
    return plan.model_copy(update={"prediction": plan.prediction.model_copy(update=saved)})


def check_rules(plan: PrecisionPlan) -> None:
    """Raise RuleError for a rule of a plan that no node of it can follow."""
    for rule in rules_without_a_node(plan.rules, plan.by_key):
        raise nothing_follows(rule, next(iter(plan.by_key)))


def assemble_plan(source: str, device: Device, selections: Sequence[Selection], rules: Sequence[Rule]) -> PrecisionPlan:
    """One plan from what was decided for each graph of a model; of a key that was decided twice the first counts."""
    decisions: dict[str, Decision] = {}
    for selection in selections:
        for decision in selection.decisions:
            decisions.setdefault(decision.key, decision)
    return PrecisionPlan(
        dsmp=version("dsmp"),
        torch=torch.__version__,
        hardware=device.id,
        hardware_data=device.caveats,
        model=ModelInfo(
            source=source,
            fingerprint=fingerprint((d.key, d.aten, d.shapes) for d in decisions.values()),
            nodes=len(decisions),
        ),
        prediction=Prediction(
            time_us=round(sum(s.time_us for s in selections), 3),
            time_us_fp32=round(sum(s.time_us_traced for s in selections), 3),
        ),
        rules=list(rules),
        nodes=list(decisions.values()),
    )


def check_plan_hardware(plan: PrecisionPlan, device: Device) -> None:
    """Raise PlanHardwareError with the verdict's text when a plan asks the device for what it cannot do.

    What stays as the model was written asks for nothing.
    """
    for decision in plan:
        op = NodeKey.parse(decision.key).op
        if op in GEMM_CLASSES and keeps_wide(decision.recipe):
            verdict = stores_weights(device, decision.compute)
            if not verdict.ok:
                raise PlanHardwareError(f"{decision.key}: {verdict.reason}")
        elif op in GEMM_CLASSES and decision.compute != decision.traced:
            require(device, decision.key, cast(OpClass, op), decision.compute, decision.accumulate)
        asked = _not_executed(decision, op in GEMM_CLASSES)
        if asked:
            raise PlanHardwareError(f"{decision.key}: {asked}.")


def _not_executed(decision: Decision, is_gemm: bool) -> str:
    """What a decision (edited by hand, say) asks for that no executor would do, with the remedy; `""` if nothing."""
    if decision.op == "view" or decision.reason.code == "view":
        return ""
    if not is_gemm and decision.compute != decision.traced:
        return f"only GEMMs compute in another format than traced ({decision.traced}); set output to store it narrower"
    if keeps_wide(decision.recipe) and decision.op != "linear":
        return f"only linears keep an operand wide; set recipe to 'row/row' or 'tensor/row' for {decision.op}"
    if decision.traced != "fp32" and packs_weight(decision.recipe):
        return f"{decision.recipe} is for products in fp32, and this was written in {decision.traced}"
    natural = recipe_accumulator(decision.compute, decision.recipe)
    if decision.accumulate != natural:
        return f"{decision.compute} is accumulated in {natural}, not in {decision.accumulate}"
    if is_static(decision.recipe):
        fits = decision.compute == "int8" and {r.name for r in split_recipe(decision.recipe)} == {"static", "row"}
        if decision.static_range is None or not fits:
            return "static steps are for int8 by static/row, with a static_range, [smallest, largest] of calibration"
    if is_dynamic(decision.recipe):
        fits = decision.compute == "int8" and {r.name for r in split_recipe(decision.recipe)} == {"dynamic", "row"}
        if decision.op != "linear" or not fits:
            return "dynamic steps are for linears in int8 by dynamic/row"
    fmt = get_format(decision.compute)
    scaled = any(r.is_scaled for r in split_recipe(decision.recipe))
    if scaled and (fmt.storage_bits > 16 or decision.compute == "bf16"):
        return f"{decision.compute} needs no scales; set recipe to 'none'"
    if not scaled and fmt.kind == "int":
        return f"{decision.compute} without scales rounds to whole numbers; set recipe, for example 'row/row'"
    return ""


def of_these_dtypes(
    gm: fx.GraphModule, decisions: Mapping[str, Decision], source: str, *, strict: bool
) -> Mapping[str, Decision]:
    """The decisions of a plan for nodes that compute in the dtype that they were planned in. What others lose is said:
    an error under strict, else a warning."""
    other: dict[str, tuple[str, str]] = {}
    for node in calls(gm):
        decided = decisions.get(str(key_of(node)))
        dtype = float_dtype(node)
        found = format_of(dtype) if dtype is not None else None
        if decided is not None and found is not None and found != decided.traced:
            other[decided.key] = (found, decided.traced)
    if not other:
        return decisions
    key, (found, planned) = next(iter(other.items()))
    text = (
        f"{len(other)} nodes compute in another dtype than in the plan for {source}, such as {key}, in {found} and not "
        f"in {planned}: the model was converted, or is called under torch.autocast. Make the plan of the model as it "
        "is called"
    )
    if strict:
        raise PlanMismatchError(f"{text}, or compile without strict to keep what is traced.")
    log.warning("dsmp: %s; these nodes stay as traced.", text)
    return {k: d for k, d in decisions.items() if k not in other}


def report_repeated(plan: PrecisionPlan, keys: Iterable[str], *, strict: bool) -> None:
    """Say which products run once in a graph but several times, in different formats, in its plan: an error under
    strict, else a warning."""
    there, first = set(keys), dict[NodeKey, Decision]()
    for d in plan:
        if d.op not in GEMM_CLASSES:
            continue
        run = replace(NodeKey.parse(d.key), ordinal=0)
        if d.key in there:
            first.setdefault(run, d)
        elif run in first and not first[run].same_formats(d):
            text = (
                f"all runs of {run} follow the plan's decision for the first one, {first[run].compute} "
                f"{first[run].recipe}: {plan.model.source} has {d.key} in {d.compute} {d.recipe}, which this graph has "
                "not. Compile what runs the module several times as a whole, or plan one format for it by a rule"
            )
            if strict:
                raise PlanMismatchError(f"{text}.")
            log.warning("dsmp: %s.", text)


def report_undecided(undecided: Iterable[str], plan: PrecisionPlan, *, strict: bool) -> None:
    """Say which nodes of a graph a plan does not know: an error under strict, else a warning; they stay as traced."""
    keys = list(undecided)
    if not keys:
        return
    named = f"{', '.join(keys[:5])}{' ...' if len(keys) > 5 else ''}"
    nodes = "1 GEMM is" if len(keys) == 1 else f"{len(keys)} GEMMs are"
    text = f"{nodes} not in the plan for {plan.model.source}: {named}. Make the plan from the same model and inputs"
    if all(NodeKey.parse(key).phase != FPROP for key in keys) and all(d.phase == FPROP for d in plan):
        text = (
            f"{nodes} not in the plan for {plan.model.source}, which has no backward pass: {named}. Call the compiled "
            "model under torch.no_grad() or torch.inference_mode(), make a plan of a training step"
        )
    if strict:
        raise PlanMismatchError(f"{text}, or compile without strict to keep their traced precision.")
    log.warning("dsmp: %s; until then they keep their traced precision.", text)
