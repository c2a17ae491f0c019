"""Every device of the catalogue gives a plan that it can carry out: the embedded model and ResNet-18."""

from __future__ import annotations

import functools

import pytest
import torch
import torchvision

from dsmp.compiler.capture import Capture, capture
from dsmp.compiler.pipeline import check_plan_hardware, make_plan
from dsmp.compiler.small_gpt import demo_model
from dsmp.hardware_db import load_catalog
from dsmp.passes.plan import PrecisionPlan
from dsmp.passes.plan_fields import GEMM_CLASSES

CATALOG = load_catalog()
ONE_PER_PROFILE = sorted({row.arch: i for i, row in sorted(CATALOG.rows.items())}.values())


@functools.cache
def graphs(name: str) -> Capture:
    if name == "gpt":
        model, inputs = demo_model()
        return capture(model, inputs, {}, training=True, source=name)
    with torch.device("meta"):
        resnet, images = torchvision.models.resnet18(), torch.empty(8, 3, 224, 224)
    return capture(resnet, (images,), {}, training=True, source=name)


def check(plan: PrecisionPlan, name: str) -> None:
    """Every format of a plan is one that its device has, every choice has its reason, and times are predicted."""
    device = CATALOG.device(name)
    check_plan_hardware(plan, device)
    assert plan.hardware == name and plan.hardware_data == device.caveats
    gemms = [d for d in plan if d.op in GEMM_CLASSES]
    assert gemms
    for d in gemms:
        assert device.supports(d.op, None, d.compute, d.accumulate), (name, d.key, d.compute)
        assert device.peak(d.compute, d.accumulate) > 0
        assert d.time_us[d.compute] > 0 and d.reason.text
    for d in plan:
        assert d.output in ("fp32", device.storage), (name, d.key, d.output)
    assert plan.prediction.time_us > 0 and plan.prediction.time_us_fp32 > 0


@pytest.mark.parametrize("name", ONE_PER_PROFILE)
def test_every_profile_plans_the_embedded_model(name):
    check(make_plan(graphs("gpt"), CATALOG.device(name), predict_memory=False), name)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["gpt", "resnet"])
@pytest.mark.parametrize("name", CATALOG.names())
def test_every_device_plans_both_models(name, model):
    check(make_plan(graphs(model), CATALOG.device(name), predict_memory=False), name)
