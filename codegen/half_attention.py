"""Fused attention of torch in scaled fp16: operands divided by powers of two, results multiplied back in fp32.

softmax(scale * q k^T) has to see the scores at their true size. q and k therefore share one balanced pair of scales,
q' = q / 2^a and k' = k / 2^b with a + b a number known to the compiler (which the softmax scale takes up again), so
that amax(q') and amax(k') are equal to a factor of two and no scale has to be read back from the device.

    forward    a + b = 0; amax(v') <= 2^10;           out = 2^ev F(q', k', v')
    backward   a + b = -6 - u; amax(v') <= 2^10;      dv = 2^ed dv'
               dq = scale dS k = 2^(ev + ed + b + 6) dq',   dk = 2^(ev + ed + a + 6) dk'

**Range.** Where amax(q) * amax(k) is above 2^30 (forward) or 2^24 (backward), q' and k' cannot be held and all results
are NaN. So they are where q or k holds an inf or NaN: kernels take a row of scores that are all -inf for one that is
masked throughout. An inf or NaN in v or dO propagates. What is all zero gets scale 1.

**Small scores.** P is computed anew in the backward pass, from the product of q' and k', but dq and dk are linear in
k' and q', which must not vanish in fp16. Six binades are won by a softmax scale of scale / 2^6. Where all scores are
surely below 2^-10 (the longest q times the longest k times scale), u > 0 enlarges them up to that bound: P changes by
less than a part in 2^10, and by far less where q and k are not parallel.

**Gradients.** The libraries hold P and dS = P (dP - delta) in fp16, and store dq', dk' and dv' in fp16; what they add
up is fp32. The scales of dO and v are the largest under which none of them can exceed 2^15, whatever P is (its rows sum
to 1): that of dO first, since dv' does not depend on v, then that of v with the room that is left, 1/2 < amax(v') <=
2^10. By the Cauchy-Schwarz inequality, with |.| the 2-norm of a row, max over rows, and sums over a head's queries:

    dS' <= 2 max |v'| max |dO'|                            dv' <= sum of amax(dO')
    dq' <= 2 max |v'| max |dO'| amax(k') scale / 2^6       dk' <= 2 max |v'| sum |dO'| amax(q') scale / 2^6

With dropout p all are larger by 1 / (1 - p), and where heads share keys and values the sums over queries by the number
of heads that do.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from .half_scaling import TOP, enlarge, exponent_above, halve, largest, poisoned

_VALUE_TOP = 10
_BACKWARD_SHIFT = 6
_SMALL_SCORE = -10
_WIDTH = 8  # fused kernels take fp16 heads whose width is a multiple of 8
_BIAS_ALIGNMENT = 16  # rows of a bias start at multiples of 16 elements, as torch pads them for its kernels


def forward(op: Any, given: Mapping[str, Any]) -> tuple[Any, ...]:
    """A fused attention operator in scaled fp16.

    op: the overload; `given`: its arguments by name, tensors [batch, heads, length, width] of any float dtype.
    Returns what the operator returns, the output in fp32.
    """
    q, k, v = given["query"], given["key"], given["value"]
    a, b, valid = _balanced(q, k, 0)
    dropout = math.ceil(_dropout_growth(given))
    value_exponent = exponent_above(largest(v)) - (_VALUE_TOP - dropout)
    scaled = {"query": _operand(q, a), "key": _operand(k, b), "value": _operand(v, value_exponent)}
    result = op(**{**given, **scaled, **_biases(op, given), "scale": _softmax_scale(given)})
    return poisoned(value_exponent, valid, result[0][..., : v.shape[-1]]), *result[1:]


def backward(op: Any, given: Mapping[str, Any]) -> tuple[Any, ...]:
    """The backward operator of a fused attention in scaled fp16; arguments as in `forward`.

    Returns the gradients of query, key and value, and of the bias where the operator has it, in fp32.
    """
    grad_name = "grad_out" if "grad_out" in given else "grad_out_"
    q, k, v, grad, out = (given[name] for name in ("query", "key", "value", grad_name, "out"))
    scale = _softmax_scale(given)
    a, b, valid = _balanced(q, k, _BACKWARD_SHIFT, scale)
    grad_exponent, value_exponent = _gradient_exponents(given, grad, scale * 2.0**-_BACKWARD_SHIFT, a, b)
    scaled = {
        "query": _operand(q, a),
        "key": _operand(k, b),
        "value": _operand(v, value_exponent),
        "out": _operand(out, value_exponent),
        grad_name: _operand(grad, grad_exponent),
    }
    result = op(**{**given, **scaled, **_biases(op, given), "scale": scale * 2.0**-_BACKWARD_SHIFT})
    both = value_exponent + grad_exponent
    exponents = (both + b + _BACKWARD_SHIFT, both + a + _BACKWARD_SHIFT, grad_exponent, both)
    widths = (q.shape[-1], k.shape[-1], v.shape[-1], None)
    return tuple(
        None if part is None else poisoned(exponent, valid, part[..., :width])
        for part, exponent, width in zip(result, exponents, widths, strict=False)
    )


def _balanced(q: Tensor, k: Tensor, shift: int, scale: float | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Exponents a and b of the scales of q and k, and whether fp16 can hold both, which are finite.

    a + b = -shift - u; u > 0 only where the softmax `scale` is given and all scores are below 2^_SMALL_SCORE.
    """
    q_largest, k_largest = largest(q), largest(k)
    q_exponent, k_exponent = exponent_above(q_largest), exponent_above(k_largest)
    enlarged: Tensor | int = 0
    if scale:
        score = _longest(enlarge(q, -q_exponent)).log2() + _longest(enlarge(k, -k_exponent)).log2()
        score = score + q_exponent + k_exponent + math.log2(abs(scale))
        enlarged = torch.where(score.isfinite(), _SMALL_SCORE - score, 0.0).floor().clamp(min=0).to(torch.int32)
    # what is all zero needs no range: the other one gets all
    q_exponent = torch.where(q_largest == 0, -shift - k_exponent, q_exponent)
    k_exponent = torch.where((k_largest == 0) & (q_largest != 0), -shift - q_exponent, k_exponent)
    both = q_exponent + k_exponent + shift + enlarged
    room = torch.div(both, 2, rounding_mode="floor")
    valid = (both <= 2 * TOP) & q_largest.isfinite() & k_largest.isfinite()
    return q_exponent - room, k_exponent - (both - room), valid


def _gradient_exponents(
    given: Mapping[str, Any], grad: Tensor, scale: float, a: Tensor, b: Tensor
) -> tuple[Tensor, Tensor]:
    """The exponents of the scales of dO and v: the module's docstring has the bounds.

    scale: what the operator is given; `a`, `b`: exponents of q and k.
    """
    q, k, v = given["query"], given["key"], given["value"]
    magnitude, value_magnitude = exponent_above(largest(grad)), exponent_above(largest(v))
    if grad.numel() == 0:
        return magnitude, value_magnitude
    unit = enlarge(grad, -magnitude)  # lengths are of numbers near 1: their squares neither overflow nor vanish
    lengths, rows = (torch.linalg.vector_norm(unit, order, dim=-1) for order in (2, math.inf))
    heads = math.log2(max(1, q.shape[1] // max(1, k.shape[1])))
    factor = math.log2(abs(scale)) if scale else -math.inf
    longest = 1 + _longest(enlarge(v, -value_magnitude)).log2()
    score, summed = longest + lengths.amax().log2(), longest + lengths.sum(-1).amax().log2() + heads
    scores = [score + max(0.0, factor), score + factor + largest(k).log2() - b, summed + factor + largest(q).log2() - a]
    values = [rows.amax().log2(), rows.sum(-1).amax().log2() + heads]
    room, both = (_room(torch.stack(bounds).amax() + _dropout_growth(given)) for bounds in (values, scores))
    grad_room = torch.minimum(room, both)
    return magnitude - grad_room, value_magnitude - (both - grad_room).clamp(max=_VALUE_TOP)


def _room(bound: Tensor) -> Tensor:
    """By how many binades what is bounded by 2^bound may grow; 0 where nothing is known of it."""
    return torch.where(bound.isfinite(), TOP - bound, 0.0).floor().to(torch.int32)


def _longest(x: Tensor) -> Tensor:
    """The largest length (2-norm) of a row of x, fp32; 0 of an empty tensor."""
    if x.numel() == 0:
        return torch.zeros((), dtype=torch.float32, device=x.device)
    lengths: Tensor = torch.linalg.vector_norm(x.detach(), dim=-1, dtype=torch.float32)
    return lengths.amax()


def _dropout_growth(given: Mapping[str, Any]) -> float:
    """log2 of the factor by which dropout enlarges what it keeps."""
    kept = 1.0 - given.get("dropout_p", 0.0)
    return -math.log2(kept) if kept > 0 else 0.0


def _softmax_scale(given: Mapping[str, Any]) -> float:
    scale = given.get("scale")
    return float(scale) if scale is not None else 1.0 / math.sqrt(given["query"].shape[-1] or 1)


def _operand(x: Tensor, exponent: Tensor) -> Tensor:
    """x / 2^exponent in fp16, its heads filled up with zeros to a width that fused kernels take; it lies in memory as x
    does, and so does what they return."""
    half = halve(x, exponent)
    missing = -x.shape[-1] % _WIDTH
    if missing == 0:
        return half
    order = [*sorted(range(half.dim() - 1), key=lambda d: -half.stride()[d]), half.dim() - 1]
    return pad(half.permute(order), (0, missing)).permute([order.index(d) for d in range(half.dim())])


def _biases(op: Any, given: Mapping[str, Any]) -> dict[str, Tensor]:
    """The additive bias or mask in the dtype that the operator takes beside fp16 operands: fp32 on CPUs, fp16 else."""
    found: dict[str, Tensor] = {}
    for name in ("attn_bias", "attn_mask"):
        bias = given.get(name)
        if bias is not None and bias.is_floating_point():
            found[name] = bias.to(torch.float32) if name == "attn_mask" else _half_bias(bias)
    return found


def _half_bias(bias: Tensor) -> Tensor:
    """A bias in fp16, its rows aligned; what fp16 cannot hold of it masks as before.

    A finite value below fp16's range becomes its lowest one: as -inf it would turn rows that are masked throughout into
    NaN. One above becomes inf, and its row NaN.
    """
    repeated = [d for d in range(bias.dim() - 1) if bias.stride(d) == 0]
    once = bias
    for d in repeated:
        once = once.narrow(d, 0, 1)
    lowest = torch.finfo(torch.float16).min
    narrow = torch.where(once.isfinite(), once.clamp(min=lowest), once).to(torch.float16)
    aligned = pad(narrow, (0, -narrow.shape[-1] % _BIAS_ALIGNMENT))[..., : narrow.shape[-1]]
    return aligned.expand(bias.shape)
