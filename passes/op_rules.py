"""One row per ATen operator: its class and what may happen to its precision.

Policies
    ladder   a product with its own sum: may take any format on the device's ladder for its class
    keep     computes in the dtype the model was traced with (sums, exponentials, divisions, losses, indices ...)
    view     makes no new numbers: takes the format of what it reads
An operator without a row is kept too, and the plan says so.

Inductor's decompositions break norms, softmax and losses into primitive operators; those still carry the operator
they came from (`original_aten`), which gives them their class.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

import torch
from torch import fx

from ..hardware_db.schema import OpClass
from .gemm import GEMM_OPS
from .graph import CAST_OPS, SLICE_OPS, VIEW_OPS, node_op, op_name


class Policy(Enum):
    """What may happen to an operator's precision."""

    LADDER = "ladder"
    KEEP = "keep"
    VIEW = "view"


@dataclass(frozen=True, kw_only=True, slots=True)
class OpRule:
    """A row: the op class, the policy, and why it is kept (shown in the plan)."""

    op_class: OpClass
    policy: Policy
    why: str = ""


def _kept(op_class: OpClass, why: str, names: str, namespace: str = "aten") -> dict[str, OpRule]:
    rule = OpRule(op_class=op_class, policy=Policy.KEEP, why=why)
    return {f"{namespace}.{name}": rule for name in names.split()}


OP_RULES: Mapping[str, OpRule] = {
    **{
        name: OpRule(op_class=op.kind, policy=Policy.LADDER, why="multiplies and accumulates")
        for name, op in GEMM_OPS.items()
    },
    **{name: OpRule(op_class="view", policy=Policy.VIEW, why="no arithmetic") for name in VIEW_OPS | SLICE_OPS},
    **{name: OpRule(op_class="pointwise", policy=Policy.KEEP, why="a cast written in the model") for name in CAST_OPS},
    **_kept(
        "pointwise",
        "elementwise: computed in registers at the traced precision, fused into its neighbours",
        """
        abs add sub rsub mul div neg relu relu_ leaky_relu hardtanh clamp clamp_min clamp_max minimum maximum fmin
        fmax where masked_fill sign sgn floor ceil round trunc frac remainder fmod floor_divide copy copy_ fill lerp
        addcmul addcdiv threshold_backward hardsigmoid hardswish hardswish_backward hardsigmoid_backward
        native_dropout dropout native_dropout_backward bernoulli heaviside copysign nan_to_num square
        """,
    ),
    **_kept(
        "pointwise",
        "elementwise with a fused multiply-add",
        "fma",
        "prims",
    ),
    **_kept(
        "pointwise",
        "transcendental: loses its low bits in a narrow format",
        """
        exp exp2 expm1 log log2 log10 log1p pow sqrt rsqrt reciprocal sin cos tan asin acos atan atan2 sinh cosh
        tanh asinh acosh atanh erf erfc erfinv sigmoid logit gelu silu mish softplus elu celu selu logaddexp lgamma
        digamma gelu_backward silu_backward sigmoid_backward tanh_backward softplus_backward elu_backward
        logit_backward mish_backward leaky_relu_backward hardtanh_backward sinc xlogy hypot polar special_i0 i0
        log_sigmoid_forward log_sigmoid_backward prelu _prelu_kernel _prelu_kernel_backward
        """,
    ),
    **_kept(
        "reduction",
        "sums many terms: stops growing in a narrow format",
        """
        sum mean prod var var_mean std std_mean norm linalg_vector_norm logsumexp cumsum cumprod logcumsumexp nansum
        amax amin aminmax max min any all argmax argmin histc bincount trace dot mv addmv addr vdot cdist
        _cdist_forward _cdist_backward avg_pool1d avg_pool2d avg_pool3d _adaptive_avg_pool2d _adaptive_avg_pool3d
        adaptive_avg_pool1d avg_pool2d_backward avg_pool3d_backward _adaptive_avg_pool2d_backward
        _adaptive_avg_pool3d_backward max_pool2d_with_indices max_pool3d_with_indices adaptive_max_pool2d
        max_pool2d_with_indices_backward max_pool3d_with_indices_backward adaptive_max_pool2d_backward
        fractional_max_pool2d upsample_bilinear2d upsample_nearest2d upsample_bicubic2d _upsample_bilinear2d_aa
        grid_sampler_2d upsample_bilinear2d_backward upsample_nearest2d_backward grid_sampler_2d_backward
        upsample_bicubic2d_backward count_nonzero median nanmedian mode kthvalue cummax cummin
        """,
    ),
    **_kept(
        "reduction",
        "window reduction",
        "_low_memory_max_pool_with_offsets _low_memory_max_pool_offsets_to_indices",
        "prims",
    ),
    **_kept(
        "norm",
        "normalisation: mean and variance are long sums",
        """
        native_layer_norm native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_no_training
        _native_batch_norm_legit_functional native_group_norm cudnn_batch_norm miopen_batch_norm batch_norm_backward
        native_layer_norm_backward native_batch_norm_backward native_group_norm_backward _fused_rms_norm
        cudnn_batch_norm_backward _fused_rms_norm_backward rms_norm renorm batch_norm_stats batch_norm_elemt
        _batch_norm_with_update _batch_norm_no_update _batch_norm_with_update_functional
        """,
    ),
    **_kept(
        "softmax",
        "exponentials and their sum",
        "_softmax _log_softmax _safe_softmax softmax log_softmax _softmax_backward_data _log_softmax_backward_data",
    ),
    **_kept(
        "loss",
        "the loss and its first gradients",
        """
        nll_loss_forward nll_loss_backward nll_loss2d_forward nll_loss2d_backward mse_loss mse_loss_backward
        binary_cross_entropy binary_cross_entropy_backward binary_cross_entropy_with_logits smooth_l1_loss
        smooth_l1_loss_backward huber_loss huber_loss_backward kl_div cross_entropy_loss _ctc_loss
        _ctc_loss_backward l1_loss soft_margin_loss multi_margin_loss cosine_embedding_loss
        """,
    ),
    **_kept(
        "embedding",
        "table look-up: no arithmetic to speed up, and its gradient is a sum",
        """
        embedding embedding_dense_backward embedding_bag _embedding_bag _embedding_bag_forward_only
        _unsafe_masked_index_put_accumulate
        """,
    ),
    **_kept(
        "index",
        "moves or orders numbers: ties and indices must not change",
        """
        index index_put _unsafe_index _unsafe_index_put gather scatter scatter_add scatter_reduce index_select
        index_add index_copy index_fill take take_along_dim topk sort argsort searchsorted bucketize _unique2 unique_dim
        nonzero masked_select masked_scatter _unsafe_masked_index select_scatter slice_scatter as_strided_scatter
        diagonal_scatter slice_backward select_backward constant_pad_nd reflection_pad1d reflection_pad2d
        replication_pad2d reflection_pad2d_backward reflection_pad1d_backward replication_pad2d_backward pad cat
        stack roll flip repeat repeat_interleave tril triu multinomial im2col col2im pixel_shuffle pixel_unshuffle
        channel_shuffle diag_embed rot90 unfold unfold_backward one_hot split_with_sizes_copy expand_copy
        permute_copy resize
        """,
    ),
    **_kept(
        "other",
        "makes constants or random numbers",
        """
        full full_like zeros zeros_like ones ones_like empty empty_like empty_strided new_zeros new_ones new_empty
        new_full arange linspace scalar_tensor eye rand rand_like randn randn_like randint randperm uniform normal
        exponential empty_permuted normal_functional tril_indices triu_indices new_empty_strided
        """,
    ),
    **_kept(
        "other",
        "makes constants",
        "iota",
        "prims",
    ),
    **_kept(
        "pointwise",
        "a comparison",
        "eq ne lt le gt ge isnan isinf isfinite logical_not logical_and logical_or logical_xor bitwise_and bitwise_or "
        "bitwise_xor bitwise_not",
    ),
    **_kept(
        "other",
        "complex numbers have no narrow formats",
        "_fft_r2c _fft_c2r _fft_c2c complex real imag view_as_real view_as_complex _conj conj_physical angle",
    ),
    **_kept(
        "other",
        "linear algebra is solved at the traced precision",
        """
        linalg_solve linalg_inv_ex linalg_qr _linalg_svd _linalg_eigh linalg_cholesky_ex triangular_solve
        _linalg_solve_ex linalg_lu_factor_ex _linalg_det
        """,
    ),
    **_kept(
        "other",
        "a check: it makes no numbers",
        "_assert_async _assert_scalar _assert_tensor_metadata sym_constrain_range_for_size",
    ),
    **_kept("other", "reads the same bits as other numbers", "view", "reinterpreted"),
    **_kept(
        "other",
        "already quantised by the model",
        "_scaled_mm _int_mm _weight_int8pack_mm",
    ),
    **_kept(
        "collective",
        "moved over the wire as written",
        """
        all_reduce all_gather_into_tensor reduce_scatter_tensor all_to_all_single broadcast wait_tensor
        all_reduce_coalesced all_gather_into_tensor_coalesced reduce_scatter_tensor_coalesced
        """,
        "_c10d_functional",
    ),
    **_kept("collective", "reads a payload that was sent", "wire_decode wire_decode_rows wire_reduce", "dsmp"),
}

_UNKNOWN = OpRule(
    op_class="other", policy=Policy.KEEP, why="the operator has no row in the op-rule table, so it is kept"
)

# The operator a decomposed primitive came from decides the class that the report shows.
_ORIGIN_CLASSES = ("norm", "softmax", "loss", "embedding")


def rule_of(node: fx.Node) -> OpRule:
    """The row of a node's operator, or the keep-it row for unknown operators."""
    return OP_RULES.get(node_op(node), _UNKNOWN)


def is_known(node: fx.Node) -> bool:
    """Whether the operator has a row of its own."""
    return node_op(node) in OP_RULES


def class_of(node: fx.Node) -> OpClass:
    """The op class of a node; primitives of a decomposed norm, softmax, loss or embedding get that class."""
    rule = rule_of(node)
    if rule.policy is Policy.LADDER:
        return rule.op_class
    origin = node.meta.get("original_aten")
    if isinstance(origin, torch._ops.OpOverload):
        whole = OP_RULES.get(op_name(origin))
        if whole is not None and whole.op_class in _ORIGIN_CLASSES:
            return whole.op_class
    return rule.op_class
