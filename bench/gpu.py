"""What benches that need a GPU share: the device, or a plain word that there is none; times on it."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import NoReturn

import torch
from triton.testing import do_bench, do_bench_cudagraph

from dsmp.codegen.targets import Target, target_of
from dsmp.errors import DsmpError, KernelUnavailableError
from dsmp.hardware_db.capability import Device
from dsmp.hardware_db.detect import resolve_hardware

NO_GPU = 2
"""The exit code where there is no GPU to measure on."""


def require_gpu(bench: str) -> tuple[Device, Target]:
    """The running GPU and its instruction set. Raises KernelUnavailableError where torch sees none, or one that no
    kernels are written for; UndetectedHardwareError where nothing is known of it."""
    if not torch.cuda.is_available():
        raise KernelUnavailableError(
            f"{bench} measures on a GPU and torch sees none. Run it where torch.cuda.is_available() is true."
        )
    device = resolve_hardware()
    target = target_of(device)
    if target is None:
        raise KernelUnavailableError(f"{bench}: there are no kernels for {device.name} ({device.isa}).")
    return device, target


def gpu_or_exit(parser: argparse.ArgumentParser, bench: str) -> tuple[Device, Target]:
    """As `require_gpu`; where it raises, one line on stderr and exit code 2."""
    try:
        return require_gpu(bench)
    except DsmpError as error:
        say_and_exit(parser, error)


def say_and_exit(parser: argparse.ArgumentParser, error: DsmpError) -> NoReturn:
    parser.exit(NO_GPU, f"error: {' '.join(str(error).split())}\n")


def milliseconds(run: Callable[[], object], *, quick: bool = False, graphs: bool = False) -> float:
    """The median time of a call on the GPU, the L2 cache emptied before each; `graphs`: of a replayed CUDA graph, whose
    time has no launching from Python in it, with a warm cache."""
    if graphs:
        return float(do_bench_cudagraph(run, rep=5 if quick else 20, return_mode="median"))
    return float(do_bench(run, warmup=5 if quick else 25, rep=20 if quick else 100, return_mode="median"))
