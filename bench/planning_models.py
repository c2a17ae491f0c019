"""How long it takes to choose formats for large models: captured on the meta device, with drifts drawn at random.

    python -m bench.planning_models [--model 8b|405b ...] [--json FILE]

Training steps of Llama-3.1-8B (32 layers) and Llama-3.1-405B (126 layers) on H800s. Capturing, building the program
(candidates, times, shared copies, ties) and solving are timed apart; solving once with two formats (fp32, bf16), once
with four (and fp8, int8) and once with every candidate, tied and untied. There are no weights, so drifts are drawn
from log-normal distributions around each format's rounding error; the budget is half the drift of the fastest plan.
"""

from __future__ import annotations

import argparse
import hashlib
import math
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import fx
from transformers import LlamaConfig, LlamaForCausalLM

import dsmp
from bench.planning import rows_of
from bench.table import Row, show
from bench.timing import timed
from dsmp.hardware_db.detect import resolve_hardware
from dsmp.hardware_db.formats import get_format
from dsmp.passes.formulate import formulate
from dsmp.passes.keys import NodeKey
from dsmp.passes.labels import split_label
from dsmp.passes.plan_fields import GEMM_CLASSES
from dsmp.passes.program import Candidate, Program

MODELS = {
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
    "405b": {"hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126, "num_attention_heads": 128},
}
FORMATS: dict[str, frozenset[str] | None] = {
    "2 formats": frozenset({"fp32", "bf16"}),
    "4 formats": frozenset({"fp32", "bf16", "fp8_e4m3", "int8"}),
    "every candidate": None,
}


def llama_config(name: str) -> LlamaConfig:
    """The config of a size of Llama 3.1."""
    return LlamaConfig(
        **MODELS[name], num_key_value_heads=8, vocab_size=128_256, max_position_embeddings=8192, use_cache=False
    )


def captured(name: str) -> tuple[dsmp.Capture, float]:
    """A training step on one sequence of 2,048 tokens, captured on the meta device, and the seconds it took."""
    with torch.device("meta"):
        model = LlamaForCausalLM(llama_config(name))
        ids = torch.empty(1, 2048, dtype=torch.int64)
    return timed(lambda: dsmp.capture(model, (), {"input_ids": ids, "labels": ids}))


def drawn_drift(key: str, label: str, node: fx.Node) -> float:
    """A drift for a label: the square of its format's rounding error times a factor that the key and format decide."""
    arithmetic, stored = split_label(label)
    fmt = get_format(arithmetic.partition(":")[0] if arithmetic else stored.removeprefix("->"))
    seed = int.from_bytes(hashlib.sha256(f"{key} {label}".encode()).digest()[:4])
    spread = math.exp(1.5 * np.random.default_rng(seed).standard_normal())
    return 1e-3 * 4.0 ** -(fmt.significand_bits - 1) * spread


def restricted(program: Program, formats: frozenset[str] | None) -> Program:
    """A program in which only some formats may be chosen, of a GEMM for its arithmetic and of any other node for its
    result, and the fastest recipe of each."""
    if formats is None:
        return program

    def kept(key: str, found: list[Candidate]) -> list[Candidate]:
        gemm = NodeKey.parse(key).op in GEMM_CLASSES
        best: dict[str, Candidate] = {}
        for c in found:
            name = c.compute if gemm else c.output
            known = best.get(name)
            if c.blocked or name not in formats:
                continue
            if known is None or (c.time_us, c.drift or 0.0) < (known.time_us, known.drift or 0.0):
                best[name] = c
        return list(best.values()) or found[:1]

    return program.model_copy(update={"candidates": {k: kept(k, f) for k, f in program.candidates.items()}})


def rows_for(name: str) -> list[Row]:
    """All rows of one model."""
    capture, seconds = captured(name)
    graphs = [(g.gm, g.parameters) for g in capture]
    nodes = sum(len(g.key_texts()) for g in capture)
    rows: list[Row] = []
    for tied in (True, False):
        formulated = timed(partial(formulate, graphs, resolve_hardware("h800"), drawn_drift, tied=tied))
        for text, formats in FORMATS.items():
            program = restricted(formulated[0], formats)
            problem = program.problem()
            free = sum(float(e[int(np.argmin(t))]) for e, t in zip(problem.error, problem.time, strict=True))
            row = rows_of(program.problem(drift=0.5 * free), f"llama-{name}, {text}, {'tied' if tied else 'untied'}")
            rows.append({**row, "graph nodes": nodes, "capture s": seconds, "formulate s": formulated[1]})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", choices=sorted(MODELS), help="only these models")
    parser.add_argument("--json", type=Path, help="write the rows here as well")
    arguments = parser.parse_args()
    rows = [row for name in arguments.model or MODELS for row in rows_for(name)]
    show("Choosing formats for large models", rows, arguments.json)


if __name__ == "__main__":
    main()
