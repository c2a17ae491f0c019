"""What the tests of kernels over rows share: memory layouts, bounds of what is right, kept and walked rows."""

from __future__ import annotations

import torch

from dsmp.codegen.kernel_call import Config

ULP = 2.0**-24  # half the spacing of fp32 in [1, 2): the relative error of one operation
SIZES = (1, 2, 17, 127, 128, 129, 300)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WALKED = Config(blocks={"ROWS": 4, "BLOCK": 128})  # longer rows are walked
CONFIGS = {"kept": None, "walked": WALKED}
# the interpreter takes its time per tile: walks are tested at few sizes
CASES = [*((size, "kept") for size in SIZES), (129, "walked"), (300, "walked")]
FORMATS = [*((a, b, "kept") for a in DTYPES for b in DTYPES), (DTYPES[1], DTYPES[0], "walked")]


def laid_out(x: torch.Tensor, layout: str) -> torch.Tensor:
    """The values of x [M, N] in another layout."""
    rows, size = x.shape
    if layout == "padded rows":
        return torch.cat([x, x.new_full((rows, 5), torch.nan)], 1)[:, :size]
    if layout == "transposed":
        return x.t().contiguous().t()
    if layout == "every second":
        return torch.stack([x, torch.full_like(x, torch.nan)], 2).view(rows, 2 * size)[:, ::2]
    assert layout == "contiguous"
    return x.contiguous()


LAYOUTS = ("contiguous", "padded rows", "transposed", "every second")
STRIDES = [*((a, "kept") for a in LAYOUTS), ("transposed", "walked")]


def half_ulp(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Half the spacing of a format's numbers at fp64 values."""
    info = torch.finfo(dtype)
    binade = torch.exp2(torch.frexp(value.abs().clamp(info.smallest_normal, info.max))[1].double() - 1)
    return binade * info.eps / 2


def assert_within(actual: torch.Tensor, exact: torch.Tensor, slack: torch.Tensor | float) -> None:
    """`actual` is fp64 `exact`, with an error of `slack`, rounded to the format of `actual`: NaN and inf at the same
    places, and what overflows the format."""
    assert actual.shape == exact.shape
    slack = torch.as_tensor(slack, dtype=torch.float64, device=exact.device).expand(exact.shape)
    rounded = exact.to(actual.dtype)
    special = ~rounded.isfinite()
    torch.testing.assert_close(actual[special], rounded[special], equal_nan=True, rtol=0, atol=0)
    error = (actual.double() - exact).abs()[~special]
    allowed = (slack + half_ulp(exact.abs() + slack, actual.dtype))[~special]
    worst = (error / allowed).max().item() if error.numel() else 0.0
    assert not (error > allowed).any() and not error.isnan().any(), f"error is {worst:.3g} of what is allowed"
