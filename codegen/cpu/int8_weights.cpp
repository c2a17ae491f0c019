#include "int8_weights.h"

#include <ATen/ops/empty.h>

#include "int8_kernels.h"
#include "packed_weights.h"

namespace dsmp_int8 {

PackedWeight pack_weight(const at::Tensor& weight, int64_t groups) {
  TORCH_CHECK(weight.dim() >= 2 && weight.numel() > 0 && weight.scalar_type() == at::kFloat && weight.is_cpu(),
              "int8 weights are packed from fp32 ones on a CPU with at least 2 axes and a number in them");
  const at::Tensor w = weight.contiguous();
  const int64_t out = w.size(0), per_group = w.size(1), area = w.numel() / out / per_group;
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

}  // namespace dsmp_int8
