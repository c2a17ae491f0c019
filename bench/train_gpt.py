"""Does training survive a plan? The embedded small GPT on real text, in fp32 and under simulated plans, same seeds.

    python -m bench.train_gpt [--steps 300] [--json FILE]

Every run starts from the same weights and reads the same bytes. The a100 and h800 plans are the default ones; the
model is so small that h800 keeps its GEMMs in bf16 (quantising would cost more than it saves), so a further row
forces fp8 into every linear layer but the head. mi250x multiplies in fp16 and trains with torch.amp.GradScaler.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch

import dsmp
from bench.table import Row, show
from dsmp.compiler.small_gpt import SmallGpt, SmallGptConfig, small_gpt_batch, train_small_gpt

RUNS: dict[str, dict[str, Any] | None] = {
    "fp32 (eager)": None,
    "a100": {"hardware": "a100"},
    "h800": {"hardware": "h800"},
    "h800, fp8 forced": {"hardware": "h800", "rules": {"blocks.*|linear|*": "fp8_e4m3"}},
    "mi250x, GradScaler": {"hardware": "mi250x"},
}
_TAIL = 20


def run(name: str, steps: int, layers: int, context: int, batch: int) -> tuple[float, float, float, str]:
    """Train once; returns (mean loss of the last 20 steps, held-out loss, seconds, formats of the GEMM nodes)."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = SmallGpt(SmallGptConfig(layers=layers, context=context))
    options = RUNS[name]
    step: Any = model
    if options is not None:
        step = torch.compile(model, backend="dsmp", options={**options, "executor": "eager"})
    scaler = torch.amp.GradScaler("cpu") if "GradScaler" in name else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    started = time.perf_counter()
    losses = train_small_gpt(step, optimizer, steps=steps, batch=batch, context=context, scaler=scaler, warmup=50)
    seconds = time.perf_counter() - started
    with torch.no_grad():
        batches = [small_gpt_batch(batch=batch, context=context, seed=i, held_out=True) for i in range(20)]
        held_out = sum(step(*b).item() for b in batches) / len(batches)
    tail = losses[-_TAIL:]
    return sum(tail) / len(tail), held_out, seconds, _formats(model, options, batch, context)


def _formats(model: SmallGpt, options: dict[str, Any] | None, batch: int, context: int) -> str:
    if options is None:
        return "fp32"
    plan = dsmp.plan(model, small_gpt_batch(batch=batch, context=context), **options)
    flops: dict[str, int] = {}
    for d in plan:
        if d.op in ("linear", "matmul", "sdpa"):
            flops[d.compute] = flops.get(d.compute, 0) + d.flops
    total = sum(flops.values())
    return ", ".join(f"{f} {100 * c / total:.0f}%" for f, c in sorted(flops.items(), key=lambda i: -i[1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--json", type=Path, dest="json_file")
    parser.add_argument("--threads", type=int, default=1, help="more threads wait for each other on a busy machine")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    rows: list[Row] = []
    reference: tuple[float, float] | None = None
    for name in RUNS:
        loss, held_out, seconds, formats = run(
            name, arguments.steps, arguments.layers, arguments.context, arguments.batch
        )
        reference = reference or (loss, held_out)
        rows.append(
            {
                "plan": name,
                "GEMM FLOPs": formats,
                f"loss (last {_TAIL})": loss,
                "vs fp32 %": 100 * (loss / reference[0] - 1),
                "held-out loss": held_out,
                "held-out vs fp32 %": 100 * (held_out / reference[1] - 1),
                "s": seconds,
            }
        )
        print(f"{name}: loss {loss:.4f}, held out {held_out:.4f}, {seconds:.0f} s", flush=True)
    show(f"small GPT, {arguments.steps} steps, seed 0", rows, arguments.json_file)


if __name__ == "__main__":
    main()
