"""dsmp: a numeric format for every node of a PyTorch model's forward and backward graph.

    import dsmp
    plan = dsmp.plan(model, inputs, hardware="h800")     # decide
    plan.save("plan.json")                               # review, edit, keep
    compiled = torch.compile(model, backend="dsmp", options={"plan": "plan.json"})

`torch.compile(model, backend="dsmp")` needs no import of dsmp. On the command line: `dsmp --help`.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from .errors import DsmpError

if TYPE_CHECKING:
    from .codegen.ddp import compress_ddp
    from .codegen.feedback import compress_gradients
    from .compiler.capture import Capture, capture
    from .compiler.expert_parallel import expert_parallel
    from .compiler.fsdp_policy import fsdp_policy
    from .compiler.module_compile import compile_modules
    from .compiler.parallelize import parallelize
    from .compiler.pipelined import pipeline
    from .compiler.plan_registry import audit, plan_of
    from .compiler.planning import measure_scores, plan
    from .compiler.released import ReleaseReport, release_weights
    from .hardware_db.capability import Device, Verdict
    from .hardware_db.detect import resolve_hardware
    from .passes.module_plan import module_plan
    from .passes.plan import Decision, PrecisionPlan, load_plan
    from .passes.rules import Rule
    from .passes.scores import Scores, load_scores
    from .passes.sharding import ShardingPlan, ShardingRule

__version__ = version("dsmp")

# Names are resolved on first use, so that the hardware database and the command line's help work without loading torch.
_HOMES = {
    "Capture": ".compiler.capture",
    "Decision": ".passes.plan",
    "Device": ".hardware_db.capability",
    "PrecisionPlan": ".passes.plan",
    "ReleaseReport": ".compiler.released",
    "Rule": ".passes.rules",
    "Verdict": ".hardware_db.capability",
    "audit": ".compiler.plan_registry",
    "capture": ".compiler.capture",
    "compile_modules": ".compiler.module_compile",
    "compress_ddp": ".codegen.ddp",
    "compress_gradients": ".codegen.feedback",
    "expert_parallel": ".compiler.expert_parallel",
    "Scores": ".passes.scores",
    "ShardingPlan": ".passes.sharding",
    "ShardingRule": ".passes.sharding",
    "fsdp_policy": ".compiler.fsdp_policy",
    "load_plan": ".passes.plan",
    "load_scores": ".passes.scores",
    "measure_scores": ".compiler.planning",
    "module_plan": ".passes.module_plan",
    "parallelize": ".compiler.parallelize",
    "pipeline": ".compiler.pipelined",
    "plan": ".compiler.planning",
    "plan_of": ".compiler.plan_registry",
    "release_weights": ".compiler.released",
    "resolve_hardware": ".hardware_db.detect",
}

__all__ = [
    "Capture",
    "Decision",
    "Device",
    "DsmpError",
    "PrecisionPlan",
    "ReleaseReport",
    "Rule",
    "Scores",
    "ShardingPlan",
    "ShardingRule",
    "Verdict",
    "audit",
    "capture",
    "compile_modules",
    "compress_ddp",
    "compress_gradients",
    "expert_parallel",
    "fsdp_policy",
    "load_plan",
    "load_scores",
    "measure_scores",
    "module_plan",
    "parallelize",
    "pipeline",
    "plan",
    "plan_of",
    "release_weights",
    "resolve_hardware",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(home, __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
