// Packing weights, and unpacking them to the values that the products multiply by.
#pragma once

#include <algorithm>
#include <cmath>

#include "layout.h"

namespace dsmp {

// Each function writes or reads one panel: `rows` (1..16) rows of w[., K] that start at `w`.

inline void pack_fp32(const float* w, int64_t rows, int64_t k, uint8_t* out) {
  auto* to = reinterpret_cast<float*>(out);
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < k; ++c) to[c * ROWS + r] = w[r * k + c];
}

inline void unpack_fp32(const uint8_t* from, int64_t rows, int64_t k, float* w) {
  auto* values = reinterpret_cast<const float*>(from);
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < k; ++c) w[r * k + c] = values[c * ROWS + r];
}

inline void pack_fp16(const float* w, int64_t rows, int64_t k, uint8_t* out) {
  auto* to = reinterpret_cast<c10::Half*>(out);
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < k; ++c) to[c * ROWS + r] = c10::Half(w[r * k + c]);
}

inline void unpack_fp16(const uint8_t* from, int64_t rows, int64_t k, float* w) {
  auto* values = reinterpret_cast<const c10::Half*>(from);
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < k; ++c) w[r * k + c] = static_cast<float>(values[c * ROWS + r]);
}

// The byte of row r, column c in a panel of int8.
inline int64_t int8_place(int64_t r, int64_t c) { return c / 4 * 64 + r * 4 + c % 4; }

// scale = amax / 127, one without values; q = round(w / scale), halves to even.
inline void pack_int8(const float* w, int64_t rows, int64_t k, uint8_t* out, float* scales) {
  auto* to = reinterpret_cast<int8_t*>(out);
  for (int64_t r = 0; r < rows; ++r) {
    float amax = 0;
    for (int64_t c = 0; c < k; ++c) amax = std::max(amax, std::fabs(w[r * k + c]));
    float scale = amax / 127.0f;
    scales[r] = scale;
    if (scale == 0) continue;
    for (int64_t c = 0; c < k; ++c)
      to[int8_place(r, c)] = static_cast<int8_t>(std::clamp(std::nearbyint(w[r * k + c] / scale), -127.0f, 127.0f));
  }
}

inline void unpack_int8(const uint8_t* from, int64_t rows, int64_t k, const float* scales, float* w) {
  auto* values = reinterpret_cast<const int8_t*>(from);
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < k; ++c) w[r * k + c] = static_cast<float>(values[int8_place(r, c)]) * scales[r];
}

// The byte of row r, column c in a panel of int4; its nibble is the low one in even columns.
inline int64_t int4_place(int64_t r, int64_t c) { return c / 8 * 64 + r * 4 + c % 8 / 2; }

struct Grid {
  float scale, zero;
};

// Symmetric: the value farthest from zero is 0 of 0..15, zero is 8 (llama.cpp's Q4_0). Asymmetric: least to greatest, zero
// among them, is 0 to 15. The scale is rounded to fp16 first where it is stored so, and kept finite.
inline Grid int4_grid(const float* w, int64_t n, bool symmetric, bool half) {
  float least = 0, greatest = 0;
  for (int64_t i = 0; i < n; ++i) {
    least = std::min(least, w[i]);
    greatest = std::max(greatest, w[i]);
  }
  float scale = symmetric ? (-least >= greatest ? least : greatest) / -8.0f : (greatest / 15.0f - least / 15.0f);
  if (half) scale = static_cast<float>(c10::Half(std::clamp(scale, -65504.0f, 65504.0f)));
  if (symmetric || scale == 0) return {scale, 8};
  return {scale, std::clamp(std::nearbyint(-least / scale), 0.0f, 15.0f)};
}

template <class S>
void pack_int4(const float* w, int64_t rows, int64_t k, int64_t group, uint8_t* out, S* scales, S* zeros) {
  std::memset(out, 0x88, round_up(k, 8) / 8 * 64);
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < k; c += group) {
      const float* at = w + r * k + c;
      int64_t n = std::min(group, k - c), place = c / group * ROWS + r;
      auto [scale, zero] = int4_grid(at, n, zeros == nullptr, sizeof(S) == 2);
      scales[place] = S(scale);
      if (zeros) zeros[place] = S(zero);
      for (int64_t i = 0; i < n; ++i) {
        float q = scale == 0 ? zero : std::clamp(std::nearbyint(at[i] / scale) + zero, 0.0f, 15.0f);
        uint8_t& byte = out[int4_place(r, c + i)];
        int shift = (c + i) % 2 * 4;
        byte = static_cast<uint8_t>((byte & ~(0xf << shift)) | static_cast<int>(q) << shift);
      }
    }
}

template <class S>
void unpack_int4(
    const uint8_t* from, int64_t rows, int64_t k, int64_t group, const S* scales, const S* zeros, float* w) {
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < k; ++c) {
      int64_t place = c / group * ROWS + r;
      int q = from[int4_place(r, c)] >> (c % 2 * 4) & 0xf;
      float zero = zeros ? static_cast<float>(zeros[place]) : 8.0f;
      w[r * k + c] = static_cast<float>(scales[place]) * (static_cast<float>(q) - zero);
    }
}

}  // namespace dsmp
