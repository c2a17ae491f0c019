"""Calibrated plans made up from numbers: transformer-like blocks with ties, shared copies, vetoes and refusals."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from dsmp.passes.assignment import Assignment, Totals, totals_of
from dsmp.passes.exchange import chosen_candidates
from dsmp.passes.labels import label
from dsmp.passes.plan import Budget, Decision, ModelInfo, PrecisionPlan, Prediction, follow, parse_plan
from dsmp.passes.plan_fields import Reason
from dsmp.passes.program import Candidate, Copy, DriftKind, Program, Solution
from dsmp.passes.solve import Solved

HEAD = "head|fprop|linear|0"
VETO = Reason(code="veto-head", text="output head: its result is the model's answer, so 8-bit formats are barred")
NO_UNITS = Reason(code="verdict", text="no fp6_e2m3 units on this device")

# (compute, recipe activation/weight, stored result) of a GEMM traced in fp32
_GEMM = (
    ("fp32", "none", "fp32"),
    ("bf16", "none", "bf16"),
    ("fp8_e4m3", "row/row", "bf16"),
    ("fp8_e4m3", "tensor/tensor", "bf16"),
)
_SPEED = {"fp32": 1.0, "bf16->bf16": 4.0, "fp8_e4m3:row/row->bf16": 7.0, "fp8_e4m3:tensor/tensor->bf16": 8.0}
_NOISE = {"bf16->bf16": 1.0, "fp8_e4m3:row/row->bf16": 60.0, "fp8_e4m3:tensor/tensor->bf16": 150.0}


class _Builder:
    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.decisions: list[Decision] = []
        self.candidates: dict[str, list[Candidate]] = {}
        self.reads: dict[str, list[str]] = {}
        self.copies: list[Copy] = []

    def node(self, key: str, op: str, reads: list[str], *, aten: str = "aten.op.default", flops: int = 0) -> str:
        fqn, phase = key.rsplit("|", 3)[:2]
        self.decisions.append(
            Decision.model_validate(
                {
                    "key": key, "op": op, "aten": aten, "phase": phase, "module": fqn,
                    "shapes": [[64, 32], [32, 16], [64, 16]] if flops else [[64, 16]], "flops": flops, "bytes": 4096,
                    "compute": "fp32", "accumulate": "fp32", "output": "fp32",
                    "reason": Reason(code="policy", text="as traced"), "time_us": {"fp32": 1.0},
                }
            )
        )  # fmt: skip
        self.reads[key] = [r for r in reads if "|" in r]
        return key

    def gemm(self, key: str, op: str, reads: list[str], *, veto: Reason | None = None) -> str:
        self.node(key, op, reads, aten="aten.mm.default", flops=2 * 64 * 32 * 16)
        base = float(self.random.uniform(20, 200))
        noise = float(self.random.lognormal(-14, 1.5))
        found = []
        for compute, recipe, output in _GEMM:
            name = label(compute, recipe, output, "fp32")
            narrow = compute.startswith("fp8")
            found.append(
                Candidate(
                    label=name, compute=compute, recipe=recipe, accumulate="fp32", output=output, bytes=2048,
                    time_us=round(base / _SPEED[name] + 2.0, 3),
                    drift=noise * _NOISE.get(name, 0.0) * float(self.random.uniform(0.7, 1.4)),
                    measured=narrow, saved_bytes=int(base) * (400 if output == "fp32" else 200),
                    blocked=veto if narrow else None,
                )
            )  # fmt: skip
        found.append(
            Candidate(
                label="fp6_e2m3:mx32/mx32->bf16", compute="fp6_e2m3", recipe="mx32/mx32", accumulate="fp32",
                output="bf16", time_us=base / 9, blocked=NO_UNITS,
            )
        )  # fmt: skip
        self.candidates[key] = found
        return key

    def kept(self, key: str, op: str, reads: list[str]) -> str:
        self.node(key, op, reads)
        base = float(self.random.uniform(2, 12))
        drift = float(self.random.lognormal(-16, 1.0))
        self.candidates[key] = [
            Candidate(label="fp32", compute="fp32", accumulate="fp32", output="fp32", time_us=base, drift=0.0,
                      bytes=4096, saved_bytes=2000),
            Candidate(label="->bf16", compute="fp32", accumulate="fp32", output="bf16", time_us=base / 2, drift=drift,
                      bytes=2048, saved_bytes=1000),
        ]  # fmt: skip
        return key

    def view(self, key: str, source: str) -> str:
        return self.node(key, "view", [source], aten="aten.view.default")

    def copy(self, value: str, readers: list[str], time_us: float) -> None:
        """The quantised copies of a value, and its bf16 copy, which is free where it is stored in bf16."""
        sources = [c.label for c in self.candidates.get(value, ())] or [""]
        narrow = [n for n in _SPEED if n.startswith("fp8")]
        for name in narrow:
            recipe = name.partition(":")[2].partition("/")[0]
            cost = {s: time_us * (0.7 if s.endswith("bf16") else 1.0) for s in sources}
            self.copies.append(
                Copy(value=value, format="fp8_e4m3", recipe=recipe, time_us=cost, readers={r: [name] for r in readers})
            )
        cost = {s: 0.0 if s.endswith("bf16") else 0.5 * time_us for s in sources}
        wide = ["bf16->bf16"]
        self.copies.append(Copy(value=value, format="bf16", time_us=cost, readers=dict.fromkeys(readers, wide)))


def sample_program(layers: int, seed: int = 0, *, ties: bool = True) -> tuple[list[Decision], Program]:
    """Decisions as traced and the program of `layers` blocks of thirteen nodes, an input and a head."""
    b = _Builder(seed)
    hidden = b.kept("embed|fprop|embedding|0", "embedding", [])
    tied = []
    for i in range(layers):
        m = f"layers.{i}"
        norm = b.kept(f"{m}.norm|fprop|native_layer_norm|0", "norm", [hidden])
        qkv = [b.gemm(f"{m}.attn.{n}|fprop|linear|0", "linear", [norm]) for n in ("q", "k", "v")]
        tied.append(qkv)
        b.copy(norm, qkv, float(b.random.uniform(2, 8)))
        heads = [b.view(f"{m}.attn|fprop|view|{j}", p) for j, p in enumerate(qkv)]
        attention = b.gemm(f"{m}.attn|fprop|sdpa|0", "sdpa", heads)
        out = b.gemm(f"{m}.attn.out|fprop|linear|0", "linear", [attention])
        b.copy(attention, [out], float(b.random.uniform(2, 8)))
        hidden = b.kept(f"{m}|fprop|add|0", "pointwise", [hidden, out])
        up = b.gemm(f"{m}.up|fprop|linear|0", "linear", [hidden])
        act = b.kept(f"{m}|fprop|gelu|0", "pointwise", [up])
        down = b.gemm(f"{m}.down|fprop|linear|0", "linear", [act])
        b.copy(hidden, [up], float(b.random.uniform(2, 8)))
        b.copy(act, [down], float(b.random.uniform(2, 8)))
        hidden = b.kept(f"{m}|fprop|add|1", "pointwise", [hidden, down])
    b.gemm(HEAD, "linear", [hidden], veto=VETO)
    b.copy(hidden, [HEAD], 4.0)
    program = Program(
        cost="roofline", drift="kl", loss=2.0, candidates=b.candidates, copies=b.copies,
        ties=tied if ties else [], reads=b.reads,
    )  # fmt: skip
    return b.decisions, program


def traced_plan(decisions: list[Decision], program: Program | None) -> PrecisionPlan:
    """The plan that holds a program and leaves every node as traced: `solve` makes it a calibrated one."""
    return PrecisionPlan(
        dsmp="0", torch="2", hardware="h800", model=ModelInfo(source="sample", fingerprint="f", nodes=len(decisions)),
        prediction=Prediction(time_us=1000.0, time_us_fp32=4000.0, saved_bytes=600, saved_bytes_fp32=1000),
        program=program, nodes=decisions,
    )  # fmt: skip


def sample_plan(
    layers: int = 2,
    seed: int = 0,
    *,
    budget: float | None = 1e-3,
    memory: int | None = None,
    ties: bool = True,
    drift: DriftKind = "kl",
) -> PrecisionPlan:
    """A plan for h800, solved for a budget (a share of the loss of 2 nats) and, if given, saved bytes."""
    decisions, program = sample_program(layers, seed, ties=ties)
    program = program.model_copy(update={"drift": drift})
    return traced_plan(decisions, program).solve(budget=budget, memory=memory)


def priced_plan(layers: int, price: float, seed: int = 0) -> PrecisionPlan:
    """A large plan without a solver: every group of tied nodes takes what is cheapest at a price (us per drift), casts
    left aside; its budget is what that uses."""
    decisions, program = sample_program(layers, seed)
    tied = {key: group for group in program.ties for key in group}
    labels = {}
    for key in program.keys:
        group = tied.get(key, [key])
        cost = {
            c.label: sum(
                o.time_us + price * (o.drift or 0.0) for k in group for o in program.allowed[k] if o.label == c.label
            )
            for c in program.allowed[key]
        }
        labels[key] = min(cost, key=cost.__getitem__)
    problem = program.problem()
    choice = tuple(names.index(labels[key]) for key, names in zip(program.keys, problem.labels, strict=True))
    totals = totals_of(problem, choice)
    solution = Solution(
        limit=totals.error, time_us=totals.time, cast_us=totals.cast_time, drift=totals.error,
        saved_bytes=int(totals.memory), bound_us=0.0, gap=1.0, price_us_per_drift=price, binding=["error"],
    )  # fmt: skip
    chosen = program.chosen(Assignment(choice=choice, totals=totals, bound=0.0))
    reason = Reason(code="optimal", text="cheapest at the price")
    solved = Solved(chosen=chosen, reasons=dict.fromkeys(chosen, reason), solution=solution)
    plan = traced_plan(follow(decisions, program, solved), program)
    return plan.model_copy(update={"solution": solution, "budget": Budget(amount=program.amount(totals.error))})


def edited(plan: PrecisionPlan, key: str, **changes: object) -> PrecisionPlan:
    """A plan with one decision changed by hand, read anew."""
    nodes = [d.model_copy(update=changes) if d.key == key else d for d in plan]
    return parse_plan(plan.model_copy(update={"nodes": nodes}).to_json())


def relabelled(plan: PrecisionPlan, keys: Iterable[str], label: str) -> Totals:
    """What a plan would cost with another label for some nodes, added up anew from its program."""
    assert plan.program is not None
    labels = {key: c.label for key, c in chosen_candidates(plan, plan.program).items()}
    return plan.program.totals({**labels, **dict.fromkeys(keys, label)})


def fastest_drift(plan: PrecisionPlan) -> float:
    """Drift of the fastest choice of a plan's program."""
    assert plan.program is not None
    solution = traced_plan(plan.nodes, plan.program).solve().solution
    assert solution is not None
    return solution.drift
