// Eight 32-bit lanes: AVX2 where the compiler targets it, else whatever it makes of its vector extension.
#pragma once

#include <c10/util/Half.h>

#include <cstdint>
#include <cstring>

#ifdef __AVX2__
#include <immintrin.h>
#endif

namespace dsmp {

typedef float f32x8 __attribute__((vector_size(32)));
typedef int32_t i32x8 __attribute__((vector_size(32)));
typedef uint32_t u32x8 __attribute__((vector_size(32)));
typedef int16_t i16x16 __attribute__((vector_size(32)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));

#define DSMP_INLINE inline __attribute__((always_inline))

template <class V>
DSMP_INLINE V load(const void* from) {
  V v;
  std::memcpy(&v, from, sizeof(V));
  return v;
}

template <class V>
DSMP_INLINE void store(void* to, V v) {
  std::memcpy(to, &v, sizeof(V));
}

DSMP_INLINE f32x8 all(float x) { return f32x8{x, x, x, x, x, x, x, x}; }
DSMP_INLINE i32x8 all(int32_t x) { return i32x8{x, x, x, x, x, x, x, x}; }

DSMP_INLINE f32x8 to_float(i32x8 v) { return __builtin_convertvector(v, f32x8); }

// a * b + c; -ffp-contract makes it one instruction where the machine has one.
DSMP_INLINE f32x8 multiply_add(f32x8 a, f32x8 b, f32x8 c) { return a * b + c; }

DSMP_INLINE f32x8 load_halves(const void* from) {
#ifdef __AVX2__
  return (f32x8)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from));
#else
  c10::Half halves[8];
  std::memcpy((void*)halves, from, sizeof halves);
  f32x8 v;
  for (int i = 0; i < 8; ++i) v[i] = static_cast<float>(halves[i]);
  return v;
#endif
}

// Per 32-bit lane: the products of the two signed 16-bit halves, added.
DSMP_INLINE i32x8 pair_products(i32x8 a, i32x8 b) {
#ifdef __AVX2__
  return (i32x8)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#else
  return ((a << 16) >> 16) * ((b << 16) >> 16) + (a >> 16) * (b >> 16);
#endif
}

// Per 16-bit lane: the products of two unsigned bytes of `a` with two signed ones of `b`, added. The caller bounds them.
DSMP_INLINE i16x16 byte_products(i32x8 a, i32x8 b) {
#ifdef __AVX2__
  return (i16x16)_mm256_maddubs_epi16((__m256i)a, (__m256i)b);
#else
  i16x16 low = (i16x16)((u16x16)a & 0xff), high = (i16x16)((u16x16)a >> 8);
  return low * (((i16x16)b << 8) >> 8) + high * ((i16x16)b >> 8);
#endif
}

// `sum` and `pair_products`.
DSMP_INLINE i32x8 add_pair_products(i32x8 sum, i32x8 a, i32x8 b) {
#ifdef __AVX512VNNI__
  return (i32x8)_mm256_dpwssd_epi32((__m256i)sum, (__m256i)a, (__m256i)b);
#else
  return sum + pair_products(a, b);
#endif
}

// Per 32-bit lane: its two signed 16-bit halves, added.
DSMP_INLINE i32x8 pair_sums(i16x16 v) { return pair_products((i32x8)v, all(0x00010001)); }

}  // namespace dsmp
