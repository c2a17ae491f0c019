"""Drift: how far a low-precision run is from the fp32 run, and the cotangents whose projections measure it.

    kl          mean over samples and scored positions of KL(p || q), p and q the distributions that the outputs give,
                in nats: how much the cross-entropy rises on labels drawn from the model itself
    bernoulli   the same for independent binary outputs, summed over the outputs of a sample
    l2          mean over samples of |y - y'|^2 / |y|^2, averaged over the output tensors
    gradients   mean over parameters of |g - g'|^2 / |g|^2, for a training step

All four are second order in a small error, so for each there is a random cotangent u of the outputs with
kappa * E[(u . dy)^2] = drift, whatever the error dy is: label-free, since labels are drawn from the model's own
distribution (kl, bernoulli) or are random probes (l2, gradients). That a mean KL rather than a signed change of the
loss is what formats should be judged by was tried on eight tasks; with gradients the relative squared error bounds the
share of a step's progress that noise of that size costs (E|g + d|^2 = |g|^2 (1 + d^2/g^2) for independent noise).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, fx

from .gemm import gemm_op
from .graph import FLOAT_DTYPES, node_op, numel_of, output_node, root, value_of
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
        first = outputs[self.outputs[0]]
        return 1 if self.kind == "gradients" or first.dim() == 0 else int(first.shape[0])

    def cotangents(self, outputs: Sequence[Any], generator: torch.Generator) -> list[Tensor | None]:
        """One random cotangent per output, None where an output is not compared."""
        found: list[Tensor | None] = [None] * len(outputs)
        for i in self.outputs:
            y = outputs[i].detach()
            found[i] = self._cotangent(y, generator).to(y.dtype)
        return found

    def _cotangent(self, y: Tensor, generator: torch.Generator) -> Tensor:
        count = len(self.outputs)
        if self.kind in ("l2", "gradients"):
            probe = torch.randn(y.shape, generator=generator, dtype=torch.float32).to(y.device)
            rows = y.reshape(1, -1) if self.kind == "gradients" or y.dim() == 0 else y.reshape(y.shape[0], -1)
            size = rows.float().norm(dim=1).reshape(-1, *[1] * max(0, y.dim() - 1))
            scaled = torch.where(size > 0, probe / size.clamp(min=_TINY), torch.zeros_like(probe))
            return scaled.reshape(y.shape).mul(count**-0.5)
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
        parts = []
        for i in self.outputs:
            a, b = reference[i].detach().double(), other[i].detach().double()
            parts.append(self._compare(a, b))
        mean = torch.stack(parts).mean(0)
        return torch.where(mean.isnan(), torch.full_like(mean, torch.inf), mean).clamp(min=0.0)

    def _compare(self, a: Tensor, b: Tensor) -> Tensor:
        if self.kind == "gradients" or a.dim() == 0:
            a, b = a.reshape(1, *a.shape), b.reshape(1, *b.shape)
        if self.kind in ("l2", "gradients"):
            size = a.square().reshape(a.shape[0], -1).sum(1)
            error = (a - b).square().reshape(a.shape[0], -1).sum(1)
            return torch.where(size > 0, error / size.clamp(min=_TINY), (error > 0).double())
        if self.kind == "bernoulli":
            return _bernoulli_kl(a, b, self.form).reshape(a.shape[0], -1).sum(1)
        la, lb = _log_distribution(a, self.form), _log_distribution(b, self.form)
        return (la.exp() * (la - lb)).sum(-1).reshape(a.shape[0], -1).mean(1)

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
                parts.append(-(log.exp() * log).sum(-1).reshape(y.shape[0], -1).mean(1))
        return torch.stack(parts).mean(0)


_TINY, _SMALL = 1e-30, 1e-12


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
    features, are distributions (kl); outputs that end in a sigmoid are independent probabilities (bernoulli); others
    are values (l2).
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
    told = [i for i, (_, k) in forms.items() if k is not None]
    first, *others = [i for i in told if forms[i][1] == chosen] or told or list(floats)

    def alike(i: int) -> bool:
        return forms[i] == forms[first] and floats[i].meta["val"].shape == floats[first].meta["val"].shape

    form = forms[first][0]
    return Metric(kind=chosen, outputs=(first, *filter(alike, others)), form="logits" if form == "values" else form)


def _holds_floats(node: fx.Node) -> bool:
    value = value_of(node)
    return value is not None and value.dtype in FLOAT_DTYPES and numel_of(value) > 0


def _form(node: fx.Node) -> tuple[Form, DriftKind | None]:
    """What an output holds, by the operator that made it, and the drift that it calls for."""
    value = value_of(node)
    source = root(node, through_casts=True)
    if node_op(source) == "aten.sigmoid":
        return "probabilities", "bernoulli"
    if source.op == "call_function" and class_of(source) == "softmax":
        # Log-probabilities are logits: their softmax is the distribution.
        return ("logits" if "log" in _original(source) else "probabilities"), "kl"
    classes = value.shape[-1] if value is not None and value.dim() in (2, 3) else 0
    if gemm_op(source) is not None and classes >= 2:
        return "logits", "kl"
    return "values", None


def _original(node: fx.Node) -> str:
    return str(node.meta.get("original_aten", node.target))
