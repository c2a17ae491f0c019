// Products of packed weights with fp32 rows, summed in fp32.
#pragma once

#include "tiles.h"

namespace dsmp {

constexpr int64_t FUSED_ROWS = 4;  // up to so many, weights become fp32 in registers, else in a block that L1 holds
constexpr int64_t BLOCK = 256;     // columns of that block: a multiple of every group of int4
constexpr int64_t TILE_ROWS = 6;   // 6 rows of 16 sums leave 4 of 16 registers

// x[M, K] as the products read it: tile by tile, column by column, the rows of a tile side by side, zeros up to `k`.
struct Rows32 {
  std::vector<Tile> tiles;
  std::vector<float> values;
  std::vector<float> group_sums;  // [tile][group][rows of the tile]: only where groups are given
  int64_t k, groups;

  Rows32(const float* x, int64_t m, int64_t columns, int64_t padded, int64_t most, bool powers, int64_t group)
      : tiles(tiles_of(m, most)), values(m * padded), k(padded), groups(group ? (columns + group - 1) / group : 0) {
    group_sums.resize(m * groups);
    for (auto [row, rows] : tiles)
      for (int64_t i = 0; i < rows; ++i) {
        const float* from = x + (row + i) * columns;
        float* to = values.data() + row * k + i;
        for (int64_t c = 0; c < columns; ++c) to[c * rows] = from[c];
        for (int64_t g = 0; g < groups; ++g) {
          float sum = 0;
          for (int64_t c = g * group; c < columns && c < (g + 1) * group; ++c) sum += from[c];
          group_sums[row * groups + g * rows + i] = sum;
        }
        for (int64_t c = 0; powers && c < columns; ++c) to[c * rows] *= Int4::power(c % 8);
      }
  }
};

template <int M>
struct Sums {
  f32x8 low[M], high[M];
};

// sums[(FIRST + j) % SETS] += column j of a step of w * x[tile]^T
template <class F, int M, int SETS, int FIRST>
DSMP_INLINE void add_step(const uint8_t* w, const float* x, Sums<M> (&sums)[SETS]) {
  prefetch<F>(w);
  auto raw = F::read(w);
  unrolled<F::KSTEP>([&]<int J>() __attribute__((always_inline)) {
    Columns column = F::template column<J>(raw);
    Sums<M>& to = sums[(FIRST + J) % SETS];
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      f32x8 by = all(x[J * M + m]);
      to.low[m] = multiply_add(column.low, by, to.low[m]);
      to.high[m] = multiply_add(column.high, by, to.high[m]);
    }
  });
}

// sums += w[16, steps * KSTEP] x[tile]^T. K is read at several places at once, since one stream of reads does not use all
// the memory's rate that a core could; and few rows have several chains of sums, or the latency of additions is what one
// waits for.
template <class F, int M>
DSMP_INLINE void add_steps(const uint8_t* w, const float* x, int64_t steps, Sums<M>& sums) {
  constexpr int SETS = M == 1 ? 4 : M == 2 ? 2 : 1;
  constexpr int STREAMS = F::STREAMS;
  int64_t each = steps / STREAMS;
  Sums<M> sets[SETS];  // filled vector by vector: compilers keep them in registers then
  for (int i = 0; i < SETS; ++i)
    for (int m = 0; m < M; ++m) {
      sets[i].low[m] = i ? all(0.0f) : sums.low[m];
      sets[i].high[m] = i ? all(0.0f) : sums.high[m];
    }
  for (int64_t s = 0; s < each; ++s)
    unrolled<STREAMS>([&]<int I>() __attribute__((always_inline)) {
      int64_t at = I * each + s;
      add_step<F, M, SETS, I>(w + at * F::BYTES, x + at * F::KSTEP * M, sets);
    });
  for (int64_t s = each * STREAMS; s < steps; ++s)
    add_step<F, M, SETS, 0>(w + s * F::BYTES, x + s * F::KSTEP * M, sets);
  for (int i = 1; i < SETS; ++i)
    for (int m = 0; m < M; ++m) {
      sets[0].low[m] += sets[i].low[m];
      sets[0].high[m] += sets[i].high[m];
    }
  for (int m = 0; m < M; ++m) {
    sums.low[m] = sets[0].low[m];
    sums.high[m] = sets[0].high[m];
  }
}

// out[M][16] += w x^T
template <class F, int M>
void add_tile(const uint8_t* w, const float* x, int64_t steps, float* out) {
  Sums<M> sums;
  for (int m = 0; m < M; ++m) {
    sums.low[m] = load<f32x8>(out + m * ROWS);
    sums.high[m] = load<f32x8>(out + m * ROWS + 8);
  }
  add_steps<F, M>(w, x, steps, sums);
  for (int m = 0; m < M; ++m) {
    store(out + m * ROWS, sums.low[m]);
    store(out + m * ROWS + 8, sums.high[m]);
  }
}

// out[M][16] += sum over groups g of scale[g] * (q[g] x^T - zero[g] * sum of x over g)
template <int M>
void add_groups(const uint8_t* w, const float* x, const float* group_sums, int64_t steps, int64_t group_steps,
                Groups groups, int64_t first, float* out) {
  for (int64_t s = 0, g = 0; s < steps; s += group_steps, ++g) {
    int64_t count = steps - s < group_steps ? steps - s : group_steps;
    Columns zero = groups.zero(first + g), scale = groups.scale(first + g);
    Sums<M> sums;
    for (int m = 0; m < M; ++m) {
      f32x8 by = all(-group_sums[g * M + m]);
      sums.low[m] = zero.low * by;
      sums.high[m] = zero.high * by;
    }
    add_steps<Int4, M>(w + s * Int4::BYTES, x + s * Int4::KSTEP * M, count, sums);
    for (int m = 0; m < M; ++m) {
      float* to = out + m * ROWS;
      store(to, multiply_add(sums.low[m], scale.low, load<f32x8>(to)));
      store(to + 8, multiply_add(sums.high[m], scale.high, load<f32x8>(to + 8)));
    }
  }
}

// Columns of one panel as fp32, [columns][16].
template <class F>
void widen(const uint8_t* w, int64_t steps, float* out) {
  for (int64_t s = 0; s < steps; ++s, w += F::BYTES) {
    prefetch<F>(w);
    auto raw = F::read(w);
    unrolled<F::KSTEP>([&]<int J>() __attribute__((always_inline)) {
      Columns column = F::template column<J>(raw);
      store(out + (s * F::KSTEP + J) * ROWS, column.low);
      store(out + (s * F::KSTEP + J) * ROWS + 8, column.high);
    });
  }
}

inline void widen_groups(const uint8_t* w, int64_t steps, int64_t group_steps, Groups groups, int64_t first,
                         float* out) {
  for (int64_t s = 0, g = first; s < steps; ++g) {
    Columns zero = groups.zero(g), scale = groups.scale(g);
    for (int64_t end = s + group_steps < steps ? s + group_steps : steps; s < end; ++s) {
      const uint8_t* at = w + s * Int4::BYTES;
      prefetch<Int4>(at);
      auto raw = Int4::read(at);
      unrolled<8>([&]<int J>() __attribute__((always_inline)) {
        Columns column = Int4::column<J>(raw);
        float* to = out + (s * 8 + J) * ROWS;
        store(to, (column.low * all(Int4::power(J)) - zero.low) * scale.low);
        store(to + 8, (column.high * all(Int4::power(J)) - zero.high) * scale.high);
      });
    }
  }
}

// sums[M][16] of one panel, over all of K; `groups` of the panel for int4, of `group_steps` steps.
template <class F>
void panel_sums(const uint8_t* w, const Rows32& x, Groups groups, int64_t group_steps, float* sums) {
  const float* values = x.values.data();
  int64_t steps = x.k / F::KSTEP;
  constexpr bool grouped = std::is_same_v<F, Int4>;
  if (x.tiles.size() == 1 && x.tiles[0].rows <= FUSED_ROWS) {
    with_rows<FUSED_ROWS>(x.tiles[0].rows, [&]<int M>() {
      if constexpr (grouped)
        add_groups<M>(w, values, x.group_sums.data(), steps, group_steps, groups, 0, sums);
      else
        add_tile<F, M>(w, values, steps, sums);
    });
    return;
  }
  using From = std::conditional_t<std::is_same_v<F, Fp32>, Fp32Ahead, Fp32Block>;
  alignas(64) float block[BLOCK * ROWS];
  for (int64_t first = 0; first < x.k; first += BLOCK) {
    int64_t columns = x.k - first < BLOCK ? x.k - first : BLOCK;
    const uint8_t* from = w + first / F::KSTEP * F::BYTES;
    const uint8_t* wide = reinterpret_cast<const uint8_t*>(block);
    if constexpr (grouped)
      widen_groups(from, columns / F::KSTEP, group_steps, groups, first / F::KSTEP / group_steps, block);
    else if constexpr (std::is_same_v<F, Fp32>)
      wide = from;
    else
      widen<F>(from, columns / F::KSTEP, block);
    for (auto [row, rows] : x.tiles)
      with_rows<TILE_ROWS>(rows, [&]<int M>() {
        add_tile<From, M>(wide, values + row * x.k + first * M, columns / From::KSTEP, sums + row * ROWS);
      });
  }
}

}  // namespace dsmp
