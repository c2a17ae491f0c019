"""What the GEMM kernels become on every target: matrix instruction, spills, shared memory."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from dsmp.codegen.kernels.gemm import gemm_call, gemm_persistent_call
from dsmp.codegen.kernels.gemm_configs import gemm_configs, has_gemm
from dsmp.codegen.offline import compile_call, meta
from dsmp.codegen.targets import TARGETS, get_target
from dsmp.hardware_db.formats import FORMATS

LARGE, FLAT, ODD = (4096, 4096, 4096), (16, 4096, 4096), (4001, 4003, 4005)


@dataclass(frozen=True)
class Case:
    """`epilogue`: "none", or the heaviest: row scales, bias, activation, residual. `rhs`: the format of b."""

    isa: str
    format: str
    rhs: str = ""
    sizes: tuple[int, int, int] = LARGE
    epilogue: str = "relu"
    persistent: bool = False
    out: torch.dtype = torch.bfloat16
    promote: int | None = None

    @property
    def id(self):
        parts = [self.isa, self.format, self.rhs, "x".join(map(str, self.sizes[:2])), self.epilogue]
        return "-".join([*filter(None, parts), *["persistent"] * self.persistent, *["promoted"] * bool(self.promote)])

    def call(self):
        target = get_target(self.isa)
        m, n, k = self.sizes
        a = meta(m, k, dtype=dtype_of(self.format))
        b = meta(n, k, dtype=dtype_of(self.rhs or self.format)).t()
        arguments = {"promote_every_k": self.promote, **({"format": "tf32"} if self.format == "tf32" else {})}
        if self.epilogue != "none":
            arguments |= {
                "scale_a": meta(m, dtype=torch.float32),
                "scale_b": meta(n, dtype=torch.float32),
                "bias": meta(n, dtype=torch.float32),
                "residual": meta(m, n, dtype=torch.bfloat16),
                "activation": self.epilogue,
            }
        if self.out.itemsize == 1:
            arguments["out_scale"] = meta(1, dtype=torch.float32)
        config = gemm_configs(m, n, k, self.format, target, promoted=self.promote is not None)[0]
        out = meta(m, n, dtype=self.out)
        if self.persistent:
            return gemm_persistent_call(a, b, out, config=config, programs=132, **arguments)
        return gemm_call(a, b, out, config=config, **arguments)


def dtype_of(format):
    return getattr(torch, FORMATS[format].torch_dtype)


def quick_cases():
    """One for each way in which a matrix instruction is fed."""
    return [
        Case("sm_80", "tf32", epilogue="none"),
        Case("sm_90", "fp8_e4m3", epilogue="none", persistent=True),
        Case("gfx942", "bf16", epilogue="none"),
    ]


def offline_cases():
    """Every target with every kind of operand it has, the flat tiles, and the persistent kernel."""
    cases = []
    for isa, target in TARGETS.items():
        kinds = ("bf16", "tf32", "fp32", "fp8_e4m3", "fp8_e4m3fnuz", "int8")
        cases += [Case(isa, format) for format in kinds if has_gemm(format, target)]
        cases.append(Case(isa, "bf16", sizes=FLAT, epilogue="none"))
    cases += [Case(isa, "fp16", epilogue="none") for isa in ("sm_90", "gfx90a", "gfx1100")]
    cases += [Case("sm_90", "fp8_e5m2"), Case("gfx942", "fp8_e5m2fnuz", epilogue="none")]
    cases += [Case(isa, "fp8_e4m3", rhs="fp8_e5m2", epilogue="none") for isa in ("sm_89", "sm_90", "sm_100", "gfx950")]
    cases += [Case("sm_90", f, persistent=True) for f in ("bf16", "tf32", "fp8_e4m3", "int8")]
    cases += [Case("sm_100", "bf16", persistent=True), Case("sm_90", "bf16", epilogue="gelu")]
    cases += [Case("sm_90", "fp8_e4m3", promote=128), Case("sm_90", "fp8_e4m3", persistent=True, promote=128)]
    cases += [Case(isa, "bf16", sizes=ODD) for isa in ("sm_80", "sm_90", "gfx90a", "gfx1100")]
    cases += [Case("sm_90", "bf16", epilogue="none", out=torch.float8_e4m3fn), Case("gfx942", "bf16", epilogue="gelu")]
    return cases


def check(case):
    target = get_target(case.isa)
    compiled = compile_call(case.call(), target)
    code = compiled.code
    assert code.spills == 0
    assert compiled.shared_bytes <= target.shared_bytes
    assert code.registers <= target.max_registers + 1  # RDNA counts from 0 to 256
    if "vector units" in has_gemm(case.format, target).reason:
        assert code.matrix_instructions == ()
        return
    instructions = " ".join(code.matrix_instructions)
    if case.rhs:
        expected = {"sm_100": "f8f6f4", "gfx950": "f8f6f4"}.get(case.isa, "e4m3.e5m2")
        assert expected in instructions
    elif (case.isa, case.format) == ("gfx90a", "int8"):
        assert "v_mfma_i32_16x16x16i8" in instructions  # CDNA2 writes the format without an underscore
    else:
        assert code.multiplies(case.format), instructions
    if case.sizes != FLAT:
        family = {"sm_90": "wgmma", "sm_100": "tcgen05"}.get(case.isa, "mma" if target.backend == "cuda" else "v_")
        assert family in instructions
    assert ("cp.async.bulk.tensor" in str(compiled.assembly.get("ptx", ""))) is case.persistent


@pytest.mark.parametrize("case", quick_cases(), ids=lambda c: c.id)
def test_representative_kernels(case):
    check(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", offline_cases(), ids=lambda c: c.id)
def test_every_target(case):
    check(case)


def test_gemms_that_a_target_lacks_are_not_in_the_table():
    listed = {(c.isa, c.format) for c in offline_cases()}
    for isa, format in (("gfx90a", "tf32"), ("gfx1100", "fp8_e4m3"), ("sm_80", "fp8_e4m3"), ("gfx942", "fp8_e4m3")):
        assert (isa, format) not in listed
    assert {isa for isa, _ in listed} == set(TARGETS)
