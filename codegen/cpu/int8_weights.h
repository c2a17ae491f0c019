// Weights of int8 products of quantised activations, as kernels read them.
#pragma once

#include <ATen/core/Tensor.h>

namespace dsmp_int8 {

struct PackedWeight {
  at::Tensor payload;  // as kernels read it
  at::Tensor scales;   // fp32 [O]
  at::Tensor sums;     // int32 [O], of the quantised weights
};

// `weight`: fp32 [O, C / groups, ...]. Packed once, and anew when the weight changes (packed_weights.h).
PackedWeight packed_weight(const at::Tensor& weight, int64_t groups);

// The same for the caller alone: nothing is kept.
PackedWeight pack_weight(const at::Tensor& weight, int64_t groups);

// A packed weight that the caller holds, of shape `size`; kernels read as far as that says.
PackedWeight held_weight(const at::Tensor& payload, const at::Tensor& scales, const at::Tensor& sums,
                         at::IntArrayRef size, int64_t groups);

}  // namespace dsmp_int8
