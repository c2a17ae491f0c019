// A linear whose weight alone is narrow: y[M, N] = x[M, K] w[N, K]^T + bias, with w in fp16, in int8 with a scale a row, or
// in int4 with a scale for every GROUP values of a row.
//
// The kernels of small_linear.h widen weights as they read them, once for four rows. Widening a whole weight once a call and
// leaving the product to torch would take fp32's time and that of the widening.
#include <torch/library.h>

#include <optional>
#include <string_view>

#include "packed_weights.h"
#include "small_linear.h"

namespace dsmp {
namespace {

using at::Tensor;
using Bias = std::optional<Tensor>;

constexpr int64_t GROUP = 128;

enum Form { kFp16, kInt8, kInt4 };

Form form_of(std::string_view name) {
  if (name == "fp16") return kFp16;
  if (name == "int8") return kInt8;
  TORCH_CHECK_VALUE(name == "int4", "weights of linears are stored in fp16, int8 or int4, not in ", name);
  return kInt4;
}

Packed pack(const Tensor& weight, Form form) {
  if (form == kFp16) return {pack_fp16_weight(weight)};
  if (form == kInt8) {
    auto [payload, scales] = pack_int8_weight(weight);
    return {payload, scales};
  }
  // symmetric, with scales in fp32
  auto [payload, scales, zeros] = pack_int4_weight(weight, GROUP, true, false);
  return {payload, scales, zeros};
}

const Packed& checked(const Packed& packed, Form form) {
  TORCH_CHECK_VALUE(packed.size() == size_t{1} + form, "this weight was packed into ", packed.size(),
                    " tensors: not in this format");
  return packed;
}

Tensor unpack(const Packed& packed, Form form, int64_t n, int64_t k) {
  const Packed& p = checked(packed, form);
  if (form == kFp16) return unpack_fp16_weight(p[0], n, k);
  return form == kInt8 ? unpack_int8_weight(p[0], p[1], n, k) : unpack_int4_weight(p[0], p[1], p[2], n, k, GROUP);
}

Tensor product(const Tensor& x, const Packed& packed, const Bias& bias, Form form, int64_t n) {
  const Packed& p = checked(packed, form);
  if (form == kFp16) return linear_fp16(x, p[0], bias, n);
  // a16: rows of x in 16-bit fixed point, products and sums exact; their error is far below that of the weights
  return form == kInt8 ? linear_int8_a16(x, p[0], p[1], bias, n) : linear_int4_a16(x, p[0], p[1], p[2], bias, n, GROUP);
}

Tensor narrow_linear(const Tensor& x, const Tensor& weight, const Bias& bias, std::string_view format, bool transposed) {
  const Form form = form_of(format);
  const int64_t kind = -1 - 2 * form - (transposed ? 1 : 0);
  const auto packed = packed_weight(weight, kind, [&] { return pack(transposed ? weight.t() : weight, form); });
  return product(x, *packed, bias, form, weight.size(transposed ? 1 : 0));
}

Tensor narrow_linear_packed(const Tensor& x, at::TensorList packed, const Bias& bias, std::string_view format, int64_t n,
                            int64_t) {
  return product(x, packed.vec(), bias, form_of(format), n);
}

Packed narrow_pack(const Tensor& weight, std::string_view format) { return pack(weight, form_of(format)); }

Tensor narrow_unpack(at::TensorList packed, std::string_view format, int64_t n, int64_t k) {
  return unpack(packed.vec(), form_of(format), n, k);
}

}  // namespace
}  // namespace dsmp

TORCH_LIBRARY_FRAGMENT(dsmp_cpu, m) {
  m.def("narrow_linear(Tensor x, Tensor weight, Tensor? bias, str format, bool transposed) -> Tensor");
  m.def(
      "narrow_linear_packed(Tensor x, Tensor[] packed, Tensor? bias, str format, int out_features, int in_features) -> "
      "Tensor");
  m.def("narrow_pack(Tensor weight, str format) -> Tensor[]");
  m.def("narrow_unpack(Tensor[] packed, str format, int out_features, int in_features) -> Tensor");
}

TORCH_LIBRARY_IMPL(dsmp_cpu, CPU, m) {
  m.impl("narrow_linear", dsmp::narrow_linear);
  m.impl("narrow_linear_packed", dsmp::narrow_linear_packed);
  m.impl("narrow_pack", dsmp::narrow_pack);
  m.impl("narrow_unpack", dsmp::narrow_unpack);
}
