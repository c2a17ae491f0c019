"""Hard limits on a GEMM's format that hold whatever the device's tier: small rules that return a reason.

All of them read dataflow, never names:
    output head      no GEMM and no norm follows: its result is the model's answer (or goes straight into the loss)
    router           its result is ranked (top-k) to choose experts: a rounding changes which expert runs
    exact integers   an operand is an integer tensor turned float (positions, counts, one-hot)
    outer product    a product of activations with nothing to sum over: a narrow format loses bits and gains no speed
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Flag, auto

from torch import fx

from ..hardware_db.formats import get_format
from .gemm import GEMM_OPS, gemm_op, operand_nodes
from .graph import FLOAT_DTYPES, calls, concrete, is_backward, is_getitem, node_op, root, value_of
from .keys import FPROP, NodeKey, key_of
from .op_rules import class_of

_RANKING = frozenset({"aten.topk", "aten.multinomial", "aten.kthvalue"})
_INVERSE_ROOTS = frozenset({"aten.rsqrt", "aten.linalg_vector_norm"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Veto:
    """A limit: formats with fewer storage bits than `min_bits`, or fewer mantissa bits than `min_mantissa`, are
    barred.
    """

    code: str
    text: str
    min_bits: int = 0
    min_mantissa: int = 0

    def bars(self, format_name: str) -> bool:
        """Whether a format is barred; the bits of an integer format count as its mantissa."""
        fmt = get_format(format_name)
        return fmt.storage_bits < self.min_bits or fmt.significand_bits <= self.min_mantissa


_HEAD = Veto(
    code="veto-head", min_bits=16,
    text="output head: its result is the model's answer, so 8-bit formats are barred",
)  # fmt: skip
_ROUTER = Veto(
    code="veto-router", min_mantissa=23,
    text="router: its result is ranked to choose experts, so it keeps the traced precision",
)  # fmt: skip
_INTEGER = Veto(
    code="veto-integer", min_mantissa=23,
    text="an operand holds integers (positions or counts) that a shorter mantissa would merge",
)  # fmt: skip
_OUTER = Veto(
    code="veto-outer-product", min_mantissa=23,
    text="outer product: nothing is summed, so a narrow format would lose bits without gaining speed",
)  # fmt: skip


class _Ahead(Flag):
    NOTHING = 0
    GEMM = auto()
    NORM = auto()
    RANKING = auto()


def find_vetoes(gm: fx.GraphModule) -> Mapping[NodeKey, tuple[Veto, ...]]:
    """The vetoes of every GEMM in a keyed graph; a backward GEMM shares those of the forward GEMM it differentiates."""
    ahead = _look_ahead(gm)
    forward: dict[tuple[str, str, int], tuple[Veto, ...]] = {}
    found: dict[NodeKey, tuple[Veto, ...]] = {}
    for node in calls(gm):
        key = key_of(node)
        if key is None or gemm_op(node) is None:
            continue
        name = (key.fqn, key.op, key.ordinal)
        if key.phase == FPROP:
            forward[name] = _forward_vetoes(node, key, ahead.get(node, _Ahead.NOTHING))
        found[key] = forward.get(name, ())
    return found


def _forward_vetoes(node: fx.Node, key: NodeKey, ahead: _Ahead) -> tuple[Veto, ...]:
    vetoes = []
    if _Ahead.RANKING in ahead:
        vetoes.append(_ROUTER)
    elif key.op in ("linear", "conv") and not ahead & (_Ahead.GEMM | _Ahead.NORM):
        vetoes.append(_HEAD)
    if any(_holds_integers(n) for n in operand_nodes(node)):
        vetoes.append(_INTEGER)
    if key.op == "matmul" and _contraction(node) == 1:
        vetoes.append(_OUTER)
    return tuple(vetoes)


def _look_ahead(gm: fx.GraphModule) -> dict[fx.Node, _Ahead]:
    """What each forward value meets on its way to the outputs, not looking past the next GEMM."""
    ahead: dict[fx.Node, _Ahead] = {}
    for node in reversed(gm.graph.nodes):
        if node.op not in ("call_function", "placeholder") or is_backward(node):
            continue
        met = _Ahead.NOTHING
        for user in node.users:
            if user.op != "call_function" or is_backward(user):
                continue
            name = node_op(user)
            if name in GEMM_OPS:
                met |= _Ahead.GEMM
                continue
            if name in _RANKING:
                met |= _Ahead.RANKING
            if not is_getitem(user) and (name in _INVERSE_ROOTS or class_of(user) == "norm"):
                met |= _Ahead.NORM
            met |= ahead.get(user, _Ahead.NOTHING)
        ahead[node] = met
    return ahead


def _holds_integers(node: fx.Node) -> bool:
    value = value_of(root(node, through_casts=True))
    return value is not None and value.dtype not in FLOAT_DTYPES and not value.dtype.is_complex


def _contraction(node: fx.Node) -> int:
    op = gemm_op(node)
    value = value_of(operand_nodes(node)[0])
    if op is None or value is None or op.axes[0] is None:
        return 0
    return concrete(value.shape[op.axes[0]])
