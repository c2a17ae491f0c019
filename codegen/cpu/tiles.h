// Rows of x are taken in tiles, so that every vector of weights is used for all rows of a tile while it is in a register.
#pragma once

#include <utility>
#include <vector>

#include "layout.h"

namespace dsmp {

struct Tile {
  int64_t row, rows;
};

// As few tiles of at most `most` rows as there can be, of nearly the same size.
inline std::vector<Tile> tiles_of(int64_t m, int64_t most) {
  int64_t count = (m + most - 1) / most;
  std::vector<Tile> tiles;
  for (int64_t i = 0, row = 0; i < count; ++i) {
    int64_t rows = m / count + (i < m % count);
    tiles.push_back({row, rows});
    row += rows;
  }
  return tiles;
}

// Calls f.template operator()<R>() for R = rows, 1..MOST.
template <int MOST, class F>
DSMP_INLINE void with_rows(int64_t rows, F&& f) {
  if constexpr (MOST > 0) {
    if (rows == MOST)
      f.template operator()<MOST>();
    else
      with_rows<MOST - 1>(rows, std::forward<F>(f));
  }
}

// Calls f.template operator()<J>() for J = 0 .. COUNT - 1.
template <int COUNT, class F>
DSMP_INLINE void unrolled(F&& f) {
  [&]<int... J>(std::integer_sequence<int, J...>) __attribute__((always_inline)) { (f.template operator()<J>(), ...); }
  (std::make_integer_sequence<int, COUNT>{});
}

// Where a panel's sums become outputs: y[m, n] = sums[m, 16] * scale[16] * row_scale[m] + bias[n].
struct Output {
  float* y;
  const float* bias;  // null: none
  int64_t m, n;

  void write(int64_t panel, const float* sums, const float* scale, const float* row_scale) const {
    int64_t first = panel * ROWS, rows = n - first < ROWS ? n - first : ROWS;
    for (int64_t i = 0; i < m; ++i) {
      float by = row_scale ? row_scale[i] : 1.0f;
      for (int64_t r = 0; r < rows; ++r) {
        float sum = sums[i * ROWS + r] * (scale ? scale[r] * by : by);
        y[i * n + first + r] = bias ? sum + bias[first + r] : sum;
      }
    }
  }
};

}  // namespace dsmp
