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

// As `quantised`, 16 numbers. Of NaN min returns its second operand, and the conversion the lowest int32; sums saturate.
inline __m128i quantised(__m256 low, __m256 high, __m256 inverse, __m256 highest, __m256i zero) {
  const __m256i a = _mm256_cvtps_epi32(_mm256_min_ps(highest, _mm256_mul_ps(low, inverse)));
  const __m256i b = _mm256_cvtps_epi32(_mm256_min_ps(highest, _mm256_mul_ps(high, inverse)));
  const __m256i shorts = _mm256_adds_epi16(_mm256_permute4x64_epi64(_mm256_packs_epi32(a, b), 0xD8), zero);
  return _mm_packus_epi16(_mm256_castsi256_si128(shorts), _mm256_extracti128_si256(shorts, 1));
}

inline __m256 highest_step(int32_t zero) { return _mm256_set1_ps(static_cast<float>(kTop - zero)); }

// Makes results of one block's sums. What the block's pixels share is held here: the compiler cannot tell that stores of
// results leave it as it is.
template <int A, int R, bool Bytes>
class BlockFinish {
 public:
  BlockFinish(const Finish& f, int64_t channel)
      : multiplier_{_mm256_loadu_ps(f.multiplier + channel), _mm256_loadu_ps(f.multiplier + channel + 8)},
        bias_{_mm256_loadu_ps(f.bias + channel), _mm256_loadu_ps(f.bias + channel + 8)},
        residual_scale_(_mm256_set1_ps(f.residual_scale)), residual_zero_(_mm256_set1_epi32(f.residual_zero)),
        inverse_(_mm256_set1_ps(f.inverse)), highest_(highest_step(f.zero)),
        zero_(_mm256_set1_epi16(static_cast<int16_t>(f.zero))) {}

  void operator()(const Sums& sums, const void* residual, void* out) const {
    __m256 y[2];
    for (int v = 0; v < 2; ++v) {
      y[v] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sums.part[v]), multiplier_[v], bias_[v]);
      if (R == kBytes) {
        const auto* bytes = reinterpret_cast<const __m128i*>(static_cast<const uint8_t*>(residual) + 8 * v);
        const __m256i whole = _mm256_sub_epi32(_mm256_cvtepu8_epi32(_mm_loadl_epi64(bytes)), residual_zero_);
        y[v] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(whole), residual_scale_, y[v]);
      } else if (R == kFloats) {
        y[v] = _mm256_add_ps(y[v], _mm256_loadu_ps(static_cast<const float*>(residual) + 8 * v));
      }
      y[v] = activated<A>(y[v]);
    }
    if (Bytes) {
      _mm_storeu_si128(static_cast<__m128i*>(out), quantised(y[0], y[1], inverse_, highest_, zero_));
    } else {
      _mm256_storeu_ps(static_cast<float*>(out), y[0]);
      _mm256_storeu_ps(static_cast<float*>(out) + 8, y[1]);
    }
  }

 private:
  __m256 multiplier_[2], bias_[2], residual_scale_;
  __m256i residual_zero_;
  __m256 inverse_, highest_;
  __m256i zero_;
};

#else

template <int A, int R, bool Bytes>
class BlockFinish {
 public:
  BlockFinish(const Finish& f, int64_t channel) : f_(f), channel_(channel) {}

  void operator()(const Sums& sums, const void* residual, void* out) const {
    for (int c = 0; c < kChannels; ++c) {
      float y = std::fma(static_cast<float>(sums.part[c]), f_.multiplier[channel_ + c], f_.bias[channel_ + c]);
      if (R == kBytes) {
        const int32_t whole = static_cast<int32_t>(static_cast<const uint8_t*>(residual)[c]) - f_.residual_zero;
        y = std::fma(static_cast<float>(whole), f_.residual_scale, y);
      } else if (R == kFloats) {
        y += static_cast<const float*>(residual)[c];
      }
      y = activated<A>(y);
      if (Bytes) {
        static_cast<uint8_t*>(out)[c] = quantised(y, f_.inverse, f_.zero);
      } else {
        static_cast<float*>(out)[c] = y;
      }
    }
  }

 private:
  const Finish& f_;
  int64_t channel_;
};

#endif

// Makes results of `count` channels from `channel` on of pixels' sums. `residual` and `out` are the pixel's own.
template <int A, int R, bool Bytes>
class Finisher {
 public:
  Finisher(const Finish& f, int64_t channel, int64_t count) : block_(f, channel), channel_(channel), count_(count) {}

  void operator()(const Sums& sums, const void* residual, void* out) const {
    constexpr int64_t in_size = R == kBytes ? 1 : 4, out_size = Bytes ? 1 : 4;
    const char* from = R == kAlone ? nullptr : static_cast<const char*>(residual) + channel_ * in_size;
    char* to = static_cast<char*>(out) + channel_ * out_size;
    if (count_ == kChannels) {
      block_(sums, from, to);
      return;
    }
    char other[kChannels * 4] = {}, made[kChannels * 4];
    if (R != kAlone) std::memcpy(other, from, count_ * in_size);
    block_(sums, other, made);
    std::memcpy(to, made, count_ * out_size);
  }

 private:
  const BlockFinish<A, R, Bytes> block_;
  const int64_t channel_, count_;
};

}  // namespace dsmp_int8
