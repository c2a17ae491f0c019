"""Why not another format: the first constraint, what the change would do, and the budget at which it would happen."""

from __future__ import annotations

import dataclasses

import pytest
from plan_samples import HEAD, NO_UNITS, VETO, edited, priced_plan, relabelled, sample_plan, sample_program, traced_plan

from dsmp.errors import UnknownFormatError, UnknownRecipeError
from dsmp.hardware_db import FORMATS, resolve
from dsmp.passes import flip_budget
from dsmp.passes.explain import Explanation, explain
from dsmp.passes.node_figures import figures_of
from dsmp.passes.plan import PrecisionPlan
from dsmp.passes.plan_fields import Reason
from dsmp.passes.program import Candidate, Program, Solution
from dsmp.passes.solve import best_alternative

Q = "layers.0.attn.q|fprop|linear|0"
UP = "layers.0.up|fprop|linear|0"
ROW = "fp8_e4m3:row/row->bf16"


def asked(plan: PrecisionPlan, key: str, want: str | None = None) -> Explanation:
    return explain(plan, plan.by_key[key], want=want, device=resolve("h800"))


def changed(plan: PrecisionPlan, budget: float | None, *, memory: int | None = None) -> PrecisionPlan:
    """The same program solved for another budget."""
    return traced_plan(plan.nodes, plan.program).solve(budget=budget, memory=memory)


def with_program(program: Program, budget: float) -> PrecisionPlan:
    return traced_plan(sample_program(2)[0], program).solve(budget=budget)


@pytest.fixture(scope="module")
def tight() -> PrecisionPlan:
    """Two blocks at a budget that holds some of the 8-bit formats back."""
    return sample_plan(2, budget=1e-4)


# ---- the first constraint ----------------------------------------------------------------------------------


def test_veto_and_verdict_come_first(tight: PrecisionPlan) -> None:
    vetoed = asked(tight, HEAD, "fp8_e4m3").constraint
    assert vetoed is not None
    assert (vetoed.code, vetoed.text) == ("veto-head", VETO.text)
    refused = asked(tight, UP, "fp6_e2m3")
    assert refused.constraint is not None
    assert (refused.constraint.code, refused.constraint.text) == ("verdict", NO_UNITS.text)
    assert refused.flip is None
    assert refused.change is not None
    assert refused.change.drift is None


def test_rule() -> None:
    plan = traced_plan(*sample_program(2)).solve(budget=1e-2, rules={"layers.0.up|*": "bf16"})
    found = asked(plan, UP, "fp8_e4m3").constraint
    assert found is not None
    assert (found.code, found.text) == ("rule", "the rule 'layers.0.up|*' asks for bf16")


def test_tie() -> None:
    _, program = sample_program(2)
    _, k, _ = program.ties[0]
    why = Reason(code="veto-integer", text="an operand holds integers")
    blocked = [c.model_copy(update={"blocked": why}) if c.compute == "fp8_e4m3" else c for c in program.candidates[k]]
    plan = with_program(program.model_copy(update={"candidates": {**program.candidates, k: blocked}}), 1e-2)
    found = asked(plan, Q, "fp8_e4m3")
    assert found.constraint is not None
    assert found.constraint.code == "tie"
    assert k in found.constraint.text
    assert why.text in found.constraint.text
    assert found.flip is None
    own = asked(plan, k, "fp8_e4m3").constraint
    assert own is not None
    assert own.code == "veto-integer"


def test_error_budget(tight: PrecisionPlan) -> None:
    found = asked(tight, UP, "fp8_e4m3")
    assert tight.solution is not None and tight.solution.limit is not None
    assert found.constraint is not None and found.change is not None and found.change.drift is not None
    assert found.constraint.code == "error-budget"
    assert found.change.time_us < 0
    assert tight.solution.drift + found.change.drift > tight.solution.limit
    assert found.change_share == found.change.drift / tight.solution.limit


def test_a_plan_that_measured_more_than_predicted_has_less_left(tight: PrecisionPlan) -> None:
    solution = tight.solution
    assert solution is not None and solution.limit is not None
    held = solution.model_copy(update={"limit": 4 * solution.limit, "measured": 3.9 * solution.drift})
    plan = traced_plan(tight.nodes, tight.program).model_copy(update={"solution": held})
    found = asked(plan, UP, "fp8_e4m3").constraint
    assert found is not None
    assert found.code == "error-budget"
    assert "(predictions times 3.9, as measured)" in found.text


def test_memory_budget() -> None:
    _, program = sample_program(2)
    candidates = {
        key: [c.model_copy(update={"saved_bytes": 1000 if c.label == "fp32" else 3000}) for c in found]
        for key, found in program.candidates.items()
    }
    program = program.model_copy(update={"candidates": candidates})
    plan = traced_plan(sample_program(2)[0], program).solve(budget=1.0, memory=len(candidates) * 2000)
    codes = set()
    for key in program.keys:
        if plan.by_key[key].output != "fp32":
            continue
        found = asked(plan, key)
        assert found.constraint is not None and found.change is not None
        codes.add(found.constraint.code)
        if found.constraint.code == "memory-budget":
            assert found.flip is not None and found.flip.budget == "memory"
            assert_flips(plan, key, found)
    assert "memory-budget" in codes


def test_does_not_pay(tight: PrecisionPlan) -> None:
    found = asked(tight, "layers.1.down|fprop|linear|0", "fp32")
    assert found.constraint is not None and found.change is not None
    assert found.constraint.code == "does-not-pay"
    assert found.change.time_us >= 0


def test_chosen(tight: PrecisionPlan) -> None:
    for want in ("bf16", "bf16->bf16"):
        found = asked(tight, UP, want)
        assert found.constraint is not None
        assert found.constraint.code == "chosen"
        assert found.alternative == found.chosen
        assert found.change is None


def test_no_candidate(tight: PrecisionPlan) -> None:
    lacking = asked(tight, UP, "int4").constraint
    assert lacking is not None
    assert lacking.code == "verdict"
    assert "no int4 units" in lacking.text
    unnamed = asked(tight, UP, "int8").constraint
    assert unnamed is not None
    assert unnamed.code == "no-candidate"  # an h800 has int8 units
    pointwise = asked(tight, "layers.0|fprop|gelu|0", "fp8_e4m3").constraint
    assert pointwise is not None
    assert pointwise.code == "no-candidate"
    assert "for GEMMs" in pointwise.text
    without_device = explain(tight, tight.by_key[UP], want="int4").constraint
    assert without_device is not None
    assert without_device.code == "no-candidate"


def test_every_node_and_every_format_has_an_answer(tight: PrecisionPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flip_budget, "EXACT_NODES", 0)
    for decision in tight:
        for want in [*FORMATS, ROW, "fp8_e4m3:row/row", "->bf16"]:
            found = asked(tight, decision.key, want)
            assert found.constraint is not None
            assert found.constraint.text
        assert asked(tight, decision.key).key == decision.key


def test_unknown_formats(tight: PrecisionPlan) -> None:
    with pytest.raises(UnknownFormatError, match="'fp9'"):
        asked(tight, UP, "fp9")
    with pytest.raises(UnknownRecipeError, match="'collumn'"):
        asked(tight, UP, "fp8_e4m3:collumn/row")


# ---- what a change would do --------------------------------------------------------------------------------


def test_the_change_is_what_the_program_says(tight: PrecisionPlan) -> None:
    assert tight.program is not None
    for key in (Q, UP, "layers.1.attn.out|fprop|linear|0"):
        found = asked(tight, key)
        assert found.alternative is not None and found.change is not None
        then = relabelled(tight, (key, *found.tied), found.alternative.label)
        now = relabelled(tight, (), "")
        assert found.change.time_us == pytest.approx(then.time - now.time)
        assert found.change.drift == pytest.approx(then.error - now.error)
        assert sum(c.us_then - c.us for c in found.casts) == pytest.approx(found.change.cast_us)
        figures = figures_of(tight)[key]
        assert found.margin_us == figures.margin_us
        assert found.slack_us == figures.slack_us


def test_tied_nodes_share_a_copy_and_move_together(tight: PrecisionPlan) -> None:
    found = asked(tight, Q, ROW)
    assert found.tied == ("layers.0.attn.k|fprop|linear|0", "layers.0.attn.v|fprop|linear|0")
    (added,) = [c for c in found.casts if c.state == "added"]
    assert added.value == "layers.0.norm|fprop|native_layer_norm|0"
    assert (added.role, added.format, added.recipe) == ("reads", "fp8_e4m3", "row")
    assert added.now == ()
    assert added.then == (Q, *found.tied)
    assert (added.us, added.us_then > 0) == (0.0, True)


def test_casts_without_an_alternative_are_those_of_now(tight: PrecisionPlan) -> None:
    found = asked(tight, "layers.1.down|fprop|linear|0", "int8")
    assert {c.state for c in found.casts} == {"kept"}
    assert all(c.now == c.then for c in found.casts)


def test_who_makes_a_copy(tight: PrecisionPlan) -> None:
    norm = "layers.1.norm|fprop|native_layer_norm|0"
    loose = sample_plan(2, budget=1e-2)
    (copy,) = [c for c in asked(loose, norm).casts if c.us]
    assert copy.role == "makes"
    assert copy.state == "repriced"  # it is dearer to make from fp32
    assert copy.us_then == pytest.approx(copy.us / 0.7)


def test_views_speak_of_what_they_read(tight: PrecisionPlan) -> None:
    view = asked(tight, "layers.0.attn|fprop|view|0", "fp8_e4m3")
    source = asked(tight, Q, "fp8_e4m3")
    assert view.follows == Q
    assert dataclasses.replace(view, key=Q, op="linear", follows=None) == source


def test_view_of_an_input() -> None:
    decisions, program = sample_program(1)
    view = "layers.0.attn|fprop|view|0"
    program = program.model_copy(update={"reads": {**program.reads, view: []}})
    found = asked(traced_plan(decisions, program).solve(budget=1e-3), view, "bf16")
    assert found.follows is None
    assert found.missing == ("it shows an input of the graph, whose format nobody chooses",)
    assert found.constraint is not None
    assert found.constraint.code == "view"


# ---- the budget at which it flips --------------------------------------------------------------------------


def assert_flips(plan: PrecisionPlan, key: str, found: Explanation) -> None:
    """The solver takes the alternative at the budget that was named and not at the one before."""
    flip = found.flip
    assert flip is not None and flip.exact and found.alternative is not None and plan.solution is not None
    wanted = {found.alternative.label, *(o.label for o in found.options if found.asked in (o.compute, o.label))}
    taken = []
    for value, amount in ((flip.value, flip.amount), (flip.before, flip.amount_before)):
        if flip.budget == "memory":
            solved = changed(plan, plan.budget.amount if plan.budget else None, memory=int(value))
        else:
            solved = changed(plan, amount, memory=plan.solution.memory_limit)
        decision = next(d for d in solved if d.key == key)
        mine = [o.label for o in found.options if (o.compute, o.recipe, o.output) ==
                (decision.compute, decision.recipe, decision.output)]  # fmt: skip
        taken.append(bool(wanted & set(mine)))
    assert taken == [True, False]
    assert max(flip.value, flip.before) <= 1.03 * min(flip.value, flip.before)


@pytest.mark.parametrize("drift", ["kl", "l2", "gradients"])
@pytest.mark.parametrize(("key", "want"), [(Q, "fp8_e4m3"), (UP, "fp8_e4m3"), (UP, "fp32"), (HEAD, None)])
def test_flip_budget_is_true(drift: str, key: str, want: str | None) -> None:
    amount = {"kl": 1e-4, "l2": 0.014, "gradients": 2e-4}[drift]
    plan = sample_plan(2, budget=amount, drift=drift)
    found = asked(plan, key, want)
    assert found.flip is not None
    assert_flips(plan, key, found)


def test_flip_of_an_unlimited_plan_is_downward() -> None:
    plan = sample_plan(2, budget=None)
    found = asked(plan, UP)
    assert found.flip is not None
    assert found.flip.value < found.flip.before
    assert_flips(plan, UP, found)


def test_what_never_pays_never_flips() -> None:
    """A format that is slower than another of the same drift is chosen at no budget."""
    _, program = sample_program(2)
    slow = [c.model_copy(update={"time_us": 1e4}) if c.label == ROW else c for c in program.candidates[UP]]
    plan = with_program(program.model_copy(update={"candidates": {**program.candidates, UP: slow}}), 1e-4)
    found = asked(plan, UP, ROW)
    assert found.flip is None
    assert found.constraint is not None
    assert found.constraint.code == "does-not-pay"


def test_estimates_say_so_and_are_near(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = sample_plan(6, budget=5e-4)
    ratios = []
    for key in (Q, UP, "layers.2.attn.out|fprop|linear|0", "layers.5.up|fprop|linear|0", HEAD):
        exact = asked(plan, key).flip
        with monkeypatch.context() as patch:
            patch.setattr(flip_budget, "EXACT_NODES", 0)
            estimate = asked(plan, key).flip
        if exact is not None and estimate is not None:
            assert exact.exact and not estimate.exact
            ratios.append(max(estimate.value / exact.value, exact.value / estimate.value))
    assert len(ratios) >= 3
    assert sorted(ratios)[len(ratios) // 2] < 2


# ---- plans that know less ----------------------------------------------------------------------------------


def test_without_calibration(tight: PrecisionPlan) -> None:
    plan = traced_plan(tight.nodes, None)
    found = asked(plan, UP)
    assert found.reason == tight.by_key[UP].reason.text
    assert {o.label: o.time_us for o in found.options} == tight.by_key[UP].time_us
    assert "without calibration" in found.missing[0]
    assert found.change is None and found.flip is None and found.slack_us is None
    refused = asked(plan, UP, "int4").constraint
    assert refused is not None and refused.code == "verdict"
    told = asked(plan, HEAD, "fp8_e4m3").constraint
    assert told is not None and told.text == tight.by_key[HEAD].reason.text
    chosen = asked(plan, UP, "bf16").constraint
    assert chosen is not None and chosen.code == "chosen"


def test_an_edited_decision(tight: PrecisionPlan) -> None:
    plan = edited(tight, UP, accumulate="bf16")
    found = asked(plan, UP, "fp32")
    assert (found.chosen.compute, found.chosen.accumulate) == ("bf16", "bf16")
    assert "edited" in found.missing[0]
    assert found.constraint is not None


def test_ten_thousand_nodes() -> None:
    plan = priced_plan(720, 1e5)
    assert len(plan) > 10_000
    key = "layers.400.up|fprop|linear|0"
    for want in ("fp8_e4m3", "fp32", None, "fp6_e2m3"):
        found = asked(plan, key, want)
        assert found.key == key
        assert found.flip is None or not found.flip.exact


def test_only_what_is_better_in_something_is_weighed() -> None:
    def candidate(label: str, time_us: float, drift: float) -> Candidate:
        return Candidate(
            label=label, compute=label, accumulate="fp32", output="fp32", time_us=time_us, drift=drift, measured=True
        )

    solution = Solution(time_us=1, cast_us=0, drift=0, saved_bytes=0, bound_us=1, gap=0)
    chosen, worse = candidate("tf32", 10.0, 1e-6), candidate("bf16", 12.0, 1e-5)
    equal, faster, exact = (candidate(*c) for c in (("fp16", 10.0, 1e-6), ("int8", 8.0, 1e-2), ("fp32", 20.0, 0.0)))
    assert best_alternative([chosen, worse, equal], chosen, solution) is None
    assert best_alternative([chosen, worse, equal, exact], chosen, solution) is exact
    assert best_alternative([chosen, worse, equal, faster], chosen, solution) is faster
