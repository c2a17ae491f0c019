"""What the tests of expert parallelism run in each rank."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
import transformers
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import dsmp

WIDTH, TOKENS = 64, 16
MODELS = ("mixtral", "qwen3_moe", "deepseek_v3")


def model(name: str, experts: int = 4, chosen: int = 2) -> nn.Module:
    """A small model with random weights, the same in every process."""
    torch.manual_seed(0)
    common = {
        "hidden_size": WIDTH, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
        "vocab_size": 96, "max_position_embeddings": 64, "num_experts_per_tok": chosen, "use_cache": False,
    }  # fmt: skip
    if name == "mixtral":
        made = transformers.MixtralConfig(**common, intermediate_size=48, num_local_experts=experts)
        return transformers.MixtralForCausalLM(made)
    if name == "qwen3_moe":
        made = transformers.Qwen3MoeConfig(
            **common, intermediate_size=96, moe_intermediate_size=48, num_experts=experts, head_dim=16
        )
        return transformers.Qwen3MoeForCausalLM(made)
    made = transformers.DeepseekV3Config(
        **{**common, "num_key_value_heads": 4}, intermediate_size=96, moe_intermediate_size=48,
        n_routed_experts=experts, n_shared_experts=1, n_group=2, topk_group=2, first_k_dense_replace=0,
        kv_lora_rank=16, q_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=16,
    )  # fmt: skip
    return transformers.DeepseekV3ForCausalLM(made)


def batch(rank: int) -> torch.Tensor:
    return torch.randint(0, 96, (2, TOKENS), generator=torch.Generator().manual_seed(100 + rank))


def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))


def loss_of(call: Any, ids: torch.Tensor) -> torch.Tensor:
    return call(input_ids=ids, labels=ids).loss


def reference(whole: nn.Module) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Each rank's loss, and the gradients of their mean, in one process."""
    losses = [loss_of(whole, batch(r)) for r in range(dist.get_world_size())]
    torch.stack(losses).mean().backward()
    return [float(x.detach()) for x in losses], {n: p.grad for n, p in whole.named_parameters() if p.grad is not None}


def errors(found: nn.Module, wanted: dict[str, torch.Tensor]) -> dict[str, float]:
    """Relative errors of the gradients, of this rank's experts against their slice."""
    rank, result = dist.get_rank(), {}
    for n, p in found.named_parameters():
        if n not in wanted:
            assert p.grad is None, n
            continue
        exact = wanted[n]
        if exact.shape != p.shape:
            exact = exact.chunk(dist.get_world_size())[rank]
        result[n] = float((p.grad - exact).norm() / exact.norm().clamp_min(1e-12))
    return result


def step(name: str, options: dict[str, Any] | None, wires: dict[str, str]) -> dict[str, Any]:
    """One step: relative errors of the loss and of all gradients."""
    whole = model(name)
    divided = dsmp.expert_parallel(copy.deepcopy(whole), mesh(), **wires)
    call: Any = divided
    if options is not None:
        call = torch.compile(divided, backend="dsmp", fullgraph=True, options=options)
    losses, wanted = reference(whole)
    loss = loss_of(call, batch(dist.get_rank()))
    loss.backward()
    exact = losses[dist.get_rank()]
    return {"loss": abs(float(loss.detach()) - exact) / exact, "gradients": errors(divided, wanted)}


class Loop(nn.Module):
    """Experts of a user's own: no gate, transposed weights, biases, and a factor that all experts share."""

    def __init__(self, experts: int = 4, width: int = 12, inner: int = 20, trained: bool = False) -> None:
        super().__init__()
        self.n_experts = experts
        self.up = nn.Parameter(torch.randn(experts, width, inner) / width**0.5)
        self.shift = nn.Parameter(torch.randn(experts, inner) / 4)
        self.down = nn.Parameter(torch.randn(experts, inner, width) / inner**0.5)
        self.scale = nn.Parameter(torch.tensor(1.5), requires_grad=trained)

    def forward(self, states: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        found = torch.zeros_like(states)
        for expert in range(self.n_experts):
            rows, place = torch.where(chosen == expert)
            if rows.numel():
                inner = torch.tanh(states[rows] @ self.up[expert] + self.shift[expert])
                results = inner @ self.down[expert] * self.scale * shares[rows, place, None]
                found = found.index_add(0, rows, results)
        return found


class Miscounted(Loop):
    """Counts its experts where nobody looks for it, and from the last."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 4

    def forward(self, states: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        up = self.up[self.total - 1 - chosen]
        return (states[:, None, None] @ up).sum((1, 2))[:, : states.shape[1]] * shares


class Squared(Loop):
    """Results that are no multiple of the router's weights."""

    def forward(self, states: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        return super().forward(states, chosen, shares.square())


class Net(nn.Module):
    """A router and experts between two linears."""

    def __init__(self, experts: nn.Module | None = None, chosen: int = 2) -> None:
        super().__init__()
        self.chosen = chosen
        self.first = nn.Linear(12, 12)
        self.experts = experts or Loop()
        self.router = nn.Linear(12, 4, bias=False)
        self.last = nn.Linear(12, 3)
        self.register_buffer("offset", torch.randn(12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x)) + self.offset
        shares, chosen = self.router(x).softmax(-1).topk(self.chosen)
        return self.last(x + self.experts(x, chosen, shares))


def net(**options: Any) -> Net:
    torch.manual_seed(0)
    return Net(**options)


def rows_of(rank: int, count: int = 9) -> torch.Tensor:
    return torch.randn(count, 12, generator=torch.Generator().manual_seed(50 + rank))


def routed(kind: str, case: str) -> dict[str, float]:
    """Experts alone, each rank with its own number of tokens and a routing of the case: largest differences of results,
    of the gradients of rows and shares, and of the weights' gradients, relative to the largest value."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    whole: nn.Module = Loop()
    if kind != "loop":
        config = transformers.MixtralConfig(
            hidden_size=12, intermediate_size=20, num_local_experts=4, experts_implementation=kind
        )
        whole = transformers.models.mixtral.modeling_mixtral.MixtralExperts(config)
        for p in whole.parameters():
            torch.nn.init.normal_(p, std=0.3)
    divided = dsmp.expert_parallel(copy.deepcopy(whole), mesh())
    call: Any = divided
    if kind == "grouped_mm":
        call = torch.compile(divided, backend="dsmp", fullgraph=True, dynamic=True, options={"executor": "eager"})
    k = {"top 1": 1, "top 3": 3}.get(case, 2)
    inputs = []
    for r in range(ranks):
        count = 0 if case == "a rank without tokens" and r == 0 else 5 + 4 * r
        generator = torch.Generator().manual_seed(r)
        x, shares = torch.randn(count, 12, generator=generator), torch.rand(count, k, generator=generator)
        chosen = torch.rand(count, 4, generator=generator).topk(k).indices
        if case == "one expert":
            chosen = torch.full((count, k), 3)
        probe = torch.randn(count, 12, generator=generator)
        inputs.append((x.requires_grad_(), chosen, shares.requires_grad_(), probe))
    results = [whole(*i[:3]) for i in inputs]
    sum(((y * i[3]).sum() for y, i in zip(results, inputs, strict=True)), torch.zeros(())).div(ranks).backward()
    x, chosen, shares, probe = inputs[rank]
    mine = x.detach().requires_grad_(), shares.detach().requires_grad_()
    found = call(mine[0], chosen, mine[1])
    (found * probe).sum().backward()

    @torch.no_grad()
    def difference(a: torch.Tensor, b: torch.Tensor) -> float:
        assert a.shape == b.shape
        return float((a - b).abs().max() / b.abs().max().clamp_min(1)) if b.numel() else 0.0

    apart = {"results": difference(found, results[rank])}
    # the rows and shares of a rank are only in its own loss, which is one of `ranks` in the mean
    apart["rows"] = difference(mine[0].grad / ranks, x.grad) if x.numel() else 0.0
    apart["shares"] = difference(mine[1].grad / ranks, shares.grad) if x.numel() else 0.0
    for name, p in divided.named_parameters():
        exact = whole.get_parameter(name).grad
        if exact is not None:
            apart[name] = difference(p.grad, exact if exact.shape == p.shape else exact.chunk(ranks)[rank])
    return apart


def states(folder: str) -> dict[str, bool]:
    """What is saved, and what can be loaded."""
    rank, ranks, x = dist.get_rank(), dist.get_world_size(), rows_of(dist.get_rank())
    whole, other = net(), Net()  # `other` has the rank's own values
    divided = dsmp.expert_parallel(copy.deepcopy(other), mesh())
    first = next(iter(other.parameters())).detach()
    dist.broadcast(first, src=0)
    result = {"rank 0's values": torch.equal(divided.first.weight, first)}
    divided.load_state_dict(whole.state_dict())
    wanted = whole(x)
    result["whole checkpoint"] = torch.allclose(divided(x), wanted, atol=1e-6)
    saved = divided.state_dict()
    result["names"] = list(saved) == list(whole.state_dict())
    result["shards"] = {n for n, v in saved.items() if isinstance(v, DTensor) and v.placements[0].is_shard(0)} == {
        f"experts.{n}" for n in ("up", "shift", "down")
    }
    full = {n: v.full_tensor() if isinstance(v, DTensor) else v for n, v in saved.items()}
    result["full tensors"] = all(torch.equal(v, whole.state_dict()[n]) for n, v in full.items())
    undivided = Net()
    undivided.load_state_dict(full)
    result["undivided"] = torch.equal(undivided(x), wanted)
    again = dsmp.expert_parallel(Net(), mesh())
    again.load_state_dict(saved)
    result["shards loaded"] = torch.equal(again(x), divided(x))
    again = dsmp.expert_parallel(Net().to("meta"), mesh())
    result["meta"] = all(p.is_meta for p in again.parameters()) and again.experts.up.shape[0] == 4 // ranks
    again.load_state_dict(whole.state_dict(), assign=True)
    result["assigned"] = torch.equal(again(x), divided(x))
    mine = {n: v.to_local() if isinstance(v, DTensor) else v for n, v in saved.items()}
    again.load_state_dict(mine)
    result["own rows"] = torch.equal(again(x), divided(x))
    twin = copy.deepcopy(divided)
    with torch.no_grad():
        twin.experts.up.zero_()
    result["copies"] = not torch.equal(twin(x), divided(x)) and torch.equal(again(x), divided(x))
    checkpoint.save({"model": saved}, checkpoint_id=folder)
    loaded = {"model": Net().state_dict()}
    checkpoint.load(loaded, checkpoint_id=folder)
    undivided.load_state_dict(loaded["model"])
    result["distributed checkpoint"] = torch.equal(undivided(x), wanted)
    result["ranks differ"] = not torch.equal(saved["experts.up"].to_local(), whole.experts.up.chunk(ranks)[rank - 1])
    wrong = {**full, "experts.up": full["experts.up"][:3]}
    try:
        divided.load_state_dict(wrong)
    except RuntimeError as error:
        result["a wrong shape"] = "size mismatch for experts.up" in str(error)
    return result


def adopted(wires: dict[str, str]) -> dict[str, Any]:
    """Three steps of Adam on the net, divided and in one process: the largest difference of a parameter; buffers."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    whole = net()
    divided = dsmp.expert_parallel(copy.deepcopy(whole), mesh(), **wires)
    optimizers = [torch.optim.Adam(m.parameters(), lr=1e-2) for m in (whole, divided)]
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        torch.stack([whole(rows_of(r)).square().mean() for r in range(ranks)]).mean().backward()
        divided(rows_of(rank)).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
    worst = 0.0
    for n, p in divided.named_parameters():
        exact = whole.get_parameter(n).detach()
        worst = max(
            worst, float((p.detach() - (exact if exact.shape == p.shape else exact.chunk(ranks)[rank])).abs().max())
        )
    return {"difference": worst, "buffers": [n for n, _ in divided.named_buffers()]}


def mistakes() -> dict[str, str]:
    """The messages of what cannot be divided, by case."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    one = mesh()
    cases: dict[str, Any] = {
        "no experts": lambda: dsmp.expert_parallel(nn.Linear(4, 4), one),
        "three experts": lambda: dsmp.expert_parallel(Loop(experts=3), one),
        "two dimensions": lambda: dsmp.expert_parallel(
            net(), init_device_mesh("cpu", (1, ranks), mesh_dim_names=("dp", "ep"))
        ),
        "no mesh": lambda: dsmp.expert_parallel(net(), "ep"),
        "sparse": lambda: dsmp.expert_parallel(net(), one, dispatch="topk"),
        "unknown": lambda: dsmp.expert_parallel(net(), one, combine="fp7"),
        "twice": lambda: dsmp.expert_parallel(dsmp.expert_parallel(net(), one), one),
        "averaged": lambda: dsmp.expert_parallel(dsmp.compress_gradients(net()), one),
        "averaged later": lambda: dsmp.compress_gradients(dsmp.expert_parallel(net(), one)),
        "wrapped": lambda: dsmp.expert_parallel(nn.parallel.DistributedDataParallel(net()), one),
        "no such name": lambda: dsmp.expert_parallel(net(), one, experts=["expert"]),
        "miscounted": lambda: dsmp.expert_parallel(net(experts=Miscounted()), one),
        "squared": lambda: dsmp.expert_parallel(net(experts=Squared()), one),
        "shared": lambda: dsmp.expert_parallel(net(experts=Loop(trained=True)), one),
        "formats differ": lambda: dsmp.expert_parallel(net(), one, dispatch="fp8" if rank else "fp32"),
        "models differ": lambda: dsmp.expert_parallel(Loop(inner=20 + rank), one),
    }
    found = {}
    for name, call in cases.items():
        try:
            call()
        except dsmp.DsmpError as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def planned(name: str, wires: dict[str, str], rules: dict[str, str]) -> dict[str, Any]:
    """What the plan for an H800 says of the experts' part, and what runs."""
    divided = dsmp.expert_parallel(model(name), mesh(), **wires)
    options = {"executor": "eager", "hardware": "h800", "rules": rules}
    compiled = torch.compile(divided, backend="dsmp", fullgraph=True, options=options)
    loss_of(compiled, batch(dist.get_rank())).backward()
    plan = dsmp.plan_of(compiled)
    return {
        "decisions": {d.key: (d.op, d.compute, d.flops, d.reason.text) for d in plan if ".mlp." in d.key},
        "ran": {e.key: (e.implementation, e.reason) for e in dsmp.audit(compiled) if ".mlp." in e.key},
    }
