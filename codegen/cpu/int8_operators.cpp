// Torch operators over the int8 kernels. Activations are bytes within [0, 127], [N, C, H, W] in channels_last order.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <cmath>
#include <tuple>
#include <vector>

#include "int8_kernels.h"
#include "int8_weights.h"

namespace {

using namespace dsmp_int8;
using at::IntArrayRef;
using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

int64_t pooled(int64_t size, int64_t pad, int64_t dilation, int64_t kernel, int64_t stride) {
  return (size + 2 * pad - dilation * (kernel - 1) - 1) / stride + 1;
}

Tensor channels_last(const Tensor& x) { return x.contiguous(at::MemoryFormat::ChannelsLast); }

Tensor empty_like_image(IntArrayRef sizes, at::ScalarType dtype) {
  return at::empty(sizes, at::TensorOptions().dtype(dtype), at::MemoryFormat::ChannelsLast);
}

void check_bytes(const Tensor& x, const char* name) {
  TORCH_CHECK(x.dim() == 4 && x.scalar_type() == at::kByte, name, " takes bytes [N, C, H, W], not ", x.scalar_type(),
              " with ", x.dim(), " axes");
}

// Numbers per output channel that may be missing.
struct Vector {
  Tensor held;
  const float* given = nullptr;

  Vector(const OptionalTensor& x, int64_t size) {
    if (!x.has_value()) return;
    TORCH_CHECK(x->numel() == size && x->scalar_type() == at::kFloat, "int8_convolution: ", size,
                " fp32 numbers are wanted per channel, not ", x->numel(), " of ", x->scalar_type());
    held = x->contiguous();
    given = held.const_data_ptr<float>();
  }
};

// A loop of its own for each step lets the compiler compute several channels at once.
template <typename Step>
void each(int64_t n, const Step& step) {
  for (int64_t i = 0; i < n; ++i) step(i);
}

// What products multiply by instead of a weight of `size`, which was packed.
Tensor unpacked(const PackedWeight& packed, IntArrayRef size, int64_t groups) {
  Tensor w = at::empty(size, at::kFloat);
  unpack(packed.payload.const_data_ptr<int8_t>(), packed.scales.const_data_ptr<float>(), w.size(0), w.size(1),
         w.numel() / w.size(0) / w.size(1), groups, w.mutable_data_ptr<float>());
  return w;
}

Tensor int8_weight(const Tensor& weight, int64_t groups) {
  return unpacked(packed_weight(weight, groups), weight.sizes(), groups);
}

std::tuple<Tensor, Tensor, Tensor> int8_pack(const Tensor& weight, int64_t groups) {
  const PackedWeight made = pack_weight(weight, groups);
  return {made.payload, made.scales, made.sums};
}

Tensor int8_unpack(const Tensor& payload, const Tensor& scales, const Tensor& sums, IntArrayRef size, int64_t groups) {
  return unpacked(held_weight(payload, scales, sums, size, groups), size, groups);
}

// What bytes stand for: scale * (byte - zero). A scale of 0: the values are no bytes.
struct Steps {
  double scale;
  int64_t zero;
};

// Row `at` of fp64 [rows, 2]: calls that share one compiled graph differ in these rows. No steps below row 0.
Steps steps_at(const Tensor& steps, int64_t at) {
  if (at < 0) return {0.0, 0};
  TORCH_CHECK(steps.dim() == 2 && steps.size(1) == 2 && steps.scalar_type() == at::kDouble && steps.is_contiguous() &&
                  steps.is_cpu() && at < steps.size(0),
              "row ", at, " of steps is read from contiguous fp64 [rows, 2] on a CPU, not from ", steps.scalar_type(),
              steps.sizes());
  const double* row = steps.const_data_ptr<double>() + 2 * at;
  return {row[0], static_cast<int64_t>(row[1])};
}

int64_t activation_of(c10::string_view name) {
  static constexpr c10::string_view names[] = {"none", "relu", "hardswish", "relu6"};  // by number
  for (int64_t i = 0; i < 4; ++i)
    if (names[i] == name) return i;
  TORCH_CHECK(false, "an int8 convolution ends in none, relu, hardswish or relu6, not in ", name);
}

Tensor int8_quantise(const Tensor& x, const OptionalTensor& gate, double scale, int64_t zero) {
  TORCH_CHECK(x.dim() == 4 && x.scalar_type() == at::kFloat, "int8_quantise takes fp32 [N, C, H, W]");
  const Tensor out = empty_like_image(x.sizes(), at::kByte);
  if (out.numel() == 0) return out;
  const int64_t channels = x.size(1), height = x.size(2), width = x.size(3);
  Tensor factors;
  if (gate.has_value()) {
    TORCH_CHECK(gate->numel() == x.size(0) * channels, "int8_quantise: a gate has a number per sample and channel");
    factors = gate->contiguous();
  }
  const float* from = x.const_data_ptr<float>();
  const float* gates = factors.defined() ? factors.const_data_ptr<float>() : nullptr;
  uint8_t* to = out.mutable_data_ptr<uint8_t>();
  const auto inverse = static_cast<float>(1.0 / scale);
  at::parallel_for(0, x.size(0) * height, 1 + 65536 / (width * channels), [&](int64_t a, int64_t b) {
    for (int64_t row = a; row < b; ++row) {
      const int64_t image = row / height;
      quantise_row(from + image * x.stride(0) + row % height * x.stride(2), width, channels, x.stride(3), x.stride(1),
                   gates ? gates + image * channels : nullptr, inverse, static_cast<int32_t>(zero),
                   to + row * width * channels);
    }
  });
  return out;
}

Tensor int8_quantise_shared(const Tensor& x, const OptionalTensor& gate, const Tensor& steps, int64_t at) {
  const Steps in = steps_at(steps, at);
  return int8_quantise(x, gate, in.scale, in.zero);
}

// By a weight of shape `size`, which was packed.
Tensor convolve(const Tensor& given, const PackedWeight& packed, IntArrayRef size, const OptionalTensor& bias,
                const OptionalTensor& mean, const OptionalTensor& variance, const OptionalTensor& gain,
                const OptionalTensor& shift, double epsilon, const OptionalTensor& residual, IntArrayRef stride,
                IntArrayRef padding, IntArrayRef dilation, int64_t groups, double x_scale, int64_t x_zero,
                double residual_scale, int64_t residual_zero, c10::string_view activation, double out_scale,
                int64_t out_zero) {
  const bool bytes = given.scalar_type() == at::kByte;
  const Tensor x = channels_last(bytes ? given : int8_quantise(given, std::nullopt, x_scale, x_zero));
  check_bytes(x, "int8_convolution");
  TORCH_CHECK(size.size() == 4 && x.size(1) == size[1] * groups && size[0] % groups == 0,
              "int8_convolution: a weight of ", size, " does not fit ", x.size(1), " channels in ", groups, " groups");
  Call c;
  Shape& s = c.s;
  s = {x.size(0), x.size(1),  x.size(2),  x.size(3),   size[0],     size[2], size[3], stride[0],
       stride[1], padding[0], padding[1], dilation[0], dilation[1], groups,  0,       0};
  s.oh = pooled(s.height, s.ph, s.dh, s.kh, s.sh);
  s.ow = pooled(s.width, s.pw, s.dw, s.kw, s.sw);
  c.out_bytes = out_scale != 0.0;
  const Tensor out = empty_like_image({s.images, s.out, s.oh, s.ow}, c.out_bytes ? at::kByte : at::kFloat);
  if (out.numel() == 0) return out;
  Tensor other;
  c.residual = nullptr;
  c.residual_bytes = false;
  if (residual.has_value()) {
    TORCH_CHECK(residual->sizes() == out.sizes(), "int8_convolution: the residual has another shape than the result");
    other = channels_last(*residual);
    c.residual = other.const_data_ptr();
    c.residual_bytes = other.scalar_type() == at::kByte;
    TORCH_CHECK(c.residual_bytes || other.scalar_type() == at::kFloat, "int8_convolution: a residual is bytes or fp32");
  }
  const int64_t padded = up(s.out, kChannels);
  const std::vector<uint8_t> outside(s.channels + kChannels, static_cast<uint8_t>(x_zero));
  std::vector<float> multiplier(padded), offset(padded);
  std::vector<int32_t> start(padded);
  const float* scale = packed.scales.const_data_ptr<float>();
  const int32_t* sum = packed.sums.const_data_ptr<int32_t>();
  const Vector added(bias, s.out), centre(mean, s.out), spread(variance, s.out), factors(gain, s.out), last(shift, s.out);
  std::vector<float> normed(s.out, 1.0f);
  if (spread.given != nullptr) each(s.out, [&](int64_t o) {
    normed[o] = 1.0f / std::sqrt(spread.given[o] + static_cast<float>(epsilon));
  });
  if (factors.given != nullptr) each(s.out, [&](int64_t o) { normed[o] *= factors.given[o]; });
  if (added.given != nullptr) each(s.out, [&](int64_t o) { offset[o] = added.given[o]; });
  if (centre.given != nullptr) each(s.out, [&](int64_t o) { offset[o] -= centre.given[o]; });
  each(s.out, [&](int64_t o) { offset[o] *= normed[o]; });
  if (last.given != nullptr) each(s.out, [&](int64_t o) { offset[o] += last.given[o]; });
  each(s.out, [&](int64_t o) {
    multiplier[o] = static_cast<float>(x_scale) * scale[o] * normed[o];
    start[o] = -static_cast<int32_t>(x_zero) * sum[o];
  });
  c.x = x.const_data_ptr<uint8_t>();
  c.outside = outside.data();
  c.w = packed.payload.const_data_ptr<int8_t>();
  c.start = start.data();
  c.out = out.mutable_data_ptr();
  c.activation = activation_of(activation);
  c.f = {multiplier.data(), offset.data(), static_cast<float>(residual_scale), static_cast<int32_t>(residual_zero),
         c.out_bytes ? static_cast<float>(1.0 / out_scale) : 0.0f, static_cast<int32_t>(out_zero)};
  if (s.depthwise()) {
    const int64_t grain = 1 + 100000 / (s.ow * s.out * s.area());
    at::parallel_for(0, s.images * s.oh, grain, [&](int64_t a, int64_t b) { depthwise(c, a, b); });
  } else {
    const int64_t tiles = up(s.images * s.oh * s.ow, kRows) / kRows;
    const int64_t grain = 1 + 400000 / (kRows * s.out * s.per_group() * s.area());
    at::parallel_for(0, tiles, grain, [&](int64_t a, int64_t b) { dense(c, a, b); });
  }
  return out;
}

Tensor int8_convolution(const Tensor& x, const Tensor& weight, const OptionalTensor& bias, const OptionalTensor& mean,
                        const OptionalTensor& variance, const OptionalTensor& gain, const OptionalTensor& shift,
                        double epsilon, const OptionalTensor& residual, IntArrayRef stride, IntArrayRef padding,
                        IntArrayRef dilation, int64_t groups, double x_scale, int64_t x_zero, double residual_scale,
                        int64_t residual_zero, c10::string_view activation, double out_scale, int64_t out_zero) {
  return convolve(x, packed_weight(weight, groups), weight.sizes(), bias, mean, variance, gain, shift, epsilon,
                  residual, stride, padding, dilation, groups, x_scale, x_zero, residual_scale, residual_zero,
                  activation, out_scale, out_zero);
}

Tensor int8_convolution_packed(const Tensor& x, const Tensor& payload, const Tensor& scales, const Tensor& sums,
                               IntArrayRef size, const OptionalTensor& bias, const OptionalTensor& mean,
                               const OptionalTensor& variance, const OptionalTensor& gain, const OptionalTensor& shift,
                               double epsilon, const OptionalTensor& residual, IntArrayRef stride, IntArrayRef padding,
                               IntArrayRef dilation, int64_t groups, double x_scale, int64_t x_zero,
                               double residual_scale, int64_t residual_zero, c10::string_view activation,
                               double out_scale, int64_t out_zero) {
  return convolve(x, held_weight(payload, scales, sums, size, groups), size, bias, mean, variance, gain, shift, epsilon,
                  residual, stride, padding, dilation, groups, x_scale, x_zero, residual_scale, residual_zero,
                  activation, out_scale, out_zero);
}

Tensor int8_convolution_shared(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                               const OptionalTensor& mean, const OptionalTensor& variance, const OptionalTensor& gain,
                               const OptionalTensor& shift, double epsilon, const OptionalTensor& residual,
                               IntArrayRef stride, IntArrayRef padding, IntArrayRef dilation, int64_t groups,
                               const Tensor& steps, int64_t x_at, int64_t residual_at, c10::string_view activation,
                               int64_t out_at) {
  const Steps in = steps_at(steps, x_at), other = steps_at(steps, residual_at), out = steps_at(steps, out_at);
  return int8_convolution(x, weight, bias, mean, variance, gain, shift, epsilon, residual, stride, padding, dilation,
                          groups, in.scale, in.zero, other.scale, other.zero, activation, out.scale, out.zero);
}

Tensor int8_convolution_packed_shared(const Tensor& x, const Tensor& payload, const Tensor& scales, const Tensor& sums,
                                      IntArrayRef size, const OptionalTensor& bias, const OptionalTensor& mean,
                                      const OptionalTensor& variance, const OptionalTensor& gain,
                                      const OptionalTensor& shift, double epsilon, const OptionalTensor& residual,
                                      IntArrayRef stride, IntArrayRef padding, IntArrayRef dilation, int64_t groups,
                                      const Tensor& steps, int64_t x_at, int64_t residual_at,
                                      c10::string_view activation, int64_t out_at) {
  const Steps in = steps_at(steps, x_at), other = steps_at(steps, residual_at), out = steps_at(steps, out_at);
  return int8_convolution_packed(x, payload, scales, sums, size, bias, mean, variance, gain, shift, epsilon, residual,
                                 stride, padding, dilation, groups, in.scale, in.zero, other.scale, other.zero,
                                 activation, out.scale, out.zero);
}

// A product is a convolution of images of one point.
Tensor multiply(const Tensor& x, const PackedWeight& packed, int64_t n, int64_t k, const OptionalTensor& bias,
                double x_scale, int64_t x_zero, c10::string_view activation) {
  TORCH_CHECK(x.dim() > 0 && x.size(-1) == k, "int8_linear: a weight of ", n, " by ", k, " does not fit ", x.sizes());
  auto sizes = x.sizes().vec();
  sizes.back() = n;
  if (x.numel() == 0) return at::empty(sizes, x.options());
  const Tensor y = convolve(x.reshape({-1, k, 1, 1}), packed, {n, k, 1, 1}, bias, std::nullopt, std::nullopt,
                            std::nullopt, std::nullopt, 0.0, std::nullopt, {1, 1}, {0, 0}, {1, 1}, 1, x_scale, x_zero,
                            0.0, 0, activation, 0.0, 0);
  return y.reshape(sizes);
}

Tensor int8_linear(const Tensor& x, const Tensor& weight, const OptionalTensor& bias, double x_scale, int64_t x_zero,
                   c10::string_view activation) {
  TORCH_CHECK(weight.dim() == 2, "int8_linear: a weight has 2 axes, not the shape ", weight.sizes());
  const PackedWeight packed = packed_weight(weight, 1);
  return multiply(x, packed, weight.size(0), weight.size(1), bias, x_scale, x_zero, activation);
}

Tensor int8_linear_packed(const Tensor& x, const Tensor& payload, const Tensor& scales, const Tensor& sums,
                          IntArrayRef size, const OptionalTensor& bias, double x_scale, int64_t x_zero,
                          c10::string_view activation) {
  TORCH_CHECK(size.size() == 2, "int8_linear_packed: a weight has 2 axes, not the shape ", size);
  return multiply(x, held_weight(payload, scales, sums, size, 1), size[0], size[1], bias, x_scale, x_zero, activation);
}

Tensor int8_linear_shared(const Tensor& x, const Tensor& weight, const OptionalTensor& bias, const Tensor& steps,
                          int64_t x_at, c10::string_view activation) {
  const Steps in = steps_at(steps, x_at);
  return int8_linear(x, weight, bias, in.scale, in.zero, activation);
}

Tensor int8_linear_packed_shared(const Tensor& x, const Tensor& payload, const Tensor& scales, const Tensor& sums,
                                 IntArrayRef size, const OptionalTensor& bias, const Tensor& steps, int64_t x_at,
                                 c10::string_view activation) {
  const Steps in = steps_at(steps, x_at);
  return int8_linear_packed(x, payload, scales, sums, size, bias, in.scale, in.zero, activation);
}

Tensor int8_max_pool(const Tensor& given, IntArrayRef kernel, IntArrayRef stride, IntArrayRef padding,
                     IntArrayRef dilation) {
  check_bytes(given, "int8_max_pool");
  const Tensor x = channels_last(given);
  Shape s = {x.size(0),  x.size(1),  x.size(2),  x.size(3),   x.size(1),   kernel[0], kernel[1], stride[0],
             stride[1],  padding[0], padding[1], dilation[0], dilation[1], 1,         0,         0};
  s.oh = pooled(s.height, s.ph, s.dh, s.kh, s.sh);
  s.ow = pooled(s.width, s.pw, s.dw, s.kw, s.sw);
  const Tensor out = empty_like_image({s.images, s.channels, s.oh, s.ow}, at::kByte);
  const uint8_t* from = x.const_data_ptr<uint8_t>();
  uint8_t* to = out.mutable_data_ptr<uint8_t>();
  at::parallel_for(0, s.images * s.oh, 4, [&](int64_t a, int64_t b) {
    for (int64_t row = a; row < b; ++row) max_pool_row(s, from, row, to + row * s.ow * s.channels);
  });
  return out;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(dsmp_cpu, m) {
  m.def(
      "int8_convolution(Tensor x, Tensor weight, Tensor? bias, Tensor? mean, Tensor? variance, Tensor? gain, "
      "Tensor? shift, float epsilon, Tensor? residual, int[] stride, int[] padding, int[] dilation, int groups, "
      "float x_scale, int x_zero, float residual_scale, int residual_zero, str activation, float out_scale, "
      "int out_zero) -> Tensor");
  m.def("int8_linear(Tensor x, Tensor weight, Tensor? bias, float x_scale, int x_zero, str activation) -> Tensor");
  m.def("int8_quantise(Tensor x, Tensor? gate, float scale, int zero) -> Tensor");
  m.def("int8_max_pool(Tensor x, int[] kernel, int[] stride, int[] padding, int[] dilation) -> Tensor");
  m.def("int8_weight(Tensor weight, int groups) -> Tensor");
  m.def("int8_pack(Tensor weight, int groups) -> (Tensor, Tensor, Tensor)");
  m.def("int8_unpack(Tensor payload, Tensor scales, Tensor sums, int[] size, int groups) -> Tensor");
  m.def(
      "int8_convolution_packed(Tensor x, Tensor payload, Tensor scales, Tensor sums, int[] size, Tensor? bias, "
      "Tensor? mean, Tensor? variance, Tensor? gain, Tensor? shift, float epsilon, Tensor? residual, int[] stride, "
      "int[] padding, int[] dilation, int groups, float x_scale, int x_zero, float residual_scale, int residual_zero, "
      "str activation, float out_scale, int out_zero) -> Tensor");
  m.def(
      "int8_linear_packed(Tensor x, Tensor payload, Tensor scales, Tensor sums, int[] size, Tensor? bias, "
      "float x_scale, int x_zero, str activation) -> Tensor");
  // The same with steps in rows of a tensor: graphs that differ in steps alone are compiled once.
  m.def("int8_quantise.shared(Tensor x, Tensor? gate, Tensor steps, int at) -> Tensor");
  m.def(
      "int8_convolution.shared(Tensor x, Tensor weight, Tensor? bias, Tensor? mean, Tensor? variance, Tensor? gain, "
      "Tensor? shift, float epsilon, Tensor? residual, int[] stride, int[] padding, int[] dilation, int groups, "
      "Tensor steps, int x_at, int residual_at, str activation, int out_at) -> Tensor");
  m.def(
      "int8_convolution_packed.shared(Tensor x, Tensor payload, Tensor scales, Tensor sums, int[] size, Tensor? bias, "
      "Tensor? mean, Tensor? variance, Tensor? gain, Tensor? shift, float epsilon, Tensor? residual, int[] stride, "
      "int[] padding, int[] dilation, int groups, Tensor steps, int x_at, int residual_at, str activation, "
      "int out_at) -> Tensor");
  m.def(
      "int8_linear.shared(Tensor x, Tensor weight, Tensor? bias, Tensor steps, int x_at, str activation) -> Tensor");
  m.def(
      "int8_linear_packed.shared(Tensor x, Tensor payload, Tensor scales, Tensor sums, int[] size, Tensor? bias, "
      "Tensor steps, int x_at, str activation) -> Tensor");
}

TORCH_LIBRARY_IMPL(dsmp_cpu, CPU, m) {
  m.impl("int8_convolution", int8_convolution);
  m.impl("int8_linear", int8_linear);
  m.impl("int8_quantise", int8_quantise);
  m.impl("int8_max_pool", int8_max_pool);
  m.impl("int8_weight", int8_weight);
  m.impl("int8_pack", int8_pack);
  m.impl("int8_unpack", int8_unpack);
  m.impl("int8_convolution_packed", int8_convolution_packed);
  m.impl("int8_linear_packed", int8_linear_packed);
  m.impl("int8_quantise.shared", int8_quantise_shared);
  m.impl("int8_convolution.shared", int8_convolution_shared);
  m.impl("int8_convolution_packed.shared", int8_convolution_packed_shared);
  m.impl("int8_linear.shared", int8_linear_shared);
  m.impl("int8_linear_packed.shared", int8_linear_packed_shared);
}
