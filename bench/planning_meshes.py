"""How long it takes to plan large models for 2,048 devices, without any of them, and what the plans predict.

    python -m bench.planning_meshes [--model NAME ...] [--json FILE]

Training steps of Llama-3.1-405B and DeepSeek-V3 on 256 nodes of eight H800s, data parallel over the nodes and tensor
parallel within them (experts divided over the nodes), a sequence of 4,096 tokens for each of the 256 data-parallel
ranks. The models lie on the meta device. `capture s` is the joint graph with each kind of block once, `plan s` all that
follows: sharding every placement that is worth a look, formats, collectives, memory. Times of a step and bytes are
predictions.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, LlamaForCausalLM

from bench.planning_models import llama_config
from bench.table import Row, show
from bench.timing import timed
from dsmp.compiler.mesh_planning import MeshRequest, capture_folded, plan_for_mesh
from dsmp.hardware_db.catalog import load_catalog
from dsmp.hardware_db.cluster import cluster_of
from dsmp.hardware_db.detect import resolve_hardware

MESH = {"dp": 256, "tp": 8}
TOKENS = 4096

MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama-405b": lambda: LlamaForCausalLM(llama_config("405b")),
    "deepseek-v3": lambda: DeepseekV3ForCausalLM(DeepseekV3Config(use_cache=False)),
}


def row_for(name: str) -> Row:
    """A model's row."""
    with torch.device("meta"):
        model = MODELS[name]()
        ids = torch.empty(MESH["dp"], TOKENS, dtype=torch.int64)
    inputs = {"input_ids": ids, "labels": ids}
    (capture, _), seconds = timed(lambda: capture_folded(model, (), inputs))
    started = time.perf_counter()
    plan = plan_for_mesh(
        model, (), inputs, resolve_hardware("h800"), cluster_of(load_catalog(), "h800"), MeshRequest(mesh=MESH),
        source=name,
    )  # fmt: skip
    whole = time.perf_counter() - started
    assert plan.mesh is not None
    first = plan.mesh.placings[0]
    return {
        "model": name,
        "parameters": sum(p.numel() for p in model.parameters()),
        "planned nodes": len(plan),
        "graph nodes": len(capture.gm.graph.nodes),
        "collectives": len(plan.mesh.collectives),
        "capture s": seconds,
        "plan s": whole - seconds,
        "placements": len(plan.mesh.placings),
        "ZeRO": first.zero,
        "sequences": "divided" if first.sequence else "whole",
        "step ms": plan.mesh.step.total_us / 1e3,
        "compute ms": plan.mesh.step.compute_us / 1e3,
        "memory GB": plan.mesh.memory.total / 1e9,
        "fits": plan.mesh.memory.fits,
        "bound by": plan.mesh.step.bound,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", choices=sorted(MODELS), help="only these models")
    parser.add_argument("--json", type=Path, help="write the rows here as well")
    arguments = parser.parse_args()
    show("plans for 2,048 H800", [row_for(name) for name in arguments.model or MODELS], arguments.json)


if __name__ == "__main__":
    main()
