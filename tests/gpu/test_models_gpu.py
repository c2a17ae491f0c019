"""Whole training steps on the GPU: close to fp64, nothing fallen back, under CUDA graphs and with dynamic shapes."""

from __future__ import annotations

import pytest
import torch
from kernel_checks.models import autocast_step, batch_of, distance, exact_step, small_gpt, step
from torch._dynamo.utils import counters

import dsmp
from dsmp.codegen.audit import Ran

pytestmark = pytest.mark.gpu

FP8 = ("fp8_e4m3", "fp8_e4m3fnuz")


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    counters.clear()


@pytest.fixture
def narrow(hardware):
    """Rules that multiply in the device's fp8, or int8, whatever a plan would gain by it."""
    for format in (*FP8, "int8"):
        if hardware.supports("linear", None, format):
            return {"blocks.*|linear|*": format}
    pytest.skip(f"{hardware.name} multiplies nothing in 8 bits")


def compiled(model, mode=None, dynamic=None, **options):
    if mode is not None:  # torch.compile takes a mode or options
        return torch.compile(model, backend="dsmp", mode=mode, dynamic=dynamic)
    return torch.compile(model, backend="dsmp", options={"strict": True, **options}, dynamic=dynamic)


@pytest.mark.parametrize("executor", ["inductor", "eager"])
def test_the_default_plan_is_as_close_to_fp64_as_autocast(executor, device):
    """1.5: the plan casts where autocast does or less; what differs is the order of sums."""
    model, batch = small_gpt(device), batch_of(device)
    exact, theirs = exact_step(model, batch), autocast_step(model, batch)
    call = compiled(model, executor=executor)
    ours = distance(step(model, call, batch), exact)
    allowed = distance(theirs, exact)
    assert ours[1] <= 1.5 * allowed[1]
    assert ours[0] <= 1.5 * allowed[0] + 1e-4  # one number: autocast's may be right by chance
    audit = dsmp.audit(call)
    assert not audit.fallbacks, str(audit)
    assert not {e.ran for e in audit} & {Ran.SIMULATED, Ran.INTERPRETED}, str(audit)


@pytest.mark.parametrize("executor", ["inductor", "eager"])
def test_narrow_kernels_compute_what_is_simulated(executor, narrow, device):
    """The kernels against exact simulation of the same plan: half of the plan's own distance from fp64, as a sum in
    another order takes some values to the neighbour when they are rounded next."""
    model, batch = small_gpt(device), batch_of(device)
    exact = exact_step(model, batch)
    call = compiled(model, executor=executor, rules=narrow)
    found = step(model, call, batch)
    audit = dsmp.audit(call)
    assert not audit.fallbacks, str(audit)
    ran = [e for e in audit if e.recipe != "none" and e.flops]
    assert ran and all(e.ran is Ran.NATIVE for e in ran), str(audit)
    torch._dynamo.reset()
    plain = torch.compile(model, backend="dsmp", options={"rules": narrow, "executor": executor, "kernels": "off"})
    simulated = step(model, plain, batch)
    of_plan = distance(simulated, exact)
    assert distance(found, simulated)[1] <= 0.5 * of_plan[1]
    assert distance(found, exact)[1] <= 1.25 * of_plan[1]
    # e4m3 rounds 16 times as coarsely as bf16, scaled by blocks; not everything is multiplied in it
    assert of_plan[1] <= 20 * distance(autocast_step(model, batch), exact)[1]


def test_training_goes_down(narrow, device):
    model, batch = small_gpt(device), batch_of(device)
    call = compiled(model, rules=narrow)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(20):
        losses.append(float(step(model, call, batch)[0]))
        optimizer.step()
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize("name", ["triton_gemm", "torch"])
def test_an_implementation_by_name(name, device):
    """bf16 products by our kernels and by the library agree to their rounding."""
    model, batch = small_gpt(device), batch_of(device)
    exact = exact_step(model, batch)
    rules = {"blocks.*|linear|*": "bf16"}
    call = compiled(model, rules=rules, implementations={"blocks.*|linear|*": name})
    ours = distance(step(model, call, batch), exact)
    mine = [e for e in dsmp.audit(call) if e.op == "linear" and e.key.startswith("blocks.")]
    assert mine and {e.implementation for e in mine} == {name}
    assert ours[1] <= 1.5 * distance(autocast_step(model, batch), exact)[1]


def test_cuda_graphs(device):
    """Recorded and replayed with new data and new weights, nothing left out of the graphs."""
    model = small_gpt(device)
    call = compiled(model, mode="reduce-overhead")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for seed in range(6):
        batch = batch_of(device, seed=seed)
        exact = exact_step(model, batch)
        allowed = distance(autocast_step(model, batch), exact)
        torch.compiler.cudagraph_mark_step_begin()
        ours = distance(step(model, call, batch), exact)
        assert ours[1] <= 1.5 * allowed[1], f"step {seed}"
        optimizer.step()
    assert not counters["inductor"]["cudagraph_skips"]
    assert not dsmp.audit(call).fallbacks


def test_cuda_graphs_of_narrow_kernels(narrow, device):
    """The kernels are captured by hand, forward only: a replay on other data equals a plain call."""
    model = small_gpt(device)
    call = compiled(model, rules=narrow)
    first, second = batch_of(device), batch_of(device, seed=1)
    static = [t.clone() for t in first]
    with torch.no_grad():
        for _ in range(3):
            call(*static)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            loss = call(*static)
        for batch in (second, first):
            for held, fresh_values in zip(static, batch, strict=True):
                held.copy_(fresh_values)
            graph.replay()
            torch.testing.assert_close(loss, call(*batch), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rules", ["default", "narrow"])
def test_dynamic_shapes(rules, request, device):
    """Two lengths, one graph."""
    options = {} if rules == "default" else {"rules": request.getfixturevalue("narrow")}
    model = small_gpt(device)
    call = compiled(model, dynamic=True, **options)
    for length in (96, 128, 50):
        batch = batch_of(device, context=length)
        exact = exact_step(model, batch)
        allowed = distance(autocast_step(model, batch), exact)[1]
        assert distance(step(model, call, batch), exact)[1] <= (1.5 if rules == "default" else 20) * allowed
    assert counters["stats"]["unique_graphs"] == 1
    assert not dsmp.audit(call).fallbacks
