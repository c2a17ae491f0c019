"""Every kernel that quantises has the simulator's bits, on any device: by its plain entry, or cut as a configuration
says. The simulator runs on the CPU."""

from __future__ import annotations

import dataclasses

import torch

from dsmp.codegen.kernels.gradients import (
    BINS,
    GradientStatistics,
    gradients_call,
    gradients_configs,
    gradients_reference,
    unscale_gradients,
)
from dsmp.codegen.kernels.quantize import (
    allocate_blocks,
    quantize_rows,
    quantize_rows_call,
    quantize_rows_configs,
    quantize_tiles,
    quantize_tiles_call,
    quantize_tiles_configs,
)
from dsmp.codegen.kernels.quantize_fused import (
    copy_call,
    copy_configs,
    gated_quantize,
    gated_quantize_call,
    gated_quantize_configs,
    gated_reference,
    norm_quantize,
    norm_quantize_call,
    norm_quantize_configs,
    norm_reference,
    transpose,
)
from dsmp.codegen.kernels.quantize_vectors import (
    quantize_tensor,
    quantize_vectors,
    quantize_vectors_call,
    quantize_vectors_configs,
)
from dsmp.codegen.kernels.scales import QUANTIZED_DTYPES
from dsmp.passes.rounding import quantize

from . import gradients as gradient_checks
from .products import TRIED
from .quantize import assert_same, sample
from .quantize_fused import assert_close, assert_quantized


def on_cpu(blocks):
    """Quantised blocks with all tensors on the CPU."""
    named = {f.name: getattr(blocks, f.name) for f in dataclasses.fields(blocks)}
    return dataclasses.replace(blocks, **{name: None if t is None else t.cpu() for name, t in named.items()})


def check_quantize(shape, format, *, device, dtype=torch.float32):
    """All recipes, along rows and columns."""
    x = sample(*shape, dtype=dtype)
    there = x.to(device)
    found = on_cpu(quantize_rows(there, format, columns=True, transposed=True))
    assert_same(found.rows, found.row_scale, quantize(x, format, "1x128"), format)
    assert_same(found.columns, found.column_scale, quantize(x, format, "1x128", axis=0), format)
    if format in ("fp8_e4m3", "fp8_e5m2", "int8"):
        found = on_cpu(quantize_rows(there, format, columns=True, group=32, power_of_two=True))
        assert_same(found.rows, found.row_scale, quantize(x, format, "mx32"), format)
        assert_same(found.columns, found.column_scale, quantize(x, format, "mx32", axis=0), format)
    _same(quantize_tiles(there, format), quantize(x, format, "128x128"), format)
    for axis in (0, 1):
        _same(quantize_vectors(there, format, axis=axis), quantize(x, format, "row", axis=axis), format)
    values, scale, amax = quantize_tensor(there, format)
    _same((values, scale), quantize(x, format, "tensor"), format)
    assert float(amax) == float(x.abs().max())


def check_quantize_configs(shape, format, *, device, target):
    """Blocks, tiles and vectors in the first configurations of their autotune spaces."""
    x = sample(*shape)
    there, (m, n) = x.to(device), shape
    row, column = quantize(x, format, "1x128"), quantize(x, format, "1x128", axis=0)
    for config in quantize_rows_configs(m, n, format, target, columns=True)[:TRIED]:
        blocks = allocate_blocks(there, format, columns=True)
        outputs = (blocks.rows, blocks.row_scale, blocks.columns, blocks.column_scale)
        quantize_rows_call(there, *outputs, format=format, config=config).run()
        _same((blocks.rows, blocks.row_scale), row, format)
        _same((blocks.columns, blocks.column_scale), column, format)
    tile = quantize(x, format, "128x128")
    for config in quantize_tiles_configs(m, n, format, target)[:TRIED]:
        values, scale = _empty(there, format), torch.empty(-(-m // 128), -(-n // 128), device=device)
        quantize_tiles_call(there, values, scale, format=format, config=config).run()
        _same((values, scale), tile, format)
    for axis in (0, 1):
        vector = quantize(x, format, "row", axis=axis)
        along = there if axis == 1 else there.T
        for config in quantize_vectors_configs(*along.shape, format, target, axis=axis)[:TRIED]:
            values, scale = _empty(there, format), torch.empty(along.shape[0], device=device)
            out = values if axis == 1 else values.T
            quantize_vectors_call(along, out, scale, format=format, config=config).run()
            _same((values, scale.unsqueeze(axis)), vector, format)


def check_norm_quantize(shape, format, layer, *, device, target=None):
    """A norm, and its result as it is written quantised."""
    x = (torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 3 + 0.5).to(device)
    weight = torch.linspace(0.5, 2, shape[1], device=device)
    exact = norm_reference(x, weight, None, layer_norm=layer, eps=1e-5).cpu()
    for config in norm_quantize_configs(shape[1], format, target)[:TRIED] if target else [None]:
        if config is None:
            blocks, y = norm_quantize(x, weight, layer_norm=layer, eps=1e-5, format=format, output=torch.float32)
        else:
            blocks, y = allocate_blocks(x, format), torch.empty_like(x)
            norm_quantize_call(
                *(x, weight, None, blocks.rows, blocks.row_scale, y),
                layer_norm=layer,
                eps=1e-5,
                format=format,
                config=config,
            ).run()
        assert_close(y.cpu(), exact)
        assert_quantized(on_cpu(blocks), y.cpu(), format)


def check_gated_quantize(shape, format, *, device, target=None):
    """silu(gate) * up, and the product as it is written quantised along rows and columns."""
    gate, up = (torch.randn(shape, generator=torch.Generator().manual_seed(s)).to(device) for s in (0, 1))
    exact = gated_reference(gate, up)
    slack = 2.0**-20 * (gate.double().abs() * up.double().abs() + 1e-6)
    for config in gated_quantize_configs(*shape, format, target, columns=True)[:TRIED] if target else [None]:
        if config is None:
            blocks, y = gated_quantize(gate, up, format=format, columns=True, transposed=True, output=torch.float32)
        else:
            blocks, y = allocate_blocks(gate, format, columns=True), torch.empty_like(gate)
            gated_quantize_call(gate, up, y, blocks, format=format, config=config).run()
        assert ((y - exact).abs() <= slack).all()
        assert_quantized(on_cpu(blocks), y.cpu(), format)


def check_transpose(shape, dtype, *, device, target=None):
    """A transposed copy has the bits of the original."""
    x = (torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 50).to(dtype)
    there = x.to(device)
    for config in copy_configs(*shape, target)[:TRIED] if target else [None]:
        if config is None:
            found = transpose(there)
        else:
            found = torch.empty(shape[::-1], dtype=dtype, device=device)
            copy_call(there, found.T, config=config).run()
        assert torch.equal(found.cpu().view(torch.uint8), x.T.contiguous().view(torch.uint8))


def check_gradients(size, dtype, *, device, target=None):
    """Unscaled gradients and their statistics are those of plain torch, bit for bit."""
    x, inverse = gradient_checks.sample(size, dtype), gradient_checks.inverse(1024.0)
    expected, reference = gradients_reference(x, inverse)
    there, factor = x.to(device), inverse.to(device)
    for config in gradients_configs(size, target)[:TRIED] if target else [None]:
        if config is None:
            (y,), (found,) = unscale_gradients([there], factor, output=torch.float32)
        else:
            y = torch.empty(size, device=device)
            found = GradientStatistics(
                found_inf=torch.zeros((), device=device),
                histogram=torch.zeros(BINS, dtype=torch.int32, device=device),
                amax=torch.zeros((), device=device),
            )
            gradients_call(there, y, factor, found, config=config).run()
        assert torch.equal(gradient_checks.bits(y.cpu()), gradient_checks.bits(expected))
        named = {f.name: getattr(found, f.name).cpu() for f in dataclasses.fields(found)}
        gradient_checks.assert_statistics(dataclasses.replace(found, **named), reference)


def _same(found, expected, format):
    values, scale = (t.cpu() for t in found)
    assert_same(values, scale, expected, format)


def _empty(x, format):
    return torch.empty(x.shape, dtype=QUANTIZED_DTYPES[format], device=x.device)
