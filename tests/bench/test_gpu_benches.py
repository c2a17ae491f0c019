"""Benches that need a GPU: what they compute from times, that they say so where there is none, and that they run on
tiny problems on the CPU, where kernels are interpreted."""

from __future__ import annotations

import importlib.util
import json
import math
import runpy
from functools import partial
from pathlib import Path

import pytest
import torch
from triton.runtime.errors import OutOfResources

from bench import gemm, gpu, models_gpu
from bench.gemm_shapes import SHAPES, Shape, Timing, rows_of, shapes_of
from bench.table import show
from dsmp.codegen.kernel_call import Config
from dsmp.codegen.targets import TARGETS
from dsmp.errors import KernelUnavailableError
from dsmp.hardware_db.detect import resolve_hardware
from dsmp.passes.rounding import quantize

GPU_TESTS = Path(__file__).parents[1] / "gpu"
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@without_gpu
@pytest.mark.parametrize("bench", [gemm, models_gpu])
def test_without_a_gpu_a_bench_says_so_in_one_line(bench, capsys):
    with pytest.raises(SystemExit) as ended:
        bench.main([])
    assert ended.value.code == gpu.NO_GPU
    said = capsys.readouterr()
    assert said.out == "" and len(said.err.strip().splitlines()) == 1
    assert bench.__name__ in said.err and "torch.cuda.is_available()" in said.err


def test_a_gpu_without_kernels_is_named(monkeypatch):
    monkeypatch.setattr(gpu.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu, "resolve_hardware", lambda: resolve_hardware("v100"))
    with pytest.raises(KernelUnavailableError, match=r"V100.*sm_70"):
        gpu.require_gpu("bench.gemm")
    monkeypatch.setattr(gpu, "resolve_hardware", lambda: resolve_hardware("h200"))
    device, target = gpu.require_gpu("bench.gemm")
    assert device.id == "h200" and target is TARGETS["sm_90"]


@without_gpu
def test_tests_for_a_gpu_are_written_for_one_and_skipped_here():
    """Their modules are importable, every test is marked, and the folder says why it is skipped."""
    conftest = runpy.run_path(str(GPU_TESTS / "conftest.py"))
    assert conftest["why_not"]() == "torch sees no GPU"
    files = sorted(GPU_TESTS.glob("test_*.py"))
    assert files
    for file in files:
        module = runpy.run_path(str(file))
        assert module["pytestmark"].name == "gpu"
        assert any(name.startswith("test_") for name in module)


def test_shapes_of_the_models():
    by_layer = {s.layer: (s.n, s.k) for s in SHAPES["llama-8b"]}
    assert by_layer == {"qkv": (6144, 4096), "o": (4096, 4096), "gate+up": (28672, 4096), "down": (4096, 14336)}
    # products of all layers are the models' parameters without embeddings: 7.0 and 68.5 billion
    assert sum(s.n * s.k for s in SHAPES["llama-8b"]) * 32 == pytest.approx(6.98e9, rel=2e-3)
    assert sum(s.n * s.k for s in SHAPES["llama-70b"]) * 80 == pytest.approx(68.45e9, rel=2e-3)
    assert (24576, 1536) in {(s.n, s.k) for s in SHAPES["deepseek-v3"]}
    assert shapes_of(["llama-8b", "deepseek-v3"]) == [*SHAPES["llama-8b"], *SHAPES["deepseek-v3"]]
    assert Shape(model="m", layer="l", n=3, k=5).flops(7) == 2 * 3 * 5 * 7


def test_rows_of_given_times(tmp_path):
    device = resolve_hardware("h200")
    shape = Shape(model="m", layer="l", n=4096, k=4096)
    flops = shape.flops(4096)
    base = Timing(implementation="torch mm", format="bf16", ms=1e3 * flops / device.peak("bf16") / 0.5)
    fp8 = Timing(implementation="dsmp gemm", format="fp8_e4m3 row", ms=base.ms / 4, quantise_ms=base.ms / 4, choice="c")
    first, second = rows_of(shape, 4096, [base, fp8], device)
    assert first["% of peak"] == pytest.approx(50) and first["x torch bf16"] == 1
    assert first["TFLOPS"] == pytest.approx(device.peak("bf16") / 2e12)
    assert second["x torch bf16"] == pytest.approx(4) and second["x with quantise"] == pytest.approx(2)
    assert second["% of peak"] == pytest.approx(100, rel=0.02), "fp8 has twice the rate of bf16"
    assert list(first) == list(second)
    file = tmp_path / "rows.json"
    show("title", [first, second], file)
    assert json.loads(file.read_text())["rows"][1]["choice"] == "c"


def test_the_fastest_configuration_that_fits_is_taken():
    space = [Config(blocks={"B": size}) for size in (1, 2, 3, 4)]
    times = {1: 3.0, 2: 1.0, 3: 2.0}

    def run(config):
        if config.blocks["B"] not in times:
            raise OutOfResources(2, 1, "shared memory")
        return times[config.blocks["B"]]

    assert gemm.fastest(space, run, lambda call: call()) == (1.0, space[1], 3)
    with pytest.raises(KernelUnavailableError, match="--tune"):
        gemm.fastest(space[3:], run, lambda call: call())


@pytest.mark.parametrize(("isa", "expected"), [
    ("sm_90", {"bf16", "fp8_e4m3 tensor", "fp8_e4m3 row", "fp8_e4m3 1x128/128x128", "int8 row"}),
    ("sm_100", {"bf16", "fp8_e4m3 tensor", "fp8_e4m3 row", "fp8_e4m3 1x128/128x128", "fp8_e4m3 mx32"}),
    ("sm_80", {"bf16", "int8 row"}),
])  # fmt: skip
def test_every_implementation_runs(isa, expected, monkeypatch):
    """Interpreted, with a clock that counts calls."""
    monkeypatch.setattr(gemm.torch, "compile", lambda function, **_: function)
    device = resolve_hardware({"sm_90": "h200", "sm_100": "b200", "sm_80": "a100"}[isa])

    def measure(run):
        run()
        return 1.0

    bench = gemm.Bench(device=device, target=TARGETS[isa], tune=1, measure=measure)
    shape = Shape(model="m", layer="l", n=32, k=128)
    found = list(bench.timings(shape, 16, place="cpu"))
    assert expected <= {t.format for t in found}
    assert found[0].implementation == "torch mm" and {"dsmp gemm"} <= {t.implementation for t in found}
    assert all(t.quantise_ms == (0.0 if t.format == "bf16" else 1.0) for t in found)
    rows = rows_of(shape, 16, found, device)
    assert all(row["x torch bf16"] == 1 for row in rows)


@pytest.mark.parametrize("recipe", ["tensor", "row"])
def test_torchs_users_quantise_as_the_simulator(recipe):
    x = torch.randn(20, 40, generator=torch.Generator().manual_seed(0)).bfloat16()
    values, scale = gemm.scale_and_round(x, "fp8_e4m3", recipe)
    expected = quantize(x, "fp8_e4m3", recipe)
    assert scale.shape == ((1, 1) if recipe == "tensor" else (20, 1))
    torch.testing.assert_close(scale.flatten(), expected.scale.flatten(), rtol=0, atol=0)
    assert torch.equal(values.float(), expected.values)


TINY = models_gpu.Settings(
    layers=1, hidden=128, inner=256, heads=2, kv_heads=1, vocabulary=64, batch=2, length=16, steps=2, device="cpu"
)


def way(name, ms, loss=1.0):
    return models_gpu.Measured(way=name, step_ms=ms, peak_bytes=2_000_000, loss=loss)


def test_rows_of_given_steps():
    results = [way("eager fp32", [4.0, 9.0, 4.0]), way(models_gpu.BASELINE, [2.0])]
    first, second = models_gpu.rows_of(results, TINY)
    assert first["ms"] == 4 and first["tokens/s"] == pytest.approx(32 / 4e-3) and first["MB"] == 2
    assert first[f"x {models_gpu.BASELINE}"] == 0.5 and second[f"x {models_gpu.BASELINE}"] == 1
    (alone,) = models_gpu.rows_of(results[:1], TINY)
    assert math.isnan(alone[f"x {models_gpu.BASELINE}"])


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")
def test_ways_train_the_same_model(monkeypatch, capsys):
    """Eager, and dsmp op by op: the same weights and batches, so the losses are close, and go down."""
    monkeypatch.setattr(models_gpu.torch, "compile", partial(compiled_op_by_op, torch.compile))
    chosen = ["eager fp32", "eager bf16", "dsmp, kernels off", *([] if has_torchao() else ["torchao fp8"])]
    found = list(models_gpu.measured(TINY, chosen))
    assert [m.way for m in found] == ["eager fp32", "eager bf16", "dsmp, kernels off"]
    assert all(len(m.step_ms) == 2 and m.loss == pytest.approx(found[0].loss, rel=0.02) for m in found)
    assert "%" in found[2].note and not found[0].note
    said = capsys.readouterr().out
    assert has_torchao() or "torchao is not installed" in said


def compiled_op_by_op(compile, model, *, backend=None, options=None):
    return compile(model, backend=backend, options={**(options or {}), "executor": "eager"})


def has_torchao():
    return importlib.util.find_spec("torchao") is not None


def test_every_way_is_there():
    assert list(models_gpu.ways("cpu")) == [
        "eager fp32", "eager bf16", "Inductor fp32", "autocast+Inductor", "torchao fp8", "dsmp", "dsmp, kernels off"
    ]  # fmt: skip
