#include "int8_weights.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/isfinite.h>

#include "int8_kernels.h"
#include "packed_weights.h"

namespace dsmp_int8 {
namespace {

// Four weights of one sign add up to 258 at most (int8_packing.cpp), so that a fourth of these, times 127, fits int32.
constexpr int64_t kLongest = int64_t{1} << 18;

}  // namespace

PackedWeight pack_weight(const at::Tensor& weight, int64_t groups) {
  TORCH_CHECK(weight.dim() >= 2 && weight.numel() > 0 && weight.scalar_type() == at::kFloat && weight.is_cpu(),
              "int8 weights are packed from fp32 ones on a CPU with at least 2 axes and a number in them");
  TORCH_CHECK_VALUE(at::isfinite(weight).all().item<bool>(),
                    "a weight with infinite or NaN entries has no integer format. Keep this one in fp32.");
  const at::Tensor w = weight.contiguous();
  const int64_t out = w.size(0), per_group = w.size(1), area = w.numel() / out / per_group;
  TORCH_CHECK_VALUE(per_group * area <= kLongest, "sums of int8 products over ", per_group * area,
                    " values may leave int32, which holds those over ", kLongest, ". Keep this weight in fp32.");
  const PackedWeight made{at::empty({Layout(out, per_group, area, groups).size}, at::kChar),
                          at::empty({out}, at::kFloat), at::empty({out}, at::kInt)};
  pack(w.const_data_ptr<float>(), out, per_group, area, groups, made.payload.mutable_data_ptr<int8_t>(),
       made.scales.mutable_data_ptr<float>(), made.sums.mutable_data_ptr<int32_t>());
  return made;
}

PackedWeight packed_weight(const at::Tensor& weight, int64_t groups) {
  const auto kept = dsmp::packed_weight(weight, groups, [&] {  // kinds above 0 are groups
    const PackedWeight made = pack_weight(weight, groups);
    return dsmp::Packed{made.payload, made.scales, made.sums};
  });
  return {(*kept)[0], (*kept)[1], (*kept)[2]};
}

PackedWeight held_weight(const at::Tensor& payload, const at::Tensor& scales, const at::Tensor& sums,
                         at::IntArrayRef size, int64_t groups) {
  int64_t count = size.size() >= 2 && groups > 0;
  for (const int64_t length : size) count *= length;
  TORCH_CHECK(count > 0, "a packed int8 weight has at least 2 axes and a number in it, not the shape ", size);
  const int64_t bytes = Layout(size[0], size[1], count / size[0] / size[1], groups).size;
  TORCH_CHECK(payload.scalar_type() == at::kChar && payload.is_contiguous() && payload.numel() == bytes,
              "a packed int8 weight of ", size, " has ", bytes, " bytes in a row, not ", payload.numel(), " of ",
              payload.scalar_type());
  TORCH_CHECK(scales.scalar_type() == at::kFloat && scales.is_contiguous() && scales.numel() == size[0] &&
                  sums.scalar_type() == at::kInt && sums.is_contiguous() && sums.numel() == size[0],
              "a packed int8 weight of ", size, " has ", size[0], " scales of fp32 and as many sums of int32");
  return {payload, scales, sums};
}

}  // namespace dsmp_int8
