#include "int8_kernels.h"

#include <vector>

namespace dsmp_int8 {
namespace {

constexpr int64_t kTiles = 12;   // of pixels, which share one pass over a block's weights
constexpr int64_t kNear = 16384;  // bytes that the pixels of a depthwise pass read, to stay in the first cache

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

// The input rows that one output row reads, padded at both ends, each copied once while output rows follow one another.
class Window {
 public:
  explicit Window(const Call& c)
      : c_(c), rows_((c.s.kh - 1) * c.s.dh + 1), held_(rows_, -1), tops_(rows_),
        width_((c.s.ow - 1) * c.s.sw + (c.s.kw - 1) * c.s.dw + 1),
        bytes_((rows_ * width_ + 1) * c.s.channels + kChannels) {}

  // Holds what output row `row` of all images reads.
  void move(int64_t row) {
    const Shape& s = c_.s;
    const int64_t image = row / s.oh, top = row % s.oh * s.sh - s.ph;
    for (int64_t i = 0; i < s.kh; ++i) {
      const int64_t y = top + i * s.dh;
      const int64_t wanted = y < 0 || y >= s.height ? kPadding : image * s.height + y;
      const int64_t slot = (y % rows_ + rows_) % rows_;
      tops_[i] = slot * width_ * s.channels;
      if (held_[slot] == wanted) continue;
      fill(bytes_.data() + tops_[i], wanted);
      held_[slot] = wanted;
    }
  }

  const uint8_t* data() const { return bytes_.data(); }
  // Where the i-th row of taps begins.
  int64_t line(int64_t i) const { return tops_[i]; }

 private:
  static constexpr int64_t kPadding = -2;

  void fill(uint8_t* to, int64_t wanted) const {
    const Shape& s = c_.s;
    const int64_t whole = wanted == kPadding ? 0 : std::min(s.width, std::max<int64_t>(0, width_ - s.pw));
    const int64_t left = whole == 0 ? width_ : std::min(s.pw, width_), right = width_ - left - whole;
    std::memset(to, *c_.outside, left * s.channels);
    if (whole > 0) std::memcpy(to + left * s.channels, c_.x + wanted * s.width * s.channels, whole * s.channels);
    std::memset(to + (left + whole) * s.channels, *c_.outside, right * s.channels);
  }

  const Call& c_;
  int64_t rows_;
  std::vector<int64_t> held_, tops_;
  int64_t width_;
  std::vector<uint8_t> bytes_;
};

// Where a pixel's residual and result lie.
template <int R>
const void* residual_of(const Call& c, int64_t pixel) {
  if (R == kAlone) return nullptr;
  return static_cast<const char*>(c.residual) + pixel * c.s.out * (R == kBytes ? 1 : 4);
}

template <bool Bytes>
void* result_of(const Call& c, int64_t pixel) {
  return static_cast<char*>(c.out) + pixel * c.s.out * (Bytes ? 1 : 4);
}

// One block of 16 output channels, or as many as a group has: its packed weights and where its sums start.
struct Block {
  const void* w;
  const int32_t* start;
  int64_t channel, count;
};

// Out of line: there are 24 kinds of results, and the last tile of an image is one of many.
template <int Rows>
[[gnu::noinline]] void few_products(const uint8_t* const* rows, int64_t taps, int64_t depth, const int8_t* w,
                                    const int32_t* start, Sums* sums) {
  products<Rows>(rows, taps, depth, w, start, sums);
}

template <int A, int R, bool Bytes>
struct Dense {
  template <int Rows>
  static void tile(const Call& c, const Layout& layout, const uint8_t* const* rows, const Block& b,
                   const Finisher<A, R, Bytes>& finish, int64_t pixel) {
    Sums sums[Rows];
    const auto* w = static_cast<const int8_t*>(b.w);
    if constexpr (Rows == kRows) {
      products<Rows>(rows, layout.taps, layout.bytes / 8, w, b.start, sums);
    } else {
      few_products<Rows>(rows, layout.taps, layout.bytes / 8, w, b.start, sums);
    }
    for (int r = 0; r < Rows; ++r)
      finish(sums[r], residual_of<R>(c, pixel + r), result_of<Bytes>(c, pixel + r));
  }

  static void tiles(const Call& c, const Layout& layout, const uint8_t* const* table, int64_t p, int64_t end,
                    const Block& b) {
    const Finisher<A, R, Bytes> finish(c.f, b.channel, b.count);
    for (; p + kRows <= end; p += kRows, table += kRows * layout.taps) tile<kRows>(c, layout, table, b, finish, p);
    if (end - p == 3) tile<3>(c, layout, table, b, finish, p);
    if (end - p == 2) tile<2>(c, layout, table, b, finish, p);
    if (end - p == 1) tile<1>(c, layout, table, b, finish, p);
  }
};

template <int A, int R, bool Bytes>
struct Depthwise {
  // Output pixels [p, end) of one row; the first one's taps lie `distances` from `x`.
  static void row(const Call& c, const uint8_t* x, const int64_t* distances, int64_t p, int64_t end, const Block& b) {
    switch (c.s.area()) {
      case 9: return pairs<5>(c, x, distances, p, end, b);
      case 25: return pairs<13>(c, x, distances, p, end, b);
      default: return pairs<0>(c, x, distances, p, end, b);
    }
  }

  template <int P>
  static void pairs(const Call& c, const uint8_t* x, const int64_t* distances, int64_t p, int64_t end, const Block& b) {
    const int64_t step = c.s.sw * c.s.channels, pairs = up(c.s.area(), 2) / 2;
    const Finisher<A, R, Bytes> finish(c.f, b.channel, b.count);
    for (; p < end; ++p, x += step) {
      const Sums sums = depthwise_products<P>(x, distances, pairs, static_cast<const int16_t*>(b.w), b.start);
      finish(sums, residual_of<R>(c, p), result_of<Bytes>(c, p));
    }
  }
};

// Calls take(Kind<activation, residual, bytes>()) for what a call asks.
template <template <int, int, bool> class Kind, int A, int R, typename Take>
void by_output(const Call& c, const Take& take) {
  c.out_bytes ? take(Kind<A, R, true>()) : take(Kind<A, R, false>());
}

template <template <int, int, bool> class Kind, int A, typename Take>
void by_residual(const Call& c, const Take& take) {
  if (c.residual == nullptr) return by_output<Kind, A, kAlone>(c, take);
  c.residual_bytes ? by_output<Kind, A, kBytes>(c, take) : by_output<Kind, A, kFloats>(c, take);
}

template <template <int, int, bool> class Kind, typename Take>
void chosen(const Call& c, const Take& take) {
  switch (c.activation) {
    case kRelu: return by_residual<Kind, kRelu>(c, take);
    case kHardswish: return by_residual<Kind, kHardswish>(c, take);
    case kRelu6: return by_residual<Kind, kRelu6>(c, take);
    default: return by_residual<Kind, kNone>(c, take);
  }
}

}  // namespace

void dense(const Call& c, int64_t first_tile, int64_t last_tile) {
  const Shape& s = c.s;
  const Layout layout(s.out, s.per_group(), s.area(), s.groups);
  const int64_t per_group = s.per_group(), group_out = s.out / s.groups, length = layout.taps * layout.bytes;
  const int64_t last = std::min(s.images * s.oh * s.ow, last_tile * kRows), taps = layout.taps;
  std::vector<const uint8_t*> table(kTiles * kRows * taps);
  std::vector<uint8_t> gathered(layout.gathered ? kTiles * kRows * layout.bytes : 0);
  if (layout.gathered)
    for (int64_t p = 0; p < kTiles * kRows; ++p) table[p] = gathered.data() + p * layout.bytes;
  for (int64_t begin = first_tile * kRows; begin < last; begin += kTiles * kRows) {
    const int64_t end = std::min(last, begin + kTiles * kRows);
    for (int64_t g = 0; g < s.groups; ++g) {
      if (layout.gathered) {
        gather(c, begin, end, g * per_group, layout.bytes, gathered.data());
      } else {
        locate(c, begin, end, g * per_group, table.data(),
               [taps](int64_t p, int64_t tap) { return (p / kRows * taps + tap) * kRows + p % kRows; });
      }
      for (int64_t b = 0; b < layout.blocks; ++b) {
        const int64_t channel = g * group_out + first_channel(b, group_out);
        const int64_t count = std::min<int64_t>(kChannels, group_out);
        alignas(32) int32_t start[kChannels] = {};
        std::memcpy(start, c.start + channel, count * sizeof(int32_t));
        const Block block = {c.w + (g * layout.blocks + b) * kChannels * length, start, channel, count};
        chosen<Dense>(c, [&](auto kind) { decltype(kind)::tiles(c, layout, table.data(), begin, end, block); });
      }
    }
  }
}

void depthwise(const Call& c, int64_t first_row, int64_t last_row) {
  const Shape& s = c.s;
  const int64_t even = up(s.area(), 2), count = std::min<int64_t>(kChannels, s.out);
  const int64_t chunk = std::max<int64_t>(4, std::min<int64_t>(32, kNear / (s.channels * s.kh * s.sw)));
  Window window(c);
  std::vector<int64_t> distances(even);
  decltype(&Depthwise<kNone, kAlone, true>::row) take = nullptr;
  chosen<Depthwise>(c, [&](auto kind) { take = &decltype(kind)::row; });
  for (int64_t row = first_row; row < last_row; ++row) {
    window.move(row);
    for (int64_t t = 0; t < s.area(); ++t)
      distances[t] = window.line(t / s.kw) + t % s.kw * s.dw * s.channels;
    if (even > s.area()) distances[s.area()] = distances[0];  // it is multiplied by 0
    for (int64_t column = 0; column < s.ow; column += chunk) {
      const int64_t begin = row * s.ow + column, end = row * s.ow + std::min(s.ow, column + chunk);
      for (int64_t b = 0; b < up(s.out, kChannels) / kChannels; ++b) {
        const int64_t channel = first_channel(b, s.out);
        alignas(32) int32_t start[kChannels] = {};
        std::memcpy(start, c.start + channel, count * sizeof(int32_t));
        const Block block = {reinterpret_cast<const int16_t*>(c.w) + b * kChannels * even, start, channel, count};
        take(c, window.data() + column * s.sw * s.channels + channel, distances.data(), begin, end, block);
      }
    }
  }
}

void quantise_row(const float* x, int64_t width, int64_t channels, int64_t pixel_stride, int64_t channel_stride,
                  const float* gate, float inverse, int32_t zero, uint8_t* out) {
  if (channel_stride == 1 && pixel_stride == channels && gate == nullptr) {  // one row of numbers
    channels *= width;
    width = 1;
  }
  if (channel_stride == 1) {
    for (int64_t p = 0; p < width; ++p, x += pixel_stride, out += channels) {
      int64_t k = 0;
#if defined(__AVX2__)
      const __m256 step = _mm256_set1_ps(inverse), highest = highest_step(zero);
      const __m256i origin = _mm256_set1_epi16(static_cast<int16_t>(zero));
      for (; k + kChannels <= channels; k += kChannels) {
        __m256 a = _mm256_loadu_ps(x + k), b = _mm256_loadu_ps(x + k + 8);
        if (gate != nullptr) {
          a = _mm256_mul_ps(a, _mm256_loadu_ps(gate + k));
          b = _mm256_mul_ps(b, _mm256_loadu_ps(gate + k + 8));
        }
        _mm_storeu_si128(reinterpret_cast<__m128i*>(out + k), quantised(a, b, step, highest, origin));
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
    const __m256 step = _mm256_set1_ps(inverse), gates = _mm256_set1_ps(factor), highest = highest_step(zero);
    const __m256i origin = _mm256_set1_epi16(static_cast<int16_t>(zero));
    for (; pixel_stride == 1 && p + kChannels <= width; p += kChannels) {
      const __m256 a = _mm256_mul_ps(_mm256_loadu_ps(x + p), gates), b = _mm256_mul_ps(_mm256_loadu_ps(x + p + 8), gates);
      alignas(16) uint8_t bytes[kChannels];
      _mm_store_si128(reinterpret_cast<__m128i*>(bytes), quantised(a, b, step, highest, origin));
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
