"""The part of a plan or wire format that `fully_shard` can follow: a MixedPrecisionPolicy."""

from __future__ import annotations

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from ..errors import FsdpPolicyError, InvalidOptionError, UnknownKeyError
from ..hardware_db.formats import get_format
from ..passes.keys import FPROP
from ..passes.plan import PrecisionPlan

_GATHERED = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
_REDUCED = {"fp32": torch.float32, "bf16": torch.bfloat16}
_WEIGHT_READERS = frozenset({"linear", "conv", "grouped_mm"})


def fsdp_policy(
    gather: str | PrecisionPlan = "fp32", *, reduce: str = "fp32", module: str = ""
) -> MixedPrecisionPolicy:
    """The MixedPrecisionPolicy for `fully_shard(block, mp_policy=...)`.

    gather: what parameters are gathered in, and so computed with: "fp32" (as they are stored), "bf16" or "fp16". Of a
    plan: bf16 where each product with a weight computes in bf16 or from narrower values with bf16's range, fp16 where
    each does in fp16, else as stored. `fully_shard` knows one format a block, so norms and biases follow it. What the
    block returns is fp32 again: give blocks the policy and leave the root without one, which keeps head and loss wide.
    reduce: what gradients are summed in: "fp32" or "bf16". Other wire formats need graphs that hold their collectives:
    see `dsmp.parallelize`, or the option `wire` for SimpleFSDP-style code.
    module: with a plan, the path of the block among the plan's modules; "" for all of it.

    Raises FsdpPolicyError for a format that `fully_shard` does not have, UnknownKeyError for a path without products,
    InvalidOptionError for a path without a plan.
    """
    if module and not isinstance(gather, PrecisionPlan):
        raise InvalidOptionError("module", module, "with a plan, such as dsmp.fsdp_policy(plan, module='blocks.0')")
    name = _of_plan(gather, module) if isinstance(gather, PrecisionPlan) else gather
    if not isinstance(name, str) or name not in _GATHERED:
        raise FsdpPolicyError("gather", name, _GATHERED)
    if not isinstance(reduce, str) or reduce not in _REDUCED:
        raise FsdpPolicyError("reduce", reduce, _REDUCED)
    dtype = _GATHERED[name]
    # what a block hands on goes into modules that compute as they are written: the head, the loss, other blocks
    output = None if dtype is None else torch.float32
    return MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=_REDUCED[reduce], output_dtype=output)


def _of_plan(plan: PrecisionPlan, module: str) -> str:
    inside = f"{module}." if module else ""
    formats = {
        d.compute
        for d in plan
        if d.op in _WEIGHT_READERS and d.phase == FPROP and (d.module == module or d.module.startswith(inside))
    }
    if not formats:
        raise UnknownKeyError(
            f"the plan has no product with a weight in {module!r}; give the path of a block that has."
        )
    if formats == {"fp16"}:
        return "fp16"
    return "bf16" if all(_fits_bf16(f) for f in formats) else "fp32"


def _fits_bf16(name: str) -> bool:
    """Whether rounding a weight to bf16 first costs a product in this format at most what its own rounding does."""
    return name == "bf16" or get_format(name).storage_bits <= 8
