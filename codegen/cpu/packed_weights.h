// Packed weights of this process: made once per weight, and again when the weight changes.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <vector>

namespace dsmp {

using Packed = std::vector<at::Tensor>;

// What `make` makes of `weight` (CPU), kept by where the weight lies and how (address, sizes, strides) and by `kind`: make
// must depend on nothing else. It holds while the weight's storage is the same and alive, its version counter stands where
// it stood and the fingerprint of 64 of its numbers is unchanged (edits through `.data` leave the counter alone). Tensors
// of inference mode count no versions: they are packed at every call. Any thread may ask.
std::shared_ptr<const Packed> packed_weight(const at::Tensor& weight, int64_t kind, const std::function<Packed()>& make);

// Bytes of all packed weights whose storage is alive; the others are dropped.
int64_t packed_bytes();

// Forgets all packed weights.
void forget_packed();

}  // namespace dsmp
