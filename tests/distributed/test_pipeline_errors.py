"""What `dsmp.pipeline` refuses, and what it plans, without processes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import dsmp
from dsmp.errors import (
    CaptureError,
    InputSpecError,
    InvalidOptionError,
    LayerTooLargeError,
    PipelineError,
    PipelineMemoryError,
    ScheduleError,
    StageSplitError,
    TooFewLayersError,
    UnknownOptionError,
    UnknownScheduleError,
)


class Stack(nn.Module):
    """Blocks behind an embedding, a head that may be the embedding's transpose; returns its loss."""

    def __init__(self, blocks=4, tied=False):
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(blocks))
        self.head = nn.Linear(16, 32, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def logits(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = x + torch.relu(block(x))
        return self.head(x)

    def forward(self, ids, targets):
        return nn.functional.cross_entropy(self.logits(ids).flatten(0, 1), targets.flatten())


class Logits(Stack):
    def forward(self, ids):
        return self.logits(ids)


class Counting(Stack):
    """Depends on values, which no single graph can."""

    def forward(self, ids, targets):
        return super().forward(ids, targets) * (2 if ids.sum().item() > 3 else 1)


IDS = torch.arange(32).reshape(8, 4)
BATCH = (IDS, IDS.flip(0))


@pytest.fixture
def made(fake_mesh):
    def make(model=None, ranks=2, **options):
        options = {"inputs": BATCH, "microbatches": 4, "compile": False, "hardware": "h800", **options}
        return dsmp.pipeline(Stack() if model is None else model, fake_mesh(pp=ranks), **options)

    return make


@pytest.mark.parametrize("schedule", ["zbv", "dualpipev"])
def test_compiled_stages_in_zero_bubble_schedules_are_refused_with_what_works(schedule, made):
    with pytest.raises(ScheduleError, match=rf"{schedule} computes.*compile=False.*1f1b"):
        made(schedule=schedule, compile=True)
    assert made(schedule=schedule).plan.schedule == schedule


def test_batches_that_microbatches_do_not_divide(made):
    with pytest.raises(InputSpecError, match=r"batch of 8 cannot be cut into 3"):
        made(microbatches=3)
    with pytest.raises(InvalidOptionError, match="microbatches"):
        made(microbatches=0)
    with pytest.raises(InputSpecError, match=r"dimension 0.*\(8, 4\), \(4, 4\)"):
        made(inputs=(IDS, IDS[:4]))


def test_schedules_and_options_that_there_are_not(made):
    with pytest.raises(UnknownScheduleError, match="1f1b"):
        made(schedule="1f2b")
    with pytest.raises(InvalidOptionError, match="'boundary' got 'fp8'"):
        made(boundary="fp8")
    with pytest.raises(InvalidOptionError, match="'split' got 'best'"):
        made(split="best")
    with pytest.raises(InvalidOptionError, match="one per rank"):
        made(hardware=["h800"] * 3)
    with pytest.raises(InvalidOptionError, match="one per rank"):
        made(memory=[10**9])
    with pytest.raises(ScheduleError, match="1f1b on 2 ranks has 2"):
        made(stages=4)


def test_too_few_layers(made):
    with pytest.raises(TooFewLayersError, match=r"3 layers.*embed, blocks\.0, head.*4 stages"):
        made(Stack(blocks=1), schedule="interleaved")


def test_tied_parameters_keep_their_layers_together(made):
    with pytest.raises(TooFewLayersError, match="embed to head share a parameter"):
        made(Stack(tied=True))
    with pytest.raises(StageSplitError, match=r"'blocks\.1'.*share a parameter"):
        made(Stack(tied=True), split=["blocks.1"])


def test_splits_by_names_that_are_no_layers_or_out_of_order(made):
    with pytest.raises(StageSplitError, match=r"'block\.1'.*did you mean blocks\.1"):
        made(split=["block.1"])
    with pytest.raises(StageSplitError, match=r"later layers than the first"):
        made(split=["embed"])
    with pytest.raises(StageSplitError, match=r"the model's order"):
        made(split=["blocks.2", "blocks.1", "head"], schedule="interleaved")


def test_memory(made):
    with pytest.raises(LayerTooLargeError, match=r"'embed'.*h800, has 1,000"):
        made(memory=1000)
    with pytest.raises(PipelineMemoryError, match=r"rank 0 .* by [\d,]+ bytes"):
        made(memory=[11_000, 11_000])


def test_models_that_are_no_single_graph_of_a_training_step(made):
    with pytest.raises((CaptureError, PipelineError), match=r"graph|data-dependent"):
        made(Counting())
    with pytest.raises(PipelineError, match="no backward pass"):
        made(Stack().requires_grad_(False))
    with pytest.raises(PipelineError, match="must return its loss"):
        made(Logits(), inputs=(IDS,))


def test_a_plan_is_checked_and_used(made):
    plan = made(split=["blocks.3"]).plan
    again = made(split=plan)
    assert again.plan is plan and again.plan.stages[1].layers == ("blocks.3", "head")
    with pytest.raises(StageSplitError, match="microbatches 4 and not 8"):
        made(split=plan, microbatches=8)


def test_this_rank_holds_the_parameters_of_its_stages_only(made):
    staged = made()
    model = Stack()
    wanted = {n for n in model.state_dict() if n.startswith(tuple(f"{x}." for x in staged.plan.stages[1].layers))}
    assert set(staged.state_dict()) == wanted  # the fake group's rank is the last
    assert "this rank runs stages 1" in str(staged)


def test_a_model_on_the_meta_device_is_planned_and_loaded_later(made):
    with torch.device("meta"):
        empty, batch = Stack(), (torch.empty(8, 4, dtype=torch.int64),) * 2
    staged = made(empty, inputs=batch)
    assert all(p.is_meta for p in staged.parameters())
    model = Stack()
    staged.to_empty(device="cpu")
    staged.load_state_dict(model.state_dict())
    for name, p in staged.named_parameters():
        torch.testing.assert_close(p, model.get_parameter(name))


@pytest.mark.parametrize(
    "options, name",
    [
        ({"microbatches": 2.0}, "microbatches"),
        ({"microbatches": True}, "microbatches"),
        ({"stages": "2"}, "stages"),
        ({"stages": 7, "split": ["blocks.1"]}, "stages"),
        ({"split": None}, "split"),
        ({"split": [1]}, "split"),
        ({"memory": -1}, "memory"),
        ({"memory": "1GB"}, "memory"),
        ({"hardware": 5}, "hardware"),
        ({"sending": 5}, "sending"),
        ({"loss_fn": 5}, "loss_fn"),
        ({"options": "x"}, "options"),
        ({"options": {"executor": "eager"}}, "options"),
        ({"executor": "x"}, "executor"),
    ],
)
def test_values_that_no_option_takes(options, name, made):
    with pytest.raises(InvalidOptionError, match=f"'{name}' got"):
        made(**options)


def test_unknown_options_are_refused_before_the_first_step(made):
    with pytest.raises(UnknownOptionError, match="foo"):
        made(options={"foo": 1}, compile=True)


def test_no_mesh(fake_mesh):
    fake_mesh(pp=2)
    with pytest.raises(InvalidOptionError, match=r"'mesh' got 5.*DeviceMesh"):
        dsmp.pipeline(Stack(), 5, inputs=BATCH, microbatches=4)


def test_steps_without_gradients_are_refused(made):
    staged = made()
    with torch.no_grad(), pytest.raises(PipelineError, match="outside no_grad"):
        staged.step(*BATCH)


def test_gradients_of_several_steps_add_up(made):
    staged = made(ranks=1)
    staged.step(*BATCH)
    once = {n: p.grad.clone() for n, p in staged.named_parameters()}
    staged.step(*BATCH)
    for name, p in staged.named_parameters():
        torch.testing.assert_close(p.grad, 2 * once[name])
