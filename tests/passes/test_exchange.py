"""What a change of labels would do is what adding everything up anew says."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_samples import HEAD, edited, priced_plan, relabelled, sample_program, traced_plan

from dsmp.passes.exchange import chosen_candidate, chosen_candidates, exchanges_of
from dsmp.passes.plan import PrecisionPlan
from dsmp.passes.program import Program


def program_of(plan: PrecisionPlan) -> Program:
    assert plan.program is not None
    return plan.program


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 50), price=st.floats(1e3, 1e7), at=st.integers(0, 10**6))
def test_change_is_the_difference_of_totals(seed: int, price: float, at: int) -> None:
    plan = priced_plan(2, price, seed)
    program = program_of(plan)
    exchanges = exchanges_of(plan, program)
    key = program.keys[at % len(program.keys)]
    group = exchanges.group(key)
    for label in exchanges.alternatives(key):
        change = exchanges.change(group, label)
        before, after = relabelled(plan, (), ""), relabelled(plan, group, label)
        assert change.time_us == pytest.approx(after.time - before.time, abs=1e-9)
        assert change.cast_us == pytest.approx(after.cast_time - before.cast_time, abs=1e-9)
        assert change.drift == pytest.approx(after.error - before.error, abs=1e-15)
        assert change.saved_bytes == after.memory - before.memory
        copies = exchanges.copies(group, label)
        assert sum(c.time_us_then - c.time_us for c in copies) == pytest.approx(change.cast_us, abs=1e-9)


def test_alternatives_are_what_all_tied_nodes_may_take() -> None:
    decisions, program = sample_program(1)
    q, k, v = program.ties[0]
    names = [c.label for c in program.candidates[k]]
    program = program.model_copy(
        update={"candidates": {**program.candidates, k: [c for c in program.candidates[k] if c.label != names[2]]}}
    )
    plan = traced_plan(decisions, program)
    exchanges = exchanges_of(plan, program)
    assert exchanges.group(v) == (q, k, v)
    assert exchanges.alternatives(q) == [names[1], names[3]]
    assert exchanges.group(HEAD) == (HEAD,)
    assert exchanges.alternatives(HEAD) == ["bf16->bf16"]


def test_ties_that_share_a_node_are_one_group() -> None:
    decisions, program = sample_program(2)
    (a, b, c), (d, e, f) = program.ties
    program = program.model_copy(update={"ties": [[a, b], [c, b], [d, e], [f, c]]})
    exchanges = exchanges_of(traced_plan(decisions, program), program)
    assert set(exchanges.group(a)) == {a, b, c, f}
    assert exchanges.group(a) == exchanges.group(f)
    assert exchanges.group(e) == (d, e)


def test_unmeasured_candidates_have_no_drift() -> None:
    plan = priced_plan(1, 1e5)
    change = exchanges_of(plan, program_of(plan)).change((HEAD,), "fp6_e2m3:mx32/mx32->bf16")
    assert change.drift is None
    assert plan.solution is not None
    assert change.priced(plan.solution) is None


def test_edited_decisions_stand_for_no_candidate() -> None:
    plan = priced_plan(1, 1e5)
    program = program_of(plan)
    other = edited(plan, HEAD, recipe="mx32/mx32")
    assert chosen_candidate(other.by_key[HEAD], program.candidates[HEAD]) is None
    chosen = chosen_candidates(other, program)
    assert set(program.keys) - set(chosen) == {HEAD}
