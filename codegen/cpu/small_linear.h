// Packing, products and unpacking of linear layers with few rows of x; small_linear.cpp says what they do.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>

namespace dsmp {

at::Tensor pack_fp16_weight(const at::Tensor& weight);
std::tuple<at::Tensor, at::Tensor> pack_int8_weight(const at::Tensor& weight);
std::tuple<at::Tensor, at::Tensor, at::Tensor> pack_int4_weight(
    const at::Tensor& weight, int64_t group, bool symmetric, bool half_scales);

at::Tensor unpack_fp16_weight(const at::Tensor& payload, int64_t n, int64_t k);
at::Tensor unpack_int8_weight(const at::Tensor& payload, const at::Tensor& scales, int64_t n, int64_t k);
at::Tensor unpack_int4_weight(const at::Tensor& payload, const at::Tensor& scales, const at::Tensor& zeros, int64_t n, int64_t k,
                       int64_t group);

at::Tensor linear_fp16(const at::Tensor& x, const at::Tensor& payload, const std::optional<at::Tensor>& bias, int64_t n);
at::Tensor linear_int8_a16(const at::Tensor& x, const at::Tensor& payload, const at::Tensor& scales,
                           const std::optional<at::Tensor>& bias, int64_t n);
at::Tensor linear_int4_a16(const at::Tensor& x, const at::Tensor& payload, const at::Tensor& scales,
                           const at::Tensor& zeros, const std::optional<at::Tensor>& bias, int64_t n, int64_t group);

}  // namespace dsmp
