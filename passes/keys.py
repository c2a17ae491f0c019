"""Names for nodes that stay the same from one capture to the next: `fqn|phase|op|ordinal`.

The module path comes from the node's module stack (backward nodes carry that of the forward node they differentiate),
the phase of a GEMM from dataflow, never from shapes: in the backward pass a GEMM multiplies a gradient with a value
of the forward pass. If that value is the forward GEMM's right operand the result is the gradient of the left one
(dgrad), and the other way round (wgrad).

A GEMM is numbered among the GEMMs of its kind in its module, in forward order, and its gradients inherit the number
through `seq_nr`. All other nodes are numbered within (module, phase, operator).
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, get_args

from torch import fx

from .gemm import GemmOp, gemm_op, operand_nodes, written_gradients
from .graph import calls, is_backward, is_float, is_joint, node_op, root

Phase = Literal["fprop", "dgrad", "wgrad", "bwd"]
FPROP: Final = "fprop"
DGRAD: Final = "dgrad"
WGRAD: Final = "wgrad"
BWD: Final = "bwd"
PHASES: tuple[Phase, ...] = get_args(Phase)

_META = "dsmp_key"
_GATHERS = frozenset({"_c10d_functional.all_gather_into_tensor", "_c10d_functional.wait_tensor"})
_ORDINAL = re.compile(r"0|[1-9][0-9]{0,8}")
_LOCAL_ROOT = re.compile(r"^(?:L\['(?:self|s|args)'\](?:\[\d+\])?|L__self__)(?:\.|$)")
_OTHER_ROOT = re.compile(r"^[LG]\['(\w+)'\](?:\[[^\]]*\])?(?:\.|$)")


@dataclass(frozen=True, order=True, slots=True)
class NodeKey:
    """Identity of a node: module path, phase, operator and ordinal."""

    fqn: str
    phase: Phase
    op: str
    ordinal: int

    def __str__(self) -> str:
        return f"{self.fqn}|{self.phase}|{self.op}|{self.ordinal}"

    @classmethod
    def parse(cls, text: str) -> NodeKey:
        """The inverse of `str`. Raises ValueError on a text that is no key."""
        parts = text.rsplit("|", 3)  # a module's name may hold a bar itself
        if len(parts) != 4 or parts[1] not in PHASES or not parts[2] or not _ORDINAL.fullmatch(parts[3]):
            raise ValueError(f"{text!r} is no node key; the form is fqn|phase|op|ordinal with a phase of {PHASES}")
        return cls(parts[0], parts[1], parts[2], int(parts[3]))


@dataclass(frozen=True, kw_only=True, slots=True)
class ModuleNames:
    """How a module stack entry becomes a module path.

    `by_id` maps `str(id(module))`, the key that Dynamo gives each stack entry, to the module's name below the compiled
    root: exact, even in the frames that a graph break leaves inside a submodule. `frame` names nodes without a stack.
    """

    by_id: Mapping[str, str] = field(default_factory=dict)
    frame: str = ""

    def of(self, node: fx.Node) -> str:
        """The module path of a node, `""` for the root."""
        stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
        if not stack:
            return self.frame
        ident, entry = list(stack.items())[-1]
        known = self.by_id.get(str(ident).split("@")[0])
        return known if known is not None else plain_path(entry[0])


def plain_path(path: str) -> str:
    """A stack entry's own text without the name of the traced frame's root (`L['self'].a.b` -> `a.b`)."""
    path = re.sub(r"@\d+", "", path)
    stripped, count = _LOCAL_ROOT.subn("", path)
    if count:
        return stripped
    other = _OTHER_ROOT.match(path)
    if other:
        rest = path[other.end() :]
        return rest or other.group(1)
    return path


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyReport:
    """What key assignment found: backward GEMMs whose forward node is unknown, by node name."""

    unmatched: tuple[str, ...]


def key_of(node: fx.Node) -> NodeKey | None:
    """The key that `assign_keys` gave a node, None for nodes that are not planned."""
    return node.meta.get(_META)


def give_key(node: fx.Node, key: NodeKey) -> None:
    """Name a node that was put into a graph after its nodes were given keys."""
    node.meta[_META] = key


def hand_on_key(source: fx.Node, node: fx.Node) -> None:
    """Give a node the key of the node that it was made from, if that has one."""
    if _META in source.meta:
        node.meta[_META] = source.meta[_META]


def assign_keys(gm: fx.GraphModule, names: ModuleNames, is_parameter: Callable[[fx.Node], bool]) -> KeyReport:
    """Give every float-valued call a key in `node.meta`; unique within the graph.

    `is_parameter` tells whether a node is a parameter: a matrix product with one is a `linear`, else a `matmul`.
    """
    joint = is_joint(gm)
    parameters = {n for n in gm.graph.nodes if is_parameter(n)}
    taken: set[NodeKey] = set()
    numbers: Counter[tuple[str, Phase, str]] = Counter()
    forward_gemms: defaultdict[int, list[fx.Node]] = defaultdict(list)
    forward: list[tuple[fx.Node, NodeKey]] = []
    unmatched: list[str] = []

    def give(node: fx.Node, key: NodeKey) -> None:
        while key in taken:
            key = NodeKey(key.fqn, key.phase, key.op, key.ordinal + 1)
        taken.add(key)
        node.meta[_META] = key

    def number(node: fx.Node, fqn: str, phase: Phase, op: str) -> None:
        give(node, NodeKey(fqn, phase, op, numbers[fqn, phase, op]))
        numbers[fqn, phase, op] += 1

    nodes = [n for n in calls(gm) if is_float(n)]
    for node in nodes:
        op = gemm_op(node)
        if op is not None and not (joint and is_backward(node)):
            number(node, names.of(node), FPROP, _kind(node, op, parameters))
            forward.append((node, node.meta[_META]))
            if "seq_nr" in node.meta:
                forward_gemms[node.meta["seq_nr"]].append(node)
    for node in nodes:
        op = gemm_op(node)
        backward = joint and is_backward(node)
        if op is None:
            number(node, names.of(node), BWD if backward else FPROP, node_op(node).split(".")[-1])
        elif backward:
            found = _differentiated(node, op, forward_gemms.get(node.meta.get("seq_nr", -1), []), taken)
            if found is None and not op.backward:
                # The backward method of a custom autograd.Function does not carry the number of its forward.
                owner = names.of(node)
                beside = [f for f, key in forward if key.fqn == owner]
                found = _differentiated(node, op, beside, taken)
            if found is None:
                unmatched.append(node.name)
                number(node, names.of(node), BWD, _kind(node, op, parameters))
            else:
                differentiated, phase = found
                origin = key_of(differentiated)
                assert origin is not None
                give(node, NodeKey(origin.fqn, phase, origin.op, origin.ordinal))
    return KeyReport(unmatched=tuple(unmatched))


def _kind(node: fx.Node, op: GemmOp, parameters: set[fx.Node]) -> str:
    if op.kind != "matmul":
        return op.kind
    return "linear" if any(_stored(n) in parameters for n in operand_nodes(node)) else "matmul"


def _stored(node: fx.Node) -> fx.Node:
    """The value that an operand is a view or cast of, through the gather of a weight that is stored in shards."""
    value = root(node, through_casts=True)
    while node_op(value) in _GATHERS:
        value = root(value.all_input_nodes[0], through_casts=True)
    return value


def _differentiated(
    node: fx.Node, op: GemmOp, candidates: list[fx.Node], taken: set[NodeKey]
) -> tuple[fx.Node, Phase] | None:
    """The forward GEMM that a backward GEMM differentiates, and the phase."""
    if op.backward:
        if not candidates:
            return None
        dgrad, wgrad = written_gradients(node)
        both = dgrad and wgrad
        return candidates[0], BWD if op.kind == "sdpa" or both else DGRAD if dgrad else WGRAD
    matches: list[tuple[int, fx.Node, Phase]] = []
    for side, operand in enumerate(operand_nodes(node)):
        value = root(operand, through_casts=True)
        if is_backward(value):
            continue
        saved = _saved(operand)
        for forward in candidates:
            lhs, rhs = operand_nodes(forward)[:2]
            pairs: tuple[tuple[int, fx.Node, Phase], ...] = ((1, rhs, DGRAD), (0, lhs, WGRAD))
            for place, source, phase in pairs:
                if root(source, through_casts=True) is value:
                    # Both operands may be views of one value (x @ x.T, q and k of one projection): the very tensor
                    # that was saved tells them apart, for x @ x the side it stands on (grad @ rhs.T, lhs.T @ grad).
                    matches.append((2 * (saved is not source) + (side != place), forward, phase))
    matches.sort(key=lambda m: m[0])
    for _, forward, phase in matches:
        origin = key_of(forward)
        if origin is not None and NodeKey(origin.fqn, phase, origin.op, origin.ordinal) not in taken:
            return forward, phase
    return matches[0][1:] if matches else None


def _saved(node: fx.Node) -> fx.Node:
    """The forward value that a view taken in the backward pass was taken of."""
    while is_backward(node) and node.args and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node
