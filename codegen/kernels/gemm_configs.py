"""Which GEMMs the kernels can be, and how they are cut into tiles."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch

from ...hardware_db.capability import Device, Verdict
from ...hardware_db.detect import resolve_hardware
from ...hardware_db.formats import FORMATS
from ..kernel_call import Config
from ..targets import Target

FORMAT_OF_DTYPE = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float8_e4m3fn: "fp8_e4m3",
    torch.float8_e5m2: "fp8_e5m2",
    torch.float8_e4m3fnuz: "fp8_e4m3fnuz",
    torch.float8_e5m2fnuz: "fp8_e5m2fnuz",
    torch.int8: "int8",
}
"""The operand format of a tensor; fp32 tensors may be multiplied as tf32 too."""

_FN = ("fp8_e4m3", "fp8_e5m2")
_FNUZ = ("fp8_e4m3fnuz", "fp8_e5m2fnuz")
_EVERYWHERE = ("bf16", "fp16", "int8")
_FP8_OF = {
    "sm_89": _FN,
    "sm_90": _FN,
    "sm_100": _FN,
    "sm_120": _FN,
    "gfx942": _FNUZ,
    "gfx950": _FN,
    "gfx1200": _FN,
}

GROUP = 8
"""Rows of tiles that are walked together (`dot.swizzle`)."""

_SHARED_BYTES_PER_CLOCK = 64  # what a unit fetches from L2, about the same everywhere


def has_gemm(format: str, target: Target, rhs: str | None = None) -> Verdict:
    """Whether a target has a matrix instruction for operands of `format` (lhs) and `rhs` (default: the same).

    fp32 on NVIDIA is a yes: its reason says that it runs on the vector units.
    """
    rhs = rhs or format
    isa = target.isa
    known = {*FORMAT_OF_DTYPE.values(), "tf32"}
    for name in (format, rhs):
        if name not in known:
            return Verdict(False, f"there is no GEMM kernel for {name}.")
    if format != rhs and not (format.startswith("fp8") and rhs.startswith("fp8")):
        return Verdict(False, f"{format} and {rhs} have no common product: cast one operand.")
    if format == "fp32":
        if target.backend == "cuda":
            return Verdict(True, f"{isa} multiplies fp32 exactly on its vector units, it has no matrix instruction.")
        if isa.startswith("gfx1"):
            return Verdict(True, f"{isa} multiplies fp32 on its vector units, its matrix units do not take fp32.")
        return Verdict(True, f"{isa} has matrix instructions for fp32.")
    if format == "tf32":
        if target.backend == "cuda" or isa == "gfx942":
            return Verdict(True, f"{isa} has matrix instructions for tf32.")
        return Verdict(False, f"{isa} has no matrix instruction for tf32: use fp32 or bf16.")
    if format in _EVERYWHERE:
        return Verdict(True, f"{isa} has matrix instructions for {format}.")
    supported = _FP8_OF.get(isa, ())
    for name in (format, rhs):
        if name not in supported:
            other = f": its matrix units take {' and '.join(supported)}" if supported else ": it multiplies no fp8"
            return Verdict(False, f"{isa} has no matrix instruction for {name}{other}.")
    return Verdict(True, f"{isa} has matrix instructions for {format} times {rhs}.")


def gemm_configs(
    m: int,
    n: int,
    k: int,
    format: str,
    target: Target,
    *,
    batch: int = 1,
    device: Device | None = None,
    promoted: bool = False,
) -> list[Config]:
    """The configurations worth measuring for a GEMM, by predicted time (`predicted_time`), best first; never empty.

    device: whose number of units and peak count; default is the reference device of the target's instruction set.
    promoted: partial sums are kept beside the accumulator (`promote_every_k`), which leaves no room for big tiles.
    """
    device = device or _reference_device(target.isa)
    limits = (_extent(m), _extent(n), _extent(k))
    # what is not aligned is loaded element by element, through registers
    unaligned = n % 16 != 0 or k % 16 != 0
    largest = 64 * 64 if unaligned else 128 * 128 if promoted else 256 * 256
    found = [c for c in _candidates(format, target, limits) if c.blocks["BLOCK_M"] * c.blocks["BLOCK_N"] <= largest]
    return sorted(found, key=lambda c: predicted_time(c, m, n, k, format, device, batch=batch))


def predicted_time(config: Config, m: int, n: int, k: int, format: str, device: Device, *, batch: int = 1) -> float:
    """Seconds: waves of tiles over the units, times the k steps of a tile, each limited by its products or by the
    bytes it fetches from L2. Good for an order, not for a plan (`hardware_db` has rates for those)."""
    block_m, block_n, block_k = (config.blocks[name] for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K"))
    waves = -(-(-(-m // block_m) * -(-n // block_n) * batch) // device.units)
    clock = 1e6 * (device.vector_clock_mhz or 1500.0)
    rate = device.peak(format if device.rated(format) else "fp32") / device.units
    if block_m < 64 and device.isa in ("sm_90", "sm_100", "sm_103"):
        rate /= 2  # wgmma and tcgen05 take 64 rows; below, the older mma.sync multiplies
    products = 2 * block_m * block_n * block_k / rate
    fetched = (block_m + block_n) * block_k * FORMATS[format].storage_bits / 8 / (_SHARED_BYTES_PER_CLOCK * clock)
    # the pipeline is filled once per tile; each step waits some hundred clocks, fewer the more stages there are
    latency = 400 / clock / config.num_stages
    steps = -(-k // block_k) + config.num_stages - 1
    stored = block_m * block_n * 4 / (_SHARED_BYTES_PER_CLOCK * clock)
    return waves * (steps * (max(products, fetched) + 0.25 * min(products, fetched) + latency) + stored)


def interpreter_config(m: int, n: int, k: int) -> Config:
    """Few big tiles: the interpreter takes about 10 ms for each step."""
    blocks = {"BLOCK_M": min(256, _extent(m)), "BLOCK_N": min(256, _extent(n)), "BLOCK_K": min(512, _extent(k))}
    return Config(blocks=blocks)


def operand_bytes(config: Config, format: str) -> int:
    """Shared memory of the operands' tiles, as many of them as there are stages."""
    block_m, block_n, block_k = (config.blocks[name] for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K"))
    return config.num_stages * (block_m + block_n) * block_k * FORMATS[format].storage_bits // 8


def _candidates(format: str, target: Target, limits: tuple[int, int, int]) -> Iterator[Config]:
    tiles, depths, stages = _space(format, target)
    size = FORMATS[format].storage_bits // 8
    shortest = min(depth // size for depth in depths)
    smallest = (min(t[0] for t in tiles), min(t[1] for t in tiles))
    for block_m, block_n, warps in tiles:
        # a larger tile than the output, rounded up to a power of two, only adds idle work
        if block_m > max(limits[0], smallest[0]) or block_n > max(limits[1], smallest[1]):
            continue
        for block_k in (depth // size for depth in depths):
            if block_k > max(limits[2], shortest):
                continue
            for options in _options(format, target):
                for count in stages:
                    config = Config(
                        blocks={"BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": block_k},
                        num_warps=warps,
                        num_stages=count,
                        options=options,
                    )
                    if operand_bytes(config, format) <= target.shared_bytes:
                        yield config


_Tile = tuple[int, int, int]

# m, n, warps. What comes first for a shape was compiled without spills, with every part of the epilogue; what comes
# later may spill, and measuring then finds it slow
_BIG: tuple[_Tile, ...] = ((128, 256, 8), (256, 128, 8))
_SQUARE: tuple[_Tile, ...] = ((128, 128, 8),)
_TILES: tuple[_Tile, ...] = ((128, 64, 4), (64, 128, 4), (64, 64, 4))
# RDNA has 32 lanes to a wave and 256 registers, the accumulator's among them
_TILES_OF_8: tuple[_Tile, ...] = ((128, 64, 8), (64, 128, 8), (64, 64, 8))
_FLAT: tuple[_Tile, ...] = ((32, 128, 4), (32, 64, 4), (16, 128, 4), (16, 64, 4), (16, 32, 2))
_VECTOR: tuple[_Tile, ...] = ((128, 128, 8), (128, 64, 8), (64, 64, 4), (32, 64, 4), (16, 64, 4), (16, 32, 2))


def _space(format: str, target: Target) -> tuple[tuple[_Tile, ...], tuple[int, ...], tuple[int, ...]]:
    """Tiles, depths in bytes of k, numbers of stages."""
    stages = (4, 3, 2) if target.backend == "cuda" else (2,)
    if "vector units" in has_gemm(format, target).reason:
        # RDNA has no room for the accumulator, both operands and addresses of the largest
        return (_VECTOR if target.backend == "cuda" else _VECTOR[1:]), (64, 128), stages[1:] or stages
    if target.isa.startswith("gfx1"):
        return (*_SQUARE, *_TILES_OF_8, *_FLAT), (64, 128), stages
    # operands of mma.sync are held in registers, other than those of wgmma and tcgen05
    in_registers = target.backend == "cuda" and target.isa not in ("sm_90", "sm_100")
    if in_registers and FORMATS[format].storage_bits == 8:
        return (*_SQUARE, *_TILES, *_FLAT), (64, 128), stages
    return (*_BIG, *_SQUARE, *_TILES, *_FLAT), (64, 128), stages


def _options(format: str, target: Target) -> tuple[dict[str, int], ...]:
    if not target.isa.startswith("gfx9") or "vector units" in has_gemm(format, target).reason:
        return ({},)
    return {"matrix_instr_nonkdim": 16}, {"matrix_instr_nonkdim": 16, "waves_per_eu": 2}, {"matrix_instr_nonkdim": 32}


def _extent(size: int) -> int:
    """The least power of two that is at least `size` and 16."""
    return max(16, 1 << max(0, size - 1).bit_length())


@functools.cache
def _reference_device(isa: str) -> Device:
    return resolve_hardware(isa)
