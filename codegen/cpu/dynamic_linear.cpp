// Int8 linears whose activations are quantised row by row, in steps that reach over each row as it comes.
//
// A row's bytes are the whole numbers [0, 127] of steps from its smallest to its largest value, 0 among them; they stand
// for scale * (byte - zero). With weights q and their scales, sums over a row are exact in int32:
//
//     y = scale * weight_scale * (sum(byte * q) - zero * sum(q)) + bias

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <limits>
#include <vector>

#include "int8_kernels.h"
#include "int8_weights.h"

namespace {

using namespace dsmp_int8;
using at::IntArrayRef;
using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

constexpr int64_t kStep = 48;  // rows whose sums are finished while they are near

struct RowSteps {
  float scale, zero;
};

// The smallest and largest of a row's values and 0; NaN for a row that has one.
void reach(const float* x, int64_t n, float& low, float& high) {
  int64_t k = 0;
  low = high = 0.0f;
  bool ordered = true;
#if defined(__AVX2__)
  __m256 least = _mm256_setzero_ps(), most = least, unordered = least;
  for (; k + 8 <= n; k += 8) {
    const __m256 v = _mm256_loadu_ps(x + k);
    least = _mm256_min_ps(least, v);
    most = _mm256_max_ps(most, v);
    unordered = _mm256_or_ps(unordered, _mm256_cmp_ps(v, v, _CMP_UNORD_Q));
  }
  alignas(32) float l[8], m[8];
  _mm256_store_ps(l, least);
  _mm256_store_ps(m, most);
  for (int i = 0; i < 8; ++i) {
    low = std::min(low, l[i]);
    high = std::max(high, m[i]);
  }
  ordered = _mm256_testz_ps(unordered, unordered) != 0;
#endif
  for (; k < n; ++k) {
    low = std::min(low, x[k]);
    high = std::max(high, x[k]);
    ordered = ordered && x[k] == x[k];
  }
  if (!ordered) low = high = std::numeric_limits<float>::quiet_NaN();
}

// Bytes of a row. No steps reach over infinities or NaN: the scale is NaN then, and so are the row's results.
RowSteps quantise(const float* x, int64_t n, uint8_t* out) {
  float low, high;
  reach(x, n, low, high);
  const auto top = static_cast<float>(kTop);
  const float scale = high / top - low / top;  // so that it is finite wherever the row is
  if (!std::isfinite(scale)) {
    std::memset(out, 0, n);
    return {std::numeric_limits<float>::quiet_NaN(), 0.0f};
  }
  if (scale < std::numeric_limits<float>::min()) {  // steps of 1, as everywhere: all are 0
    std::memset(out, 0, n);
    return {1.0f, 0.0f};
  }
  const float zero = std::nearbyintf(-low / scale);
  quantise_row(x, 1, n, n, 1, nullptr, 1.0f / scale, static_cast<int32_t>(zero), out);
  return {scale, zero};
}

// By a weight [n, k] that was packed.
Tensor multiply(const Tensor& x, const PackedWeight& packed, int64_t n, int64_t k, const OptionalTensor& bias) {
  TORCH_CHECK(x.dim() > 0 && x.size(-1) == k && x.scalar_type() == at::kFloat, "int8_dynamic_linear: a weight of ", n,
              " by ", k, " does not fit ", x.scalar_type(), x.sizes());
  auto sizes = x.sizes().vec();
  sizes.back() = n;
  const Tensor y = at::empty(sizes, x.options());
  if (y.numel() == 0) return y;
  Tensor added;
  if (bias.has_value()) {
    TORCH_CHECK(bias->numel() == n && bias->scalar_type() == at::kFloat, "int8_dynamic_linear: ", n,
                " fp32 numbers are wanted as a bias, not ", bias->numel(), " of ", bias->scalar_type());
    added = bias->contiguous();
  }
  const Tensor given = x.contiguous();
  const int64_t rows = given.numel() / k, padded = up(n, kChannels);
  const Tensor bytes = at::empty({rows, k}, at::kByte);
  const std::vector<uint8_t> outside(k + kChannels);  // read by nothing: there is no padding
  std::vector<float> multiplier(padded), none(padded), weights(n);
  const std::vector<int32_t> start(padded);
  std::vector<RowSteps> steps(rows);
  const float* scale = packed.scales.const_data_ptr<float>();
  const int32_t* sum = packed.sums.const_data_ptr<int32_t>();
  for (int64_t o = 0; o < n; ++o) {
    multiplier[o] = scale[o];
    weights[o] = scale[o] * static_cast<float>(sum[o]);
  }
  Call c = {};
  c.s = {rows, k, 1, 1, n, 1, 1, 1, 1, 0, 0, 1, 1, 1, 1, 1};
  c.x = bytes.const_data_ptr<uint8_t>();
  c.outside = outside.data();
  c.w = packed.payload.const_data_ptr<int8_t>();
  c.start = start.data();
  c.out = y.mutable_data_ptr();
  c.f.multiplier = multiplier.data();
  c.f.bias = none.data();
  const float* from = given.const_data_ptr<float>();
  uint8_t* to = bytes.mutable_data_ptr<uint8_t>();
  float* result = y.mutable_data_ptr<float>();
  const float* last = added.defined() ? added.const_data_ptr<float>() : none.data();
  const int64_t chunks = up(rows, kStep) / kStep;
  at::parallel_for(0, chunks, 1 + 400000 / (kStep * n * k), [&](int64_t first, int64_t end) {
    for (int64_t chunk = first; chunk < end; ++chunk) {
      const int64_t begin = chunk * kStep, past = std::min(rows, begin + kStep);
      for (int64_t r = begin; r < past; ++r) steps[r] = quantise(from + r * k, k, to + r * k);
      if (c.s.depthwise()) {  // a weight of one number
        depthwise(c, begin, past);
      } else {
        dense(c, begin / kRows, up(past, kRows) / kRows);
      }
      for (int64_t r = begin; r < past; ++r) {
        const RowSteps s = steps[r];
        float* row = result + r * n;
        for (int64_t o = 0; o < n; ++o) row[o] = s.scale * (row[o] - s.zero * weights[o]) + last[o];
      }
    }
  });
  return y;
}

Tensor int8_dynamic_linear(const Tensor& x, const Tensor& weight, const OptionalTensor& bias, bool transposed) {
  TORCH_CHECK(weight.dim() == 2, "int8_dynamic_linear: a weight has 2 axes, not the shape ", weight.sizes());
  const Tensor w = transposed ? weight.t() : weight;
  return multiply(x, packed_weight(w, 1), w.size(0), w.size(1), bias);
}

Tensor int8_dynamic_linear_packed(const Tensor& x, const Tensor& payload, const Tensor& scales, const Tensor& sums,
                                  IntArrayRef size, const OptionalTensor& bias) {
  TORCH_CHECK(size.size() == 2, "int8_dynamic_linear_packed: a weight has 2 axes, not the shape ", size);
  return multiply(x, held_weight(payload, scales, sums, size, 1), size[0], size[1], bias);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(dsmp_cpu, m) {
  m.def("int8_dynamic_linear(Tensor x, Tensor weight, Tensor? bias, bool transposed) -> Tensor");
  m.def(
      "int8_dynamic_linear_packed(Tensor x, Tensor payload, Tensor scales, Tensor sums, int[] size, Tensor? bias) -> "
      "Tensor");
}

TORCH_LIBRARY_IMPL(dsmp_cpu, CPU, m) {
  m.impl("int8_dynamic_linear", int8_dynamic_linear);
  m.impl("int8_dynamic_linear_packed", int8_dynamic_linear_packed);
}
