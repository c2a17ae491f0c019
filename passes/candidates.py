"""Every way in which each node may be computed and stored, and why some ways are barred.

A GEMM may be computed as traced or in any narrower format and recipe that is scored (sensitivity.py), and hand on its
result as traced or rounded to the device's 16-bit storage format. Every other node computes as traced; what it writes
to memory may be stored in that format, too. A way is barred, in this order, when the format was measured to be no
faster than fp32, by the device's verdict, by a veto, by the recipe, near the model's input, by the range of the values,
and for want of a score. An arithmetic that is barred is listed once, a format that the device or a veto refuses with
one recipe.

A value of another operator that only GEMMs read may be stored narrow for nothing in drift: each reader rounds its
operand itself, and its score says what that costs. Readers that do not must then not be chosen together with the narrow
storage (see `formulate`).

A linear's weights alone may be narrow (recipe `wide`) where the device has such products, in graphs without a backward
pass: a training step would change the weights after each use. CPUs store nothing narrower than traced between the nodes
of such graphs: what is read again soon lies in their caches, and converting it takes time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import cast

from torch import fx

from ..hardware_db.capability import Device, Verdict
from ..hardware_db.formats import WIDE, get_format, is_static, keeps_wide, packs_weight, split_recipe
from ..hardware_db.narrow_weights import stores_weights
from ..hardware_db.schema import OpClass, natural_accumulator, recipe_accumulator
from .cost import format_of
from .gemm import gemm_op, operand_nodes, operand_slots, takes_recipe
from .graph import CAST_OPS, calls, concrete, float_dtype, is_backward, is_joint, node_op, root, value_of
from .keys import WGRAD, NodeKey, key_of
from .labels import SCORED_ARITHMETIC, gemm_label, label, split_label, stored_label
from .op_rules import Policy, class_of, rule_of
from .plan_fields import Reason
from .regions import leaves_region
from .scores import NodeScores, Score, Scores
from .sensitivity import has_one_weight, weight_operands
from .static_steps import has_steps
from .value_use import Use, use_of
from .vetoes import find_vetoes
from .workload import gemm_shape

DriftOf = Callable[[str, str, fx.Node], float]
"""The drift of (key, label of an arithmetic or of a stored result, node), in place of measured scores."""

STORED_CLASSES = frozenset({"pointwise", "norm", "softmax", "embedding"})
"""Op classes whose results may be stored narrow although others than GEMMs read them."""

_RAW_CONTRACTION = 16
_FEW_ROWS = 16
_IN_FP16 = {"fp16": ("lhs", "rhs", "out"), "fp16:wide/none": ("rhs",)}
"""Which tensors of a product these ways hold in fp16 without a scale."""
_NO_RANGE = Reason(code="unscored", text="calibration saw no range of the activations for static steps to reach over")
_FP16_LIMIT = get_format("fp16").max / 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """One way to compute and store a node: a candidate without its price.

    `recipe` is in the order of the node's operands, `activation` the recipe of the operands that are no parameters;
    `static_range` is what its static steps reach over.
    """

    label: str
    compute: str
    recipe: str = "none"
    activation: str = "none"
    accumulate: str
    output: str
    drift: float | None = None
    measured: bool = False
    static_range: tuple[float, float] | None = None
    blocked: Reason | None = None

    @property
    def arithmetic(self) -> str:
        """The label of the arithmetic alone."""
        return split_label(self.label)[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeWays:
    """The ways of one node, the traced one first, then from wide to narrow.

    `rounded_by_readers`: a narrow result is charged no drift, since the GEMMs that read it round it themselves.
    """

    node: fx.Node
    key: NodeKey
    traced: str
    ways: tuple[Way, ...]
    rounded_by_readers: bool = False

    @property
    def allowed(self) -> list[Way]:
        """The ways that may be chosen; the traced one always may."""
        return [w for w in self.ways if w.blocked is None]


def ways_of(
    gm: fx.GraphModule, device: Device, parameters: frozenset[fx.Node], scores: Scores | DriftOf | None
) -> list[NodeWays]:
    """The ways of every keyed node of a graph that is no view, in graph order.

    With measured `scores` a way without a score is barred, without any (None) no way has a drift and none is barred for
    that.
    """
    return _Finder(gm, device, parameters, scores).run()


def narrow_storage(device: Device) -> str | None:
    """The 16-bit format in which a device can hold what its vector units compute, None if it has none."""
    if get_format(device.storage).storage_bits == 16:
        return device.storage
    return next((f for f in ("bf16", "fp16") if device.supports("pointwise", None, f).ok), None)


class _Finder:
    def __init__(
        self, gm: fx.GraphModule, device: Device, parameters: frozenset[fx.Node], scores: Scores | DriftOf | None
    ) -> None:
        self.device = device
        self.parameters = parameters
        self.scores = scores
        self.joint = is_joint(gm)
        self.storage = None if device.kind == "cpu" and not self.joint else narrow_storage(device)
        self.vetoes = find_vetoes(gm)
        self.nodes = [
            (n, k) for n in calls(gm) if (k := key_of(n)) is not None and rule_of(n).policy is not Policy.VIEW
        ]
        self.arithmetics = _offered(device)
        self.verdicts: dict[tuple[str, str], Verdict] = {}
        self.arithmetic: dict[fx.Node, list[Way]] = {}

    def run(self) -> list[NodeWays]:
        for node, key in self.nodes:
            if rule_of(node).policy is Policy.LADDER:
                self.arithmetic[node] = list(self._gemm(node, key, _traced(node)))
        return [
            self._stored_gemm(node, key) if node in self.arithmetic else self._kept(node, key)
            for node, key in self.nodes
        ]

    # the arithmetic of GEMMs

    def _gemm(self, node: fx.Node, key: NodeKey, traced: str) -> Iterator[Way]:
        """The ways to multiply, with the result as traced."""
        yield _traced_way(traced)
        weights = weight_operands(node, self.parameters)[:2]
        for name, recipes in self.arithmetics.items():
            if not _is_narrower(name, traced):
                continue
            refused = self._refused(node, key, traced, name)
            recipes = [r for r in recipes if not packs_weight(r) or self._packs(node, r, weights)]
            rounded = [r for r in recipes if not keeps_wide(r)]
            for recipe in rounded[:1] if refused else rounded:
                yield self._way(node, key, traced, name, recipe, weights, refused)
            for recipe in filter(keeps_wide, recipes):
                yield self._way(node, key, traced, name, recipe, weights, self._refused_weight(key, name))

    def _way(
        self, node: fx.Node, key: NodeKey, traced: str, name: str, recipe: str, weights: list[bool],
        refused: Reason | None,
    ) -> Way:  # fmt: skip
        text = gemm_label(name, recipe)
        score = self._score(key, text, node)
        activation, weight = (r.name for r in split_recipe(recipe))
        in_order = "/".join(weight if is_weight else activation for is_weight in weights)
        reach = self._reach(key) if is_static(recipe) else None
        return Way(
            label=text,
            compute=name,
            recipe="none" if recipe == "none" else in_order,
            activation=activation,
            accumulate=recipe_accumulator(name, recipe),
            output=traced,
            drift=score.drift if score else None,
            measured=score is not None and score.measured,
            static_range=reach,
            blocked=refused
            or _no_recipe(node, recipe)
            or (_NO_RANGE if is_static(recipe) and reach is None else None)
            or (self._raw_input(node) if score is None or not score.measured else None)
            or _overflow(self._known(key), text, *_IN_FP16.get(text, ()))
            or self._unscored(text, score),
        )

    def _packs(self, node: fx.Node, recipe: str, weights: list[bool]) -> bool:
        """Whether a product is one whose weight may be packed once: in a forward pass that nobody trains."""
        if self.joint or _traced(node) != "fp32" or not has_one_weight(weights):
            return False
        few = gemm_op(node).kind == "matmul" and ((s := gemm_shape(node)) is None or s.m < _FEW_ROWS)  # type: ignore
        if few and not keeps_wide(recipe):  # narrow weights alone are read as fast, and lose less
            return False
        return takes_recipe(node, recipe) and bool(self.device.profile.weights)

    def _reach(self, key: NodeKey) -> tuple[float, float] | None:
        """The smallest and largest value that calibration saw of the activations."""
        known = self._known(key)
        seen = known.ranges.get("lhs") if known is not None else None
        return seen.ends if seen is not None and seen.ends is not None and has_steps(*seen.ends) else None

    def _refused_weight(self, key: NodeKey, name: str) -> Reason | None:
        """Why a linear's weights may not be stored in a format. An output head's may: its products and results stay as
        traced, and what its weights lose is in the score."""
        verdict = stores_weights(self.device, name)
        if not verdict.ok:
            return Reason(code="verdict", text=verdict.reason)
        return self._vetoed(key, name, but="veto-head")

    def _refused(self, node: fx.Node, key: NodeKey, traced: str, name: str) -> Reason | None:
        """Why no recipe makes a format possible."""
        device, accumulate = self.device, natural_accumulator(name)
        if traced == "fp32" and device.measured is not None:
            slow = device.slower_than_fp32(name, accumulate, gemm_shape(node))
            if slow is not None:
                text = f"GEMMs of about this shape measured {slow:.2g} times as fast as fp32's"
                return Reason(code="measured", text=f"no {name}: {text} ({', '.join(device.overlays)})")
        verdict = self.verdicts.get((key.op, name))
        if verdict is None:
            verdict = device.supports(cast(OpClass, key.op), None, name, accumulate)
            self.verdicts[key.op, name] = verdict
        if not verdict.ok:
            return Reason(code="verdict", text=verdict.reason)
        return self._vetoed(key, name)

    def _vetoed(self, key: NodeKey, name: str, but: str = "") -> Reason | None:
        barring = next((v for v in self.vetoes.get(key, ()) if v.bars(name) and v.code != but), None)
        return Reason(code=barring.code, text=f"no {name}: {barring.text}") if barring else None

    def _raw_input(self, node: fx.Node) -> Reason | None:
        """Why ways that were not measured are barred: for short sums over the model's raw input estimates fail, since
        rounding errors repeat there and what follows can amplify them at second order."""
        read = [root(n, through_casts=True) for n in operand_nodes(node)]
        if not any(v.op == "placeholder" and v not in self.parameters and not is_backward(v) for v in read):
            return None
        length = _contraction(node)
        if length >= _RAW_CONTRACTION:
            return None
        text = f"reads the model's input and sums over {length} values: stays as traced unless measured"
        return Reason(code="veto-first-layer", text=text)

    # how results are stored

    def _stored_gemm(self, node: fx.Node, key: NodeKey) -> NodeWays:
        """The ways of a GEMM: each arithmetic with its result as traced, or stored narrow, or either."""
        traced, use = _traced(node), use_of(node)
        # A library GEMM of narrow operands can write fp32 on GPUs: a parameter's gradient is not rounded twice.
        as_traced = key.phase == WGRAD and key.op != "conv" and self.device.kind == "gpu"
        narrow = None if traced != "fp32" or use.output or as_traced else self.storage
        stored = None if narrow is None else self._score(key, stored_label(narrow), node)
        ways: list[Way] = []
        for way in self.arithmetic[node]:
            wide = narrow is None or _bits(way) > 8
            if wide:
                ways.append(way)
            if narrow is not None and way.compute != traced and not (wide and way.blocked):
                text = label(way.label, "none", narrow, traced)
                ways.append(self._narrowed(key, way, text, stored))
        return NodeWays(node=node, key=key, traced=traced, ways=tuple(ways))

    def _narrowed(self, key: NodeKey, way: Way, text: str, stored: Score | None) -> Way:
        """A way with its result rounded to the narrow storage format, which scores `stored`, under the label `text`."""
        assert self.storage is not None
        too_large = _overflow(self._known(key), text, "out") if self.storage == "fp16" else None
        return replace(
            way,
            label=text,
            output=self.storage,
            drift=None if way.drift is None or stored is None else way.drift + stored.drift,
            measured=way.measured and stored is not None and stored.measured,
            blocked=way.blocked or too_large or self._unscored(text, stored),
        )

    def _kept(self, node: fx.Node, key: NodeKey) -> NodeWays:
        traced = _traced(node)
        way = _traced_way(traced)
        if traced != "fp32" or self.storage is None:
            return NodeWays(node=node, key=key, traced=traced, ways=(way,))
        use, text = use_of(node), stored_label(self.storage)
        free = value_of(node) is not None and self._free(use, self.storage)
        score = Score(drift=0.0, measured=True) if free else self._score(key, text, node)
        stored = self._narrowed(key, replace(way, blocked=self._kept_wide(node, use, free)), text, score)
        return NodeWays(node=node, key=key, traced=traced, ways=(way, stored), rounded_by_readers=free)

    def _kept_wide(self, node: fx.Node, use: Use, free: bool) -> Reason | None:
        """Why the result of a node that is no GEMM is not stored narrow."""
        if value_of(node) is None:
            return Reason(code="policy", text="several tensors result: they are stored as traced")
        if use.output:
            return Reason(code="output", text="goes straight to the model's outputs, which keep their dtype")
        if not leaves_region(node):
            return Reason(code="fused", text="stays in registers: nothing outside of its fused region reads it")
        if use.ranked:
            return Reason(code="veto-ranking", text="its values are ranked, and rounding could reorder them")
        if free:
            return None
        if class_of(node) not in STORED_CLASSES or node_op(node) in CAST_OPS or node_op(node).endswith("_"):
            return Reason(code="policy", text=rule_of(node).why)
        return None

    def _free(self, use: Use, narrow: str) -> bool:
        """Whether only GEMMs read a value and each of them may round it at least as much as `narrow` does."""
        return use.only_gemms and all(
            any(w.blocked is None and _rounds(w, narrow) for w in self.arithmetic.get(g, ())) for g in use.gemms
        )

    # scores

    def _known(self, key: NodeKey) -> NodeScores | None:
        return self.scores.nodes.get(str(key)) if isinstance(self.scores, Scores) else None

    def _score(self, key: NodeKey, text: str, node: fx.Node) -> Score | None:
        if self.scores is None:
            return None
        if isinstance(self.scores, Scores):
            return self.scores.of(str(key), text)
        return Score(drift=self.scores(str(key), text, node))

    def _unscored(self, text: str, score: Score | None) -> Reason | None:
        if score is not None or self.scores is None:
            return None
        return Reason(code="unscored", text=f"calibration gave no score for {text}")


def _traced_way(traced: str) -> Way:
    return Way(
        label=traced, compute=traced, accumulate=natural_accumulator(traced), output=traced, drift=0.0, measured=True
    )


def _traced(node: fx.Node) -> str:
    dtype = float_dtype(node)
    return (format_of(dtype) if dtype is not None else None) or "fp32"


def _rounds(way: Way, narrow: str) -> bool:
    """Whether a way rounds the activations that it reads at least as much as `narrow` does."""
    return way.activation != WIDE.name and (way.compute == narrow or _bits(way) <= 8)


def _bits(way: Way) -> int:
    return get_format(way.compute).storage_bits


def _is_narrower(name: str, traced: str) -> bool:
    """Whether a format is a cheaper way to compute what was traced: fewer bits, or fp32's shorter mantissas."""
    if traced in ("fp64", name):
        return False
    return traced == "fp32" or get_format(name).storage_bits < get_format(traced).storage_bits


def _no_recipe(node: fx.Node, recipe: str) -> Reason | None:
    """Why a recipe cannot scale a GEMM's operands."""
    op = gemm_op(node)
    if recipe != "none" and op is not None and op.kind == "sdpa":
        return Reason(code="recipe", text="fused attention takes operands without scales only")
    if not takes_recipe(node, recipe):
        text = "the operands are not summed along one axis that such scales could follow"
        return Reason(code="recipe", text=f"no {recipe} scales: {text}")
    return None


def _offered(device: Device) -> dict[str, list[str]]:
    """Recipes by format, from wide to narrow formats: what is scored; 8-bit floats take mx32 where the device scales
    them in hardware."""
    found: dict[str, list[str]] = {}
    for name, recipe in sorted(SCORED_ARITHMETIC, key=lambda pair: -get_format(pair[0]).storage_bits):
        if name.startswith("fp8_") and recipe == "mx32/mx32" and name not in device.profile.mx_formats:
            continue
        found.setdefault(name, []).append(recipe)
    return found


def _overflow(known: NodeScores | None, text: str, *tensors: str) -> Reason | None:
    """Why a tensor does not fit fp16 with a factor of two to spare, by the ranges seen in calibration."""
    if known is None:
        return None
    for name in tensors:
        if (seen := known.ranges.get(name)) is not None and seen.absmax > _FP16_LIMIT:
            what = "the result" if name == "out" else f"operand {name}"
            limit = f"fp16 holds {2 * _FP16_LIMIT:.0f}, half of which is kept free"
            return Reason(code="overflow", text=f"no {text}: {what} reaches {seen.absmax:.4g}, {limit}")
    return None


def _contraction(node: fx.Node) -> int:
    """Values along the contracted axis (channels of a convolution), of the shorter operand; the length of the sum where
    no operand has such an axis."""
    lengths = [
        concrete(value.shape[axis])
        for index, axis in operand_slots(node)
        if axis is not None and (value := value_of(cast(fx.Node, node.args[index]))) is not None
    ]
    shape = gemm_shape(node)
    return min(lengths) if lengths else shape.k if shape is not None else 0
