"""Captured graphs run with the same numbers as plainly, and their derivatives are those of finite differences."""

from __future__ import annotations

import weakref

import pytest
import torch
import torch.nn.functional as F
import transformers.integrations.moe
import zoo
from graph_helpers import aten_graph, random_inputs
from graph_helpers import run as run_plainly
from torch import fx
from torch.autograd import gradcheck, gradgradcheck
from torch.fx.experimental.proxy_tensor import make_fx

from dsmp.compiler.capture import capture
from dsmp.errors import NotDifferentiableError
from dsmp.passes.differentiable import differentiable, run
from dsmp.passes.graph import aten, is_backward, node_op, output_node, prims
from dsmp.passes.rounding import fake_quantize

assert transformers.integrations.moe  # registers the grouped product
SLOW = {"bert", "vit", "t5", "resnet18", "mobilenet_v3_small"}
MODELS = [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in zoo.MODELS]
NAMES = [n for n in zoo.TINY if n != "wide"] + MODELS
STEP = 1e-8
GROUPS = 12


def in_double(gm):
    """A copy of a graph in which every fp32 is fp64, so that finite differences are sharp."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    copy = fx.GraphModule(gm, graph)
    for node in graph.nodes:
        node.args, node.kwargs = fx.node.map_aggregate((node.args, node.kwargs), _double)
    for name, buffer in list(copy.named_buffers(recurse=False)):
        if buffer.dtype == torch.float32:
            setattr(copy, name, buffer.double())
    return copy


def _double(a):
    return torch.float64 if a == torch.float32 else a


def prepared(graph):
    """The graph in double precision, inputs for it, and which of them are floats."""
    inputs = [x.double() if is_float(x) else x for x in random_inputs(graph.gm, graph.parameters)]
    return in_double(graph.gm), inputs, [i for i, x in enumerate(inputs) if is_float(x)]


def is_float(x):
    return isinstance(x, torch.Tensor) and x.is_floating_point()


def seeded_run(gm, inputs, tap=None):
    torch.manual_seed(0)
    return run(gm, inputs, tap)


def like(tensors, seed):
    generator = torch.Generator().manual_seed(seed)
    return {i: torch.randn(x.shape, generator=generator, dtype=torch.float64) for i, x in tensors.items()}


def dotted(values, weights):
    return sum(((values[i] * w).sum() for i, w in weights.items()), torch.zeros((), dtype=torch.float64))


def moved(inputs, directions, step):
    return [x + step * directions[i] if i in directions else x for i, x in enumerate(inputs)]


@pytest.mark.parametrize("training", [True, False], ids=["joint", "inference"])
@pytest.mark.parametrize("name", NAMES)
def test_a_graph_runs_as_it_does_plainly_and_writes_nothing(captured, name, training):
    for graph in captured(name, training):
        inputs = random_inputs(graph.gm, graph.parameters)
        before = [x.clone() if isinstance(x, torch.Tensor) else x for x in inputs]
        with torch.no_grad():
            actual, expected = seeded_run(graph.gm, inputs), run_plainly(graph.gm, inputs)
        assert len(actual) == len(expected)
        scale = max(float(y.abs().max()) for y in expected if is_float(y))
        for a, e in zip(actual, expected, strict=True):
            if e is None:
                assert a is None
            else:
                assert (a.dtype, a.shape) == (e.dtype, e.shape)
                torch.testing.assert_close(a, e, rtol=1e-4, atol=1e-5 * scale)
        assert all(torch.equal(x, y) for x, y in zip(inputs, before, strict=True) if isinstance(x, torch.Tensor))


@pytest.mark.parametrize("training", [True, False], ids=["joint", "inference"])
@pytest.mark.parametrize("name", NAMES)
def test_derivatives_of_all_outputs_by_all_inputs_are_finite_differences(captured, name, training):
    for graph in captured(name, training):
        gm, inputs, floats = prepared(graph)
        leaves = [x.clone().requires_grad_() if i in floats else x for i, x in enumerate(inputs)]
        outputs = seeded_run(gm, leaves)
        cotangents = like({i: y for i, y in enumerate(outputs) if is_float(y)}, seed=1)
        grads = torch.autograd.grad(dotted(outputs, cotangents), [leaves[i] for i in floats], allow_unused=True)
        found = dict(zip(floats, grads, strict=True))
        groups = [group for k in range(GROUPS) if (group := floats[k::GROUPS])]
        slopes = []
        for group in groups:
            directions = like({i: inputs[i] for i in group}, seed=2)
            with torch.no_grad():
                up, down = (seeded_run(gm, moved(inputs, directions, s)) for s in (STEP, -STEP))
            for i, cotangent in cotangents.items():
                assert outputs[i].requires_grad or torch.equal(up[i], down[i]), f"output {i} lost its derivative"
                assert cotangent.shape == up[i].shape
            measured = (dotted(up, cotangents) - dotted(down, cotangents)) / (2 * STEP)
            computed = sum((found[i] * d).sum() for i, d in directions.items() if found[i] is not None)
            slopes.append((float(measured), float(computed)))
        scale = max(abs(m) for m, _ in slopes)
        assert scale > 0
        for measured, computed in slopes:
            assert measured == pytest.approx(computed, rel=1e-4, abs=1e-6 * scale)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_of_a_joint_graph_have_derivatives_of_their_own(captured, name):
    for graph in captured(name):
        gm, inputs, floats = prepared(graph)
        returned = output_node(graph.gm).args[0]
        leaves = [x.clone().requires_grad_() if i in floats else x for i, x in enumerate(inputs)]
        outputs = seeded_run(gm, leaves)
        wanted = {i: y for i, y in enumerate(outputs) if is_float(y) and is_backward(returned[i])}
        assert wanted
        cotangents, directions = like(wanted, seed=3), like({i: inputs[i] for i in floats}, seed=4)
        grads = torch.autograd.grad(dotted(outputs, cotangents), [leaves[i] for i in floats], allow_unused=True)
        computed = sum((g * directions[i]).sum() for i, g in zip(floats, grads, strict=True) if g is not None)
        with torch.no_grad():
            up, down = (dotted(seeded_run(gm, moved(inputs, directions, s)), cotangents) for s in (STEP, -STEP))
        assert float((up - down) / (2 * STEP)) == pytest.approx(float(computed), rel=1e-4)


def test_a_tap_computes_every_call(captured):
    (graph,) = captured("fused_qkv")
    inputs = random_inputs(graph.gm, graph.parameters)
    seen = []

    def tap(node, function, args, kwargs):
        seen.append(node)
        result = function(*args, **kwargs)
        return result * 2 if node_op(node) == "aten.bmm" else result

    doubled, plain = seeded_run(graph.gm, inputs, tap), seeded_run(graph.gm, inputs)
    assert seen == [n for n in graph.gm.graph.nodes if n.op == "call_function" and node_op(n)]
    assert not torch.allclose(doubled[0], plain[0])


def test_values_are_freed_after_their_last_use():
    references, alive = [], []

    def tap(node, function, args, kwargs):
        alive.append(sum(r() is not None for r in references))
        result = function(*args, **kwargs)
        references.append(weakref.ref(result))
        return result

    gm = aten_graph(lambda x: x.sin().cos().exp().sin().cos(), torch.randn(3))
    with torch.no_grad():
        run(gm, [torch.randn(3)], tap)
    assert alive == [0, 1, 1, 1, 1]


def test_symbolic_sizes_take_the_sizes_of_the_inputs():
    gm = make_fx(lambda x: x.view(x.shape[0] * x.shape[1]).sin().view(x.shape) * x.shape[0], tracing_mode="symbolic")(
        torch.randn(3, 4)
    )
    assert any(node_op(n) == "aten.sym_size" for n in gm.graph.nodes)
    x = torch.randn(5, 6)
    torch.testing.assert_close(run(gm, [x]), [x.sin() * 5])


def test_outputs_that_are_absent_stay_none():
    gm = aten_graph(lambda x: (x.sin(), None, (x.cos(),)), torch.randn(3))
    x = torch.randn(3)
    first, absent, last = run(gm, [x])
    assert absent is None and torch.equal(first, x.sin()) and torch.equal(last, x.cos())


def test_writing_operators_write_to_copies():
    x, y = torch.randn(4), torch.randn(4)
    kept = x.clone()
    for target, args in [
        (aten.copy_.default, (x, y)),
        (aten.add_.Tensor, (x, y)),
        (aten.index_put_.default, (x, [torch.tensor([1])], y[:1])),
        (aten._foreach_mul_.Scalar, ([x, x], 2.0)),
        (aten.add.out, (y, y)),
    ]:
        kwargs = {"out": x} if target is aten.add.out else {}
        result = differentiable(target)(*args, **kwargs)
        assert torch.equal(x, kept), target
        if target is not aten._foreach_mul_.Scalar:
            assert torch.equal(result, target(*[a.clone() if a is x else a for a in args], **kwargs))
            x.copy_(kept)


def test_what_is_copied_into_a_buffer_takes_its_form():
    buffer = torch.zeros(2, 3, dtype=torch.float64).t()
    result = differentiable(aten.copy_.default)(buffer, torch.ones(2))
    assert (result.dtype, result.stride()) == (torch.float64, buffer.stride())
    assert torch.equal(result, torch.ones(3, 2, dtype=torch.float64)) and not buffer.any()


@pytest.mark.parametrize("view", [aten.view.default, aten._unsafe_view.default], ids=str)
def test_views_of_a_formula_that_lies_otherwise_in_memory(view):
    def function(query, key, value):
        out, _ = aten._scaled_dot_product_flash_attention_for_cpu(query.transpose(1, 2), key, value)
        return view(out.transpose(1, 2), [1, 3, 8])

    args = torch.randn(1, 3, 2, 4), torch.randn(1, 2, 5, 4), torch.randn(1, 2, 5, 4)
    gm = aten_graph(function, *args)
    torch.testing.assert_close(run(gm, args)[0], function(*args))


def test_elements_read_by_their_place_are_the_traced_ones():
    def function(query, key, value):
        out, _ = aten._scaled_dot_product_flash_attention_for_cpu(query.transpose(1, 2), key, value)
        return torch.as_strided(out, (4, 2), (2, 1))

    args = torch.randn(1, 3, 2, 4), torch.randn(1, 2, 5, 4), torch.randn(1, 2, 5, 4)
    gm = aten_graph(function, *args)
    torch.testing.assert_close(run(gm, args)[0], function(*args))


def test_operators_with_a_derivative_compute_themselves():
    for target in (aten.mm.default, aten.convolution_backward.default, aten.embedding_dense_backward.default):
        assert differentiable(target) is target
    assert differentiable(max) is max


# ---- formulas: (operator, arguments); what is float requires a derivative


def randn(*shape):
    return torch.randn(*shape, dtype=torch.float64)


IDS = torch.tensor([1, 3, 0, 3, 2, 1])
OFFSETS = torch.tensor([0, 2, 2, 5])
ENDS = torch.tensor([2, 2, 5], dtype=torch.int32)
FORMULAS = {
    "cast": lambda: (prims.convert_element_type.default, (randn(3, 4).t(), torch.float64)),
    "dsmp cast": lambda: (torch.ops.dsmp.cast.default, (randn(3), torch.float64)),
    "fma": lambda: (prims.fma.default, (randn(3), randn(3), randn(3))),
    "rev": lambda: (prims.rev.default, (randn(3, 4), [1])),
    "max pool": lambda: (
        prims._low_memory_max_pool_with_offsets.default,
        (randn(1, 2, 6, 6), [3, 3], [2, 2], [1, 1], [1, 1], False),
    ),
    "copy": lambda: (aten.copy.default, (randn(2, 3), randn(3))),
    "view": lambda: (aten.view.default, (randn(3, 4), [2, 6])),
    "detach": lambda: (aten.detach.default, (randn(3),)),
    "exp": lambda: (aten.exp.default, (randn(5),)),
    "expm1": lambda: (aten.expm1.default, (randn(5),)),
    "embedding": lambda: (aten.embedding.default, (randn(5, 3), IDS, 3, True)),
    "embedding gradient": lambda: (aten.embedding_dense_backward.default, (randn(6, 3), IDS, 5, 3, False)),
    "weight norm gradient": lambda: (
        aten._weight_norm_interface_backward.default,
        (randn(4, 3), randn(4, 3), randn(4, 1), randn(4, 1).abs() + 1, 0),
    ),
    "grouped": lambda: (torch.ops.transformers.grouped_mm_fallback.default, (randn(6, 4), randn(3, 4, 2), ENDS)),
    "grouped gradient": lambda: (
        torch.ops.transformers.grouped_mm_fallback_backward.default,
        (randn(6, 4), randn(3, 4, 2), ENDS, randn(6, 2)),
    ),
}
BAGS = {
    "sum": {"mode": 0},
    "weighted": {"mode": 0, "per_sample_weights": True},
    "mean": {"mode": 1},
    "max": {"mode": 2},
    "padding": {"mode": 0, "padding_idx": 3},
    "mean with padding": {"mode": 1, "padding_idx": 3},
    "max with padding": {"mode": 2, "padding_idx": 3},
    "by frequency": {"mode": 0, "scale_grad_by_freq": True},
    "last offset": {"mode": 1, "include_last_offset": True},
}


@pytest.mark.parametrize("name", FORMULAS)
def test_formulas_give_the_operators_results(name):
    torch.manual_seed(0)
    target, args = FORMULAS[name]()
    check_formula(target, args)


def check_formula(target, args, kwargs=None):
    kwargs = kwargs or {}
    actual, expected = differentiable(target)(*args, **kwargs), target(*args, **kwargs)
    torch.testing.assert_close(actual, expected)
    leaves = [i for i, a in enumerate(args) if isinstance(a, torch.Tensor) and a.dtype == torch.float64]

    def of(*floats):
        full = [floats[leaves.index(i)] if i in leaves else a for i, a in enumerate(args)]
        results = differentiable(target)(*full, **kwargs)
        return tuple(r for r in (results if isinstance(results, tuple) else (results,)) if is_float(r))

    floats = [args[i].detach().clone().requires_grad_() for i in leaves]
    assert gradcheck(of, floats)
    assert gradgradcheck(of, floats)


@pytest.mark.parametrize("name", BAGS)
def test_bags_of_embeddings(name):
    torch.manual_seed(0)
    settings = dict(BAGS[name])
    weights = torch.rand(IDS.numel(), dtype=torch.float64) if settings.pop("per_sample_weights", False) else None
    offsets = torch.cat([OFFSETS, torch.tensor([IDS.numel()])]) if settings.get("include_last_offset") else OFFSETS
    by_frequency, mode = settings.pop("scale_grad_by_freq", False), settings.pop("mode")
    args = (randn(5, 3), IDS, offsets, by_frequency, mode, False, weights)
    check_formula(aten._embedding_bag.default, args, settings)
    table, records = args[0], aten._embedding_bag(*args, **settings)[1:]
    padding = settings.get("padding_idx", -1)
    check_formula(
        aten._embedding_bag_backward.default,
        (randn(len(OFFSETS), 3), IDS, offsets, *records, len(table), by_frequency, mode, False, weights, padding),
    )


def test_rounding_passes_the_derivative():
    x = torch.randn(4, 8, requires_grad=True)
    y = differentiable(torch.ops.dsmp.fake_quantize.default)(x, "fp8_e4m3", "row", -1)
    assert torch.equal(y, fake_quantize(x.detach(), "fp8_e4m3", "row"))
    (grad,) = torch.autograd.grad(y, x, torch.full_like(y, 3.0))
    assert torch.equal(grad, torch.full_like(grad, 3.0))


def test_random_values_depend_on_nothing():
    x = torch.rand(1000, requires_grad=True)
    torch.manual_seed(0)
    drawn = differentiable(aten.bernoulli.p)(x, 0.25)
    torch.manual_seed(0)
    assert torch.equal(drawn, aten.bernoulli.p(x, 0.25)) and not drawn.requires_grad


@pytest.mark.parametrize(
    "function", [F.silu, F.softplus, F.mish, F.elu, F.selu, torch.sigmoid], ids=lambda f: f.__name__
)
def test_activations_have_finite_derivatives_far_from_zero(function):
    x = torch.tensor([-2000.0, -200.0, -1.0, 1.0, 200.0, 2000.0])
    ((graph,),) = (capture(lambda x: function(x), (x,), training=False).graphs,)
    y = x.clone().requires_grad_()
    (actual,) = torch.autograd.grad(run(graph.gm, [y])[0].sum(), y, create_graph=True)
    (expected,) = torch.autograd.grad(function(y).sum(), y)
    torch.testing.assert_close(actual, expected)
    (second,) = torch.autograd.grad(actual.sum(), y)
    assert second.isfinite().all()


# ---- attention: query [2, 4, 5, 8], keys and values [2, 4, 7, 8] or fewer heads of them

BLIND = torch.zeros(2, 1, 5, 7)
BLIND[0, 0, 1] = BLIND[1, 0, 2, 3:] = -torch.inf
ATTENTION = {
    "plain": {},
    "causal": {"is_causal": True},
    "scale": {"scale": 0.3},
    "mask": {"attn_mask": torch.randn(1, 4, 5, 7, generator=torch.Generator().manual_seed(5))},
    "row that sees nothing": {"attn_mask": BLIND},
    "shared heads": {"heads": 2},
    "one key head": {"heads": 1, "is_causal": True},
}
CPU, CPU_BACKWARD = (
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
)


def attention_case(name, dtype):
    torch.manual_seed(0)
    settings = {"is_causal": False, "scale": None, "attn_mask": None, "heads": 4, **ATTENTION[name]}
    heads, mask = settings.pop("heads"), settings.pop("attn_mask")
    q, k, v, g = (torch.randn(2, h, n, 8).to(dtype) for h, n in ((4, 5), (heads, 7), (heads, 7), (4, 5)))
    return q, k, v, g, None if mask is None else mask.to(dtype), settings["is_causal"], settings["scale"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ATTENTION)
def test_attention_on_the_cpu_and_its_gradient(name, dtype):
    q, k, v, g, mask, causal, scale = attention_case(name, dtype)
    out, lse = CPU(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if dtype in (torch.bfloat16, torch.float16) else {}
    actual = differentiable(CPU)(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)
    torch.testing.assert_close(actual, (out, lse), **tolerance)
    expected = CPU_BACKWARD(g, q, k, v, out, lse, 0.0, causal, attn_mask=mask, scale=scale)
    actual = differentiable(CPU_BACKWARD)(g, q, k, v, out, lse, 0.0, causal, attn_mask=mask, scale=scale)
    torch.testing.assert_close(actual, expected, **tolerance)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    derived = torch.autograd.grad(differentiable(CPU)(*leaves, 0.0, causal, attn_mask=mask, scale=scale)[0], leaves, g)
    torch.testing.assert_close(derived, expected, **tolerance)


@pytest.mark.parametrize("name", ["causal", "row that sees nothing", "shared heads"])
def test_attention_has_second_derivatives(name):
    *operands, mask, causal, _ = attention_case(name, torch.float64)
    q, k, v, g = (x[:1, :, :3, :2] for x in operands)
    mask = None if mask is None else mask[:1, :, :3, :3]
    forward, backward = differentiable(CPU), differentiable(CPU_BACKWARD)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    assert gradcheck(lambda *x: forward(*x, 0.0, causal, attn_mask=mask), leaves)
    assert gradgradcheck(lambda *x: forward(*x, 0.0, causal, attn_mask=mask), leaves)
    leaves = [x.clone().requires_grad_() for x in (g, q, k, v, *forward(q, k, v, 0.0, causal, attn_mask=mask))]
    assert gradcheck(lambda *x: backward(*x, 0.0, causal, attn_mask=mask), leaves)
    assert gradgradcheck(lambda *x: backward(*x, 0.0, causal, attn_mask=mask), leaves)


def on_meta(args):
    return [x.to("meta") if isinstance(x, torch.Tensor) else x for x in args]


def same_form(actual, expected):
    for a, e in zip(actual, expected, strict=True):
        assert (a.shape, a.dtype) == (e.shape, e.dtype) if isinstance(e, torch.Tensor) else a == e


@pytest.mark.parametrize("kernel", ["flash", "efficient", "cudnn"])
@pytest.mark.parametrize("name", ATTENTION)
def test_attention_of_accelerators(name, kernel):
    """The same numbers as on the CPU; the form of the results as their fake kernels say."""
    q, k, v, g, mask, causal, scale = attention_case(name, torch.float32)
    if kernel == "flash" and mask is not None:
        pytest.skip("the operator takes no mask")
    out, lse = CPU(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)
    wanted = CPU_BACKWARD(g, q, k, v, out, lse, 0.0, causal, attn_mask=mask, scale=scale)
    forward = getattr(aten, f"_scaled_dot_product_{kernel}_attention").default
    backward = getattr(aten, f"_scaled_dot_product_{kernel}_attention_backward").default
    args = (q, k, v, 0.0, causal) if kernel == "flash" else (q, k, v, mask, True, 0.0, causal)
    actual = differentiable(forward)(*args, scale=scale)
    same_form(actual, forward(*on_meta(args), scale=scale))
    torch.testing.assert_close(actual[0], out)
    torch.testing.assert_close(actual[1].flatten(2)[..., :5], lse)
    rest = {
        "flash": (None, None, 5, 7, 0.0, causal, *actual[6:8]),
        "efficient": (*actual[2:], 0.0, [True] * 4, causal),
        "cudnn": (*actual[6:8], mask, None, None, 5, 7, 0.0, causal),
    }[kernel]
    args = (g, q, k, v, *([mask] if kernel == "efficient" else []), *actual[:2], *rest)
    grads = differentiable(backward)(*args, scale=scale)
    torch.testing.assert_close(grads[:3], wanted)
    if kernel == "efficient" and mask is not None:
        bias = mask.clone().requires_grad_()
        (expected,) = torch.autograd.grad(differentiable(CPU)(q, k, v, 0.0, causal, attn_mask=bias)[0], bias, g)
        torch.testing.assert_close(grads[3], expected)
    else:
        same_form(grads, backward(*on_meta(args), scale=scale))


def test_attention_with_dropout_is_an_error():
    q = torch.randn(1, 1, 2, 4)
    with pytest.raises(NotDifferentiableError, match=r"dropout \(0.1\).*eval mode"):
        differentiable(aten._scaled_dot_product_flash_attention.default)(q, q, q, 0.1)
