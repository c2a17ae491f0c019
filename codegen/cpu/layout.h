// How packed weights lie in memory, and how a step of them becomes vectors.
//
// A weight w[N, K] is cut into panels of 16 rows. A panel is a sequence of steps along K; a step holds KSTEP columns of
// the 16 rows, in two halves of 8 rows where a 32-bit lane holds several columns of one row (int8: four bytes, int4: eight
// nibbles, lowest first). So a vector of weights is 8 rows of one column, x is broadcast, and nothing is summed across
// lanes. Rows and columns that fill up a panel are zero (of int4: 8, which stands for zero in the symmetric flavour).
#pragma once

#include "vectors.h"

namespace dsmp {

constexpr int64_t ROWS = 16;

struct Columns {
  f32x8 low, high;  // rows 0..7 and 8..15 of a column
};

struct Fp32 {
  static constexpr int KSTEP = 4, BYTES = 256, AHEAD = 0, STREAMS = 4;
  static constexpr bool POWERS = false;
  struct Raw {
    const uint8_t* at;
  };
  static DSMP_INLINE Raw read(const uint8_t* at) { return {at}; }
  template <int J>
  static DSMP_INLINE Columns column(const Raw& raw) {
    return {load<f32x8>(raw.at + 64 * J), load<f32x8>(raw.at + 64 * J + 32)};
  }
};

// A block that is read once for several tiles of rows: they wait for arithmetic rather than for memory.
struct Fp32Ahead : Fp32 {
  static constexpr int AHEAD = 2048, STREAMS = 1;
};

// The same, of a block that is in the cache already.
struct Fp32Block : Fp32 {
  static constexpr int STREAMS = 1;
};

struct Fp16 {
  static constexpr int KSTEP = 4, BYTES = 128, AHEAD = 4096, STREAMS = 4;
  static constexpr bool POWERS = false;
  struct Raw {
    const uint8_t* at;
  };
  static DSMP_INLINE Raw read(const uint8_t* at) { return {at}; }
  template <int J>
  static DSMP_INLINE Columns column(const Raw& raw) {
    return {load_halves(raw.at + 32 * J), load_halves(raw.at + 32 * J + 16)};
  }
};

struct Words {
  i32x8 low, high;
};

DSMP_INLINE Words read_words(const uint8_t* at) { return {load<i32x8>(at), load<i32x8>(at + 32)}; }

struct Int8 {
  static constexpr int KSTEP = 4, BYTES = 64, AHEAD = 2048, STREAMS = 2;
  static constexpr bool POWERS = false;
  using Raw = Words;
  static DSMP_INLINE Raw read(const uint8_t* at) { return read_words(at); }
  template <int J>
  static DSMP_INLINE f32x8 one(i32x8 words) {
    return to_float((words << (24 - 8 * J)) >> 24);
  }
  template <int J>
  static DSMP_INLINE Columns column(const Raw& raw) {
    return {one<J>(raw.low), one<J>(raw.high)};
  }
};

// Nibble j is left where it is in its word, so that it counts 16^j: x is divided by that power beforehand, exactly.
struct Int4 {
  static constexpr int KSTEP = 8, BYTES = 64, AHEAD = 4096, STREAMS = 1;
  static constexpr bool POWERS = true;
  using Raw = Words;
  static DSMP_INLINE Raw read(const uint8_t* at) { return read_words(at); }
  template <int J>
  static DSMP_INLINE f32x8 one(i32x8 words) {
    if constexpr (J == 7)  // the sign bit is in it
      return to_float((i32x8)((u32x8)words >> 28));
    else
      return to_float(words & (int32_t)(0xf << (4 * J)));
  }
  template <int J>
  static DSMP_INLINE Columns column(const Raw& raw) {
    return {one<J>(raw.low), one<J>(raw.high)};
  }
  static constexpr float power(int j) { return j == 7 ? 1.0f : 1.0f / static_cast<float>(1 << (4 * j)); }
};

template <class F>
DSMP_INLINE void prefetch(const uint8_t* at) {
  if constexpr (F::AHEAD > 0)
    for (int line = 0; line < F::BYTES; line += 64) __builtin_prefetch(at + F::AHEAD + line, 0, 3);
}

constexpr int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// Scales and zero points of int4: per panel and group along K, 16 values of fp32 or fp16.
struct Groups {
  const uint8_t* scales;
  const uint8_t* zeros;  // null: 8
  bool half;
  int64_t bytes() const { return ROWS * (half ? 2 : 4); }
  DSMP_INLINE Columns read(const uint8_t* at) const {
    if (half) return {load_halves(at), load_halves(at + 16)};
    return {load<f32x8>(at), load<f32x8>(at + 32)};
  }
  DSMP_INLINE Columns scale(int64_t group) const { return read(scales + group * bytes()); }
  DSMP_INLINE Columns zero(int64_t group) const {
    return zeros ? read(zeros + group * bytes()) : Columns{all(8.0f), all(8.0f)};
  }
};

}  // namespace dsmp
