"""Verdicts, ladders and peaks of devices."""

from __future__ import annotations

import dataclasses

import pytest

from dsmp.errors import UnknownFormatError, UnsupportedFormatError
from dsmp.hardware_db import FORMATS, OP_CLASSES, Choice, Verdict, names, resolve

ARITHMETIC = [c for c in OP_CLASSES if c not in ("view", "collective")]


@pytest.mark.parametrize("name", names())
def test_every_question_gets_one_sentence(name):
    device = resolve(name)
    for op_class in OP_CLASSES:
        for format in FORMATS:
            for operand in (None, 0, 1, 2):
                verdict = device.supports(op_class, operand, format)
                assert isinstance(verdict, Verdict) and verdict.reason.endswith("."), verdict
                assert ". " not in verdict.reason.replace("vs. ", ""), verdict.reason
                assert bool(verdict) is verdict.ok


@pytest.mark.parametrize("name", names())
def test_fp32_is_always_possible(name):
    device = resolve(name)
    assert all(device.supports(c, None, "fp32") for c in OP_CLASSES)
    assert device.peak("fp32") >= device.vector_peak("fp32") > 0


@pytest.mark.parametrize("name", names())
def test_peaks_and_verdicts_agree(name):
    device = resolve(name)
    for format in FORMATS:
        if device.supports("matmul", None, format):
            assert device.peak(format) > 0
        try:
            device.peak(format)
        except UnsupportedFormatError as error:
            verdict = device.supports("linear", 0, format)
            assert not verdict and str(error) == verdict.reason
    assert device.supports("pointwise", None, device.storage)


@pytest.mark.parametrize("name", names())
def test_ladders_are_supported_or_refused_with_a_reason(name):
    device = resolve(name)
    for op_class in OP_CLASSES:
        ladder = device.ladder(op_class)
        assert ladder[-1] == Choice("fp32", "none", "fp32")
        for choice in ladder:
            verdict = device.supports(op_class, None, choice.format, choice.accumulate)
            if not verdict:
                assert op_class in ("conv", "grouped_mm") and choice.format.startswith("fp8"), verdict
                assert "no fp8" in verdict.reason and "GEMMs only" in verdict.reason


@pytest.mark.parametrize(
    ("name", "op_class", "ladder"),
    [
        ("a100", "linear", [("tf32", "none"), ("fp32", "none")]),
        ("a100", "sdpa", [("tf32", "none"), ("fp32", "none")]),
        ("v100", "conv", [("fp16", "tensor"), ("fp32", "none")]),
        ("t4", "matmul", [("fp16", "tensor"), ("fp32", "none")]),
        ("mi250x", "linear", [("fp16", "tensor"), ("fp32", "none")]),
        ("h800", "linear", [("fp8_e4m3", "1x128/128x128"), ("bf16", "none"), ("fp32", "none")]),
        ("h20", "grouped_mm", [("fp8_e4m3", "1x128/128x128"), ("bf16", "none"), ("fp32", "none")]),
        ("h200", "sdpa", [("bf16", "none"), ("fp32", "none")]),
        ("mi300x", "linear", [("fp8_e4m3fnuz", "1x128/128x128"), ("bf16", "none"), ("fp32", "none")]),
        ("b200", "linear", [("fp8_e4m3", "mx32/mx32"), ("bf16", "none"), ("fp32", "none")]),
        ("b200", "matmul", [("bf16", "none"), ("fp32", "none")]),
        ("cpu-avx2", "linear", [("fp32", "none")]),
        ("cpu-amx", "conv", [("bf16", "none"), ("fp32", "none")]),
        ("cpu-zen4", "linear", [("bf16", "none"), ("fp32", "none")]),
        ("h100", "softmax", [("fp32", "none")]),
        ("h100", "collective", [("fp32", "none")]),
    ],
)
def test_the_tier_is_the_designs(name, op_class, ladder):
    assert [(c.format, c.recipe) for c in resolve(name).ladder(op_class)] == ladder
    assert {c.accumulate for c in resolve(name).ladder(op_class)} == {"fp32"}


def test_storage_formats():
    wide = ("k80", "v100", "t4", "a100", "a40", "mi250x", "mi100", "rx-6900-xt", "apple-m1", "cpu-avx2", "cpu-avx512")
    narrow = ("h100", "b200", "mi300x", "mi355x", "rtx-3090", "rtx-4090", "rx-9070-xt", "max-1550", "tpu-v4", "cpu-amx")
    assert {resolve(n).storage for n in wide} == {"fp32"}
    assert {resolve(n).storage for n in narrow} == {"bf16"}
    assert {resolve(n).storage for n in names()} <= {"fp32", "bf16", "fp16"}


@pytest.mark.parametrize("name", ["v100", "t4", "cpu-avx2", "cpu-avx512"])
def test_no_bf16_where_it_is_emulated(name):
    device = resolve(name)
    assert not any(device.supports(c, None, "bf16") for c in ARITHMETIC)
    with pytest.raises(UnsupportedFormatError, match="bf16"):
        device.peak("bf16")


@pytest.mark.parametrize(
    ("question", "words"),
    [
        (("v100", "linear", 0, "bf16"), "V100 SXM2 32GB (sm_70) has no bf16 units; formats with matrix units: fp16."),
        (("v100", "linear", 0, "int8"), "dp4a"),
        (("h100", "conv", 0, "fp8_e4m3"), "no fp8_e4m3 conv on H100 SXM5 80GB (sm_90)"),
        (("h100", "sdpa", 0, "fp8_e4m3"), "no fp8_e4m3 sdpa"),
        (("h100", "norm", 0, "fp8_e4m3"), "no fp8_e4m3 norm"),
        (("h100", "linear", 2, "fp8_e4m3"), "no fp8_e4m3 bias of linear"),
        (("h100", "linear", 0, "fp8_e4m3fnuz"), "use fp8_e4m3 and convert values"),
        (("mi300x", "linear", 0, "fp8_e4m3"), "use fp8_e4m3fnuz and convert values"),
        (("a100", "linear", 0, "fp8_e4m3"), "has no fp8_e4m3 units"),
        (("h100", "linear", 0, "int4"), "has no int4 units"),
        (("mi250x", "linear", 0, "tf32"), "has no tf32 units; formats with matrix units: fp64, fp32, bf16, fp16"),
        (("h100", "linear", 0, "fp4_e2m1"), "has no fp4_e2m1 units"),
        (("h100", "pointwise", 0, "tf32"), "vector units do not have it"),
        (("h100", "collective", 0, "tf32"), "nothing is stored or sent in it"),
        (("cpu-avx2", "linear", 0, "bf16"), "measured 6 to 100 times slower"),
        (("cpu-avx2", "linear", 0, "fp16"), "measured 6 to 100 times slower"),
        (("cpu-avx2", "linear", 0, "tf32"), "none (vector units compute fp32)"),
        (("cpu-amx", "linear", 0, "fp16"), "AMX tiles hold no fp16"),
        (("h100", "linear", 0, "bf16", "fp16"), "does not accumulate bf16 in fp16; accumulators it has: fp32"),
        (("h100", "norm", 0, "bf16", "bf16"), "accumulate in fp32"),
    ],
)
def test_refusals_say_why(question, words):
    name, *rest = question
    verdict = resolve(name).supports(*rest)
    assert not verdict.ok and words in verdict.reason, verdict.reason


@pytest.mark.parametrize(
    "question",
    [
        ("h100", "linear", 0, "fp8_e4m3"),
        ("h100", "linear", 1, "fp8_e5m2"),
        ("h100", "grouped_mm", 0, "fp8_e4m3"),
        ("h100", "linear", 2, "bf16"),
        ("h100", "norm", 0, "bf16"),
        ("h100", "pointwise", 0, "fp16", "fp16"),
        ("h100", "collective", 0, "fp8_e4m3"),
        ("v100", "collective", 0, "int8"),
        ("v100", "linear", 0, "fp16", "fp16"),
        ("t4", "linear", 0, "int8"),
        ("mi300x", "matmul", 0, "fp8_e5m2fnuz"),
        ("b200", "linear", 0, "fp4_e2m1"),
        ("a100", "conv", 0, "tf32"),
        ("h20", "linear", 0, "fp64"),
        ("cpu-amx", "sdpa", 2, "bf16"),
        ("cpu-amx", "conv", 0, "int8"),
        ("cpu-avx2", "embedding", 0, "fp16"),
    ],
)
def test_what_is_possible(question):
    name, *rest = question
    verdict = resolve(name).supports(*rest)
    assert verdict.ok, verdict.reason


def test_matrix_and_vector_peaks():
    h100, mi250x = resolve("h100"), resolve("mi250x")
    assert h100.peak("fp32") == 132 * 256 * 1980e6
    assert h100.peak("bf16") == 132 * 4096 * 1830e6
    assert h100.peak("fp64") == 132 * 256 * 1980e6, "fp64 tensor cores run at the vector clock"
    assert mi250x.peak("fp32") == 2 * mi250x.vector_peak("fp32"), "matrix fp32 before vector fp32"
    assert h100.vector_peak("fp16") == 2 * h100.vector_peak()
    assert h100.vector_peak("bf16") == h100.vector_peak("fp32"), "widened on load, computed in fp32"
    assert resolve("cpu-avx2").peak("fp32") == 64 * 32 * 2800e6
    with pytest.raises(UnsupportedFormatError, match="vector units do not have it"):
        h100.vector_peak("tf32")
    with pytest.raises(UnsupportedFormatError, match="does not accumulate bf16 in fp16"):
        h100.peak("bf16", "fp16")


def test_hopper_needs_promotion_and_blackwell_does_not():
    h800, b200 = resolve("h800"), resolve("b200")
    assert (h800.accumulator_mantissa_bits("fp8_e4m3"), h800.promote_every_k("fp8_e4m3")) == (13, 128)
    assert (b200.accumulator_mantissa_bits("fp8_e4m3"), b200.promote_every_k("fp8_e4m3")) == (25, None)
    assert h800.accumulator_mantissa_bits("bf16") is None


def test_denormals_are_flushed_on_gfx90a_only_among_gpus():
    assert resolve("mi250x").flushes_denormals("fp16") and resolve("mi250x").flushes_denormals("bf16")
    assert not resolve("mi250x").flushes_denormals("fp32")
    assert not any(resolve(n).flushes_denormals("fp16") for n in ("mi300x", "h100", "v100"))


def test_efficiencies_are_data_with_a_source():
    h100, amx = resolve("h100").efficiency, resolve("cpu-amx").efficiency
    assert (h100.compute, h100.memory, h100.compute_for("bf16")) == (0.78, 0.92, 0.78)
    assert "measured" in h100.source
    assert amx.compute_for("bf16") < amx.compute_for("fp32")
    # what was measured on two cores: bf16 about three times as fast as fp32
    ratio = resolve("cpu-amx").peak("bf16") * amx.compute_for("bf16") / resolve("cpu-amx").peak("fp32")
    assert 2.5 < ratio / amx.compute_for("fp32") < 4


def test_unknown_words_are_errors():
    device = resolve("h100")
    with pytest.raises(UnknownFormatError, match="'fp8'"):
        device.supports("linear", 0, "fp8")
    with pytest.raises(UnknownFormatError):
        device.supports("linear", 0, "bf16", "fp33")
    with pytest.raises(UnknownFormatError):
        device.peak("float32")
    with pytest.raises(ValueError, match="unknown op class 'gemm'; known: linear, matmul"):
        device.supports("gemm", 0, "bf16")
    with pytest.raises(ValueError, match="unknown op class"):
        device.ladder("gemm")


def test_devices_are_frozen_hashable_values():
    device = resolve("h100")
    assert device == resolve("H100-SXM") and hash(device) == hash(resolve("H100-SXM"))
    assert device != resolve("h200")
    with pytest.raises(dataclasses.FrozenInstanceError):
        device.units = 1
    assert (device.architecture, device.scratchpad_bytes) == ("nv.sm_90", 228 * 1024)
