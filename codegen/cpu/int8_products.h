// Inner loops of int8 convolutions: bytes of activations, within [0, 127], times signed 8-bit weights, added up in int32.
//
// Packed weights, dense: for each block of 16 output channels, for each tap, for each 8 input channels k: channels 0..7
// times k 0..3, channels 8..15 times k 0..3, then both times k 4..7: 128 bytes. Without VNNI, two products of neighbouring
// k are added in int16 and, with the two that are 4 apart, stay there: packing bounds weights so that the four never leave
// int16, on every machine, so that all give the same sums.
// Depthwise: for each block of 16 channels, for each pair of taps, int16 pairs of channels 0-3, 8-11, 4-7, 12-15.
#pragma once

#include <cstdint>
#include <cstring>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace dsmp_int8 {

constexpr int kChannels = 16;  // output channels of a block
constexpr int kRows = 4;       // pixels of a tile

#if defined(__AVX2__)

// One pixel's sums of 16 output channels.
struct Sums {
  __m256i part[2];
};

// Sums of R pixels: `rows` holds, tap after tap, one pointer per pixel; `depth` is the bytes per tap / 8.
#if defined(__AVX512VNNI__)

// Four bytes everywhere, from memory: through a general register they would take the port that shuffles, twice.
inline __m512i four(const uint8_t* x) {
  int32_t bytes;
  std::memcpy(&bytes, x, 4);
  return _mm512_broadcastd_epi32(_mm_cvtsi32_si128(bytes));
}

template <int R>
[[gnu::always_inline]] inline void products(const uint8_t* const* rows, int64_t taps, int64_t depth, const int8_t* w,
                                            const int32_t* start, Sums* sums) {
  // two sums per pixel, or each would wait for the one before
  __m512i total[R][2];
  for (int r = 0; r < R; ++r) {
    total[r][0] = _mm512_loadu_si512(start);
    total[r][1] = _mm512_setzero_si512();
  }
  for (int64_t tap = 0; tap < taps; ++tap) {
    const uint8_t* x[R];
    for (int r = 0; r < R; ++r) x[r] = rows[tap * kRows + r];
    for (int64_t d = 0; d < depth; ++d, w += 128) {
      const __m512i first = _mm512_loadu_si512(w), second = _mm512_loadu_si512(w + 64);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        total[r][0] = _mm512_dpbusd_epi32(total[r][0], four(x[r] + 8 * d), first);
        total[r][1] = _mm512_dpbusd_epi32(total[r][1], four(x[r] + 8 * d + 4), second);
      }
    }
  }
  for (int r = 0; r < R; ++r) {
    const __m512i whole = _mm512_add_epi32(total[r][0], total[r][1]);
    sums[r].part[0] = _mm512_castsi512_si256(whole);
    sums[r].part[1] = _mm512_extracti64x4_epi64(whole, 1);
  }
}

#else

template <int R>
[[gnu::always_inline]] inline void products(const uint8_t* const* rows, int64_t taps, int64_t depth, const int8_t* w,
                                            const int32_t* start, Sums* sums) {
  __m256i total[R][2];
  const __m256i ones = _mm256_set1_epi16(1);
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < 2; ++v) total[r][v] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(start + 8 * v));
  for (int64_t tap = 0; tap < taps; ++tap) {
    const uint8_t* x[R];
    for (int r = 0; r < R; ++r) x[r] = rows[tap * kRows + r];
    for (int64_t d = 0; d < depth; ++d) {
      const auto* block = reinterpret_cast<const __m256i*>(w);
      const __m256i w00 = _mm256_loadu_si256(block), w01 = _mm256_loadu_si256(block + 1);
      const __m256i w10 = _mm256_loadu_si256(block + 2), w11 = _mm256_loadu_si256(block + 3);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        int32_t four[2];
        std::memcpy(four, x[r] + 8 * d, 8);
        const __m256i first = _mm256_set1_epi32(four[0]), second = _mm256_set1_epi32(four[1]);
        const __m256i s0 = _mm256_add_epi16(_mm256_maddubs_epi16(first, w00), _mm256_maddubs_epi16(second, w10));
        const __m256i s1 = _mm256_add_epi16(_mm256_maddubs_epi16(first, w01), _mm256_maddubs_epi16(second, w11));
        total[r][0] = _mm256_add_epi32(total[r][0], _mm256_madd_epi16(s0, ones));
        total[r][1] = _mm256_add_epi32(total[r][1], _mm256_madd_epi16(s1, ones));
      }
      w += 128;
    }
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < 2; ++v) sums[r].part[v] = total[r][v];
}

#endif

inline __m256i add_pairs(__m256i sum, __m256i a, __m256i b) {
#if defined(__AVX512VNNI__)
  return _mm256_dpwssd_epi32(sum, a, b);
#else
  return _mm256_add_epi32(sum, _mm256_madd_epi16(a, b));
#endif
}

// Sums of 16 channels, each with weights of its own, over pairs of taps (as many as P says, or `pairs` with a P of 0);
// tap t of the first channel lies at x + distances[t].
template <int P>
[[gnu::always_inline]] inline Sums depthwise_products(const uint8_t* x, const int64_t* distances, int64_t pairs,
                                                      const int16_t* w, const int32_t* start) {
  __m256i low = _mm256_setzero_si256(), high = _mm256_setzero_si256();
  for (int64_t p = 0; p < (P == 0 ? pairs : P); ++p) {
    const auto* first = reinterpret_cast<const __m128i*>(x + distances[2 * p]);
    const auto* second = reinterpret_cast<const __m128i*>(x + distances[2 * p + 1]);
    const __m256i a = _mm256_cvtepu8_epi16(_mm_loadu_si128(first)), b = _mm256_cvtepu8_epi16(_mm_loadu_si128(second));
    const auto* pair = reinterpret_cast<const __m256i*>(w + 32 * p);
    low = add_pairs(low, _mm256_unpacklo_epi16(a, b), _mm256_loadu_si256(pair));
    high = add_pairs(high, _mm256_unpackhi_epi16(a, b), _mm256_loadu_si256(pair + 1));
  }
  const auto* from = reinterpret_cast<const __m256i*>(start);
  return {{_mm256_add_epi32(_mm256_permute2x128_si256(low, high, 0x20), _mm256_loadu_si256(from)),
           _mm256_add_epi32(_mm256_permute2x128_si256(low, high, 0x31), _mm256_loadu_si256(from + 1))}};
}

#else

struct Sums {
  int32_t part[kChannels];
};

template <int R>
[[gnu::always_inline]] inline void products(const uint8_t* const* rows, int64_t taps, int64_t depth, const int8_t* w,
                                            const int32_t* start, Sums* sums) {
  for (int r = 0; r < R; ++r) std::memcpy(sums[r].part, start, sizeof(sums[r].part));
  for (int64_t tap = 0; tap < taps; ++tap)
    for (int64_t d = 0; d < depth; ++d, w += 128)
      for (int r = 0; r < R; ++r) {
        const uint8_t* x = rows[tap * kRows + r] + 8 * d;
        for (int half = 0; half < 2; ++half)
          for (int c = 0; c < kChannels; ++c)
            for (int k = 0; k < 4; ++k)
              sums[r].part[c] += static_cast<int32_t>(x[4 * half + k]) * w[64 * half + 4 * c + k];
      }
}

template <int P>
[[gnu::always_inline]] inline Sums depthwise_products(const uint8_t* x, const int64_t* distances, int64_t pairs,
                                                      const int16_t* w, const int32_t* start) {
  static constexpr int order[4] = {0, 8, 4, 12};
  Sums sums;
  std::memcpy(sums.part, start, sizeof(sums.part));
  for (int64_t p = 0; p < pairs; ++p)
    for (int part = 0; part < 4; ++part)
      for (int c = 0; c < 4; ++c)
        for (int t = 0; t < 2; ++t)
          sums.part[order[part] + c] += static_cast<int32_t>(x[distances[2 * p + t] + order[part] + c]) *
                                        w[32 * p + 8 * part + 2 * c + t];
  return sums;
}

#endif

}  // namespace dsmp_int8
