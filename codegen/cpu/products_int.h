// Products of packed int8 and int4 weights with rows in fixed point, summed exactly in int32, then in fp32.
//
// 16 bits (one scale per row of x, amax / 32767): |x q| of a pair of int8 weights is at most 2 * 32767 * 127, so 256 pairs,
// 512 columns, fit an int32 (INT8_BLOCK). On machines without VNNI it costs what 8 bits would.
// 8 bits (one scale per row and group, amax / 127), for int4 only: a pair is at most 2 * 127 * 15 = 3810, and eight pairs,
// the two of each of four steps, fit an int16.
#pragma once

#include <algorithm>
#include <cmath>

#include "tiles.h"

namespace dsmp {

constexpr int64_t INT_TILE_ROWS = 4;
constexpr int64_t INT8_BLOCK = 512;

// The columns of a step in the order in which the kernels' words hold them.
constexpr int INT8_PAIRS[4] = {0, 2, 1, 3};
constexpr int INT4_PAIRS[8] = {0, 4, 1, 5, 2, 6, 3, 7};
constexpr int INT4_QUADS[8] = {0, 2, 4, 6, 1, 3, 5, 7};

// x[M, K] as integers T: tile by tile, step by step, 32-bit words of the rows of a tile side by side.
template <class T>
struct RowsInt {
  std::vector<Tile> tiles;
  std::vector<T> values;
  std::vector<float> scales;        // [tile][group][rows of the tile]; one group: [M]
  std::vector<int32_t> group_sums;  // [tile][group][rows of the tile]
  int64_t k, groups;                // groups of sums

  // `order` of `step` columns; scales per `scaled` columns, sums per `group` columns (0: none).
  RowsInt(const float* x, int64_t m, int64_t columns, const int* order, int64_t step, int64_t scaled, int64_t group)
      : tiles(tiles_of(m, INT_TILE_ROWS)), k(round_up(columns, step)) {
    constexpr int64_t words = 4 / sizeof(T);
    constexpr float top = sizeof(T) == 1 ? 127.0f : 32767.0f;
    int64_t scale_groups = std::max<int64_t>(1, (columns + scaled - 1) / scaled);
    groups = group ? (columns + group - 1) / group : 0;
    values.resize(m * k);
    scales.resize(m * scale_groups);
    group_sums.resize(m * groups);
    std::vector<T> line(k);
    for (auto [row, rows] : tiles)
      for (int64_t i = 0; i < rows; ++i) {
        const float* from = x + (row + i) * columns;
        for (int64_t g = 0; g < scale_groups; ++g) {
          int64_t begin = g * scaled, end = std::min(columns, begin + scaled);
          scales[row * scale_groups + g * rows + i] = quantize(from + begin, end - begin, top, line.data() + begin);
        }
        for (int64_t g = 0; g < groups; ++g) {
          int32_t sum = 0;
          for (int64_t c = g * group; c < std::min(columns, (g + 1) * group); ++c) sum += line[c];
          group_sums[row * groups + g * rows + i] = sum;
        }
        T* to = values.data() + row * k;
        for (int64_t c = 0; c < k; c += step)
          for (int64_t j = 0; j < step; ++j) to[((c + j) / words * rows + i) * words + j % words] = line[c + order[j]];
      }
  }

  // The scale of n values: NaN, with zeros for values, where one of them is not finite.
  static float quantize(const float* x, int64_t n, float top, T* out) {
    float amax = 0, spoilt = 0;
    for (int64_t c = 0; c < n; ++c) {
      float size = std::fabs(x[c]);
      amax = size > amax ? size : amax;
      spoilt += x[c] * 0.0f;
    }
    float scale = amax / top;
    if (spoilt != 0 || !(scale > 0)) {
      std::fill(out, out + n, T(0));
      return spoilt == 0 ? 0.0f : NAN;
    }
    float by = top / amax;
    if (!(by <= 3e38f)) by = 0;  // amax below fp32's normal range
    for (int64_t c = 0; c < n; ++c) out[c] = static_cast<T>(std::nearbyint(x[c] * by));
    return scale;
  }
};

template <int M>
struct IntSums {
  i32x8 low[M], high[M];
};

// One pair of vectors of weights, rows 0..7 and 8..15, times the words of the tile's rows.
template <int M>
DSMP_INLINE void add_pairs(i32x8 low, i32x8 high, const int32_t* x, IntSums<M>& sums) {
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
    i32x8 by = all(x[m]);
    sums.low[m] = add_pair_products(sums.low[m], low, by);
    sums.high[m] = add_pair_products(sums.high[m], high, by);
  }
}

DSMP_INLINE i32x8 even_bytes(i32x8 v) { return (i32x8)(((i16x16)v << 8) >> 8); }
DSMP_INLINE i32x8 odd_bytes(i32x8 v) { return (i32x8)((i16x16)v >> 8); }

template <int M>
DSMP_INLINE void add_int8_steps(const uint8_t* w, const int32_t* x, int64_t steps, IntSums<M>& sums) {
  for (int64_t s = 0; s < steps; ++s, w += Int8::BYTES, x += 2 * M) {
    prefetch<Int8>(w);
    Words raw = read_words(w);
    add_pairs<M>(even_bytes(raw.low), even_bytes(raw.high), x, sums);
    add_pairs<M>(odd_bytes(raw.low), odd_bytes(raw.high), x + M, sums);
  }
}

template <int M>
DSMP_INLINE void add_int4_steps(const uint8_t* w, const int32_t* x, int64_t steps, IntSums<M>& sums) {
  for (int64_t s = 0; s < steps; ++s, w += Int4::BYTES, x += 4 * M) {
    prefetch<Int4>(w);
    Words raw = read_words(w);
    unrolled<4>([&]<int J>() __attribute__((always_inline)) {
      i32x8 mask = all(0x000f000f);
      add_pairs<M>((raw.low >> (4 * J)) & mask, (raw.high >> (4 * J)) & mask, x + J * M, sums);
    });
  }
}

// The same with rows of 8 bits: sums of int16 over four steps at most, then of int32.
template <int M>
DSMP_INLINE void add_int4_byte_steps(const uint8_t* w, const int32_t* x, int64_t steps, IntSums<M>& sums) {
  i32x8 mask = all(0x0f0f0f0f);
  for (int64_t s = 0; s < steps; s += 4) {
    i16x16 low[M], high[M];
    for (int m = 0; m < M; ++m) low[m] = high[m] = i16x16{};
    for (int64_t end = std::min<int64_t>(steps - s, 4); end > 0; --end, w += Int4::BYTES, x += 2 * M) {
      prefetch<Int4>(w);
      Words raw = read_words(w);
      i32x8 first = raw.low & mask, second = raw.high & mask;
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) {
        low[m] += byte_products(first, all(x[m]));
        high[m] += byte_products(second, all(x[m]));
      }
      first = (raw.low >> 4) & mask, second = (raw.high >> 4) & mask;
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) {
        low[m] += byte_products(first, all(x[M + m]));
        high[m] += byte_products(second, all(x[M + m]));
      }
    }
    for (int m = 0; m < M; ++m) {
      sums.low[m] += pair_sums(low[m]);
      sums.high[m] += pair_sums(high[m]);
    }
  }
}

template <int M>
DSMP_INLINE void fold(const IntSums<M>& sums, Columns scale, const float* row_scales, float* out) {
  for (int m = 0; m < M; ++m) {
    f32x8 by = all(row_scales ? row_scales[m] : 1.0f);
    float* to = out + m * ROWS;
    store(to, multiply_add(to_float(sums.low[m]), scale.low * by, load<f32x8>(to)));
    store(to + 8, multiply_add(to_float(sums.high[m]), scale.high * by, load<f32x8>(to + 8)));
  }
}

// sums[M][16] of a panel of int8, without the scales.
inline void int8_panel_sums(const uint8_t* w, const RowsInt<int16_t>& x, float* sums) {
  auto* values = reinterpret_cast<const int32_t*>(x.values.data());
  for (int64_t first = 0; first < x.k; first += INT8_BLOCK) {
    int64_t steps = std::min(x.k - first, INT8_BLOCK) / Int8::KSTEP;
    for (auto [row, rows] : x.tiles)
      with_rows<INT_TILE_ROWS>(rows, [&]<int M>() {
        IntSums<M> part{};
        add_int8_steps<M>(w + first / Int8::KSTEP * Int8::BYTES, values + row * x.k / 2 + first / 2 * M, steps, part);
        fold<M>(part, {all(1.0f), all(1.0f)}, nullptr, sums + row * ROWS);
      });
  }
}

// sums[M][16] of a panel of int4 with its groups' scales; those of x too where they are per group (8 bits).
template <class T>
void int4_panel_sums(const uint8_t* w, const RowsInt<T>& x, Groups groups, int64_t group, float* sums) {
  auto* values = reinterpret_cast<const int32_t*>(x.values.data());
  for (int64_t g = 0; g < x.groups; ++g) {
    int64_t first = g * group, steps = std::min(x.k - first, group) / Int4::KSTEP;
    Columns scale = groups.scale(g), zero = groups.zero(g);
    i32x8 low = __builtin_convertvector(zero.low, i32x8), high = __builtin_convertvector(zero.high, i32x8);
    const uint8_t* from = w + first / Int4::KSTEP * Int4::BYTES;
    for (auto [row, rows] : x.tiles)
      with_rows<INT_TILE_ROWS>(rows, [&]<int M>() {
        constexpr int64_t words = 4 / sizeof(T);
        const int32_t* at = values + row * x.k / words + first / words * M;
        int64_t place = row * x.groups + g * M;
        IntSums<M> part;
        for (int m = 0; m < M; ++m) {
          i32x8 by = all(-x.group_sums[place + m]);
          part.low[m] = low * by;
          part.high[m] = high * by;
        }
        if constexpr (sizeof(T) == 1)
          add_int4_byte_steps<M>(from, at, steps, part);
        else
          add_int4_steps<M>(from, at, steps, part);
        fold<M>(part, scale, sizeof(T) == 1 ? x.scales.data() + place : nullptr, sums + row * ROWS);
      });
  }
}

}  // namespace dsmp
