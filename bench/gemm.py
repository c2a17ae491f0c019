"""Our GEMM kernels against torch's on the running GPU, over the linear layers of Llama-8B/70B and DeepSeek-V3.

    python -m bench.gemm [--shapes llama-8b,llama-70b,deepseek-v3] [--tokens 4096] [--tune 8] [--quick] [-o FILE]

Every row of a shape is measured in the same run, one after the other: `x torch bf16` is how many times as fast as
torch's mm in bf16 a product is. `with quantise` adds what it takes to bring both operands, held in bf16, into the
format: by our kernels for ours, by the same formula compiled by Inductor for torch's `_scaled_mm`. Each of our kernels
is measured in the first N configurations of its autotune space (--tune), the fastest is shown with how many ran.
Outputs are bf16. On Hopper fp8 sums are kept in fewer bits than fp32: our block GEMM, and `_scaled_mm` unless it is
`fast`, promote them to fp32 on the way, our plain GEMM does not. `% of peak` is of the dense rate of the format that
the hardware database derives for the device.

Without a GPU: one line, exit code 2.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from bench.gemm_shapes import ROW_BASELINE, SHAPES, Shape, Timing, rows_of, shapes_of
from bench.gpu import gpu_or_exit, milliseconds
from bench.table import Row, show
from dsmp.codegen.kernel_call import Config
from dsmp.codegen.kernels.block_gemm import block_gemm_available, block_gemm_call, block_gemm_configs
from dsmp.codegen.kernels.gemm import gemm
from dsmp.codegen.kernels.gemm_configs import gemm_configs, has_gemm
from dsmp.codegen.kernels.mx_gemm import mx_gemm_available, mx_gemm_call, mx_gemm_configs
from dsmp.codegen.kernels.quantize import quantize_rows, quantize_tiles
from dsmp.codegen.kernels.quantize_vectors import quantize_tensor, quantize_vectors
from dsmp.codegen.kernels.scales import QUANTIZED_DTYPES
from dsmp.codegen.targets import Target
from dsmp.errors import KernelUnavailableError
from dsmp.hardware_db.capability import Device
from dsmp.hardware_db.formats import get_format

BF16 = torch.bfloat16
FP8 = ("fp8_e4m3", "fp8_e4m3fnuz")
Measure = Callable[[Callable[[], object]], float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Bench:
    """Where and how products are measured: `tune` configurations of each kernel."""

    device: Device
    target: Target
    tune: int
    measure: Measure

    def timings(self, shape: Shape, tokens: int, place: str = "cuda") -> Iterator[Timing]:
        """What every implementation that runs on the target takes for a shape, the baseline first."""
        generator = torch.Generator().manual_seed(0)
        x, w = (torch.randn(rows, shape.k, generator=generator).to(place, BF16) for rows in (tokens, shape.n))
        yield Timing(implementation=ROW_BASELINE, format="bf16", ms=self.measure(lambda: x @ w.t()))
        yield self._gemm(x, w, "bf16")
        fp8 = next((f for f in FP8 if has_gemm(f, self.target)), None)
        if fp8 is not None:
            for recipe in ("tensor", "row"):
                yield from self._scaled_mm(x, w, fp8, recipe)
                yield self._gemm(x, w, fp8, recipe)
            yield self._blocks(x, w, fp8)
        if mx_gemm_available(torch.float8_e4m3fn, self.target):
            yield self._mx(x, w)
        if self.device.rated("int8") and has_gemm("int8", self.target):
            yield self._gemm(x, w, "int8", "row")

    def _gemm(self, x: Tensor, w: Tensor, format: str, recipe: str = "") -> Timing:
        space = gemm_configs(len(x), len(w), x.size(1), format, self.target, device=self.device)

        def prepare() -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
            return _quantized(x, w, format, recipe)

        a, b, scale_a, scale_b = prepare()

        def run(config: Config) -> object:
            return gemm(a, b.t(), out_dtype=BF16, config=config, scale_a=scale_a, scale_b=scale_b)

        return self._best("dsmp gemm", f"{format} {recipe}".strip(), space, run, prepare if recipe else None)

    def _blocks(self, x: Tensor, w: Tensor, format: str) -> Timing:
        def prepare() -> tuple[Tensor, Tensor, Tensor, Tensor]:
            blocks = quantize_rows(x, format)
            values, scale = quantize_tiles(w, format)
            assert blocks.rows is not None and blocks.row_scale is not None
            return blocks.rows, blocks.row_scale, values, scale

        a, scale_a, b, scale_b = prepare()
        out = torch.empty(len(x), len(w), dtype=BF16, device=x.device)
        space = block_gemm_configs(len(x), len(w), x.size(1), self.target)

        def run(config: Config) -> None:
            block_gemm_call(a, b, out, scale_a, scale_b, config=config).run()

        assert block_gemm_available(QUANTIZED_DTYPES[format], self.target)
        return self._best("dsmp block gemm", f"{format} 1x128/128x128", space, run, prepare)

    def _mx(self, x: Tensor, w: Tensor) -> Timing:
        quantise = partial(quantize_rows, format="fp8_e4m3", group=32, power_of_two=True, e8m0=True)

        def prepare() -> list[Tensor]:
            blocks = quantise(x), quantise(w)
            return [t for b in blocks for t in (b.rows, b.row_scale) if t is not None]

        a, scale_a, b, scale_b = prepare()
        out = torch.empty(len(x), len(w), dtype=BF16, device=x.device)
        space = mx_gemm_configs(len(x), len(w), x.size(1), self.target, dtype=a.dtype)

        def run(config: Config) -> None:
            mx_gemm_call(a, b, out, scale_a, scale_b, config=config).run()

        return self._best("dsmp mx gemm", "fp8_e4m3 mx32", space, run, prepare)

    def _scaled_mm(self, x: Tensor, w: Tensor, format: str, recipe: str) -> Iterator[Timing]:
        """Nothing where the library does not take it."""
        torch._dynamo.reset()  # each shape is compiled for itself, and there is a limit of recompiling
        quantise = torch.compile(scale_and_round, dynamic=False)

        def prepare() -> list[Tensor]:
            return [*quantise(x, format, recipe), *quantise(w, format, recipe)]

        a, scale_a, b, scale_b = prepare()
        for name, fast in (("torch _scaled_mm", False), ("torch _scaled_mm fast", True)):
            run = partial(
                torch._scaled_mm, a, b.t(), scale_a=scale_a, scale_b=scale_b.t(), out_dtype=BF16, use_fast_accum=fast
            )
            try:
                run()
            except (RuntimeError, ValueError) as error:
                print(f"{name} with {recipe} scales: {str(error).splitlines()[0]}", flush=True)
                continue
            yield Timing(
                implementation=name,
                format=f"{format} {recipe}",
                ms=self.measure(run),
                quantise_ms=self.measure(prepare),
            )

    def _best(
        self,
        name: str,
        format: str,
        space: Sequence[Config],
        run: Callable[[Config], object],
        prepare: Callable[[], object] | None,
    ) -> Timing:
        """The fastest of the first configurations. Raises KernelUnavailableError where none of them runs."""
        ms, config, ran = fastest(space[: self.tune], run, self.measure)
        text = f"{config.text} w{config.num_warps} s{config.num_stages}, of {ran}"
        return Timing(
            implementation=name,
            format=format,
            ms=ms,
            quantise_ms=self.measure(prepare) if prepare is not None else 0.0,
            choice=text,
        )


def fastest(space: Sequence[Config], run: Callable[[Config], object], measure: Measure) -> tuple[float, Config, int]:
    """(time, configuration, how many ran) of the fastest; those that need more of the device than it has are left out.

    Raises KernelUnavailableError where none runs.
    """
    found: list[tuple[float, Config]] = []
    for config in space:
        try:
            found.append((measure(partial(run, config)), config))
        except OutOfResources as error:
            print(f"{config.text}: {error}", flush=True)
    if not found:
        raise KernelUnavailableError("none of the kernel's configurations fits the device. Try more with --tune.")
    ms, best = min(found, key=lambda item: item[0])
    return ms, best, len(found)


def scale_and_round(x: Tensor, format: str, recipe: str) -> tuple[Tensor, Tensor]:
    """x [m, k] in fp8 with a scale per tensor ([1, 1]) or row ([m, 1]), as a user of `_scaled_mm` writes it."""
    wide = x.float()
    amax = wide.abs().amax((0, 1) if recipe == "tensor" else (1,), keepdim=True)
    top = get_format(format).max
    scale = (amax / top).clamp(min=2.0**-126)
    return (wide / scale).clamp(-top, top).to(QUANTIZED_DTYPES[format]), scale


def _quantized(x: Tensor, w: Tensor, format: str, recipe: str) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """x and w in a format by our kernels, and their scales."""
    if not recipe:
        return x, w, None, None
    if recipe == "tensor":
        (a, scale_a, _), (b, scale_b, _) = quantize_tensor(x, format), quantize_tensor(w, format)
    else:
        (a, scale_a), (b, scale_b) = quantize_vectors(x, format), quantize_vectors(w, format)
        scale_a, scale_b = scale_a.flatten(), scale_b.flatten()
    return a, b, scale_a, scale_b


def _names(text: str) -> list[str]:
    names = text.split(",")
    unknown = [name for name in names if name not in SHAPES]
    if unknown:
        raise argparse.ArgumentTypeError(f"no shapes of {', '.join(unknown)}; there are {', '.join(SHAPES)}")
    return names


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", type=_names, default=list(SHAPES), help="models, with commas between them")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--tune", type=int, default=8, metavar="N", help="configurations of each kernel to measure")
    parser.add_argument("--quick", action="store_true", help="a fifth of the repeats, two configurations")
    parser.add_argument("--graphs", action="store_true", help="time replayed CUDA graphs, without launches from Python")
    parser.add_argument("-o", "--json", type=Path, dest="json_file")
    arguments = parser.parse_args(argv)
    device, target = gpu_or_exit(parser, "bench.gemm")
    bench = Bench(
        device=device,
        target=target,
        tune=min(2, arguments.tune) if arguments.quick else arguments.tune,
        measure=partial(milliseconds, quick=arguments.quick, graphs=arguments.graphs),
    )
    rows: list[Row] = []
    for shape in shapes_of(arguments.shapes):
        rows += rows_of(shape, arguments.tokens, bench.timings(shape, arguments.tokens), device)
        print(f"{shape.text}: done", flush=True)
    show(f"GEMM, {arguments.tokens} tokens", rows, arguments.json_file)


if __name__ == "__main__":
    main()
