"""Calibration: what is measured, what is left out, and that later plans use it."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from dsmp.compiler.calibration import commands, gemm, timing
from dsmp.compiler.calibration.collectives import fit_line, measure_collectives
from dsmp.compiler.calibration.commands import busy_note, calibrate, summary
from dsmp.compiler.calibration.gemm import (
    DynamicInt8Gemm,
    Grid,
    IntegerGemm,
    PlainGemm,
    Pool,
    ScaledGemm,
    gemm_operators,
    measure_gemms,
)
from dsmp.compiler.calibration.measure import FULL, QUICK, Effort, choose_operators, count_steps, measure
from dsmp.compiler.calibration.memory import (
    conversions,
    cpu_cache_bytes,
    measure_bandwidth,
    measure_conversions,
    measure_launch,
    streaming_bytes,
)
from dsmp.compiler.calibration.timing import EventClock, WallClock, kernel_clock, kernel_seconds, seconds_per_call
from dsmp.errors import InvalidOptionError, UnknownFormatError
from dsmp.hardware_db import overlays, resolve
from dsmp.hardware_db.capability import Device
from dsmp.hardware_db.detect import resolve_hardware
from dsmp.hardware_db.work import GemmShape

CPU = torch.device("cpu")
SHAPES = (GemmShape(m=1, n=64, k=64), GemmShape(m=32, n=64, k=64), GemmShape(batch=2, m=32, n=32, k=32))
TINY = Effort(grid=Grid(shapes=SHAPES, point_s=0.005, round_s=5.0, total_s=60.0), number_s=0.005)


@pytest.fixture
def cpu() -> Device:
    """The running CPU, with so little memory that nothing measured needs much of it."""
    return dataclasses.replace(resolve_hardware("cpu"), memory_bytes=2**28, measured=None, overlays=())


@pytest.fixture
def own_folder(tmp_path, monkeypatch):
    """A user's folder for data files, empty at first."""
    folder = tmp_path / "config" / "hardware"
    for module in (overlays, commands):
        monkeypatch.setattr(module, "user_folder", lambda: folder)
    monkeypatch.setattr(commands, "QUICK", TINY)
    return folder


def silent(_text: str) -> None:
    """Progress that nobody sees."""


# ---- timing ------------------------------------------------------------------------------------------------


class FakeClock:
    """Says of each run what it is told; counts the calls it holds."""

    block_s, most_calls = 1e-3, 100

    def __init__(self, call, slow=()):
        self.calls, self._call, self._slow, self._runs = call, call, slow, 0

    def seconds(self, run):
        before = self._call.count
        run()
        self._runs += 1
        return (self._call.count - before) * (1.0 if self._runs in self._slow else 1e-4)


class Counted:
    """A call that knows how often it was made."""

    count = 0

    def __call__(self):
        self.count += 1


def test_interrupted_blocks_do_not_count():
    call = Counted()
    assert seconds_per_call(call, FakeClock(call, slow={5, 6, 9, 12}), 0.02) == pytest.approx(1e-4)
    assert call.count > 3 + 10 * 10  # blocks of 1 ms hold ten calls


def test_a_call_slower_than_the_budget_is_made_once():
    call = Counted()
    assert seconds_per_call(call, FakeClock(call, slow={1}), 0.5) == 1.0
    assert call.count == 1


def test_wall_time_is_that_of_the_call():
    assert seconds_per_call(lambda: time.sleep(2e-3), WallClock(CPU), 0.03) == pytest.approx(2e-3, rel=0.5)


@pytest.fixture
def two_threads():
    """torch with two threads, afterwards as it was."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_threads_that_hinder_each_other_do_not_count(two_threads):
    seen = set()

    def call():
        seen.add(torch.get_num_threads())
        time.sleep(2e-3 if torch.get_num_threads() > 1 else 5e-4)

    assert kernel_seconds(call, WallClock(CPU, busy=True), 0.02) < 1.5e-3
    assert seen == {1, 2} and torch.get_num_threads() == 2
    for slow, busy in ((0.3, True), (0.0, False)):  # one thread would take too long, or need not be tried
        seen.clear()
        kernel_seconds(lambda s=slow: (call(), time.sleep(s)), WallClock(CPU, busy=busy), 0.02)
        assert seen == {2}


def test_accelerators_are_timed_between_events(monkeypatch):
    log = []

    class Event:
        def __init__(self, device, *, enable_timing):
            assert enable_timing

        def record(self):
            log.append("record")

        def synchronize(self):
            log.append("wait")

        def elapsed_time(self, _end):
            return 12.0

    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr(timing, "_FILLER_BYTES", 16)
    assert EventClock(CPU).seconds(lambda: log.append("run")) == pytest.approx(12e-3)
    assert log == ["record", "run", "record", "wait"]


# ---- products ----------------------------------------------------------------------------------------------


def test_operands_come_from_all_of_the_pool():
    pool = Pool(torch.bfloat16, CPU, 2**12)
    a, b = pool.take(16, 24), pool.take(16, 24)
    assert a.dtype is torch.bfloat16 and a.is_contiguous()
    assert not torch.equal(a, b) and a.float().std() > 0.5
    assert pool.take(64, 64).shape == (64, 64)  # more than it held
    assert pool.operands(GemmShape(m=8, n=8, k=8)) > pool.operands(GemmShape(m=64, n=64, k=32)) == 1


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.float8_e5m2, torch.float64])
def test_pools_hold_every_dtype(dtype):
    values = Pool(dtype, CPU, 2**10).take(64).double()
    assert values.isfinite().all() and len(values.unique()) > 10


@pytest.mark.parametrize("shape", [*SHAPES, GemmShape(m=48, n=16, k=32), GemmShape(batch=3, m=4, n=16, k=8)])
def test_every_layout_multiplies_the_shape(shape):
    layouts = PlainGemm("fp32", Pool(torch.float32, CPU, 2**16)).calls(shape)
    assert len(layouts) == (3 if shape.m > 16 else 1)
    expected = (shape.m, shape.n) if shape.batch == 1 else (shape.batch, shape.m, shape.n)
    assert {tuple(call().shape) for calls in layouts for call in calls} == {expected}


def test_narrow_operators_multiply_the_shape():
    """Also those of accelerators, which the CPU has too, if slowly."""
    shape = GemmShape(m=32, n=64, k=48)
    e4m3, e5m2 = (Pool(d, CPU, 2**14) for d in (torch.float8_e4m3fn, torch.float8_e5m2))
    for operator, dtype in (
        (IntegerGemm(Pool(torch.int8, CPU, 2**14)), torch.int32),
        (ScaledGemm("fp8_e4m3", e4m3, e4m3, CPU), torch.bfloat16),
        (ScaledGemm("fp8_e5m2", e5m2, e4m3, CPU), torch.bfloat16),
    ):
        [calls] = operator.calls(shape)
        assert {(tuple(c().shape), c().dtype) for c in calls} == {((32, 64), dtype)}, operator.describe(shape)


def test_int8_on_a_cpu_is_a_product():
    if "int8" not in gemm_operators(resolve_hardware("cpu"), CPU, 2**16):
        pytest.skip("this build of torch has no quantised linear")
    values = Pool(torch.float32, CPU, 2**14)
    [calls] = DynamicInt8Gemm(values).calls(GemmShape(m=4, n=8, k=64))
    values._next = 0
    x, weight = values.take(4, 64), values.take(8, 64)
    # weights are clipped to 127 steps of 0.02
    expected = x @ weight.clamp(-2.56, 2.54).T
    assert (calls[0]() - expected).norm() < 0.05 * expected.norm()


def test_tf32_is_switched_on_for_its_own_products_only():
    seen = []

    class Spy(PlainGemm):
        def calls(self, shape):
            seen.append((self.format, torch.get_float32_matmul_precision()))
            return super().calls(shape)

    pool = Pool(torch.float32, CPU, 2**14)
    before = torch.get_float32_matmul_precision()
    operators = [Spy("fp32", pool), Spy("tf32", pool, "high")]
    points = measure_gemms(operators, dataclasses.replace(TINY.grid, shapes=SHAPES[:1]), WallClock(CPU), silent)
    assert seen == [("fp32", "highest"), ("tf32", "high")]
    assert torch.get_float32_matmul_precision() == before
    assert [p.operator for p in points] == ["aten.mm, forward layout", "aten.mm under tf32, forward layout"]


def test_accelerators_get_the_operators_they_have(monkeypatch):
    """On meta tensors: shapes and dtypes of the operators' arguments are checked, nothing is computed."""
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    meta = torch.device("meta")
    hopper, volta = (set(gemm_operators(resolve(name), meta, 2**14)) for name in ("h100", "v100"))
    assert {"fp32", "tf32", "bf16", "fp16", "fp64", "int8", "fp8_e4m3", "fp8_e5m2"} <= hopper
    assert "tf32" not in volta


def test_what_is_refused_or_too_slow_is_left_out(monkeypatch):
    class Refused(PlainGemm):
        def calls(self, shape):
            if shape.m > 1:
                raise RuntimeError("expected m to be 1")
            return super().calls(shape)

    class Slow(PlainGemm):
        def calls(self, shape):
            return [[lambda: time.sleep(0.02)]]

    pool = Pool(torch.float32, CPU, 2**14)
    operators = [PlainGemm("fp32", pool), Refused("bf16", pool), Slow("fp16", pool)]
    grid = Grid(shapes=SHAPES[:2], point_s=0.005, round_s=0.5, total_s=60.0)
    points = measure_gemms(operators, grid, WallClock(CPU), silent)
    # 0.02 s for one row is 0.64 s for 32 of them, in each of three layouts
    assert [(p.format, p.m) for p in points] == [("fp32", 1), ("bf16", 1), ("fp16", 1), ("fp32", 32)]
    assert points[2].flop_per_s == pytest.approx(SHAPES[0].flops / 0.02, rel=0.3)

    with pytest.raises(RuntimeError, match="expected m"):
        measure_gemms([Refused("fp32", pool)], dataclasses.replace(grid, shapes=SHAPES[1:2]), WallClock(CPU), silent)


def test_no_shape_is_begun_after_the_time_is_up():
    pool = Pool(torch.float32, CPU, 2**14)
    grid = dataclasses.replace(TINY.grid, total_s=-1.0)
    points = measure_gemms([PlainGemm("fp32", pool)], grid, WallClock(CPU), silent)
    assert [p.shape for p in points] == [SHAPES[0]]


def test_formats_are_chosen(cpu):
    assert {"fp32", "fp64", "bf16", "fp16"} <= {o.format for o in choose_operators(cpu, None)}
    assert [o.format for o in choose_operators(cpu, ["bf16"])] == ["fp32", "bf16"]
    with pytest.raises(UnknownFormatError, match="bf17"):
        choose_operators(cpu, ["bf17"])
    for format in ("tf32", "fp4_e2m1"):
        with pytest.raises(InvalidOptionError, match=r"multiplies on .*bf16, fp16, fp32"):
            choose_operators(cpu, [format])


# ---- everything else ---------------------------------------------------------------------------------------


def test_caches_are_added_up_over_the_socket(tmp_path):
    for cpu_number in range(4):
        for index, (level, shared, size) in enumerate(
            ((1, str(cpu_number), "32K"), (2, str(cpu_number), "512K"), (3, "0-1" if cpu_number < 2 else "2-3", "32M"))
        ):
            folder = tmp_path / f"cpu{cpu_number}" / "cache" / f"index{index}"
            folder.mkdir(parents=True)
            for name, text in (("level", level), ("shared_cpu_list", shared), ("size", size)):
                (folder / name).write_text(f"{text}\n")
    (tmp_path / "cpu0" / "cache" / "index9").mkdir()  # says nothing
    assert cpu_cache_bytes(tmp_path) == 64 * 2**20
    assert cpu_cache_bytes(tmp_path / "cpu0" / "cache") == 0


def test_arrays_exceed_the_caches_but_not_the_memory(cpu):
    h100 = resolve("h100")
    assert streaming_bytes(h100) >= 4 * h100.l2_bytes
    assert streaming_bytes(cpu) == 2**28 // 16


def test_bandwidth_and_launches_are_plausible(cpu):
    assert 1e8 < measure_bandwidth(cpu, CPU, WallClock(CPU), 0.02) < 1e13
    assert 1e-7 < measure_launch(CPU, 0.02) < 1e-2


def test_conversions_are_those_that_plans_make(cpu):
    casts = {("fp32", "bf16", "none"), ("bf16", "fp32", "none"), ("fp32", "fp16", "none"), ("fp16", "fp32", "none")}
    assert set(conversions(cpu, ["fp32", "bf16"])) >= casts
    assert ("fp32", "int8", "row") in conversions(cpu, ["int8"])
    h100 = resolve("h100")
    scaled = set(conversions(h100, ["fp32", "bf16"])) - casts
    ladder = {c.format for c in h100.ladder("linear") if c.recipe != "none"}
    assert {target for _, target, _ in scaled} == ladder != set()
    assert {source for source, _, _ in scaled} == {"fp32", h100.storage}


def test_conversions_are_measured(cpu):
    wanted = [("fp32", "bf16", "none"), ("bf16", "fp8_e4m3", "1x128"), ("fp32", "int8", "tensor")]
    heard = []
    found = measure_conversions(wanted, cpu, CPU, WallClock(CPU), 0.001, heard.append)
    assert [(c.source, c.target, c.recipe) for c in found] == wanted
    assert all(1e5 < c.bytes_per_s < 1e13 for c in found)
    assert heard == ["fp32 to bf16", "bf16 to fp8_e4m3 with scales (1x128)", "fp32 to int8 with scales (tensor)"]


def test_latency_and_bandwidth_are_fitted():
    sizes = [2**12, 2**16, 2**20, 2**24]
    latency, rate = fit_line([(s, 2e-5 + s / 5e9) for s in sizes])
    assert latency == pytest.approx(2e-5) and rate == pytest.approx(5e9)
    # neither is ever negative or infinite, whatever the noise
    latency, rate = fit_line([(s, s / 5e9 * (1 + s / 2**25)) for s in sizes])
    assert latency == 1e-9 and 3e9 < rate < 5e9
    latency, rate = fit_line([(2**12, 2e-5), (2**24, 1e-5)])
    assert 1e-5 < latency < 2e-5 and rate == pytest.approx(1e14)


def test_alone_there_are_no_collectives():
    assert measure_collectives(silent) == []


def test_a_busy_machine_is_named(cpu, monkeypatch):
    monkeypatch.setattr(timing.os, "getloadavg", lambda: (5.0, 1.0, 1.0), raising=False)
    monkeypatch.setattr(timing.os, "cpu_count", lambda: 2)
    assert "load 2.5 per core" in busy_note(cpu) and kernel_clock(CPU).busy
    assert busy_note(resolve("h100")) is None
    monkeypatch.setattr(timing.os, "getloadavg", lambda: (0.25, 1.0, 1.0))
    assert busy_note(cpu) is None and not kernel_clock(CPU).busy


def test_grids_compare_all_formats_on_the_same_shapes():
    assert len(set(FULL.grid.shapes)) == len(FULL.grid.shapes) > len(QUICK.grid.shapes)
    assert set(QUICK.grid.shapes) <= set(FULL.grid.shapes)


def test_a_measurement_is_complete(cpu):
    heard = []
    operators = choose_operators(cpu, ["bf16"])
    measured = measure(cpu, operators, TINY, [], heard.append)
    assert (measured.device, measured.name, measured.units) == (cpu.id, cpu.name, cpu.units)
    assert {p.shape for p in measured.gemm if p.format == "bf16"} == set(SHAPES)
    assert {p.shape for p in measured.gemm if p.format == "fp32"} == set(SHAPES)
    assert measured.ratio_to_fp32("bf16@fp32") > 0
    assert len(heard) == count_steps(cpu, operators, TINY)
    text = [str(line) for line in summary(measured, cpu)]
    assert text[0].startswith(f"{cpu.name} ({cpu.id}), {cpu.units} core")


# ---- the command -------------------------------------------------------------------------------------------


def test_later_plans_use_what_was_measured(own_folder, capsys):
    calibrate(output=None, quick=True, formats=["bf16"], files=[], as_json=False)
    shown = capsys.readouterr().out
    [file] = own_folder.iterdir()
    device = resolve_hardware("cpu")
    measured = device.measured
    assert file.name == f"{device.id}-{device.units}.toml"
    assert f"written to {file}" in shown and "bf16" in shown and "launch overhead" in shown
    assert file.name in device.overlays
    ratio = measured.ratio_to_fp32("bf16@fp32")
    assert device.slower_than_fp32("bf16") == (ratio if ratio <= 1 else None)
    fp32 = {p.shape: p.flop_per_s for p in measured.gemm if p.format == "fp32"}
    assert device.achievable("fp32", SHAPES[1]) == fp32[SHAPES[1]]
    assert device.achieved_bandwidth == measured.memory_bandwidth_bytes_per_s
    assert measured.conversion_rate("fp32", "bf16", "none") > 0


def test_output_and_json(own_folder, tmp_path, capfdbinary):
    target = tmp_path / "here.toml"
    calibrate(output=target, quick=True, formats=["fp32"], files=[], as_json=True)
    record = json.loads(capfdbinary.readouterr().out)
    assert record["file"] == str(target) and not own_folder.exists()
    device = resolve_hardware("cpu", [target])
    assert device.measured.model_dump(mode="json") == record["measurement"]
    assert {p.format for p in device.measured.gemm} == {"fp32"}


def test_nothing_is_measured_for_a_file_that_cannot_be_written(own_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(commands, "measure", lambda *a: pytest.fail("measured"))
    with pytest.raises(InvalidOptionError, match="folder that exists"):
        calibrate(output=tmp_path / "nowhere" / "x.toml", quick=True, formats=None, files=[], as_json=False)
    own_folder.parent.write_text("a file where the folder should be")
    with pytest.raises(InvalidOptionError, match="cannot be made"):
        calibrate(output=None, quick=True, formats=None, files=[], as_json=False)


def test_an_interrupted_calibration_leaves_no_file(own_folder, monkeypatch):
    def interrupted(*_args, **_kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(gemm, "kernel_seconds", interrupted)
    with pytest.raises(KeyboardInterrupt):
        calibrate(output=None, quick=True, formats=["fp32"], files=[], as_json=False)
    assert list(own_folder.iterdir()) == []


TWO_PROCESSES = """
from __future__ import annotations

import sys
from pathlib import Path

from dsmp.compiler.calibration import commands
from dsmp.compiler.calibration.measure import Effort, Grid
from dsmp.hardware_db.work import GemmShape

shapes = (GemmShape(m=32, n=64, k=64),)
commands.QUICK = Effort(grid=Grid(shapes=shapes, point_s=0.01, round_s=5.0, total_s=60.0), number_s=0.01)
commands.calibrate(output=Path(sys.argv[1]), quick=True, formats=["fp32"], files=[], as_json=True)
"""


@pytest.mark.slow
def test_collectives_of_two_processes(tmp_path):
    script, target = tmp_path / "script.py", tmp_path / "rates.toml"
    script.write_text(TWO_PROCESSES)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    run = subprocess.run([*launch, str(script), str(target)], capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stderr
    record = json.loads(run.stdout)  # one rank alone writes
    assert Path(record["file"]) == target
    found = {c["op"]: c for c in record["measurement"]["collective"]}
    assert set(found) == {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"}
    for point in found.values():
        assert (point["backend"], point["ranks"]) == ("gloo", 2)
        assert 1e-6 < point["latency_s"] < 1 and 1e6 < point["bytes_per_s"] < 1e12
