"""Run a captured graph so that autograd can differentiate it: how an output moves when a value inside it moves.

A captured graph is an inference graph, or the joint graph of a training step, of which a derivative is a second
derivative of the model. Some of its operators have no derivative: what AOTAutograd and Inductor's decompositions write
into it (`prims`), fused attention (its backward operator), operators of libraries that are the derivative of another.
`differentiable` replaces those by formulas; the rest computes itself. `run` interprets a graph that way and writes to
none of its inputs.

A derivative here is the true one: a disturbance passes what the model detached and the padding row of an embedding,
where training stops.

Attention: Dao et al., FlashAttention, https://arxiv.org/abs/2205.14135, algorithms 1 and 4 (appendix B) without tiles.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves, tree_map

from ..errors import NotDifferentiableError
from .graph import aten, value_of
from .rounding_ops import fake_quantize_op

# Computes a call in place of `run`: node, function to call, arguments and keyword arguments as real values.
Tap = Callable[[fx.Node, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


def run(gm: fx.GraphModule, inputs: Sequence[Any], tap: Tap | None = None, *, order: int = 2) -> list[Any]:
    """The outputs of a captured ATen graph in order, absent ones as None; autograd can differentiate them `order` times
    (0, 1 or 2; the less, the faster: fused attention stays fused).

    `inputs` are one value per placeholder, in order: tensors, and ints for symbolic sizes. Nothing is written to them:
    where the graph updates a buffer at its end, the new value is computed and left out. Values are freed after their
    last use. Random operators draw from torch's generators, so whoever needs the same numbers again seeds before.

    `tap`, when given, is called for every call of a function (accesses to a tuple's items apart) and returns its value.

    Raises NotDifferentiableError for fused attention with dropout. An operator that has no derivative and no formula
    here raises torch's RuntimeError when it is differentiated.
    """
    return list(tree_leaves(_Interpreter(gm, tap, order).run(*inputs, enable_io_processing=False)))


class _Interpreter(fx.Interpreter):
    def __init__(self, gm: fx.GraphModule, tap: Tap | None, order: int) -> None:
        super().__init__(gm)
        self.extra_traceback = False
        self._tap = tap
        self._order = order

    def run_node(self, n: fx.Node) -> Any:
        if n.op != "call_function" or n.target is operator.getitem:
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        if n.target in _READ_MEMORY:
            args = (_laid_out(args[0], n.args[0]), *args[1:])
        function = differentiable(n.target, self._order)
        return function(*args, **kwargs) if self._tap is None else self._tap(n, function, args, kwargs)


# What reads elements by their place in memory needs the layout that the graph was traced with.
_READ_MEMORY = frozenset({aten.as_strided.default, aten.as_strided_copy.default, aten.as_strided_scatter.default})


def _laid_out(tensor: Tensor, source: Any) -> Tensor:
    """The tensor with the strides that its node had while tracing."""
    traced = value_of(source)
    if traced is None or not all(isinstance(s, int) for s in traced.stride()) or traced.stride() == tensor.stride():
        return tensor
    return tensor.new_empty_strided(traced.shape, traced.stride()).copy_(tensor)


def differentiable(target: Any, order: int = 2) -> Callable[..., Any]:
    """A function with the arguments and, to rounding, the results of a call's target, which can be differentiated
    `order` times.

    That is the target itself when it is no operator or has a derivative. A target that writes to its arguments writes
    to copies of them, which whoever reads the arguments later does not see: captured graphs are functional.
    """
    if not isinstance(target, torch._ops.OpOverload):
        return target  # type: ignore[no-any-return]
    if "_scaled_dot_product_" in str(target) and order < (1 if "_backward" in str(target) else 2):
        return target
    formula = _FORMULAS.get(str(target))
    if formula is not None:
        return formula
    if target.namespace == "prims":
        return target.impl_aten  # type: ignore[attr-defined, no-any-return]
    return functools.partial(_on_copies, target) if target._schema.is_mutable else target


def _on_copies(target: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> Any:
    """The call with copies of the arguments that it writes to."""
    schema = target._schema.arguments
    written = {i: a.name for i, a in enumerate(schema) if a.alias_info is not None and a.alias_info.is_write}

    def copy(value: Any) -> Any:
        return tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, value)

    return target(
        *(copy(a) if i in written else a for i, a in enumerate(args)),
        **{k: copy(a) if k in written.values() else a for k, a in kwargs.items()},
    )


# ---- copies, casts, rounding


def _cast(a: Tensor, dtype: torch.dtype) -> Tensor:
    return a.to(dtype, copy=True)


def _copied(self: Tensor, src: Tensor, non_blocking: bool = False) -> Tensor:
    """What `self` would hold after `src` was copied into it."""
    return torch.empty_like(self.detach()).copy_(src, non_blocking)


class _StraightThrough(torch.autograd.Function):
    """Rounding has the derivative 0 almost everywhere; what it approximates has the derivative 1."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, format: str, recipe: str, axis: int) -> Tensor:
        rounded: Tensor = fake_quantize_op(x, format, recipe, axis)
        return rounded

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return grad, None, None, None


class _Exponential(torch.autograd.Function):
    """exp(x) - shift, whose derivative stays 0 where nothing depends on it, even where exp overflows.

    Decompositions write silu as x / (1 + exp(-x)): far below 0 the value is right, but the derivative is 0 * inf.
    """

    @staticmethod
    def forward(ctx: Any, shift: int, x: Tensor) -> Tensor:
        result = x.expm1() if shift else x.exp()
        ctx.save_for_backward(result)
        ctx.shift = shift
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        (result,) = ctx.saved_tensors
        return None, grad * (result + ctx.shift).masked_fill(grad == 0, 0)


# ---- grouped products: rows offs[i-1]:offs[i] of x [S, K] times w[i] of w [G, K, N]; rows behind the last give zeros


def _groups(x: Tensor, offs: Tensor) -> list[Tensor]:
    return [x[start:end] for start, end in pairwise([0, *offs.tolist()])]


def _grouped_mm(input: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    parts = [x @ w for x, w in zip(_groups(input, offs), weight.unbind(0), strict=True)]
    rest = input.shape[0] - sum(p.shape[0] for p in parts)
    return torch.cat([*parts, input.new_zeros(rest, weight.shape[2])])


def _grouped_mm_backward(input: Tensor, weight: Tensor, offs: Tensor, grad_output: Tensor) -> tuple[Tensor, Tensor]:
    pairs = zip(_groups(input, offs), _groups(grad_output, offs), strict=True)
    return _grouped_mm(grad_output, weight.mT, offs), torch.stack([x.mT @ g for x, g in pairs])


# ---- bags of embeddings: mode 0 sums the rows of a bag, 1 takes their mean, 2 the maximum of each column


def _bags(
    indices: Tensor, offsets: Tensor, padding_idx: int, mode: int, per_sample_weights: Tensor | None, like: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The bag of each index, int64[n]; the factor of its row, [n, 1], 0 for padding; which bags have rows, [B, 1]."""
    bag = torch.bucketize(torch.arange(indices.numel(), device=indices.device), offsets, right=True) - 1
    counted = (indices != padding_idx).to(like.dtype)
    size = like.new_zeros(like.shape[0]).index_add(0, bag, counted)
    factor = counted / size.clamp(min=1)[bag] if mode == 1 else counted
    if per_sample_weights is not None:
        factor = factor * per_sample_weights
    return bag, factor[:, None], (size > 0)[:, None]


def _embedding_bag(
    weight: Tensor, indices: Tensor, offsets: Tensor, scale_grad_by_freq: bool = False, mode: int = 0,
    sparse: bool = False, per_sample_weights: Tensor | None = None, include_last_offset: bool = False,
    padding_idx: int = -1,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    with torch.no_grad():
        out, *records = aten._embedding_bag(
            weight, indices, offsets, False, mode, False, per_sample_weights, include_last_offset, padding_idx
        )
    bag, factor, filled = _bags(indices, offsets, padding_idx, mode, per_sample_weights, out)
    if mode == 2:
        return (weight.gather(0, records[2].clamp(min=0).long()) * filled, *records)
    return (torch.zeros_like(out).index_add(0, bag, weight[indices] * factor), *records)


def _embedding_bag_backward(
    grad: Tensor, indices: Tensor, offsets: Tensor, offset2bag: Tensor, bag_size: Tensor, maximum_indices: Tensor,
    num_weights: int, scale_grad_by_freq: bool, mode: int, sparse: bool, per_sample_weights: Tensor | None,
    padding_idx: int = -1,
) -> Tensor:  # fmt: skip
    """The gradient of the table, float[num_weights, D], from that of the bags, float[B, D]."""
    bag, factor, filled = _bags(indices, offsets, padding_idx, mode, per_sample_weights, grad)
    table = grad.new_zeros(num_weights, grad.shape[1])
    if mode == 2:
        return table.scatter_add(0, maximum_indices.clamp(min=0).long(), grad * filled)
    if scale_grad_by_freq:
        factor = factor / torch.bincount(indices, minlength=num_weights)[indices][:, None]
    return table.index_add(0, indices, grad[bag] * factor)


# ---- attention. query float[B, H, L, D], key float[B, H/g, S, D], value float[B, H/h, S, E]; g, h > 1 where heads
# share keys or values; bias broadcasts to [B, H, L, S]; logsumexp [B, H, L] is over S, 0 in rows that see nothing.


def _wide(x: Tensor) -> Tensor:
    """fp16 and bf16 as fp32, in which fused attention computes."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _per_head(x: Tensor, heads: int) -> Tensor:
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def _scores(
    query: Tensor, key: Tensor, bias: Tensor | None, dropout_p: float, is_causal: bool, scale: float | None
) -> Tensor:
    if dropout_p:
        raise NotDifferentiableError(
            f"fused attention with dropout ({dropout_p:g}), whose mask the operator keeps to itself",
            "Set the attention's dropout to 0, or put the model in eval mode, for calibration.",
        )
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if bias is not None:
        scores = scores.masked_fill(~bias, -math.inf) if bias.dtype == torch.bool else scores + bias
    if is_causal:
        ahead = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(ahead, -math.inf)
    return scores


def _attention(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, dropout_p: float, is_causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """softmax(query key^T scale + bias) value, and the logsumexp of its argument."""
    heads, dtype = query.shape[1], query.dtype
    query, key, value = _wide(query), _per_head(_wide(key), heads), _per_head(_wide(value), heads)
    scores = _scores(query, key, bias, dropout_p, is_causal, scale)
    peak = scores.detach().amax(-1, keepdim=True)
    peak = peak.masked_fill(peak == -math.inf, 0)
    total = (scores - peak).exp().sum(-1, keepdim=True)
    logsumexp = peak + total.masked_fill(total == 0, 1).log()
    return ((scores - logsumexp).exp() @ value).to(dtype), logsumexp.squeeze(-1)


def _attention_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor, bias: Tensor | None,
    dropout_p: float, is_causal: bool, scale: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of query, key, value and scores (all heads, broadcast dimensions of the bias not yet summed)."""
    heads = query.shape[1]
    grad, q = _wide(grad_out), _wide(query)
    k, v = _per_head(_wide(key), heads), _per_head(_wide(value), heads)
    weights = (_scores(q, k, bias, dropout_p, is_causal, scale) - logsumexp.unsqueeze(-1)).exp()
    moved = (grad * _wide(out)).sum(-1, keepdim=True)
    grad_scores = weights * (grad @ v.mT - moved)
    scaled = grad_scores * (query.shape[-1] ** -0.5 if scale is None else scale)

    def of(operand: Tensor, per_head: Tensor) -> Tensor:
        shared = per_head.reshape(*operand.shape[:2], heads // operand.shape[1], *operand.shape[2:])
        return shared.sum(2).to(operand.dtype)

    return (scaled @ k).to(query.dtype), of(key, scaled.mT @ q), of(value, weights.mT @ grad), grad_scores


def _unused_state(query: Tensor) -> Tensor:
    """The place of the random state, which nobody reads when there is no dropout."""
    return torch.zeros((), dtype=torch.int64, device=query.device)


def _cpu_attention(
    query: Tensor, key: Tensor, value: Tensor, dropout_p: float = 0.0, is_causal: bool = False, *,
    attn_mask: Tensor | None = None, scale: float | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return _attention(query, key, value, attn_mask, dropout_p, is_causal, scale)


def _cpu_attention_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor, dropout_p: float,
    is_causal: bool, *, attn_mask: Tensor | None = None, scale: float | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    return _attention_backward(grad_out, query, key, value, out, logsumexp, attn_mask, dropout_p, is_causal, scale)[:3]


def _flash_attention(
    query: Tensor, key: Tensor, value: Tensor, dropout_p: float = 0.0, is_causal: bool = False,
    return_debug_mask: bool = False, *, scale: float | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    out, logsumexp = _attention(query, key, value, None, dropout_p, is_causal, scale)
    state = [torch.zeros(n, dtype=torch.uint64, device=query.device) for n in ((2,), ())]
    return out, logsumexp, None, None, query.shape[2], key.shape[2], *state, query.new_empty(0)


def _flash_attention_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor, cum_seq_q: Any,
    cum_seq_k: Any, max_q: Any, max_k: Any, dropout_p: float, is_causal: bool, philox_seed: Any, philox_offset: Any, *,
    scale: float | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    return _attention_backward(grad_out, query, key, value, out, logsumexp, None, dropout_p, is_causal, scale)[:3]


def _efficient_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_bias: Tensor | None, compute_log_sumexp: bool,
    dropout_p: float = 0.0, is_causal: bool = False, *, scale: float | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    out, logsumexp = _attention(query, key, value, attn_bias, dropout_p, is_causal, scale)
    tiles = F.pad(logsumexp, (0, -query.shape[2] % 32), value=math.inf)  # the kernel writes whole tiles of 32 rows
    return out, tiles if compute_log_sumexp else tiles[..., :0], _unused_state(query), _unused_state(query)


def _efficient_attention_backward(
    grad_out_: Tensor, query: Tensor, key: Tensor, value: Tensor, attn_bias: Tensor | None, out: Tensor,
    logsumexp: Tensor, philox_seed: Any, philox_offset: Any, dropout_p: float, grad_input_mask: Sequence[bool],
    is_causal: bool = False, *, scale: float | None = None,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    *grads, grad_scores = _attention_backward(
        grad_out_, query, key, value, out, logsumexp[..., : query.shape[2]], attn_bias, dropout_p, is_causal, scale
    )
    if attn_bias is None or not grad_input_mask[3]:
        return (*grads, None)
    return (*grads, grad_scores.sum_to_size(attn_bias.shape).to(attn_bias.dtype))


def _cudnn_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_bias: Tensor | None, compute_log_sumexp: bool,
    dropout_p: float = 0.0, is_causal: bool = False, return_debug_mask: bool = False, *, scale: float | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    out, logsumexp = _attention(query, key, value, attn_bias, dropout_p, is_causal, scale)
    state = [_unused_state(query)] * 2
    return out, logsumexp.unsqueeze(-1), None, None, query.shape[2], key.shape[2], *state, None


def _cudnn_attention_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor, philox_seed: Any,
    philox_offset: Any, attn_bias: Tensor | None, cum_seq_q: Any, cum_seq_k: Any, max_q: Any, max_k: Any,
    dropout_p: float, is_causal: bool, *, scale: float | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    logsumexp = logsumexp.squeeze(-1)
    return _attention_backward(grad_out, query, key, value, out, logsumexp, attn_bias, dropout_p, is_causal, scale)[:3]


_FORMULAS: Mapping[str, Callable[..., Any]] = {
    # a formula's result may lie in memory in another order than the operator's, where a view would not be possible
    "aten.view.default": aten.reshape.default,
    "aten._unsafe_view.default": aten.reshape.default,
    "aten.detach.default": aten.alias.default,
    "aten.copy.default": _copied,
    "aten.bernoulli.p": lambda self, p, **kwargs: aten.bernoulli.p(self.detach(), p, **kwargs),
    "aten.exp.default": functools.partial(_Exponential.apply, 0),
    "aten.expm1.default": functools.partial(_Exponential.apply, 1),
    # without padding, whose row has no derivative in training
    "aten.embedding.default": lambda weight, indices, *_, **__: aten.embedding.default(weight, indices),
    "aten._embedding_bag.default": _embedding_bag,
    "aten._embedding_bag_backward.default": _embedding_bag_backward,
    "aten._weight_norm_interface_backward.default": aten._weight_norm_differentiable_backward.default,
    "aten._scaled_dot_product_flash_attention_for_cpu.default": _cpu_attention,
    "aten._scaled_dot_product_flash_attention_for_cpu_backward.default": _cpu_attention_backward,
    "aten._scaled_dot_product_flash_attention.default": _flash_attention,
    "aten._scaled_dot_product_flash_attention_backward.default": _flash_attention_backward,
    "aten._scaled_dot_product_efficient_attention.default": _efficient_attention,
    "aten._scaled_dot_product_efficient_attention_backward.default": _efficient_attention_backward,
    "aten._scaled_dot_product_cudnn_attention.default": _cudnn_attention,
    "aten._scaled_dot_product_cudnn_attention_backward.default": _cudnn_attention_backward,
    "prims.convert_element_type.default": _cast,
    "dsmp.cast.default": _cast,
    "dsmp.fake_quantize.default": _StraightThrough.apply,
    "transformers.grouped_mm_fallback.default": _grouped_mm,
    "transformers.grouped_mm_fallback_backward.default": _grouped_mm_backward,
}
"""One row per operator without a true derivative; all other `prims` carry a formula in ATen operators themselves."""
