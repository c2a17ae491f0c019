#include <limits>
#include <numeric>
#include <vector>

#include "int8_kernels.h"

namespace dsmp_int8 {
namespace {

constexpr int64_t kQuad = 32767 / kTop;              // what four weights of one sign may add up to
constexpr int64_t kPlace[4] = {0, 2, 1, 3};          // of four channels in a depthwise pair: 0-3, 8-11, 4-7, 12-15

// The most that four weights of one sign add up to whose products meet in int16.
int64_t worst_quad(const std::vector<int8_t>& q) {
  int64_t worst = 0;
  for (size_t k = 0; k < q.size(); k += 8)
    for (size_t j : {k, k + 2}) {
      int64_t positive = 0, negative = 0;
      for (size_t i : {j, j + 1, j + 4, j + 5}) (q[i] > 0 ? positive : negative) += q[i];
      worst = std::max({worst, positive, -negative});
    }
  return worst;
}

// Quantises one channel's finite weights and returns their scale: amax / 127, or more where that keeps quads within kQuad.
// Scales stay normal numbers: products of others are rounded too coarsely to grow.
float quantise_channel(const std::vector<float>& w, bool bounded, std::vector<int8_t>& q) {
  float largest = 0.0f;
  for (float value : w) largest = std::max(largest, std::fabs(value));
  float scale = largest > 0.0f ? std::max(largest / 127.0f, std::numeric_limits<float>::min()) : 1.0f;
  for (;;) {
    for (size_t i = 0; i < w.size(); ++i)
      q[i] = static_cast<int8_t>(std::nearbyintf(std::min(127.0f, std::max(-127.0f, w[i] / scale))));
    const int64_t worst = bounded ? worst_quad(q) : 0;
    if (worst <= kQuad) return scale;
    scale *= static_cast<float>(worst) / static_cast<float>(kQuad);
  }
}

// Calls place(index within its row, where it lies) for every weight of output channel `o`, in groups of `width`; twice
// where blocks overlap.
template <typename Place>
void each(const Layout& layout, int64_t o, int64_t width, int64_t area, int64_t length, const Place& place) {
  for (int64_t b = 0; b < layout.blocks; ++b) {
    const int64_t lane = o % width - first_channel(b, width);
    if (lane < 0 || lane >= kChannels) continue;
    if (layout.depthwise) {
      const int64_t base = b * kChannels * up(area, 2);
      for (int64_t t = 0; t < area; ++t) place(t, base + t / 2 * 32 + kPlace[lane / 4] * 8 + lane % 4 * 2 + t % 2);
    } else {
      const int64_t base = (o / width * layout.blocks + b) * kChannels * length;
      for (int64_t k = 0; k < length; ++k) place(k, base + k / 8 * 128 + k % 8 / 4 * 64 + lane * 4 + k % 4);
    }
  }
}

}  // namespace

Layout::Layout(int64_t out, int64_t per_group, int64_t area, int64_t groups) {
  depthwise = per_group == 1 && out == groups;
  gathered = !depthwise && per_group % 8 != 0;
  taps = depthwise || gathered ? 1 : area;
  bytes = depthwise ? area : gathered ? up(per_group * area, 8) : per_group;
  blocks = up(depthwise ? out : out / groups, kChannels) / kChannels;
  size = blocks * kChannels * (depthwise ? up(area, 2) * 2 : groups * taps * bytes);
}

void pack(const float* weight, int64_t out, int64_t per_group, int64_t area, int64_t groups, int8_t* payload,
          float* scales, int32_t* sums) {
  const Layout layout(out, per_group, area, groups);
  const int64_t length = layout.taps * layout.bytes, width = layout.depthwise ? out : out / groups;
  std::fill(payload, payload + layout.size, static_cast<int8_t>(0));
  std::vector<float> row(length);
  std::vector<int8_t> q(length);
  for (int64_t o = 0; o < out; ++o, weight += per_group * area) {
    for (int64_t c = 0; c < per_group; ++c)
      for (int64_t t = 0; t < area; ++t) row[t * per_group + c] = weight[c * area + t];
    scales[o] = quantise_channel(row, !layout.depthwise, q);
    sums[o] = std::accumulate(q.begin(), q.end(), int32_t{0});
    each(layout, o, width, area, length, [&](int64_t k, int64_t at) {
      if (layout.depthwise) {
        reinterpret_cast<int16_t*>(payload)[at] = q[k];
      } else {
        payload[at] = q[k];
      }
    });
  }
}

void unpack(const int8_t* payload, const float* scales, int64_t out, int64_t per_group, int64_t area, int64_t groups,
            float* weight) {
  const Layout layout(out, per_group, area, groups);
  const int64_t length = layout.taps * layout.bytes, width = layout.depthwise ? out : out / groups;
  for (int64_t o = 0; o < out; ++o, weight += per_group * area)
    each(layout, o, width, area, length, [&](int64_t k, int64_t at) {
      if (k >= per_group * area) return;  // the row's padding
      const int32_t q = layout.depthwise ? reinterpret_cast<const int16_t*>(payload)[at] : payload[at];
      weight[k % per_group * area + k / per_group] = static_cast<float>(q) * scales[o];
    });
}

}  // namespace dsmp_int8
