// Torch operators over the int8 kernels. Activations are bytes within [0, 127], [N, C, H, W] in channels_last order.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <cmath>
#include <vector>

#include "int8_kernels.h"

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
  float at(int64_t o, float otherwise) const { return given == nullptr ? otherwise : given[o]; }
};

std::tuple<Tensor, Tensor, Tensor> int8_pack(const Tensor& weight, int64_t groups) {
  TORCH_CHECK(weight.dim() == 4 && weight.scalar_type() == at::kFloat, "int8_pack takes an fp32 weight of 4 axes");
  const Tensor w = weight.contiguous();
  const int64_t out = w.size(0), per_group = w.size(1), area = w.size(2) * w.size(3);
  Tensor payload = at::empty({Layout(out, per_group, area, groups).size}, at::kChar);
  Tensor scales = at::empty({out}, at::kFloat), sums = at::empty({out}, at::kInt);
  pack(w.const_data_ptr<float>(), out, per_group, area, groups, payload.mutable_data_ptr<int8_t>(),
       scales.mutable_data_ptr<float>(), sums.mutable_data_ptr<int32_t>());
  return {payload, scales, sums};
}

Tensor int8_unpack(const Tensor& payload, const Tensor& scales, int64_t groups, IntArrayRef sizes) {
  Tensor w = at::empty(sizes, at::kFloat);
  unpack(payload.const_data_ptr<int8_t>(), scales.const_data_ptr<float>(), w.size(0), w.size(1), w.size(2) * w.size(3),
         groups, w.mutable_data_ptr<float>());
  return w;
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

Tensor int8_convolution(const Tensor& given, double x_scale, int64_t x_zero, const Tensor& payload, const Tensor& scales,
                        const Tensor& weight_sums, const OptionalTensor& bias, const OptionalTensor& mean,
                        const OptionalTensor& variance, const OptionalTensor& gain, const OptionalTensor& shift,
                        double epsilon, IntArrayRef kernel, IntArrayRef stride, IntArrayRef padding,
                        IntArrayRef dilation, int64_t groups, const OptionalTensor& residual, double residual_scale,
                        int64_t residual_zero, int64_t activation, double out_scale, int64_t out_zero) {
  if (given.scalar_type() != at::kByte) {
    const Tensor bytes = int8_quantise(given, std::nullopt, x_scale, x_zero);
    return int8_convolution(bytes, x_scale, x_zero, payload, scales, weight_sums, bias, mean, variance, gain, shift,
                            epsilon, kernel, stride, padding, dilation, groups, residual, residual_scale, residual_zero,
                            activation, out_scale, out_zero);
  }
  check_bytes(given, "int8_convolution");
  const Tensor x = channels_last(given);
  Call c;
  Shape& s = c.s;
  s = {x.size(0),  x.size(1),  x.size(2),  x.size(3),   scales.size(0), kernel[0], kernel[1], stride[0],
       stride[1],  padding[0], padding[1], dilation[0], dilation[1],    groups,    0,         0};
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
  const float* scale = scales.const_data_ptr<float>();
  const int32_t* sum = weight_sums.const_data_ptr<int32_t>();
  const Vector added(bias, s.out), centre(mean, s.out), spread(variance, s.out), factors(gain, s.out), last(shift, s.out);
  for (int64_t o = 0; o < s.out; ++o) {
    const float normed = (spread.given ? 1.0f / std::sqrt(spread.at(o, 1.0f) + static_cast<float>(epsilon)) : 1.0f) *
                         factors.at(o, 1.0f);
    multiplier[o] = static_cast<float>(x_scale) * scale[o] * normed;
    offset[o] = (added.at(o, 0.0f) - centre.at(o, 0.0f)) * normed + last.at(o, 0.0f);
    start[o] = -static_cast<int32_t>(x_zero) * sum[o];
  }
  c.x = x.const_data_ptr<uint8_t>();
  c.outside = outside.data();
  c.w = payload.const_data_ptr<int8_t>();
  c.start = start.data();
  c.out = out.mutable_data_ptr();
  c.finish = finish_of(activation, c.residual == nullptr ? kAlone : c.residual_bytes ? kBytes : kFloats, c.out_bytes);
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
  m.def("int8_pack(Tensor weight, int groups) -> (Tensor, Tensor, Tensor)");
  m.def("int8_unpack(Tensor payload, Tensor scales, int groups, int[] sizes) -> Tensor");
  m.def(
      "int8_convolution(Tensor x, float x_scale, int x_zero, Tensor payload, Tensor scales, Tensor sums, Tensor? bias, "
      "Tensor? mean, Tensor? variance, Tensor? gain, Tensor? shift, float epsilon, int[] kernel, int[] stride, "
      "int[] padding, int[] dilation, int groups, Tensor? residual, float residual_scale, int residual_zero, int activation, float out_scale, int out_zero) -> Tensor");
  m.def("int8_quantise(Tensor x, Tensor? gate, float scale, int zero) -> Tensor");
  m.def("int8_max_pool(Tensor x, int[] kernel, int[] stride, int[] padding, int[] dilation) -> Tensor");
}

TORCH_LIBRARY_IMPL(dsmp_cpu, CPU, m) {
  m.impl("int8_pack", int8_pack);
  m.impl("int8_unpack", int8_unpack);
  m.impl("int8_convolution", int8_convolution);
  m.impl("int8_quantise", int8_quantise);
  m.impl("int8_max_pool", int8_max_pool);
}
