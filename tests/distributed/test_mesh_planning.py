"""Plans for meshes of devices: blocks that are priced once, collectives and their formats, memory, the search."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from llama import Llama
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

import dsmp
from dsmp.codegen.wire_noise import relative_noise
from dsmp.compiler import mesh_planning
from dsmp.compiler.block_folding import fold_blocks
from dsmp.compiler.cli import app
from dsmp.compiler.fake_mesh import fake_mesh
from dsmp.compiler.mesh_planning import MeshRequest, plan_for_mesh
from dsmp.errors import (
    ClusterError,
    IndivisibleError,
    InvalidOptionError,
    PlanSchemaError,
    ScoresError,
    ShardingPlanError,
    UnknownWireFormatError,
)
from dsmp.hardware_db.catalog import load_catalog
from dsmp.hardware_db.cluster import cluster_of
from dsmp.passes.keys import NodeKey
from dsmp.passes.mesh_plan import RankMemory
from dsmp.passes.plan import load_plan, parse_plan
from dsmp.passes.sharding import ShardingPlan, ShardingRule
from dsmp.passes.wire_formats import parse_wire

H800 = dsmp.resolve_hardware("h800")
LAYERS = 4


def tokens(batch=8, length=128):
    ids = torch.zeros(batch, length, dtype=torch.int64, device="meta")
    return ids, ids


def llama(layers=LAYERS, **options):
    with torch.device("meta"):
        return Llama(
            layers=layers, **{"width": 256, "heads": 8, "kv_heads": 4, "hidden": 512, "length": 128, **options}
        )


def planned(model=None, inputs=None, device=H800, **request):
    request = MeshRequest(**{"mesh": {"dp": 4, "tp": 2}, "zero": 0, "sequence": False, **request})
    cluster = cluster_of(load_catalog(), "h800")
    return plan_for_mesh(model or llama(), inputs or tokens(), {}, device, cluster, request, source="llama")


@pytest.fixture(scope="module")
def plan():
    return planned()


@pytest.fixture(scope="module")
def whole():
    """The same without folding."""
    patch = pytest.MonkeyPatch()
    patch.setattr(mesh_planning, "fold_blocks", lambda model, fold=True: fold_blocks(model, fold=False))
    yield planned()
    patch.undo()


def owned(items):
    """What belongs to a module (gradients that are added up outside of all have no name in common)."""
    return [d for d in items if NodeKey.parse(d.key).fqn]


def test_blocks_that_are_priced_once_give_the_plan_of_the_whole_model(plan, whole):
    first, second = ({d.key: d for d in owned(p)} for p in (plan, whole))
    assert sorted(first) == sorted(second)
    assert all(d.same_formats(second[k]) and d.shapes == second[k].shapes for k, d in first.items())
    folded, full = ({c.key: c for c in p.mesh.collectives} for p in (plan, whole))
    assert folded == full and len(full) == len(whole.mesh.collectives)
    assert plan.mesh.step.total_us == pytest.approx(whole.mesh.step.total_us, rel=0.01)
    assert plan.prediction.time_us_fp32 == pytest.approx(whole.prediction.time_us_fp32, rel=0.01)
    assert plan.mesh.memory.activations == pytest.approx(whole.mesh.memory.activations, rel=0.02)
    assert plan.mesh.memory.model_copy(update={"activations": 0}) == whole.mesh.memory.model_copy(
        update={"activations": 0}
    )
    first, second = (ShardingPlan.from_dict(p.mesh.sharding) for p in (plan, whole))
    names = dict(llama().named_parameters())
    assert all(first.stored(n) == second.stored(n) and first.gradient(n) == second.gradient(n) for n in names)


def test_a_list_of_blocks_is_cut_after_the_first_of_each_kind():
    model = llama(7)
    model.layers[2] = llama(1, hidden=768).layers[0]
    short, repeats = fold_blocks(model)
    assert len(short.layers) == 3 and len(model.layers) == 7
    assert repeats.blocks == {"layers.1": ("layers.1", *(f"layers.{i}" for i in range(3, 7)))}
    assert repeats.count("layers.1.mlp.up_proj.weight") == 5
    assert repeats.count("layers.0.mlp.up_proj.weight") == repeats.count("layers.2.mlp") == repeats.count("head") == 1
    assert repeats.paths("layers.1.mlp")[-1] == "layers.6.mlp"


def test_blocks_that_count_themselves_are_of_one_kind():
    model = llama(5)
    for i, layer in enumerate(model.layers):
        layer.index = i + 3
    assert fold_blocks(model)[1].count("layers.1") == 4
    for i, layer in enumerate(model.layers):
        layer.scale = 0.5**i
    assert not fold_blocks(model)[1].blocks


def test_a_model_that_needs_all_its_blocks_is_captured_whole():
    class Counted(Llama):
        def forward(self, ids, targets):
            assert len(self.layers) == LAYERS
            return super().forward(ids, targets)

    with torch.device("meta"):
        model = Counted(layers=LAYERS, width=256, heads=8, kv_heads=4, hidden=512, length=128)
    capture, repeats = mesh_planning.capture_folded(model, tokens(), {})
    assert not repeats.blocks
    assert len([n for n in capture.gm.graph.nodes if n.op == "placeholder"]) > 9 * LAYERS


@pytest.mark.long
def test_rules_that_tell_blocks_apart_hold_for_the_blocks_they_name():
    rule = ShardingRule(pattern="layers.3.mlp.*", placements={"tp": "replicate"})
    made = planned(sharding_rules=[rule])
    over_tp = {c.key.split("|")[0].split(".mlp")[0] for c in made.mesh.collectives if c.dim == "tp" and ".mlp" in c.key}
    assert over_tp == {f"layers.{i}" for i in range(LAYERS) if i != 3}


@pytest.mark.parametrize(
    "sequence", [pytest.param(False, marks=pytest.mark.slow), pytest.param(True, marks=pytest.mark.long)]
)
def test_each_layer_is_summed_twice_each_way_over_tp(sequence):
    made = planned(llama(4), tokens(512), mesh={"dp": 256, "tp": 4}, sequence=sequence, zero=0)
    kinds = ("reduce_scatter", "all_gather") if sequence else ("all_reduce",)
    for layer in range(4):
        for kind in kinds:
            found = [c for c in made.mesh.collectives if c.dim == "tp" and c.kind == kind and not c.hidden]
            own = [NodeKey.parse(c.key) for c in found if c.key.startswith(f"layers.{layer}.")]
            assert [k.phase for k in own].count("fprop") == 2 and [k.phase for k in own].count("bwd") >= 2


def test_values_travel_as_they_are_stored(plan):
    by_key = {c.key: c for c in plan.mesh.collectives}
    summed = by_key["layers.3.mlp.down_proj|fprop|all_reduce@tp|0"]
    assert (summed.wire, summed.reason.code) == ("bf16", "stored")
    assert summed.bytes == pytest.approx(summed.bytes_as_written / 2)
    assert plan.by_key["layers.3.mlp.down_proj|fprop|linear|0"].output == "bf16"
    gradient = next(c for k, c in by_key.items() if c.dim == "dp" and c.hidden and "up_proj" in k)
    assert (gradient.wire, gradient.reason.code) == ("fp32", "as-traced")
    loss = [c for c in plan.mesh.collectives if not c.shape]
    assert loss and all(c.wire == "fp32" and c.reason.code == "small" for c in loss)


def test_parameters_of_narrow_products_are_gathered_narrow():
    gathered = [
        c for c in planned(zero=3).mesh.collectives if c.kind == "all_gather" and c.dim == "dp" and "proj" in c.key
    ]
    assert len(gathered) >= 7 * LAYERS and {c.wire for c in gathered} == {"bf16"}
    assert all(c.hidden for c in gathered)


def test_formats_that_were_asked_for(plan):
    made = planned(wire={"dp": "int8"})
    assert {c.wire for c in made.mesh.collectives if c.dim == "dp" and c.shape} <= {"int8", "fp32"}
    big = [c for c in made.mesh.collectives if c.dim == "dp" and "proj" in c.key]
    assert len(big) == 7 * LAYERS and all(c.bytes < 0.27 * c.bytes_as_written for c in big)
    assert made.mesh.step.exposed_us["dp"] <= plan.mesh.step.exposed_us["dp"]


def test_formats_that_are_none():
    with pytest.raises(UnknownWireFormatError, match="int8"):
        planned(wire="int7")
    with pytest.raises(InvalidOptionError, match="dp, tp"):
        planned(wire={"pp": "int8"})


def test_memory_is_that_of_the_shards():
    plan = planned(zero=3).mesh
    made, sharding = plan.memory, ShardingPlan.from_dict(plan.sharding)
    ranks = {"dp": 4, "tp": 2}
    values = 0
    for name, p in llama().named_parameters():
        parts = [n for (dim, n), where in zip(ranks.items(), sharding.stored(name), strict=True) if where.is_shard()]
        values += p.numel() // (parts[0] if len(parts) == 1 else 8 if parts else 1)
    buffers = sum(b.numel() for b in llama().buffers())
    assert made.parameters == 4 * (values + buffers)
    assert (made.gradients, made.optimizer) == (4 * values, 8 * values)
    assert made.total == made.parameters + made.gradients + made.optimizer + made.activations + made.gathered
    assert made.available == H800.memory_bytes and made.fits


@pytest.mark.long
def test_the_zero_stage_rises_as_far_as_memory_asks(plan, caplog):
    need = plan.mesh.memory
    tight = dataclasses.replace(H800, memory_bytes=need.total - need.optimizer // 2)
    made = planned(device=tight, zero=None)
    assert made.mesh.placings[0].zero == 3 and made.mesh.memory.fits
    assert not [r for r in caplog.records if r.name == "dsmp"]
    hopeless = planned(device=dataclasses.replace(H800, memory_bytes=1_000_000), zero=None)
    assert not hopeless.mesh.memory.fits and "no placement that was tried fits" in caplog.text


@pytest.mark.slow
def test_experts_are_divided_and_their_rows_travel_in_what_products_read():
    transformers = pytest.importorskip("transformers")
    config = transformers.DeepseekV3Config(
        vocab_size=512, hidden_size=512, intermediate_size=1024, moe_intermediate_size=2048, num_hidden_layers=5,
        num_attention_heads=8, num_key_value_heads=8, n_routed_experts=16, first_k_dense_replace=1, n_group=4,
        topk_group=2, num_experts_per_tok=4, q_lora_rank=128, kv_lora_rank=128, qk_nope_head_dim=64,
        qk_rope_head_dim=32, v_head_dim=64, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.DeepseekV3ForCausalLM(config)
    ids = torch.zeros(16, 2048, dtype=torch.int64, device="meta")
    request = MeshRequest(mesh={"dp": 8, "tp": 2}, zero=0, sequence=False)
    made = plan_for_mesh(
        model, (), {"input_ids": ids, "labels": ids}, H800, cluster_of(load_catalog(), "h800"), request, source="moe"
    )
    sharding = ShardingPlan.from_dict(made.mesh.sharding)
    for name in ("gate_up_proj", "down_proj"):
        assert [str(p) for p in sharding.computed(f"model.layers.3.mlp.experts.{name}")] == ["S(0)", "R"]
    for layer in range(1, 5):
        own = {c.key: c for c in made.mesh.collectives if c.key.startswith(f"model.layers.{layer}.mlp.experts|")}
        sent = [
            own[f"model.layers.{layer}.mlp.experts|{p}|all_to_all@dp|{i}"] for p in ("fprop", "bwd") for i in (0, 1)
        ]
        assert [c.shape for c in sent] == [[2 * 2048 * 4 // 2, 512]] * 4  # two samples a rank, four experts, over two
        product = made.by_key[f"model.layers.{layer}.mlp.experts|fprop|grouped_mm|0"]
        assert product.shapes[1] == [2, 512, 4096]  # two of the sixteen experts
        reading = [
            made.by_key[f"model.layers.{layer}.mlp.experts|{p}|grouped_mm|0"].compute for p in ("fprop", "wgrad")
        ]
        assert sent[0].wire == ("fp8" if set(reading) == {"fp8_e4m3"} else "bf16")
        assert sent[1].wire == sent[3].wire == "bf16"  # what the experts made is stored so
        assert made.by_key[f"model.layers.{layer}.mlp.gate|fprop|linear|0"].compute == "fp32"
    assert sum("|sdpa|" in d.key and d.phase == "fprop" for d in made) == 5  # fused, though values are narrower


def test_a_plan_is_the_same_after_a_file(plan, tmp_path):
    path = plan.save(tmp_path / "plan.json")
    assert load_plan(path) == plan
    data = json.loads(path.read_text())
    data["mesh"]["collectives"][0]["wire"] = "int7"
    with pytest.raises(PlanSchemaError, match="int7"):
        parse_plan(json.dumps(data))
    data = json.loads(path.read_text())
    data["mesh"]["sharding"]["mesh"] = {"dp": "four"}
    with pytest.raises(PlanSchemaError, match="ranks of each mesh dimension"):
        parse_plan(json.dumps(data))


def test_what_bounds_a_step(plan):
    step = plan.mesh.step
    parts = {"products": step.products_us, "memory": step.compute_us - step.products_us, **step.exposed_us}
    assert step.total_us == pytest.approx(sum(parts.values()))
    assert f"{100 * max(parts.values()) / step.total_us:.0f} %" in step.bound
    assert RankMemory(parameters=1, gradients=2, optimizer=3, activations=4, gathered=5, available=14).fits is False


def test_what_no_mesh_can_do():
    with pytest.raises(IndivisibleError, match=r"8.*3 ranks of mesh dimension 'dp'"):
        planned(mesh={"dp": 3})
    with pytest.raises(ShardingPlanError, match="nothing of the model can be divided over the 7 ranks of mesh"):
        planned(mesh={"tp": 7})
    with pytest.raises(ShardingPlanError, match="row"):
        planned(mesh={"row": 2})
    for bad in ({}, {"dp": 0}, {"dp": 1 << 20}, {"dp": True}):
        with pytest.raises(InvalidOptionError, match="ranks by dimension"):
            planned(mesh=bad)
    with pytest.raises(ShardingPlanError, match=r"no parameter or buffer matches.*layers"):
        planned(sharding_rules=[ShardingRule(pattern="layer.9.*", placements={"tp": "replicate"})])


@pytest.mark.long
def test_from_python():
    made = dsmp.plan(llama(), tokens(), hardware="h800", mesh={"dp": 2, "tp": 2}, zero=3, sequence=True, wire="bf16")
    assert [(p.zero, p.sequence) for p in made.mesh.placings] == [(3, True)]
    inference = dsmp.plan(llama(), tokens(), hardware="h800", mesh={"tp": 2}, training=False)
    assert {d.phase for d in inference} == {"fprop"} and inference.mesh.memory.gradients == 0
    with pytest.raises(InvalidOptionError, match="with a mesh"):
        dsmp.plan(llama(), tokens(), hardware="h800", zero=3)
    with pytest.raises(InvalidOptionError, match="no calibration"):
        dsmp.plan(llama(), hardware="h800", calibration=[tokens()], mesh={"tp": 2})
    with pytest.raises(InvalidOptionError, match="with a module"):
        dsmp.plan(torch.sin, torch.zeros(4), hardware="h800", mesh={"tp": 2})
    with pytest.raises(ClusterError, match="no node"):
        dsmp.plan(llama(), tokens(), hardware="rtx-4090", mesh={"tp": 2})


def test_a_process_group_is_in_the_way():
    with fake_mesh({"dp": 2}), pytest.raises(InvalidOptionError, match="outside a process group"):
        dsmp.plan(llama(), tokens(), hardware="h800", mesh={"tp": 2})


def test_on_the_command_line(tmp_path):
    path = tmp_path / "plan.json"
    command = [
        "plan",
        "dsmp.compiler.small_gpt:demo_model",
        "--hardware",
        "h800",
        "--mesh",
        "dp=2,tp=2",
        "-o",
        str(path),
    ]
    done = CliRunner().invoke(app, [*command, "--wire", "dp=int8", "--place", "*head*=tp:replicate", "--zero", "2"])
    assert done.exit_code == 0, done.stderr
    for words in (
        "mesh dp 2 x tp 2 = 4 ranks, links of hgx-h800, ZeRO 2",
        "reduce-scatter",
        "int8",
        "bound by",
        "memory of a rank",
    ):
        assert words in done.stdout
    shown = CliRunner().invoke(app, ["report", str(path)])
    assert shown.exit_code == 0 and "mesh dp 2 x tp 2 = 4 ranks" in shown.stdout
    assert load_plan(path).mesh.mesh == {"dp": 2, "tp": 2}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--mesh", "dp"], "dp=256,tp=8"),
        (["--mesh", "dp=2,dp=3"], "dp=256,tp=8"),
        (["--mesh", "dp=2", "--wire", "int8", "--wire", "dp=int4"], "DIMENSION=FORMAT"),
        (["--mesh", "dp=2", "--wire", "dp=int8", "--wire", "dp=int4"], "dp has int8"),
        (["--mesh", "dp=2", "--place", "*=tp"], "GLOB=DIMENSION:PLACEMENT"),
        (["--mesh", "dp=2", "--place", "*=tp:shard(0)"], "no dimension 'tp'"),
        (["--mesh", "dp=2", "--zero", "4"], "0, 1, 2 or 3"),
        (["--mesh", "dp=2", "--budget", "1%"], "--scores"),
        (["--mesh", "dp=2", "--memory", "1GB", "--scores", "x.json"], "without --mesh"),
        (["--mesh", "dp=2", "--node", "hgx-a100"], "holds a100"),
        (["--zero", "3"], "with --mesh only"),
    ],
)
def test_options_that_make_no_sense(options, words, tmp_path):
    command = ["plan", "dsmp.compiler.small_gpt:demo_model", "--hardware", "h800", "-o", str(tmp_path / "p.json")]
    done = CliRunner().invoke(app, [*command, *options])
    assert done.exit_code == 2 and words in done.stderr and not (tmp_path / "p.json").exists()


@pytest.fixture(scope="module")
def scored():
    """A small model with values, a batch, and its scores."""
    torch.manual_seed(0)
    model = Llama(layers=3, width=128, heads=8, kv_heads=4, hidden=256, length=32, vocabulary=256)
    generator = torch.Generator().manual_seed(1)
    batch = tuple(torch.randint(0, 256, (8, 32), generator=generator) for _ in range(2))
    inputs = {"ids": batch[0], "targets": batch[1]}
    return model, batch, dsmp.measure_scores(model, [inputs], hardware="h800")


def within(scored, budget, **options):
    model, batch, scores = scored
    options = {"mesh": {"dp": 2, "tp": 2}, "zero": 0, "sequence": False, **options}
    return dsmp.plan(model, batch, hardware="h800", scores=scores, budget=budget, **options)


@pytest.mark.slow
def test_wires_and_nodes_share_a_budget(scored, tmp_path):
    sent = []
    for budget in (1e-6, 1e-4, 1e-1):
        made = within(scored, budget)
        assert made.budget.amount == budget and 0 < made.solution.drift <= made.solution.limit == budget
        sent.append(sum(c.bytes for c in made.mesh.collectives))
        paid = [c for c in made.mesh.collectives if c.reason.code == "budget"]
        assert {c.wire for c in paid} <= {"bf16", "int8", "int4"}
    assert sent[0] > sent[1] > sent[2]
    assert any(c.wire == "int4" and c.dim == "dp" for c in paid)
    kept = within(scored, 1e-1, wire={"dp": "fp32"})
    assert {c.wire for c in kept.mesh.collectives if c.dim == "dp"} == {"fp32"}
    assert load_plan(made.save(tmp_path / "plan.json")) == made


@pytest.mark.long
def test_scores_belong_to_the_model(scored, tmp_path):
    _, batch, scores = scored
    with pytest.raises(ScoresError, match="fingerprint"):
        within((llama(2, length=32), batch, scores), 1e-3)
    path = scores.save(tmp_path / "scores.json")
    assert within(scored, "0.1%").nodes == within((*scored[:2], path), 0.001).nodes
    with pytest.raises(InvalidOptionError, match="measure_scores"):
        dsmp.plan(scored[0], batch, hardware="h800", mesh={"tp": 2}, scores=scores, memory="1GB")


def test_noise_of_wire_formats_is_that_of_their_steps():
    for name, low, high in (("bf16", 2e-6, 4e-6), ("int8", 2e-5, 6e-5), ("int4", 8e-3, 2e-2)):
        assert low < relative_noise(parse_wire(name)) < high
    assert relative_noise(parse_wire("fp32")) == 0


def test_models_keep_no_cache_in_a_sharded_graph():
    """transformers' models return a cache of keys and values unless they are told not to."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "vocab_size": 64}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2, num_hidden_layers=1))
    ids = torch.randint(0, 64, (4, 16))
    inputs, mesh = {"input_ids": ids, "labels": ids}, {"dp": 2, "tp": 2}
    plan = dsmp.plan(model, inputs, hardware="h800", mesh=mesh)
    without = dsmp.plan(model, {**inputs, "use_cache": False}, hardware="h800", mesh=mesh)
    assert [d.key for d in plan] == [d.key for d in without]
    assert "on h800 x dp 2 x tp 2:" in repr(plan)
    assert model.config.use_cache, "the model stays as it was"


def test_what_a_graph_cannot_return_is_none(caplog):
    class Kept(nn.Module):
        """A product, and a set of its sizes."""

        def __init__(self) -> None:
            super().__init__()
            self.product = nn.Linear(16, 16)

        def forward(self, x):
            return self.product(x).square().mean(), {x.shape[0]}

    plan = dsmp.plan(Kept(), (torch.randn(8, 16),), hardware="h800", mesh={"dp": 2})
    assert "product|fprop|linear|0" in plan.by_key
    assert "a sharded Kept returns no set: it gives None" in caplog.text
