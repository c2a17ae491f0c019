"""dsmp: a numeric format for every node of a PyTorch model's forward and backward graph.

    import dsmp
    plan = dsmp.plan(model, inputs, hardware="h800")     # decide
    plan.save("plan.json")                               # review, edit, keep
    compiled = torch.compile(model, backend="dsmp", options={"plan": "plan.json"})

`torch.compile(model, backend="dsmp")` needs no import of dsmp. On the command line: `dsmp report`, `dsmp plan`, `dsmp diff`.
"""

from __future__ import annotations

from importlib.metadata import version

from .compiler.capture import Capture, capture
from .compiler.planning import plan
from .errors import DsmpError
from .hardware_db.capability import Device, Verdict
from .hardware_db.detect import resolve_hardware as hardware
from .passes.plan import Decision, PrecisionPlan, Rule, load_plan

__version__ = version("dsmp")

__all__ = [
    "Capture",
    "Decision",
    "Device",
    "DsmpError",
    "PrecisionPlan",
    "Rule",
    "Verdict",
    "capture",
    "hardware",
    "load_plan",
    "plan",
]
