"""LayerNorm and RMSNorm kernels, interpreted, against fp64 and torch."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_checks.norm import EPS, check_backward, check_forward, draw
from row_kernels import CASES, CONFIGS, DTYPES, FORMATS, LAYOUTS, STRIDES, WALKED, assert_within, laid_out

from dsmp.codegen.kernels.norm import (
    layer_norm,
    layer_norm_reference,
    norm_call,
    norm_configs,
    rms_norm,
    rms_norm_reference,
)
from dsmp.codegen.kernels.norm_backward import (
    layer_norm_backward,
    norm_backward_call,
    norm_backward_configs,
    norm_backward_reference,
    rms_norm_backward,
)
from dsmp.codegen.kernels.row_blocks import is_wide
from dsmp.codegen.targets import TARGETS

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of NaN and inf


@pytest.mark.parametrize(("size", "config"), CASES)
def test_equals_fp64_for_awkward_sizes(size, config):
    x, dy = draw(5, size, torch.bfloat16), draw(5, size, torch.bfloat16, seed=1)
    weight, bias = draw(1, size, seed=2)[0], draw(1, size, seed=3)[0]
    check_forward(x, weight, bias, config=CONFIGS[config])
    check_backward(dy, x, weight, bias, config=CONFIGS[config])


@pytest.mark.parametrize(("inner", "outer", "config"), FORMATS)
def test_formats_mix(inner, outer, config):
    x, dy = draw(4, 129, inner), draw(4, 129, outer, seed=1)
    weight, bias = draw(1, 129, outer, seed=2)[0], draw(1, 129, inner, seed=3)[0]
    check_forward(x, weight, bias, dtype=outer, config=CONFIGS[config])
    check_backward(dy, x, weight, bias, dtype=inner, config=CONFIGS[config])


@pytest.mark.parametrize(("mean", "config"), [(1e4, "kept"), (1e4, "walked"), (-1e6, "kept")])
def test_a_large_mean_cancels_nothing(mean, config):
    """mean 1e4: the mean in fp32 is off by 5e-4 deviations, of which nothing may be seen in the result."""
    x, dy, weight, bias = (
        draw(6, 300, mean=mean),
        draw(6, 300, seed=1),
        draw(1, 300, seed=2)[0],
        draw(1, 300, seed=3)[0],
    )
    check_forward(x, weight, bias, config=CONFIGS[config])
    check_backward(dy, x, weight, bias, config=CONFIGS[config])


@pytest.mark.parametrize("config", CONFIGS)
def test_weight_and_bias_are_optional(config):
    x, dy, weight, bias = draw(4, 130), draw(4, 130, seed=1), draw(1, 130, seed=2)[0], draw(1, 130, seed=3)[0]
    for w, b in ((None, None), (weight, None), (None, bias)):
        check_forward(x, w, b, config=CONFIGS[config])
        check_backward(dy, x, w, b, config=CONFIGS[config])


@pytest.mark.parametrize(("layout", "config"), STRIDES)
def test_any_strides(layout, config):
    x, dy = laid_out(draw(4, 130), layout), laid_out(draw(4, 130, seed=1), LAYOUTS[LAYOUTS.index(layout) - 1])
    weight, bias = draw(1, 260, seed=2)[0, ::2], draw(130, 2, seed=3)[:, 1]
    check_forward(x, weight, bias, config=CONFIGS[config])
    check_backward(dy, x, weight, bias, config=CONFIGS[config])


def test_an_expanded_gradient():
    x, weight, bias = draw(6, 130), draw(1, 130, seed=2)[0], draw(1, 130, seed=3)[0]
    spread = torch.ones(1, 1).expand(6, 130)  # the gradient of a sum
    check_backward(spread, x, weight, bias)


def test_leading_dimensions_and_outputs_of_any_strides():
    x = draw(24, 40).view(2, 3, 4, 40).transpose(0, 2)
    y, mean, rstd = layer_norm(x)
    assert y.shape == x.shape and mean.shape == rstd.shape == (4, 3, 2)
    assert_within(y, layer_norm_reference(x)[0], 1e-6)
    vector, _ = rms_norm(x[0, 0, 0])
    assert_within(vector, rms_norm_reference(x[0, 0, 0])[0], 1e-6)
    flat, out = draw(5, 130), torch.full((130, 5), torch.nan).t()
    for wide in (False, True):
        call = norm_call(flat, None, None, out.fill_(torch.nan), torch.empty(5), torch.empty(5), eps=EPS, config=WALKED)
        dataclasses.replace(call, constants={**call.constants, "WIDE": wide}).run()
        assert_within(out, layer_norm_reference(flat)[0], 1e-6)


def test_wide_offsets_are_noticed():
    storage = torch.empty(1, device="meta")
    assert is_wide(storage.as_strided((4, 40000), (1, 100000)))
    assert not is_wide(storage.as_strided((100000, 40000), (40000, 1)), None)


@pytest.mark.parametrize(
    ("value", "config"), [(torch.nan, "kept"), (torch.inf, "kept"), (-torch.inf, "walked"), (torch.nan, "walked")]
)
def test_nan_and_inf_as_in_torch(value, config):
    x, dy, weight = draw(4, 150), draw(4, 150, seed=1), draw(1, 150, seed=2)[0]
    x[1, 70] = value
    x[3] = value
    x.requires_grad_()
    for centred in (True, False):
        expected = F.layer_norm(x, (150,), weight) if centred else F.rms_norm(x, (150,), weight)
        (expected_dx,) = torch.autograd.grad(expected, x, dy)
        with torch.no_grad():
            if centred:
                y, mean, rstd = layer_norm(x, weight, config=CONFIGS[config])
                dx = layer_norm_backward(dy, x, mean, rstd, weight, config=CONFIGS[config])[0]
            else:
                y, rstd = rms_norm(x, weight, config=CONFIGS[config])
                dx = rms_norm_backward(dy, x, rstd, weight, config=CONFIGS[config])[0]
        torch.testing.assert_close(y, expected.detach(), equal_nan=True, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(dx, expected_dx, equal_nan=True, atol=1e-5, rtol=1e-5)


def test_overflow_of_a_narrow_output_is_infinite():
    x, weight = draw(2, 64), torch.full((64,), 1e6)
    y, _, _ = layer_norm(x, weight, dtype=torch.float16)
    assert_within(y, layer_norm_reference(x, weight)[0], 1.0)
    assert y.isinf().any()


@pytest.mark.parametrize("shape", [(0, 8), (3, 0), (0, 0), (2, 0, 4)])
def test_empty(shape):
    x, size = torch.ones(shape), shape[-1]
    weight, bias = torch.ones(size), torch.ones(size)
    y, mean, rstd = layer_norm(x, weight, bias)
    assert y.shape == shape and mean.shape == rstd.shape == shape[:-1]
    dx, dweight, dbias = layer_norm_backward(x, x, mean, rstd, weight, bias)
    assert dx.shape == shape and dweight.tolist() == dbias.tolist() == [0.0] * size
    assert mean.isnan().all()


def test_constant_rows_are_zero():
    x = torch.tensor([[0.1], [3e4], [0.0]]).expand(3, 77)
    y, _, rstd = layer_norm(x)
    assert y.abs().max() < 1e-6
    assert_within(rstd, torch.full((3,), 1e-5, dtype=torch.float64).rsqrt(), 1e-4)


@pytest.mark.parametrize("config", CONFIGS)
def test_each_program_sums_its_own_rows(config):
    """Program p of P has every P-th tile of rows: nothing is added in an order that chance decides."""
    x, dy, rstd = draw(22, 130), draw(22, 130, seed=1), torch.ones(22)
    chosen = CONFIGS[config] or dataclasses.replace(WALKED, blocks={"ROWS": 4, "BLOCK": 256})
    partial = torch.full((3, 130), torch.nan)
    norm_backward_call(dy, x, torch.ones(130), None, rstd, torch.empty_like(x), partial, None, config=chosen).run()
    for program in range(3):
        rows = [r for r in range(22) if r // 4 % 3 == program]
        assert_within(partial[program], (x[rows].double() * dy[rows].double()).sum(0), 1e-5)


def test_references_are_torchs():
    x, dy = draw(4, 50, torch.float64, seed=4).requires_grad_(), draw(4, 50, torch.float64, seed=5)
    weight, bias = (draw(1, 50, torch.float64, seed=s)[0].requires_grad_() for s in (6, 7))
    y = F.layer_norm(x, (50,), weight, bias, EPS)
    torch.testing.assert_close(layer_norm_reference(x, weight, bias, EPS)[0], y)
    expected = torch.autograd.grad(y, (x, weight, bias), dy)
    torch.testing.assert_close(norm_backward_reference(dy, x, weight, eps=EPS, centred=True), expected)
    y = F.rms_norm(x, (50,), weight, EPS)
    torch.testing.assert_close(rms_norm_reference(x, weight, EPS)[0], y)
    expected = torch.autograd.grad(y, (x, weight), dy)
    torch.testing.assert_close(norm_backward_reference(dy, x, weight, eps=EPS, centred=False)[:2], expected)


def test_the_default_eps_is_torchs():
    x = torch.full((1, 4), 1e-3, dtype=torch.bfloat16)
    torch.testing.assert_close(rms_norm(x)[0], F.rms_norm(x, (4,)), atol=0, rtol=0)


@given(
    rows=st.integers(1, 6),
    size=st.integers(1, 200),
    dtype=st.sampled_from(DTYPES),
    exponents=st.tuples(st.integers(-6, 6), st.integers(-4, 10)),
    config=st.sampled_from(sorted(CONFIGS)),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=6, deadline=None)
def test_any_shape_and_magnitude(rows, size, dtype, exponents, config, seed):
    x = (draw(rows, size, seed=seed) * 2.0 ** exponents[0] + 2.0 ** exponents[1]).to(dtype)
    weight, bias = draw(1, size, seed=seed + 1)[0], draw(1, size, seed=seed + 2)[0]
    check_forward(x, weight, bias, dtype=torch.float32, config=CONFIGS[config])
    check_backward(draw(rows, size, dtype, seed=seed + 3), x, weight, bias, config=CONFIGS[config])


@pytest.mark.parametrize("target", TARGETS.values(), ids=str)
def test_configurations_fit_the_target(target):
    for size, configs in itertools.product(
        (1, 100, 128, 4096, 8192, 16384, 128256), (norm_configs, norm_backward_configs)
    ):
        found = configs(size, target)
        assert found and len(found) == len({(c.text, c.num_warps) for c in found})
        for config in found:
            elements = config.blocks["ROWS"] * config.blocks["BLOCK"]
            assert config.num_warps * target.warp_size <= 512
            assert elements <= config.num_warps * target.warp_size * 32
    assert norm_configs(128256, target)[0].blocks["BLOCK"] < 128256 <= 2 * 65536
    assert norm_configs(4096, target)[0].blocks == {"ROWS": 1, "BLOCK": 4096}
