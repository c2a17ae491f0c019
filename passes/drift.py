"""Drift: how far a low-precision run is from the fp32 run, and the cotangents whose projections measure it.

    kl          mean over samples and scored positions of KL(p || q), p and q the distributions that the outputs give,
                in nats: how much the cross-entropy rises on labels drawn from the model itself
    bernoulli   the same for independent binary outputs, summed over the outputs of a sample
    l2          mean over samples of |y - y'|^2 / |y|^2, averaged over the output tensors; an output that does not hold
                the samples along its first dimension is compared as a whole
    gradients   mean over parameters of |g - g'|^2 / |g|^2, for a training step

All four are second order in a small error, so for each there is a random cotangent u of the outputs with
kappa * E[(u . dy)^2] = drift, whatever the error dy is: label-free, since labels are drawn from the model's own
distribution (kl, bernoulli) or are random probes (l2, gradients). That a mean KL rather than a signed change of the
loss is what formats should be judged by was tried on eight tasks; with gradients the relative squared error bounds the
share of a step's progress that noise of that size costs (E|g + d|^2 = |g|^2 (1 + d^2/g^2) for independent noise).

Gradients that are zero but for rounding do not count: those of a bias that a norm or a softmax takes out again (before
a batch norm, of attention's keys) are noise in every precision, and relative to noise any error is as large as itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, fx

from ..errors import CalibrationError
from .gemm import gemm_op
from .graph import FLOAT_DTYPES, concrete, node_op, numel_of, output_node, root, value_of
from .op_rules import class_of
from .program import DriftKind

Form = Literal["logits", "probabilities", "values"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Metric:
    """What is compared: positions among a graph's outputs, and what they hold.

    Outputs are [samples, ...], the last dimension holding classes for `kl`; scalars are one sample.
    """

    kind: DriftKind
    outputs: tuple[int, ...]
    form: Form = "values"

    @property
    def kappa(self) -> float:
        """drift = kappa * E[(u . dy)^2] for the cotangents of this metric."""
        return 0.5 if self.kind in ("kl", "bernoulli") else 1.0

    def samples(self, outputs: Sequence[Any]) -> int:
        """How many samples a batch of outputs holds; a training step counts as one."""
        if self.kind == "gradients":
            return 1
        return next((int(outputs[i].shape[0]) for i in self.outputs if outputs[i].dim()), 1)

    def cotangents(self, outputs: Sequence[Any], generator: torch.Generator) -> list[Tensor | None]:
        """One random cotangent per output, None where an output is not compared."""
        found: list[Tensor | None] = [None] * len(outputs)
        compared = self._compared(outputs)
        samples = self.samples(outputs)
        for i in compared:
            y = outputs[i].detach()
            found[i] = self._cotangent(y, generator, samples, len(compared)).to(y.dtype)
        return found

    def _cotangent(self, y: Tensor, generator: torch.Generator, samples: int, count: int) -> Tensor:
        if self.kind in ("l2", "gradients"):
            probe = torch.randn(y.shape, generator=generator, dtype=torch.float32).to(y.device)
            rows = _by_sample(y, samples)
            size = rows.float().norm(dim=1, keepdim=True)
            scaled = torch.where(size > 0, probe.reshape(rows.shape) / size.clamp(min=_TINY), torch.zeros_like(size))
            # What is compared as a whole is charged to every sample, and its error is the sum of what theirs give.
            return scaled.reshape(y.shape).mul((samples / rows.shape[0] / count) ** 0.5)
        if self.kind == "bernoulli":
            p = _probability(y, self.form)
            drawn = torch.bernoulli(p.cpu(), generator=generator).to(y.device)
            u = p - drawn
            if self.form == "probabilities":
                u = u / (p * (1 - p)).clamp(min=_SMALL)
            return u.mul(count**-0.5)
        p = _distribution(y, self.form)
        flat = p.reshape(-1, p.shape[-1])
        drawn = torch.multinomial(flat.cpu(), 1, generator=generator).to(y.device)
        onehot = torch.zeros_like(flat).scatter_(1, drawn, 1.0).reshape(p.shape)
        positions = max(1, p[0].numel() // p.shape[-1]) if p.dim() > 1 else 1
        u = onehot.neg().div(p.clamp(min=_SMALL)) if self.form == "probabilities" else p - onehot
        return u.mul((positions * count) ** -0.5)

    def per_sample(self, reference: Sequence[Any], other: Sequence[Any]) -> Tensor:
        """Drift of each sample, fp64 [samples]; infinite where the other run is not finite."""
        compared, samples = self._compared(reference), self.samples(reference)
        parts = [torch.zeros(samples, dtype=torch.float64)]
        for i in self.outputs:
            a, b = reference[i].detach().double(), other[i].detach().double()
            if i in compared:
                parts.append(self._compare(a, b, samples).cpu())
            elif not bool(torch.isfinite(b).all()):
                parts[0] += torch.inf
        mean = torch.stack(parts).sum(0) / max(1, len(compared))
        return torch.where(mean.isnan(), torch.full_like(mean, torch.inf), mean).clamp(min=0.0)

    def _compared(self, reference: Sequence[Any]) -> tuple[int, ...]:
        """The outputs that count: of gradients those that are more than rounding noise."""
        if self.kind != "gradients":
            return self.outputs
        squares = {
            i: (float(reference[i].detach().double().square().sum()), reference[i].numel()) for i in self.outputs
        }
        mean = sum(s for s, _ in squares.values()) / max(1, sum(n for _, n in squares.values()))
        return tuple(
            i
            for i, (s, n) in squares.items()
            if s > n * mean * (_NOISE if _is_wide(reference[i]) else _NARROW_NOISE) ** 2
        )

    def _compare(self, a: Tensor, b: Tensor, samples: int) -> Tensor:
        if self.kind in ("l2", "gradients"):
            size = _by_sample(a, samples).square().sum(1)
            error = _by_sample(a - b, samples).square().sum(1)
            ratio = torch.where(size > 0, error / size.clamp(min=_TINY), (error > 0).double())
            return ratio.expand(samples)
        if a.dim() == 0:
            a, b = a.reshape(1), b.reshape(1)
        if self.kind == "bernoulli":
            return _bernoulli_kl(a, b, self.form).reshape(a.shape[0], -1).sum(1)
        la, lb = _log_distribution(a, self.form), _log_distribution(b, self.form)
        terms = torch.where(la == -torch.inf, 0.0, la.exp() * (la - lb))  # what is ruled out has no part in it
        return terms.sum(-1).reshape(a.shape[0], -1).mean(1)

    def entropy(self, outputs: Sequence[Any]) -> Tensor | None:
        """Entropy of each sample's outputs in nats, fp64 [samples]; None for l2 and gradients."""
        if self.kind in ("l2", "gradients"):
            return None
        parts = []
        for i in self.outputs:
            y = outputs[i].detach().double()
            y = y.reshape(1, *y.shape) if y.dim() == 0 else y
            if self.kind == "bernoulli":
                p = _probability(y, self.form)
                h = -(torch.xlogy(p, p) + torch.xlogy(1 - p, 1 - p))
                parts.append(h.reshape(h.shape[0], -1).sum(1))
            else:
                log = _log_distribution(y, self.form)
                parts.append(-torch.xlogy(log.exp(), log.exp()).sum(-1).reshape(y.shape[0], -1).mean(1))
        return torch.stack(parts).mean(0)


_TINY, _SMALL = 1e-30, 1e-12
_NOISE, _NARROW_NOISE = 1e-5, 5e-4
"""Gradients whose root mean square is this share of that of all are noise: in fp32, and in 16-bit formats."""


def _is_wide(y: Tensor) -> bool:
    return y.element_size() >= 4


def _by_sample(y: Tensor, samples: int) -> Tensor:
    """A value as [samples, elements], or [1, elements] where its first dimension does not count samples."""
    return y.reshape(samples if y.dim() and y.shape[0] == samples else 1, -1)


def _distribution(y: Tensor, form: Form) -> Tensor:
    p = y.float().softmax(-1) if form == "logits" else y.float().clamp(min=0)
    return torch.where(p.sum(-1, keepdim=True) > 0, p, torch.ones_like(p))


def _log_distribution(y: Tensor, form: Form) -> Tensor:
    return (y if form == "logits" else y.clamp(min=_TINY).log()).log_softmax(-1)


def _probability(y: Tensor, form: Form) -> Tensor:
    p = y.sigmoid() if form == "logits" else y
    return p.clamp(_SMALL, 1 - 1e-7)


def _bernoulli_kl(a: Tensor, b: Tensor, form: Form) -> Tensor:
    if form == "logits":
        p = a.sigmoid()
        return p * (torch.nn.functional.logsigmoid(a) - torch.nn.functional.logsigmoid(b)) + (1 - p) * (
            torch.nn.functional.logsigmoid(-a) - torch.nn.functional.logsigmoid(-b)
        )
    p, q = a.clamp(0, 1), b.clamp(_SMALL, 1 - _SMALL)
    return torch.xlogy(p, p / q) + torch.xlogy(1 - p, (1 - p) / (1 - q))


def find_metric(gm: fx.GraphModule, kind: DriftKind | None, forward_outputs: int) -> Metric:
    """The metric of a graph: of the given kind, or the one its outputs call for.

    `forward_outputs` counts the outputs of the forward pass; in a joint graph, which has more, gradients are compared.
    Outputs of an inference graph that end in a softmax, or come straight out of the last linear layer with two or more
    features, are distributions (kl) when their last dimension holds the classes; outputs that end in a sigmoid are
    independent probabilities (bernoulli); others are values (l2).

    Raises CalibrationError for kl where no output has a dimension of classes.
    """
    outputs = output_node(gm).args[0]
    flat = list(outputs) if isinstance(outputs, (list, tuple)) else [outputs]
    floats = {i: n for i, n in enumerate(flat) if isinstance(n, fx.Node) and _holds_floats(n)}
    if len(flat) > forward_outputs:
        return Metric(kind="gradients", outputs=tuple(i for i in floats if i >= forward_outputs))
    forms = {i: _form(node) for i, node in floats.items()}
    called_for: list[DriftKind] = [k for _, k in forms.values() if k is not None]
    chosen: DriftKind = kind or (called_for[0] if called_for else "l2")
    if chosen == "l2" or not floats:
        return Metric(kind="l2", outputs=tuple(floats))
    if chosen == "kl":
        floats = {i: n for i, n in floats.items() if _has_classes(n)}
        if not floats:
            raise CalibrationError(
                "drift 'kl' compares distributions over classes, and no output is [samples, ..., classes]. "
                "Allowed here: 'l2', and 'bernoulli' for independent probabilities."
            )
    told = [i for i, (_, k) in forms.items() if k is not None and i in floats]
    first, *others = [i for i in told if forms[i][1] == chosen] or told or list(floats)

    def alike(i: int) -> bool:
        return forms[i] == forms[first] and floats[i].meta["val"].shape == floats[first].meta["val"].shape

    form = forms[first][0]
    return Metric(kind=chosen, outputs=(first, *filter(alike, others)), form="logits" if form == "values" else form)


def _holds_floats(node: fx.Node) -> bool:
    value = value_of(node)
    return value is not None and value.dtype in FLOAT_DTYPES and numel_of(value) > 0


def _has_classes(node: fx.Node) -> bool:
    value = value_of(node)
    return value is not None and value.dim() >= 2 and concrete(value.shape[-1]) >= 2


def _form(node: fx.Node) -> tuple[Form, DriftKind | None]:
    """What an output holds, by the operator that made it, and the drift that it calls for."""
    value = value_of(node)
    source = root(node, through_casts=True)
    if node_op(source) == "aten.sigmoid":
        return "probabilities", "bernoulli"
    if value is None or not _has_classes(node) or not _keeps_last(node, source):
        return "values", None
    if source.op == "call_function" and class_of(source) == "softmax" and _normalises_last(source):
        # Log-probabilities are logits: their softmax is the distribution.
        return ("logits" if "log" in _original(source) else "probabilities"), "kl"
    op = gemm_op(source)
    if op is not None and op.kind != "conv" and value.dim() <= 3:
        return "logits", "kl"
    return "values", None


def _keeps_last(node: fx.Node, source: fx.Node) -> bool:
    """Whether the last dimension of a view, or a part of it, is the last one of what it is a view of."""
    while node is not source:
        above = node.args[0]
        assert isinstance(above, fx.Node)
        if _moves_last(node, above):
            return False
        if node_op(node) in _RESHAPES:
            before, after = value_of(above), value_of(node)
            if before is None or after is None or not before.dim() or before.shape[-1] != after.shape[-1]:
                return False
        node = above
    return True


_RESHAPES = ("aten.view", "aten._unsafe_view", "aten.reshape")


def _moves_last(node: fx.Node, above: fx.Node) -> bool:
    """Whether a view of `above` puts another dimension last."""
    value, name = value_of(above), node_op(node)
    last = value.dim() - 1 if value is not None else 0
    if name == "aten.permute":
        return node.args[1][-1] not in (-1, last)  # type: ignore[index, operator]
    if name == "aten.transpose":
        return bool({-1, last} & set(node.args[1:3]))
    return name == "aten.t"


def _normalises_last(node: fx.Node) -> bool:
    """Whether a softmax, or the last operator of a decomposed one, runs over the last dimension."""
    value = value_of(node)
    assert value is not None
    last = value.dim() - 1
    if node_op(node) in ("aten._softmax", "aten._log_softmax"):
        return node.args[1] in (-1, last)
    total = node.args[1] if len(node.args) > 1 else None
    while isinstance(total, fx.Node) and node_op(total) != "aten.sum":
        total = total.args[0] if total.args else None
    dims = total.args[1] if isinstance(total, fx.Node) and len(total.args) > 1 else None
    return isinstance(dims, (list, tuple)) and list(dims) in ([-1], [last])


def _original(node: fx.Node) -> str:
    return str(node.meta.get("original_aten", node.target))
