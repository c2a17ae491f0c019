"""Pipelines on real processes (gloo) against the same model in one process."""

from __future__ import annotations

import numpy as np
import pipeline_ranks
import pytest
import torch

from dsmp.passes.pipeline_plan import PipelinePlan

pytestmark = pytest.mark.slow  # real processes

MICROBATCHES = pipeline_ranks.MICROBATCHES
COMPILED = {name: {"schedule": name, "executor": "eager"} for name in ("gpipe", "1f1b", "interleaved")}
EAGER = {name: {"schedule": name, "compile": False} for name in ("zbv", "dualpipev")}
NARROW = {"bf16": {"boundary": "bf16", "executor": "eager", "split": ["blocks.1"]}}
TOLERANCE = 1e-5


def one_process(model, loss_of):
    loss = loss_of(model)
    loss.backward()
    return loss.item(), pipeline_ranks.gradients(model)


@pytest.fixture(scope="module")
def whole():
    return one_process(pipeline_ranks.gpt(), lambda m: m(*pipeline_ranks.batch()))


@pytest.fixture(scope="module")
def found(two_ranks):
    return two_ranks.run(pipeline_ranks.train, {**COMPILED, **NARROW})


def worst(ranks, whole):
    """The largest relative error of the loss and of any gradient; every parameter must be on one rank."""
    loss, gradients = whole
    parts = [set(r["gradients"]) for r in ranks]
    assert not set.intersection(*parts) and set.union(*parts) == set(gradients)
    losses = [r["losses"] for r in ranks if r["losses"] is not None]
    assert len(losses) == 1 and losses[0].shape == (MICROBATCHES,)
    got = {n: g for r in ranks for n, g in r["gradients"].items()}
    errors = [np.abs(got[n] - g).max() / np.abs(g).max() for n, g in gradients.items()]
    return max(*errors, abs(losses[0].mean() - loss) / loss)


@pytest.mark.parametrize("case", COMPILED)
def test_losses_and_gradients_are_those_of_one_process(case, found, whole):
    ranks = [rank[case] for rank in found]
    assert worst(ranks, whole) < TOLERANCE
    for rank, other in zip(ranks, reversed(ranks), strict=True):
        assert rank["plan"] == other["plan"] and rank["plan"].schedule == case
        assert len(rank["plan"].stages) == (4 if case == "interleaved" else 2)
        assert case in rank["text"] and "blocks.0" in rank["text"]


def test_names_are_those_of_the_model(found):
    """State and node keys, so that a state dict and a plan of the whole model serve its stages."""
    for case in COMPILED:
        state = [name for rank in found for name in rank[case]["state"]]
        assert sorted(state) == sorted(pipeline_ranks.gpt().state_dict())
    keys = {key for rank in found for key in rank["1f1b"]["keys"]}
    model = pipeline_ranks.gpt()
    wanted = {
        f"{n}|{p}|linear|0" for n, m in model.named_modules() if hasattr(m, "in_features") for p in ("fprop", "wgrad")
    }
    assert wanted <= keys


def test_narrow_boundaries_halve_what_is_sent(found, whole):
    wide, narrow = ([rank[case]["sent"] for rank in found] for case in ("1f1b", "bf16"))
    values = MICROBATCHES * 2 * 16 * 128  # microbatches of 2 rows: forward on the first rank, backward on the second
    assert wide == [{"float32": 4 * values}] * 2
    assert narrow == [{"bfloat16": 2 * values}] * 2
    assert found[0]["bf16"]["plan"].stages[0].boundary_bytes == 2 * values // MICROBATCHES
    assert 1e-5 < worst([rank["bf16"] for rank in found], whole) < 2e-2


def test_a_pipeline_is_trained_and_refuses_what_it_was_not_made_for(two_ranks):
    first, last = two_ranks.run(pipeline_ranks.uses)
    ids, targets = pipeline_ranks.batch()
    model = pipeline_ranks.gpt()
    optimizer = torch.optim.SGD(model.parameters(), lr=pipeline_ranks.LEARNING_RATE)
    whole = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(ids, targets)
        loss.backward()
        optimizer.step()
        whole.append(loss.item())
    assert first["losses"] == [None] * 3 and whole[2] < whole[0]
    np.testing.assert_allclose(last["losses"], whole, rtol=1e-5)
    assert first["stages"][1][0] == "gpt.blocks.1"
    assert all(n.startswith("gpt.") for n in first["state"] + last["state"])
    for found in (first, last):
        assert "InputSpecError" in found["refused"]["rows"] and "(8, 16)" in found["refused"]["rows"]
        assert "loss_fn" in found["refused"]["target"] and "form" in found["refused"]["form"]
        assert "PipelineError" in found["missing"] and found["zero"]


def test_ranks_with_different_splits_refuse_to_start(two_ranks):
    for text in two_ranks.run(pipeline_ranks.disagree):
        assert "RanksDisagreeError" in text and "different pipeline plans" in text


def test_the_plan_survives_json(found):
    plan = found[0]["interleaved"]["plan"]
    assert PipelinePlan.from_dict(plan.to_dict()) == plan


@pytest.mark.parametrize("case", ["zbv", pytest.param("dualpipev", marks=pytest.mark.long)])
def test_zero_bubble_schedules_run_stages_that_are_not_compiled(case, two_ranks, whole):
    ranks = two_ranks.run(pipeline_ranks.train, {case: EAGER[case]})
    assert worst([rank[case] for rank in ranks], whole) < TOLERANCE


def test_a_transformers_llama(two_ranks):
    ids, targets = pipeline_ranks.batch()
    whole = one_process(pipeline_ranks.llama(), lambda m: pipeline_ranks.llama_loss(m(input_ids=ids), targets))
    assert worst(two_ranks.run(pipeline_ranks.train_llama, {"executor": "eager"}), whole) < TOLERANCE


def test_inductor_compiles_stages(two_ranks, whole):
    ranks = two_ranks.run(pipeline_ranks.train, {"1f1b": {"schedule": "1f1b", "executor": "inductor"}})
    assert worst([rank["1f1b"] for rank in ranks], whole) < TOLERANCE
