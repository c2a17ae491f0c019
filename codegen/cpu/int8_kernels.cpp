#include "int8_kernels.h"

#include <vector>

namespace dsmp_int8 {
namespace {

constexpr int64_t kTiles = 12;   // of pixels, which share one pass over a block's weights
constexpr int64_t kChunk = 32;   // pixels of a depthwise pass

template <int A, int R>
FinishFunction by_output(bool bytes) {
  return bytes ? finish<A, R, true> : finish<A, R, false>;
}

template <int A>
FinishFunction by_residual(int64_t residual, bool bytes) {
  if (residual == kBytes) return by_output<A, kBytes>(bytes);
  return residual == kFloats ? by_output<A, kFloats>(bytes) : by_output<A, kAlone>(bytes);
}

// Calls take(first pixel, how many, its row, its column) for runs of output pixels within one row.
template <typename Take>
void runs(const Shape& s, int64_t begin, int64_t end, const Take& take) {
  int64_t row = begin / s.ow, column = begin % s.ow;
  while (begin < end) {
    const int64_t count = std::min(end - begin, s.ow - column);
    take(begin, count, row, column);
    begin += count;
    column = 0;
    ++row;
  }
}

// Pointers to all taps of output pixels [begin, end); place(pixel - begin, tap) says where in `table` each goes.
template <typename Place>
void locate(const Call& c, int64_t begin, int64_t end, int64_t offset, const uint8_t** table, const Place& place) {
  const Shape& s = c.s;
  const uint8_t* outside = c.outside + offset;
  runs(s, begin, end, [&](int64_t first, int64_t count, int64_t row, int64_t column) {
    const int64_t image = row / s.oh, top = row % s.oh * s.sh - s.ph, left = column * s.sw - s.pw;
    for (int64_t i = 0, tap = 0; i < s.kh; ++i) {
      const int64_t y = top + i * s.dh;
      const bool inside = y >= 0 && y < s.height;
      const uint8_t* line = c.x + (image * s.height + y) * s.width * s.channels + offset;
      for (int64_t j = 0; j < s.kw; ++j, ++tap) {
        int64_t z = left + j * s.dw;
        for (int64_t p = 0; p < count; ++p, z += s.sw)
          table[place(first - begin + p, tap)] = inside && z >= 0 && z < s.width ? line + z * s.channels : outside;
      }
    }
  });
}

inline void copy(uint8_t* to, const uint8_t* from, int64_t n) {
  if (n < 8) {
    for (int64_t k = 0; k < n; ++k) to[k] = from[k];
    return;
  }
  for (int64_t k = 0; k + 8 < n; k += 8) std::memcpy(to + k, from + k, 8);
  std::memcpy(to + n - 8, from + n - 8, 8);
}

// All taps of output pixels [begin, end), each pixel's in one row of `bytes` bytes.
void gather(const Call& c, int64_t begin, int64_t end, int64_t offset, int64_t bytes, uint8_t* to) {
  const Shape& s = c.s;
  const int64_t n = s.per_group(), reach = (s.kw - 1) * s.dw;
  const bool whole = s.groups == 1 && s.dw == 1;
  runs(s, begin, end, [&](int64_t, int64_t count, int64_t row, int64_t column) {
    const int64_t image = row / s.oh, top = row % s.oh * s.sh - s.ph;
    for (int64_t p = 0; p < count; ++p, to += bytes) {
      const int64_t left = (column + p) * s.sw - s.pw;
      uint8_t* place = to;
      for (int64_t i = 0; i < s.kh; ++i) {
        const int64_t y = top + i * s.dh;
        const bool inside = y >= 0 && y < s.height;
        const uint8_t* line = c.x + (image * s.height + y) * s.width * s.channels + offset;
        if (inside && whole && left >= 0 && left + reach < s.width) {
          copy(place, line + left * s.channels, s.kw * n);
          place += s.kw * n;
          continue;
        }
        for (int64_t j = 0; j < s.kw; ++j, place += n) {
          const int64_t z = left + j * s.dw;
          copy(place, inside && z >= 0 && z < s.width ? line + z * s.channels : c.outside, n);
        }
      }
    }
  });
}

using Kernel = void (*)(const uint8_t* const*, int64_t, int64_t, const int8_t*, const int32_t*, int32_t*);
constexpr Kernel kKernels[kRows + 1] = {nullptr, products<1>, products<2>, products<3>, products<4>};

void write(const Call& c, const int32_t* sums, int64_t pixel, int64_t rows, int64_t channel, int64_t count) {
  const int64_t at = pixel * c.s.out;
  const void* residual = c.residual ? static_cast<const char*>(c.residual) + at * (c.residual_bytes ? 1 : 4) : nullptr;
  c.finish(sums, rows, channel, count, c.s.out, residual, static_cast<char*>(c.out) + at * (c.out_bytes ? 1 : 4), c.f);
}

}  // namespace

FinishFunction finish_of(int64_t activation, int64_t residual, bool bytes) {
  switch (activation) {
    case kRelu: return by_residual<kRelu>(residual, bytes);
    case kHardswish: return by_residual<kHardswish>(residual, bytes);
    case kRelu6: return by_residual<kRelu6>(residual, bytes);
    default: return by_residual<kNone>(residual, bytes);
  }
}

void dense(const Call& c, int64_t first_tile, int64_t last_tile) {
  const Shape& s = c.s;
  const Layout layout(s.out, s.per_group(), s.area(), s.groups);
  const int64_t per_group = s.per_group(), group_out = s.out / s.groups, length = layout.taps * layout.bytes;
  const int64_t last = std::min(s.images * s.oh * s.ow, last_tile * kRows);
  std::vector<const uint8_t*> table(kTiles * kRows * layout.taps);
  std::vector<uint8_t> gathered(layout.gathered ? kTiles * kRows * layout.bytes : 0);
  alignas(32) int32_t sums[kRows * kChannels];
  if (layout.gathered)
    for (int64_t p = 0; p < kTiles * kRows; ++p) table[p] = gathered.data() + p * layout.bytes;
  for (int64_t begin = first_tile * kRows; begin < last; begin += kTiles * kRows) {
    const int64_t end = std::min(last, begin + kTiles * kRows);
    for (int64_t g = 0; g < s.groups; ++g) {
      if (layout.gathered) {
        gather(c, begin, end, g * per_group, layout.bytes, gathered.data());
      } else {
        const int64_t taps = layout.taps;
        locate(c, begin, end, g * per_group, table.data(),
               [taps](int64_t p, int64_t tap) { return (p / kRows * taps + tap) * kRows + p % kRows; });
      }
      for (int64_t b = 0; b < layout.blocks; ++b) {
        const int64_t channel = g * group_out + b * kChannels;
        const int64_t count = std::min<int64_t>(kChannels, group_out - b * kChannels);
        const int8_t* w = c.w + (g * layout.blocks + b) * kChannels * length;
        alignas(32) int32_t start[kChannels] = {};
        std::memcpy(start, c.start + channel, count * sizeof(int32_t));
        for (int64_t p = begin; p < end; p += kRows) {
          const int64_t rows = std::min<int64_t>(kRows, end - p);
          kKernels[rows](table.data() + (p - begin) * layout.taps, layout.taps, layout.bytes / 8, w, start, sums);
          write(c, sums, p, rows, channel, count);
        }
      }
    }
  }
}

void depthwise(const Call& c, int64_t first_row, int64_t last_row) {
  const Shape& s = c.s;
  const int64_t even = up(s.area(), 2), last = last_row * s.ow;
  std::vector<const uint8_t*> table(kChunk * even, c.outside), tails(even);
  std::vector<uint8_t> tail(even * kChannels);
  for (int64_t t = 0; t < even; ++t) tails[t] = tail.data() + t * kChannels;
  alignas(32) int32_t sums[kRows * kChannels];
  for (int64_t begin = first_row * s.ow; begin < last; begin += kChunk) {
    const int64_t end = std::min(begin + kChunk, last);
    locate(c, begin, end, 0, table.data(), [even](int64_t p, int64_t tap) { return p * even + tap; });
    for (int64_t channel = 0; channel < s.out; channel += kChannels) {
      const int64_t count = std::min<int64_t>(kChannels, s.out - channel);
      const auto* w = reinterpret_cast<const int16_t*>(c.w) + channel * even;
      alignas(32) int32_t start[kChannels] = {};
      std::memcpy(start, c.start + channel, count * sizeof(int32_t));
      for (int64_t p = begin; p < end; p += kRows) {
        const int64_t rows = std::min<int64_t>(kRows, end - p);
        for (int64_t r = 0; r < rows; ++r) {
          const uint8_t* const* taps = table.data() + (p + r - begin) * even;
          if (count == kChannels) {
            depthwise_products(taps, even / 2, channel, w, start, sums + r * kChannels);
            continue;
          }
          for (int64_t t = 0; t < even; ++t) copy(tail.data() + t * kChannels, taps[t] + channel, count);
          depthwise_products(tails.data(), even / 2, 0, w, start, sums + r * kChannels);
        }
        write(c, sums, p, rows, channel, count);
      }
    }
  }
}

void quantise_row(const float* x, int64_t width, int64_t channels, int64_t pixel_stride, int64_t channel_stride,
                  const float* gate, float inverse, int32_t zero, uint8_t* out) {
  if (channel_stride == 1) {
    for (int64_t p = 0; p < width; ++p, x += pixel_stride, out += channels) {
      int64_t k = 0;
#if defined(__AVX2__)
      const __m256 step = _mm256_set1_ps(inverse);
      for (; k + kChannels <= channels; k += kChannels) {
        __m256 a = _mm256_loadu_ps(x + k), b = _mm256_loadu_ps(x + k + 8);
        if (gate != nullptr) {
          a = _mm256_mul_ps(a, _mm256_loadu_ps(gate + k));
          b = _mm256_mul_ps(b, _mm256_loadu_ps(gate + k + 8));
        }
        const __m128i bytes = bytes_of(quantised(a, step, zero), quantised(b, step, zero));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(out + k), bytes);
      }
#endif
      for (; k < channels; ++k) out[k] = quantised(gate == nullptr ? x[k] : x[k] * gate[k], inverse, zero);
    }
    return;
  }
  for (int64_t k = 0; k < channels; ++k, x += channel_stride) {
    const float factor = gate == nullptr ? 1.0f : gate[k];
    int64_t p = 0;
#if defined(__AVX2__)
    const __m256 step = _mm256_set1_ps(inverse), gates = _mm256_set1_ps(factor);
    for (; pixel_stride == 1 && p + kChannels <= width; p += kChannels) {
      const __m256 a = _mm256_mul_ps(_mm256_loadu_ps(x + p), gates), b = _mm256_mul_ps(_mm256_loadu_ps(x + p + 8), gates);
      alignas(16) uint8_t bytes[kChannels];
      _mm_store_si128(reinterpret_cast<__m128i*>(bytes), bytes_of(quantised(a, step, zero), quantised(b, step, zero)));
      for (int64_t i = 0; i < kChannels; ++i) out[(p + i) * channels + k] = bytes[i];
    }
#endif
    for (; p < width; ++p) out[p * channels + k] = quantised(x[p * pixel_stride] * factor, inverse, zero);
  }
}

void max_pool_row(const Shape& s, const uint8_t* x, int64_t row, uint8_t* out) {
  const int64_t image = row / s.oh, top = row % s.oh * s.sh - s.ph;
  for (int64_t column = 0; column < s.ow; ++column, out += s.channels) {
    std::memset(out, 0, s.channels);
    for (int64_t i = 0; i < s.kh; ++i) {
      const int64_t y = top + i * s.dh;
      if (y < 0 || y >= s.height) continue;
      for (int64_t j = 0; j < s.kw; ++j) {
        const int64_t z = column * s.sw - s.pw + j * s.dw;
        if (z < 0 || z >= s.width) continue;
        const uint8_t* from = x + ((image * s.height + y) * s.width + z) * s.channels;
        for (int64_t k = 0; k < s.channels; ++k) out[k] = std::max(out[k], from[k]);
      }
    }
  }
}

}  // namespace dsmp_int8
