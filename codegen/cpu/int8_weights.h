// Packed int8 weights of this process: made once per weight, and again when the weight changes.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

namespace dsmp_int8 {

struct PackedWeight {
  at::Tensor payload;  // as kernels read it
  at::Tensor scales;   // fp32 [O]
  at::Tensor sums;     // int32 [O], of the quantised weights
};

// `weight`: fp32 [O, C / groups, ...]. What was packed holds while the weight's storage is the same and alive, its version
// counter stands where it stood and the fingerprint of 64 of its numbers is unchanged (edits through `.data` leave the
// counter alone). Tensors of inference mode count no versions: they are packed at every call. Any thread may ask.
std::shared_ptr<const PackedWeight> packed_weight(const at::Tensor& weight, int64_t groups);

// The same for the caller alone: nothing is kept.
PackedWeight pack_weight(const at::Tensor& weight, int64_t groups);

// Bytes of all packed weights whose storage is alive; the others are dropped.
int64_t packed_bytes();

// Forgets all packed weights.
void forget();

}  // namespace dsmp_int8
