"""Linear layers with few rows on the CPU: our packed weights against what torch ships, in one run.

    python -m bench.cpu_linears [--shapes 4096x4096,11008x4096] [--rows 1,4,16] [--threads 1] [--repeats 25] [-o FILE]

Every implementation is called in turn, `repeats` times, each time on another copy of its weight: the copies take
160 MB and more, so that the cache holds none of them. Times are medians; `fastest` is the least one in ms, `spread` the
range of the middle half of them over the median. `x torch fp32` is the median of the ratios of torch's fp32 time to
this one's in the same round, `x our fp32` the same with our fp32 kernel, which is what a narrow format buys by itself.
With one thread a time is the processor time of that thread, which other work on the machine hardly changes; with more
it is wall time: only `fastest` means something unless the machine is idle. `error` is the relative distance (2-norm) of
the outputs from those of the fp32 weight in fp64, on normal weights and rows.

fbgemm's int8 rounds x to 7 bits, ours its rows to 7 (`dynamic`) or 16 (`a16`), int4 `a8` to 8 bits per 128 columns.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import statistics
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from bench.table import Row, show
from bench.timing import in_turns
from dsmp.codegen.cpu.extension import cpu_operators

COLD_BYTES = 160_000_000
BASELINE, OURS = "torch fp32", "dsmp fp32"
Product = Callable[[Tensor], Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Implementation:
    """A way to compute a layer, once per copy of its weight of `weight_bytes`."""

    name: str
    weight_bytes: int
    copies: Sequence[Product]


def copies_of(weight_bytes: int) -> int:
    """How many copies of a weight no cache holds."""
    return max(2, math.ceil(COLD_BYTES / weight_bytes))


def implementations(weight: Tensor) -> Iterator[Implementation]:
    """All of them for a weight [out, in] in fp32; only torch's where our kernels cannot be built."""
    n = len(weight)
    yield _cloned(BASELINE, [weight], F.linear)
    yield from _fbgemm(weight)
    verdict = cpu_operators()
    if not verdict:
        print(verdict.reason)
        return
    ops = torch.ops.dsmp_cpu
    for name in ("fp32", "fp16"):
        yield _cloned(f"dsmp {name}", [getattr(ops, f"pack_{name}")(weight)], partial(_ours, f"linear_{name}", n))
    packed = ops.pack_int8(weight)
    for name in ("int8", "int8_a16"):
        yield _cloned(f"dsmp {name}", list(packed), partial(_ours, f"linear_{name}", n))
    yield _cloned("dsmp int8 dynamic", list(ops.int8_pack(weight, 1)), partial(_dynamic, list(weight.shape)))
    payload, scales, zeros = ops.pack_int4(weight, 128, True, True)
    for name in ("int4", "int4_a16", "int4_a8"):
        product = partial(_ours, f"linear_{name}", n, group=128, zeros=zeros)
        yield _cloned(f"dsmp {name} g128", [payload, scales], product)


def _ours(op: str, n: int, x: Tensor, *packed: Tensor, group: int | None = None, zeros: Tensor | None = None) -> Tensor:
    call = getattr(torch.ops.dsmp_cpu, op)
    y: Tensor = call(x, *packed, None, n) if group is None else call(x, *packed, zeros, None, n, group)
    return y


def _dynamic(size: list[int], x: Tensor, *packed: Tensor) -> Tensor:
    y: Tensor = torch.ops.dsmp_cpu.int8_dynamic_linear_packed(x, *packed, size, None)
    return y


def _cloned(name: str, tensors: Sequence[Tensor], product: Callable[..., Tensor]) -> Implementation:
    size = sum(t.nbytes for t in tensors)

    def copy() -> Product:
        own = [t.clone() for t in tensors]
        return lambda x: product(x, *own)

    return Implementation(name=name, weight_bytes=size, copies=[copy() for _ in range(copies_of(size))])


def _fbgemm(weight: Tensor) -> Iterator[Implementation]:
    n, k = weight.shape
    if "fbgemm" not in torch.backends.quantized.supported_engines:
        return
    torch.backends.quantized.engine = "fbgemm"
    ops = torch.ops.quantized
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that torch means to move these operators elsewhere
        zeros = torch.zeros(n, dtype=torch.long)
        int8 = torch.quantize_per_channel(weight, weight.abs().amax(1) / 127, zeros, 0, torch.qint8)
        packed = [ops.linear_prepack(int8, None) for _ in range(copies_of(n * k))]
        halves = [ops.linear_prepack_fp16(weight, None) for _ in range(copies_of(2 * n * k))]
    yield Implementation(
        name="fbgemm int8", weight_bytes=n * k, copies=[partial(_call, ops.linear_dynamic, p, True) for p in packed]
    )
    yield Implementation(
        name="fbgemm fp16", weight_bytes=2 * n * k, copies=[partial(_call, ops.linear_dynamic_fp16, p) for p in halves]
    )


def _call(op: Callable[..., Tensor], packed: object, *rest_and_x: object) -> Tensor:
    *rest, x = rest_and_x
    return op(x, packed, *rest)


def measure(found: Sequence[Implementation], x: Tensor, repeats: int) -> dict[str, list[float]]:
    """Seconds of each implementation in every round; the first calls pay for pages and threads."""

    def on_copies(implementation: Implementation) -> Callable[[], object]:
        copies = itertools.cycle(implementation.copies)
        return lambda: next(copies)(x)

    return in_turns({i.name: on_copies(i) for i in found}, repeats, untimed=2)


def rows_of(weight: Tensor, found: Sequence[Implementation], m: int, repeats: int) -> Iterator[Row]:
    """A line for each implementation with m rows of x."""
    n, k = weight.shape
    x = torch.randn(m, k, generator=torch.Generator().manual_seed(m))
    exact = x.double() @ weight.double().t()
    times = measure(found, x, repeats)
    for implementation in found:
        own = times[implementation.name]
        middle = statistics.median(own)
        low, _, high = statistics.quantiles(own, n=4)
        row: dict[str, str | int | float | bool] = {
            "layer": f"{n}x{k}",
            "rows": m,
            "implementation": implementation.name,
            "ms": middle * 1e3,
            "fastest": min(own) * 1e3,
            "spread": (high - low) / middle,
            "GB/s": implementation.weight_bytes / middle / 1e9,
        }
        for base in (BASELINE, OURS):
            ratios = [b / t for b, t in zip(times.get(base, []), own, strict=False)]
            row[f"x {base.replace('dsmp', 'our')}"] = statistics.median(ratios) if ratios else float("nan")
        y = implementation.copies[0](x).double()
        row["error"] = float((y - exact).norm() / exact.norm())
        yield row


def _shapes(text: str) -> list[tuple[int, int]]:
    shapes = [tuple(map(int, part.split("x"))) for part in text.split(",")]
    if any(len(s) != 2 for s in shapes):
        raise argparse.ArgumentTypeError("layers are given as OUTxIN, with commas between them")
    return [(s[0], s[1]) for s in shapes]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", type=_shapes, default="4096x4096,11008x4096", help="OUTxIN, commas between them")
    parser.add_argument("--rows", type=lambda text: list(map(int, text.split(","))), default="1,4,16")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=25)
    parser.add_argument("-o", "--json", type=Path, dest="json_file")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(arguments.threads)
    rows: list[Row] = []
    for n, k in arguments.shapes:
        weight = torch.randn(n, k, generator=torch.Generator().manual_seed(0)) / math.sqrt(k)
        found = list(implementations(weight))
        for m in arguments.rows:
            rows += rows_of(weight, found, m, arguments.repeats)
            print(f"{n}x{k}, {m} rows: done", flush=True)
    kind = "processor" if arguments.threads == 1 else "wall"
    load = os.getloadavg()[0]
    show(f"Linear layers with few rows, {kind} time, load of the machine {load:.1f}", rows, arguments.json_file)


if __name__ == "__main__":
    main()
