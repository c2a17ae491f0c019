// What becomes of an int8 convolution's int32 sums: scale and bias, residual, activation, quantisation.
#pragma once

#include <algorithm>
#include <cmath>

#include "int8_products.h"

namespace dsmp_int8 {

constexpr int32_t kTop = 127;  // of quantised activations

enum Activation { kNone, kRelu, kHardswish, kRelu6 };
enum Residual { kAlone, kBytes, kFloats };

struct Finish {
  const float* multiplier;  // per output channel; readable up to the next multiple of 16, as is `bias`
  const float* bias;
  float residual_scale;  // of bytes
  int32_t residual_zero;
  float inverse;  // 1 / scale of the result's bytes
  int32_t zero;
};

template <int A>
float activated(float y) {
  if (A == kRelu) return std::max(y, 0.0f);
  if (A == kHardswish) return y * (std::min(std::max(y + 3.0f, 0.0f), 6.0f) * (1.0f / 6.0f));
  if (A == kRelu6) return std::min(std::max(y, 0.0f), 6.0f);
  return y;
}

// The nearest (ties to even) whole number of steps from `zero`, within [0, kTop]; of NaN, 0.
inline uint8_t quantised(float y, float inverse, int32_t zero) {
  const float lowest = static_cast<float>(-zero), highest = static_cast<float>(kTop - zero);
  float steps = y * inverse;
  steps = steps > lowest ? steps : lowest;
  steps = steps < highest ? steps : highest;
  return static_cast<uint8_t>(static_cast<int32_t>(std::nearbyintf(steps)) + zero);
}

#if defined(__AVX2__)

// NaN stays: max and min return their second operand for it.
template <int A>
__m256 activated(__m256 y) {
  const __m256 none = _mm256_setzero_ps(), six = _mm256_set1_ps(6.0f);
  if (A == kRelu) return _mm256_max_ps(none, y);
  if (A == kHardswish) {
    const __m256 gate = _mm256_min_ps(_mm256_max_ps(_mm256_add_ps(y, _mm256_set1_ps(3.0f)), none), six);
    return _mm256_mul_ps(y, _mm256_mul_ps(gate, _mm256_set1_ps(1.0f / 6.0f)));
  }
  if (A == kRelu6) return _mm256_min_ps(six, _mm256_max_ps(none, y));
  return y;
}

// As `quantised`, 8 numbers as int32: max and min return their second operand for NaN.
inline __m256i quantised(__m256 y, __m256 inverse, int32_t zero) {
  y = _mm256_max_ps(_mm256_mul_ps(y, inverse), _mm256_set1_ps(static_cast<float>(-zero)));
  y = _mm256_min_ps(y, _mm256_set1_ps(static_cast<float>(kTop - zero)));
  return _mm256_add_epi32(_mm256_cvtps_epi32(y), _mm256_set1_epi32(zero));
}

inline __m128i bytes_of(__m256i low, __m256i high) {
  const __m256i shorts = _mm256_permute4x64_epi64(_mm256_packs_epi32(low, high), 0xD8);
  return _mm_packus_epi16(_mm256_castsi256_si128(shorts), _mm256_extracti128_si256(shorts, 1));
}

inline __m256 widened(const uint8_t* x, int32_t zero) {
  const __m256i whole = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(x)));
  return _mm256_cvtepi32_ps(_mm256_sub_epi32(whole, _mm256_set1_epi32(zero)));
}

template <int A, int R, bool Bytes>
inline void finish_block(const Sums& sums, int64_t channel, const void* residual, void* out, const Finish& f) {
  __m256 y[2];
  for (int v = 0; v < 2; ++v) {
    const __m256 total = _mm256_cvtepi32_ps(sums.part[v]);
    const __m256 multiplier = _mm256_loadu_ps(f.multiplier + channel + 8 * v);
    y[v] = _mm256_fmadd_ps(total, multiplier, _mm256_loadu_ps(f.bias + channel + 8 * v));
    if (R == kBytes) {
      const __m256 other = widened(static_cast<const uint8_t*>(residual) + 8 * v, f.residual_zero);
      y[v] = _mm256_fmadd_ps(other, _mm256_set1_ps(f.residual_scale), y[v]);
    } else if (R == kFloats) {
      y[v] = _mm256_add_ps(y[v], _mm256_loadu_ps(static_cast<const float*>(residual) + 8 * v));
    }
    y[v] = activated<A>(y[v]);
  }
  if (Bytes) {
    const __m256 inverse = _mm256_set1_ps(f.inverse);
    const __m128i bytes = bytes_of(quantised(y[0], inverse, f.zero), quantised(y[1], inverse, f.zero));
    _mm_storeu_si128(static_cast<__m128i*>(out), bytes);
  } else {
    _mm256_storeu_ps(static_cast<float*>(out), y[0]);
    _mm256_storeu_ps(static_cast<float*>(out) + 8, y[1]);
  }
}

#else

template <int A, int R, bool Bytes>
inline void finish_block(const Sums& sums, int64_t channel, const void* residual, void* out, const Finish& f) {
  for (int c = 0; c < kChannels; ++c) {
    float y = std::fma(static_cast<float>(sums.part[c]), f.multiplier[channel + c], f.bias[channel + c]);
    if (R == kBytes) {
      const int32_t whole = static_cast<int32_t>(static_cast<const uint8_t*>(residual)[c]) - f.residual_zero;
      y = std::fma(static_cast<float>(whole), f.residual_scale, y);
    } else if (R == kFloats) {
      y += static_cast<const float*>(residual)[c];
    }
    y = activated<A>(y);
    if (Bytes) {
      static_cast<uint8_t*>(out)[c] = quantised(y, f.inverse, f.zero);
    } else {
      static_cast<float*>(out)[c] = y;
    }
  }
}

#endif

// One pixel's sums become results of `count` channels from `channel` on. `residual` and `out` are the pixel's own.
template <int A, int R, bool Bytes>
inline void finish(const Sums& sums, int64_t channel, int64_t count, const void* residual, void* out, const Finish& f) {
  constexpr int64_t in_size = R == kBytes ? 1 : 4, out_size = Bytes ? 1 : 4;
  const char* from = R == kAlone ? nullptr : static_cast<const char*>(residual) + channel * in_size;
  char* to = static_cast<char*>(out) + channel * out_size;
  if (count == kChannels) {
    finish_block<A, R, Bytes>(sums, channel, from, to, f);
    return;
  }
  char other[kChannels * 4] = {}, made[kChannels * 4];
  if (R != kAlone) std::memcpy(other, from, count * in_size);
  finish_block<A, R, Bytes>(sums, channel, other, made, f);
  std::memcpy(to, made, count * out_size);
}

}  // namespace dsmp_int8
