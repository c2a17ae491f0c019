// A cheap sign that a weight was changed: edits through `.data` leave the version counter alone.
#pragma once

#include <ATen/core/Tensor.h>

#include <cmath>
#include <cstring>
#include <vector>

namespace dsmp {

// Hash of 64 elements' bytes, the last among them, and of the weight's address (CPU, any dtype and strides). They are
// spread evenly but along no row, column or diagonal (multiples of the golden ratio): a change of many elements shows,
// whatever its pattern; one of a few elements or rows seldom does.
inline int64_t fingerprint(const at::Tensor& weight) {
  constexpr int64_t SAMPLES = 64;
  int64_t count = weight.numel(), size = static_cast<int64_t>(weight.element_size());
  auto* data = static_cast<const char*>(weight.const_data_ptr());
  bool dense = weight.is_contiguous();
  uint64_t hash = reinterpret_cast<uintptr_t>(data) ^ static_cast<uint64_t>(count);
  for (int64_t i = 0; i < SAMPLES && count > 0; ++i) {
    const double place = 0.6180339887498949 * static_cast<double>(i);
    int64_t element = count <= SAMPLES ? i % count : static_cast<int64_t>((place - std::floor(place)) * count);
    if (i + 1 == SAMPLES && count > SAMPLES) element = count - 1;
    int64_t offset = element;
    if (!dense) {
      offset = 0;
      for (int64_t d = weight.dim() - 1; d >= 0; element /= weight.size(d), --d)
        offset += element % weight.size(d) * weight.stride(d);
    }
    uint64_t bits = 0;
    std::memcpy(&bits, data + offset * size, size < 8 ? size : 8);
    hash = (hash ^ bits) * 0x9e3779b97f4a7c15ull;
    hash ^= hash >> 32;
  }
  return static_cast<int64_t>(hash);
}

}  // namespace dsmp
