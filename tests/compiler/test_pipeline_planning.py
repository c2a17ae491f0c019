"""Costs of layers from captured models, and pipelines planned from them."""

from __future__ import annotations

import pytest
import torch

import dsmp
from dsmp.compiler.pipeline import make_plan
from dsmp.compiler.pipeline_planning import RankDevice, layer_costs, plan_pipeline
from dsmp.compiler.small_gpt import SmallGpt, SmallGptConfig
from dsmp.errors import PipelineError, StageSplitError
from dsmp.passes.layers import joined, layer_of
from dsmp.passes.pipeline_plan import PipelinePlan

NAMES = ["token_embedding", "position_embedding", *(f"blocks.{i}" for i in range(4)), "norm_out", "head"]


@pytest.fixture(scope="module")
def h800():
    return dsmp.resolve_hardware("h800")


@pytest.fixture(scope="module")
def captured():
    with torch.device("meta"):
        model, ids = SmallGpt(SmallGptConfig(context=64, d_model=256)), torch.empty(2, 64, dtype=torch.int64)
    return dsmp.capture(model, (ids, ids))


@pytest.fixture(scope="module")
def plan(captured, h800):
    return make_plan(captured, h800)


def test_layers_of_paths():
    assert layer_of("model.layers.3.self_attn.q_proj") == "model.layers.3"
    assert layer_of("encoder.layers.encoder_layer_0.mlp.0") == "encoder.layers.encoder_layer_0"
    assert layer_of("lm_head") == "lm_head" and layer_of("layer1.0.conv1") == "layer1.0" and layer_of("") is None


def test_layers_with_one_parameter_are_joined():
    assert joined(6, [[1, 3], [2, 4], [5]]) == [range(1), range(1, 5), range(5, 6)]
    assert joined(3, []) == [range(i, i + 1) for i in range(3)]


def test_costs_add_up_to_those_of_the_model(captured, plan, h800):
    layers = layer_costs(captured, {h800.id: plan}, {h800.id: h800})
    assert [x.name for x in layers] == NAMES
    total = sum(x.seconds[h800.id].total for x in layers)
    assert 1e6 * total == pytest.approx(plan.prediction.time_us, rel=1e-3)
    assert sum(x.activation_bytes[h800.id] for x in layers) == plan.prediction.saved_bytes
    parameters = sum(p.numel() for p in SmallGpt(SmallGptConfig(context=64, d_model=256)).parameters())
    assert sum(x.parameter_bytes for x in layers) == 16 * parameters  # weight, gradient, two moments
    assert {x.boundary_bytes for x in layers[1:-1]} == {4 * 2 * 64 * 256}
    blocks = [x for x in layers if x.name.startswith("blocks")]
    for block in blocks:
        assert block.seconds[h800.id].total == pytest.approx(blocks[0].seconds[h800.id].total, rel=0.1)
        assert block.seconds[h800.id].weight_gradient > 0
        assert block.activation_bytes[h800.id] == pytest.approx(blocks[0].activation_bytes[h800.id], rel=0.3)


def test_a_pipeline_is_planned_without_processes_and_kept_as_json(captured, plan, h800):
    found = plan_pipeline(captured, plan, [h800] * 2, None, 8, "1f1b", boundary="bf16")
    assert [n for s in found.stages for n in s.layers] == NAMES
    assert found.peak_microbatches == (2, 1) and found.stages[0].boundary_bytes == 2 * 2 * 64 * 256
    assert found.bubble > 1 / 9 - 1e-9  # that of equal stages
    assert "bf16" in str(found) and "blocks.1" in str(found)
    again = PipelinePlan.from_dict(found.to_dict())
    assert again == found and again.digest() == found.digest()
    other = plan_pipeline(captured, plan, [h800] * 2, ["blocks.3"], 8, "1f1b", boundary="bf16")
    assert other.digest() != found.digest() and other.stages[1].layers[0] == "blocks.3"
    assert found.step_s <= other.step_s


def test_unequal_devices(captured, plan, h800):
    slow = dsmp.resolve_hardware("v100")
    found = plan_pipeline(captured, plan, [h800, slow], None, 8)
    assert found.devices == ("h800", slow.id)
    assert len(found.stages[0].layers) != len(plan_pipeline(captured, plan, [slow, h800], None, 8).stages[0].layers)
    small = RankDevice(device=h800, memory_bytes=20_000_000)
    squeezed = plan_pipeline(captured, plan, [small, h800], None, 8)
    assert squeezed.memory_bytes[0] <= 20_000_000 < found.memory_bytes[0]


def test_plans_and_captures_that_do_not_serve(captured, plan, h800):
    values = plan_pipeline(captured, plan, [h800] * 2, None, 8).to_dict()
    with pytest.raises(StageSplitError, match="no pipeline plan"):
        PipelinePlan.from_dict({**values, "unknown": 1})
    with pytest.raises(StageSplitError, match="no pipeline plan"):
        PipelinePlan.from_dict({k: v for k, v in values.items() if k != "stages"})
    with pytest.raises(StageSplitError, match=r"boundary is 'int8'; allowed: fp32"):
        PipelinePlan.from_dict({**values, "boundary": "int8"})
    with pytest.raises(StageSplitError, match="3 devices"):
        PipelinePlan.from_dict({**values, "devices": ["h800"] * 3})
    inference = dsmp.capture(torch.nn.Linear(4, 4), (torch.zeros(2, 4),), training=False)
    with pytest.raises(PipelineError, match="no backward pass"):
        plan_pipeline(inference, None, [h800] * 2, None, 4)
    with pytest.raises(PipelineError, match="one per rank"):
        plan_pipeline(captured, plan, [], None, 4)
