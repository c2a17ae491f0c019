// Linear layers with few rows of x and packed weights: y[M, N] = x[M, K] w[N, K]^T + bias.
//
// Packing, products and unpacking as operators of the namespace dsmp_cpu. x, bias and y are fp32, sums are fp32 (or exact
// integers, in the operators that round x to fixed point). A payload is a uint8 [panels, bytes per panel] as layout.h lays
// it out, scales are [panels, 16] (int8) or [panels, groups, 16] (int4). Every panel is computed by one thread, so results
// do not depend on how many there are.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include <optional>
#include <tuple>

#include "fingerprint.h"
#include "pack.h"
#include "products_fp32.h"
#include "products_int.h"
#include "small_linear.h"

namespace dsmp {
namespace {

using at::Tensor;
using Bias = std::optional<Tensor>;

int64_t panels_of(int64_t n) { return (n + ROWS - 1) / ROWS; }

template <class F>
int64_t panel_bytes(int64_t k) {
  return round_up(k, F::KSTEP) / F::KSTEP * F::BYTES;
}

template <class F>
Tensor empty_payload(int64_t n, int64_t k) {
  Tensor payload = at::empty({panels_of(n), panel_bytes<F>(k)}, at::kByte);
  return n % ROWS || k % F::KSTEP ? payload.zero_() : payload;
}

// f(panel) for all panels, by as many threads as have enough to do.
template <class F>
void for_panels(int64_t panels, int64_t work_per_panel, const F& f) {
  int64_t grain = std::max<int64_t>(1, 65536 / std::max<int64_t>(1, work_per_panel));
  at::parallel_for(0, panels, grain, [&](int64_t begin, int64_t end) {
    for (int64_t panel = begin; panel < end; ++panel) f(panel);
  });
}

Tensor checked_weight(const Tensor& weight, bool finite) {
  TORCH_CHECK_VALUE(weight.dim() == 2 && weight.scalar_type() == at::kFloat && weight.device().is_cpu(),
                    "a weight to pack is an fp32 matrix [out, in] on the CPU, not ", weight.toString(), " of shape ",
                    weight.sizes());
  if (finite)
    TORCH_CHECK_VALUE(weight.numel() == 0 || at::isfinite(weight).all().item<bool>(),
                      "a weight with infinite or NaN entries has no integer format. Keep this one in fp32.");
  return weight.contiguous();
}

int64_t checked_group(int64_t group) {
  TORCH_CHECK_VALUE(group == 32 || group == 64 || group == 128, "groups of int4 are 32, 64 or 128 columns, not ", group);
  return group;
}

// x as a contiguous matrix and y to be filled.
struct Call {
  Tensor rows, y, bias;
  int64_t m, n, k;

  Call(const Tensor& x, const Bias& b, int64_t out_features) : n(out_features) {
    TORCH_CHECK_VALUE(x.scalar_type() == at::kFloat && x.dim() >= 1 && x.device().is_cpu(),
                      "rows for a packed linear layer are fp32 [..., in] on the CPU, not ", x.toString());
    k = x.size(-1);
    m = x.numel() / std::max<int64_t>(1, k);
    if (k == 0) m = c10::multiply_integers(x.sizes().slice(0, x.dim() - 1));
    rows = x.contiguous();
    auto shape = x.sizes().vec();
    shape.back() = n;
    y = at::empty(shape, x.options());
    if (b) {
      TORCH_CHECK_VALUE(b->scalar_type() == at::kFloat && b->dim() == 1 && b->size(0) == n,
                        "the bias is fp32 of shape [", n, "], not ", b->toString(), " of shape ", b->sizes());
      bias = b->contiguous();
    }
  }

  const float* x() const { return rows.const_data_ptr<float>(); }
  Output output() const {
    return {y.mutable_data_ptr<float>(), bias.defined() ? bias.const_data_ptr<float>() : nullptr, m, n};
  }
};

template <class F>
const uint8_t* checked_payload(const Tensor& payload, int64_t n, int64_t k) {
  TORCH_CHECK_VALUE(payload.scalar_type() == at::kByte && payload.is_contiguous() && payload.dim() == 2 &&
                        payload.size(0) == panels_of(n) && payload.size(1) == panel_bytes<F>(k),
                    "a payload of ", n, " x ", k, " weights is uint8 [", panels_of(n), ", ", panel_bytes<F>(k),
                    "], contiguous, not ", payload.toString(), " of shape ", payload.sizes(),
                    ": it was packed for other sizes or another format");
  return payload.const_data_ptr<uint8_t>();
}

const float* checked_scales(const Tensor& scales, int64_t n) {
  TORCH_CHECK_VALUE(scales.scalar_type() == at::kFloat && scales.is_contiguous() && scales.numel() == panels_of(n) * ROWS,
                    "scales of ", n, " rows of int8 are fp32 [", panels_of(n), ", 16], not ", scales.toString(),
                    " of shape ", scales.sizes());
  return scales.const_data_ptr<float>();
}

// Scales and zero points of all panels; `of` gives a panel's.
struct AllGroups {
  Groups first;
  int64_t per_panel;

  AllGroups(const Tensor& scales, const Tensor& zeros, int64_t n, int64_t k, int64_t group) {
    int64_t groups = (k + checked_group(group) - 1) / group, count = panels_of(n) * groups * ROWS;
    bool half = scales.scalar_type() == at::kHalf;
    TORCH_CHECK_VALUE((half || scales.scalar_type() == at::kFloat) && scales.is_contiguous() && scales.numel() == count,
                      "scales of ", n, " x ", k, " weights in groups of ", group, " are fp32 or fp16 [", panels_of(n),
                      ", ", groups, ", 16], not ", scales.toString(), " of shape ", scales.sizes());
    bool none = zeros.numel() == 0;
    TORCH_CHECK_VALUE(none || (zeros.scalar_type() == scales.scalar_type() && zeros.is_contiguous() &&
                               zeros.numel() == count),
                      "zero points have the dtype and shape of their scales, or are empty");
    first = {static_cast<const uint8_t*>(scales.const_data_ptr()),
             none ? nullptr : static_cast<const uint8_t*>(zeros.const_data_ptr()), half};
    per_panel = groups * first.bytes();
  }

  Groups of(int64_t panel) const {
    int64_t skip = panel * per_panel;
    return {first.scales + skip, first.zeros ? first.zeros + skip : nullptr, first.half};
  }
};

// ---- packing ----

// pack(rows, first row, panel, place of the panel's payload) for all panels
template <class F, class P>
Tensor packed(const Tensor& weight, const P& pack) {
  int64_t n = weight.size(0), k = weight.size(1), bytes = panel_bytes<F>(k);
  Tensor payload = empty_payload<F>(n, k);
  const float* w = weight.const_data_ptr<float>();
  auto* out = payload.mutable_data_ptr<uint8_t>();
  for_panels(panels_of(n), k * ROWS, [&](int64_t p) {
    pack(w + p * ROWS * k, std::min(ROWS, n - p * ROWS), p, out + p * bytes);
  });
  return payload;
}

}  // namespace

Tensor pack_fp32_weight(const Tensor& weight) {
  Tensor w = checked_weight(weight, false);
  return packed<Fp32>(w, [&](const float* from, int64_t rows, int64_t, uint8_t* out) {
    pack_fp32(from, rows, w.size(1), out);
  });
}

Tensor pack_fp16_weight(const Tensor& weight) {
  Tensor w = checked_weight(weight, false);
  return packed<Fp16>(w, [&](const float* from, int64_t rows, int64_t, uint8_t* out) {
    pack_fp16(from, rows, w.size(1), out);
  });
}

std::tuple<Tensor, Tensor> pack_int8_weight(const Tensor& weight) {
  Tensor w = checked_weight(weight, true);
  Tensor scales = at::zeros({panels_of(w.size(0)), ROWS}, at::kFloat);
  auto* to = scales.mutable_data_ptr<float>();
  Tensor payload = packed<Int8>(w, [&](const float* from, int64_t rows, int64_t panel, uint8_t* out) {
    pack_int8(from, rows, w.size(1), out, to + panel * ROWS);
  });
  return {payload, scales};
}

std::tuple<Tensor, Tensor, Tensor> pack_int4_weight(const Tensor& weight, int64_t group, bool symmetric, bool half_scales) {
  Tensor w = checked_weight(weight, true);
  int64_t k = w.size(1), groups = (k + checked_group(group) - 1) / group, per_panel = groups * ROWS;
  auto dtype = half_scales ? at::kHalf : at::kFloat;
  Tensor scales = at::zeros({panels_of(w.size(0)), groups, ROWS}, dtype);
  Tensor zeros = symmetric ? at::empty({0}, dtype) : at::zeros_like(scales);
  auto pack = [&]<class S>(S* s, S* z) {
    return packed<Int4>(w, [&](const float* from, int64_t rows, int64_t panel, uint8_t* out) {
      int64_t skip = panel * per_panel;
      pack_int4(from, rows, k, group, out, s + skip, symmetric ? nullptr : z + skip);
    });
  };
  Tensor payload = half_scales ? pack(scales.mutable_data_ptr<c10::Half>(), zeros.mutable_data_ptr<c10::Half>())
                               : pack(scales.mutable_data_ptr<float>(), zeros.mutable_data_ptr<float>());
  return {payload, scales, zeros};
}

// ---- unpacking ----

namespace {

// unpack(place of the panel's payload, rows, panel, place of its first row) for all panels
template <class F, class U>
Tensor unpacked(const Tensor& payload, int64_t n, int64_t k, const U& unpack) {
  const uint8_t* from = checked_payload<F>(payload, n, k);
  Tensor weight = at::empty({n, k}, at::kFloat);
  auto* w = weight.mutable_data_ptr<float>();
  for_panels(panels_of(n), k * ROWS, [&](int64_t p) {
    unpack(from + p * panel_bytes<F>(k), std::min(ROWS, n - p * ROWS), p, w + p * ROWS * k);
  });
  return weight;
}

}  // namespace

Tensor unpack_fp32_weight(const Tensor& payload, int64_t n, int64_t k) {
  return unpacked<Fp32>(payload, n, k, [&](const uint8_t* from, int64_t rows, int64_t, float* w) {
    unpack_fp32(from, rows, k, w);
  });
}

Tensor unpack_fp16_weight(const Tensor& payload, int64_t n, int64_t k) {
  return unpacked<Fp16>(payload, n, k, [&](const uint8_t* from, int64_t rows, int64_t, float* w) {
    unpack_fp16(from, rows, k, w);
  });
}

Tensor unpack_int8_weight(const Tensor& payload, const Tensor& scales, int64_t n, int64_t k) {
  const float* s = checked_scales(scales, n);
  return unpacked<Int8>(payload, n, k, [&](const uint8_t* from, int64_t rows, int64_t panel, float* w) {
    unpack_int8(from, rows, k, s + panel * ROWS, w);
  });
}

Tensor unpack_int4_weight(
    const Tensor& payload, const Tensor& scales, const Tensor& zeros, int64_t n, int64_t k, int64_t group) {
  AllGroups groups(scales, zeros, n, k, group);
  return unpacked<Int4>(payload, n, k, [&](const uint8_t* from, int64_t rows, int64_t panel, float* w) {
    Groups of = groups.of(panel);
    auto unpack = [&]<class S>(S) {
      unpack_int4(from, rows, k, group, reinterpret_cast<const S*>(of.scales), reinterpret_cast<const S*>(of.zeros), w);
    };
    of.half ? unpack(c10::Half()) : unpack(0.0f);
  });
}

// ---- products ----

namespace {

// sums(panel, place of the panel's payload, [m][16] of zeros to add to), then the output
template <class F, class S>
Tensor multiplied(const Call& call, const uint8_t* payload, const float* scales, const float* row_scales, const S& sums) {
  int64_t bytes = panel_bytes<F>(call.k), work = call.k * ROWS * call.m;
  Output output = call.output();
  if (call.m == 0) return call.y;
  int64_t grain = std::max<int64_t>(1, 65536 / std::max<int64_t>(1, work));
  at::parallel_for(0, panels_of(call.n), grain, [&](int64_t begin, int64_t end) {
    std::vector<float> part(call.m * ROWS);
    for (int64_t p = begin; p < end; ++p) {
      std::fill(part.begin(), part.end(), 0.0f);
      sums(p, payload + p * bytes, part.data());
      output.write(p, part.data(), scales ? scales + p * ROWS : nullptr, row_scales);
    }
  });
  return call.y;
}

template <class F>
Tensor linear32(const Call& call, const Tensor& payload, const float* scales) {
  const uint8_t* w = checked_payload<F>(payload, call.n, call.k);
  bool wide = std::is_same_v<F, Fp32> || call.m > FUSED_ROWS;
  Rows32 rows(call.x(), call.m, call.k, round_up(call.k, F::KSTEP), wide ? TILE_ROWS : FUSED_ROWS, false, 0);
  return multiplied<F>(call, w, scales, nullptr, [&](int64_t, const uint8_t* from, float* sums) {
    panel_sums<F>(from, rows, {}, 0, sums);
  });
}

}  // namespace

Tensor linear_fp32(const Tensor& x, const Tensor& payload, const Bias& bias, int64_t n) {
  return linear32<Fp32>(Call(x, bias, n), payload, nullptr);
}

Tensor linear_fp16(const Tensor& x, const Tensor& payload, const Bias& bias, int64_t n) {
  return linear32<Fp16>(Call(x, bias, n), payload, nullptr);
}

Tensor linear_int8(const Tensor& x, const Tensor& payload, const Tensor& scales, const Bias& bias, int64_t n) {
  return linear32<Int8>(Call(x, bias, n), payload, checked_scales(scales, n));
}

Tensor linear_int8_a16(const Tensor& x, const Tensor& payload, const Tensor& scales, const Bias& bias, int64_t n) {
  Call call(x, bias, n);
  const uint8_t* w = checked_payload<Int8>(payload, n, call.k);
  RowsInt<int16_t> rows(call.x(), call.m, call.k, INT8_PAIRS, Int8::KSTEP, std::max<int64_t>(1, call.k), 0);
  return multiplied<Int8>(call, w, checked_scales(scales, n), rows.scales.data(),
                          [&](int64_t, const uint8_t* from, float* sums) { int8_panel_sums(from, rows, sums); });
}

Tensor linear_int4(const Tensor& x, const Tensor& payload, const Tensor& scales, const Tensor& zeros, const Bias& bias,
                   int64_t n, int64_t group) {
  Call call(x, bias, n);
  const uint8_t* w = checked_payload<Int4>(payload, n, call.k);
  AllGroups groups(scales, zeros, n, call.k, group);
  bool fused = call.m <= FUSED_ROWS;
  Rows32 rows(call.x(), call.m, call.k, round_up(call.k, Int4::KSTEP), fused ? FUSED_ROWS : TILE_ROWS, fused, group);
  return multiplied<Int4>(call, w, nullptr, nullptr, [&](int64_t panel, const uint8_t* from, float* sums) {
    panel_sums<Int4>(from, rows, groups.of(panel), group / Int4::KSTEP, sums);
  });
}

namespace {

template <class T>
Tensor linear_int4_fixed(const Tensor& x, const Tensor& payload, const Tensor& scales, const Tensor& zeros,
                         const Bias& bias, int64_t n, int64_t group) {
  constexpr bool bytes = sizeof(T) == 1;
  Call call(x, bias, n);
  const uint8_t* w = checked_payload<Int4>(payload, n, call.k);
  AllGroups groups(scales, zeros, n, call.k, group);
  int64_t scaled = bytes ? group : std::max<int64_t>(1, call.k);
  RowsInt<T> rows(call.x(), call.m, call.k, bytes ? INT4_QUADS : INT4_PAIRS, Int4::KSTEP, scaled, group);
  const float* row_scales = bytes ? nullptr : rows.scales.data();
  return multiplied<Int4>(call, w, nullptr, row_scales, [&](int64_t panel, const uint8_t* from, float* sums) {
    int4_panel_sums<T>(from, rows, groups.of(panel), group, sums);
  });
}

}  // namespace

Tensor linear_int4_a16(const Tensor& x, const Tensor& payload, const Tensor& scales, const Tensor& zeros, const Bias& bias,
                       int64_t n, int64_t group) {
  return linear_int4_fixed<int16_t>(x, payload, scales, zeros, bias, n, group);
}

Tensor linear_int4_a8(const Tensor& x, const Tensor& payload, const Tensor& scales, const Tensor& zeros, const Bias& bias,
                      int64_t n, int64_t group) {
  return linear_int4_fixed<int8_t>(x, payload, scales, zeros, bias, n, group);
}

}  // namespace dsmp

TORCH_LIBRARY(dsmp_cpu, m) {
  using namespace dsmp;
  m.def("fingerprint(Tensor weight) -> int");
  m.def("pack_fp32(Tensor weight) -> Tensor");
  m.def("pack_fp16(Tensor weight) -> Tensor");
  m.def("pack_int8(Tensor weight) -> (Tensor payload, Tensor scales)");
  m.def("pack_int4(Tensor weight, int group, bool symmetric, bool half_scales) -> "
        "(Tensor payload, Tensor scales, Tensor zeros)");
  m.def("unpack_fp32(Tensor payload, int out_features, int in_features) -> Tensor");
  m.def("unpack_fp16(Tensor payload, int out_features, int in_features) -> Tensor");
  m.def("unpack_int8(Tensor payload, Tensor scales, int out_features, int in_features) -> Tensor");
  m.def("unpack_int4(Tensor payload, Tensor scales, Tensor zeros, int out_features, int in_features, int group) -> "
        "Tensor");
  m.def("linear_fp32(Tensor x, Tensor payload, Tensor? bias, int out_features) -> Tensor");
  m.def("linear_fp16(Tensor x, Tensor payload, Tensor? bias, int out_features) -> Tensor");
  m.def("linear_int8(Tensor x, Tensor payload, Tensor scales, Tensor? bias, int out_features) -> Tensor");
  m.def("linear_int8_a16(Tensor x, Tensor payload, Tensor scales, Tensor? bias, int out_features) -> Tensor");
  for (const char* name : {"linear_int4", "linear_int4_a16", "linear_int4_a8"})
    m.def((std::string(name) + "(Tensor x, Tensor payload, Tensor scales, Tensor zeros, Tensor? bias, int out_features, "
                               "int group) -> Tensor").c_str());
}

TORCH_LIBRARY_IMPL(dsmp_cpu, CPU, m) {
  using namespace dsmp;
  m.impl("fingerprint", fingerprint);
  m.impl("pack_fp32", pack_fp32_weight);
  m.impl("pack_fp16", pack_fp16_weight);
  m.impl("pack_int8", pack_int8_weight);
  m.impl("pack_int4", pack_int4_weight);
  m.impl("unpack_fp32", unpack_fp32_weight);
  m.impl("unpack_fp16", unpack_fp16_weight);
  m.impl("unpack_int8", unpack_int8_weight);
  m.impl("unpack_int4", unpack_int4_weight);
  m.impl("linear_fp32", linear_fp32);
  m.impl("linear_fp16", linear_fp16);
  m.impl("linear_int8", linear_int8);
  m.impl("linear_int8_a16", linear_int8_a16);
  m.impl("linear_int4", linear_int4);
  m.impl("linear_int4_a16", linear_int4_a16);
  m.impl("linear_int4_a8", linear_int4_a8);
}
