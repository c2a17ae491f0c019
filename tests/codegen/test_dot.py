"""The conversions and activations of codegen/kernels/dot.py, interpreted, against the exact simulator and torch."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from torch.nn.functional import gelu, relu, silu

from dsmp.codegen.kernel_call import Config, KernelCall
from dsmp.codegen.kernels.dot import activate, narrow, round_tf32, swizzle, widen
from dsmp.hardware_db.formats import FORMATS
from dsmp.passes.rounding import round_to

NARROW = ("fp8_e4m3", "fp8_e5m2", "fp8_e4m3fnuz", "fp8_e5m2fnuz", "bf16", "fp16", "int8")
SPECIAL = [0.0, -0.0, float("inf"), -float("inf"), float("nan"), 2.0**-149, -(2.0**-149)]
ACTIVATIONS = {
    "none": lambda t: t,
    "relu": relu,
    "gelu": gelu,
    "gelu_tanh": lambda t: gelu(t, approximate="tanh"),
    "silu": silu,
}

# an interpreted NaN or overflow is a warning of NumPy
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@triton.jit
def convert(x, y, n, SATURATE: tl.constexpr, BLOCK: tl.constexpr, INTERPRETED: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = widen(tl.load(x + i, mask=i < n), INTERPRETED)
    tl.store(y + i, narrow(value, y.dtype.element_ty, SATURATE, INTERPRETED), mask=i < n)


@triton.jit
def apply(x, y, n, FUNCTION: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + i, mask=i < n)
    value = round_tf32(value) if FUNCTION == "tf32" else activate(value, FUNCTION)
    tl.store(y + i, value, mask=i < n)


@triton.jit
def order(out, tiles_m, tiles_n, GROUP: tl.constexpr):
    pid = tl.program_id(0)
    m, n = swizzle(pid, tiles_m, tiles_n, GROUP)
    tl.store(out + pid, m * tiles_n + n)


def launch(kernel, grid, arguments, **constants):
    KernelCall(
        name="test", kernel=kernel, arguments=arguments, constants=constants, grid=(grid,), config=Config(blocks={})
    ).run()


def converted(x, dtype, *, saturate):
    y = torch.empty(x.shape, dtype=dtype)
    n = x.numel()
    launch(convert, -(-n // 4096), {"x": x, "y": y, "n": n}, SATURATE=saturate, BLOCK=4096)
    return y


def applied(x, function):
    y = torch.empty_like(x)
    n = x.numel()
    launch(apply, -(-n // 4096), {"x": x, "y": y, "n": n}, FUNCTION=function, BLOCK=4096)
    return y


def bits(x):
    """fp32 patterns, with one pattern for NaN."""
    return torch.where(x.isnan(), torch.full_like(x, float("nan")), x).view(torch.int32)


def hard_values(fmt):
    """Random patterns of fp32, and every midpoint between neighbours of the format with its neighbours in fp32."""
    generator = torch.Generator().manual_seed(1)
    random = torch.randint(-(2**31), 2**31, (20000,), generator=generator).to(torch.int32).view(torch.float32)
    near = torch.randn(20000, generator=generator) * fmt.max / 2
    grid = round_to(near, fmt)
    middle = grid + (torch.nextafter(grid.bfloat16(), torch.tensor(torch.inf).bfloat16()).float() - grid) / 2
    ulp = torch.tensor([1.0, 1 - 2.0**-24, 1 + 2.0**-23])
    edges = torch.tensor([fmt.max, fmt.max * (1 + fmt.epsilon / 4), fmt.max * (1 + fmt.epsilon / 2), fmt.max * 1.5])
    lowest = torch.arange(0, 9) * fmt.smallest_subnormal / 2
    exact = torch.cat([middle, edges, lowest, -edges, -lowest])
    return torch.cat([random, near, (exact[:, None] * ulp).flatten(), torch.tensor(SPECIAL)])


@pytest.mark.parametrize("saturate", [True, False])
@pytest.mark.parametrize("name", NARROW)
def test_narrowing_rounds_as_the_simulator_bit_for_bit(name, saturate):
    fmt = FORMATS[name]
    x = hard_values(fmt)
    if name == "int8":
        x = torch.nan_to_num(x, nan=0.0, posinf=torch.inf, neginf=-torch.inf)
    got = converted(x, getattr(torch, fmt.torch_dtype), saturate=saturate).float()
    assert torch.equal(bits(got), bits(round_to(x, fmt, saturate=saturate)))


@pytest.mark.parametrize("name", NARROW)
def test_widening_is_exact_for_every_pattern(name):
    dtype = getattr(torch, FORMATS[name].torch_dtype)
    patterns = (
        torch.arange(256, dtype=torch.int32).to(torch.uint8)
        if dtype.itemsize == 1
        else torch.arange(65536, dtype=torch.int32).to(torch.int16)
    )
    x = patterns.view(dtype)
    assert torch.equal(bits(converted(x, torch.float32, saturate=False)), bits(x.float()))


def test_int8_takes_nan_for_zero():
    assert converted(torch.tensor([float("nan")]), torch.int8, saturate=True).item() == 0


def test_tf32_rounds_as_the_simulator_bit_for_bit():
    x = hard_values(FORMATS["tf32"])
    assert torch.equal(bits(applied(x, "tf32")), bits(round_to(x, "tf32")))


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_are_those_of_torch(name):
    x = torch.cat([torch.linspace(-30, 30, 4001), torch.tensor([float("inf"), float("nan"), 1e30, -1e30, -100.0])])
    expected = ACTIVATIONS[name](x.double())
    got = applied(x, name).double()
    finite = expected.isfinite()
    assert torch.equal(got[~finite].isnan(), expected[~finite].isnan())
    assert torch.equal(got[-5], torch.tensor(torch.inf, dtype=torch.float64))
    # exp of -|x| carries an error of |x| * 2^-24, erf an absolute one of 2^-23
    error = (got - expected).abs()[finite]
    assert (error <= 2.0**-20 * expected.abs()[finite] + 2.0**-22 * x[finite].double().abs().clamp(max=8)).all()


@pytest.mark.parametrize(("tiles_m", "tiles_n", "group"), [(1, 1, 8), (7, 5, 3), (16, 4, 8), (3, 9, 8), (8, 1, 4)])
def test_the_order_of_tiles_visits_each_once_and_keeps_to_its_rows(tiles_m, tiles_n, group):
    out = torch.empty(tiles_m * tiles_n, dtype=torch.int32)
    launch(order, out.numel(), {"out": out, "tiles_m": tiles_m, "tiles_n": tiles_n}, GROUP=group)
    assert sorted(out.tolist()) == list(range(tiles_m * tiles_n))
    rows = out // tiles_n
    first = rows[: min(group, tiles_m) * tiles_n]
    assert int(first.max()) < group
