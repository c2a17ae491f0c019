"""What belongs to one int8 convolution in an inference graph: its batch norm, a residual, an activation, and what its
input is multiplied by.

Batch norms are met as AOTAutograd decomposes them with Inductor's table (subtract the mean, multiply by
rsqrt(variance + epsilon), by the gain, add the shift, each broadcast from [C]), and as
`_native_batch_norm_legit_no_training`. Hardswish is met whole and as z * clamp(z + 3, 0, 6) / 6.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ...passes.graph import aten, node_op, prims, value_of

_POOLS = ("prims._low_memory_max_pool_with_offsets", "prims._low_memory_max_pool2d_with_offsets",
          "aten.max_pool2d_with_indices")  # fmt: skip
_POOL_DEFAULTS: tuple[Any, ...] = ([], 0, 1, False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Norm:
    """A batch norm with fixed statistics, [C] each; gain and shift may be missing."""

    mean: fx.Node
    variance: fx.Node
    gain: fx.Node | None
    shift: fx.Node | None
    epsilon: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Fused:
    """A convolution and what follows it: nodes up to `last` become one operator."""

    conv: fx.Node
    norm: Norm | None
    addition: fx.Node | None
    residual: fx.Node | None
    activation: str
    last: fx.Node


@dataclass(frozen=True, kw_only=True, slots=True)
class Pool:
    """A max-pool of which only the values are read."""

    source: fx.Node
    values: fx.Node
    kernel: list[int]
    stride: list[int]
    padding: list[int]
    dilation: list[int]


def fused(conv: fx.Node, taken: Collection[fx.Node]) -> Fused:
    """What one operator computes from `conv` on; additions in `taken` belong to other convolutions."""
    norm, last = _norm(conv)
    residual, addition = None, _only_user(last)
    if addition is not None and addition.target is aten.add.Tensor and addition not in taken and not addition.kwargs:
        other = addition.args[1] if addition.args[0] is last else addition.args[0]
        if isinstance(other, fx.Node) and other is not last and _alike(other, last):
            residual, last = other, addition
    activation, last = following_activation(last)
    return Fused(conv=conv, norm=norm, addition=addition if residual is not None else None, residual=residual,
                 activation=activation, last=last)  # fmt: skip


def following_activation(node: fx.Node) -> tuple[str, fx.Node]:
    """The activation that alone reads `node`, and its last node; ("none", node) if there is none that is known."""
    user = _only_user(node)
    if user is None:
        return _decomposed_hardswish(node)
    if user.target is aten.relu.default:
        return "relu", user
    if user.target is aten.hardswish.default:
        return "hardswish", user
    if user.target in (aten.hardtanh.default, aten.clamp.default) and tuple(user.args[1:]) == (0, 6):
        return "relu6", user
    if _is(user, aten.clamp_min.default, 0):
        top = _only_user(user)
        if top is not None and _is(top, aten.clamp_max.default, 6):
            return "relu6", top
        return "none", node
    return "none", node


def gated(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """(x, gate) if `node` multiplies x [N, C, H, W] by a gate [N, C, 1, 1]."""
    if node.target is not aten.mul.Tensor:
        return None
    value = value_of(node)
    for x, gate in (node.args[:2], node.args[1::-1]):
        if not isinstance(x, fx.Node) or not isinstance(gate, fx.Node) or value is None:
            continue
        whole, factors = value_of(x), value_of(gate)
        if whole is None or factors is None or whole.dtype != torch.float32 or factors.dtype != torch.float32:
            continue
        if whole.shape == value.shape and factors.shape == (*value.shape[:2], 1, 1) and whole.shape != factors.shape:
            return x, gate
    return None


def max_pool(node: fx.Node) -> Pool | None:
    """The max-pool whose values `node` takes, unless its indices are read or it rounds its size up."""
    source = node.args[0] if node.target is operator.getitem and node.args[1] == 0 else None
    if not isinstance(source, fx.Node) or node_op(source) not in _POOLS or list(source.users) != [node]:
        return None
    x, kernel, *given = source.args
    rest: tuple[Any, ...] = (*given, *_POOL_DEFAULTS[len(given) :])
    stride, padding, dilation, ceil = rest
    value = value_of(node)
    if not isinstance(x, fx.Node) or ceil or value is None or value.dim() != 4:
        return None
    pair = _pair(kernel)
    return Pool(source=x, values=node, kernel=pair, stride=_pair(stride) or pair, padding=_pair(padding),
                dilation=_pair(dilation))  # fmt: skip


def _pair(given: Any) -> list[int]:
    """One number per axis of an image; none for an empty list."""
    numbers = list(given) if isinstance(given, (list, tuple)) else [given]
    return numbers * 2 if len(numbers) == 1 else numbers


def _norm(conv: fx.Node) -> tuple[Norm | None, fx.Node]:
    """The batch norm that alone reads a convolution, and its last node."""
    first = _only_user(conv)
    if first is None:
        return None, conv
    if node_op(first) == "aten._native_batch_norm_legit_no_training":
        values = _only_user(first)
        x, gain, shift, mean, variance, _, epsilon = first.args
        if x is not conv or values is None or values.target is not operator.getitem or values.args[1] != 0:
            return None, conv
        norm = Norm(mean=mean, variance=variance, gain=gain, shift=shift, epsilon=epsilon)  # type: ignore[arg-type]
        return norm, values
    value = value_of(conv)
    channels = None if value is None else value.shape[1]
    mean = _vector(first.args[1], channels) if first.target is aten.sub.Tensor and first.args[0] is conv else None
    scaled = _only_user(first)
    if mean is None or scaled is None:
        return None, conv
    spread = _spread(_other(scaled, first, aten.mul.Tensor, channels))
    if spread is None:
        return None, conv
    last, gain, shift = scaled, None, None
    follower = _only_user(last)
    gain = None if follower is None else _other(follower, last, aten.mul.Tensor, channels)
    if gain is not None and follower is not None:
        last, follower = follower, _only_user(follower)
    shift = None if follower is None else _other(follower, last, aten.add.Tensor, channels)
    if shift is not None and follower is not None:
        last = follower
    return Norm(mean=mean, variance=spread[0], gain=gain, shift=shift, epsilon=spread[1]), last


def _other(node: fx.Node, known: fx.Node, target: Callable[..., Any], channels: Any) -> fx.Node | None:
    """The [C] vector that a call of `target` combines with `known`."""
    if node.target is not target or len(node.args) != 2 or node.kwargs:
        return None
    return _vector(node.args[1] if node.args[0] is known else node.args[0], channels)


def _vector(node: Any, channels: Any) -> fx.Node | None:
    """The fp32 vector [C] that `node` ([C, 1, 1] or [1, C, 1, 1]) is a view of, before casts that change nothing."""
    if not isinstance(node, fx.Node):
        return None
    value = value_of(node)
    if value is None or value.shape not in (torch.Size((channels, 1, 1)), torch.Size((1, channels, 1, 1))):
        return None
    while node_op(node) in ("aten.unsqueeze", "aten.view", "aten.reshape") and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return _as_held(node) if (held := value_of(node)) is not None and held.dim() == 1 else None


def _as_held(node: fx.Node) -> fx.Node | None:
    """A vector before casts from fp32 to fp32; None if it is not fp32."""
    while node.target is prims.convert_element_type.default and isinstance(node.args[0], fx.Node):
        source = value_of(node.args[0])
        if source is None or source.dtype != torch.float32:
            break
        node = node.args[0]
    value = value_of(node)
    return node if value is not None and value.dtype == torch.float32 else None


def _spread(node: fx.Node | None) -> tuple[fx.Node, float] | None:
    """(variance, epsilon) of a vector rsqrt(variance + epsilon)."""
    inner = node.args[0] if node is not None and node.target is aten.rsqrt.default else None
    if not isinstance(inner, fx.Node) or inner.target is not aten.add.Tensor:
        return None
    variance, epsilon = inner.args
    held = _as_held(variance) if isinstance(variance, fx.Node) else None
    return (held, float(epsilon)) if held is not None and isinstance(epsilon, (int, float)) else None


def _decomposed_hardswish(node: fx.Node) -> tuple[str, fx.Node]:
    moved = next((u for u in node.users if _is(u, aten.add.Tensor, 3)), None)
    low = None if moved is None else _only_user(moved)
    high = _only_user(low) if low is not None and _is(low, aten.clamp_min.default, 0) else None
    product = _only_user(high) if high is not None and _is(high, aten.clamp_max.default, 6) else None
    if product is None or product.target is not aten.mul.Tensor or set(product.args) != {node, high}:
        return "none", node
    last = _only_user(product)
    if last is None or not _is(last, aten.div.Tensor, 6) or set(node.users) != {moved, product}:
        return "none", node
    return "hardswish", last


def _is(node: fx.Node, target: Callable[..., Any], number: float) -> bool:
    return node.target is target and tuple(node.args[1:]) == (number,) and not node.kwargs


def _alike(a: fx.Node, b: fx.Node) -> bool:
    first, second = value_of(a), value_of(b)
    if first is None or second is None:
        return False
    return bool(first.shape == second.shape) and first.dtype == second.dtype


def _only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None
