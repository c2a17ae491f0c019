// Int8 convolutions and what surrounds them, on plain memory: images are [N, H, W, C], bytes within [0, 127].
#pragma once

#include "int8_finish.h"

namespace dsmp_int8 {

inline int64_t up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

struct Shape {
  int64_t images, channels, height, width, out, kh, kw, sh, sw, ph, pw, dh, dw, groups, oh, ow;

  int64_t per_group() const { return channels / groups; }
  int64_t area() const { return kh * kw; }
  bool depthwise() const { return per_group() == 1 && out == groups; }
};

// How a packed weight lies in memory. Taps of channels that are no multiple of 8 are gathered into one row.
struct Layout {
  bool depthwise, gathered;
  int64_t taps, bytes;  // per packed row: taps, and bytes of each
  int64_t blocks;       // of 16 output channels, per group
  int64_t size;         // bytes of all
  Layout(int64_t out, int64_t per_group, int64_t area, int64_t groups);
};

struct Call {
  Shape s;
  const uint8_t* x;
  const uint8_t* outside;  // what padding reads: C bytes of x's zero point, and 16 more
  const int8_t* w;
  const int32_t* start;  // per output channel, -(zero point of x) * (sum of its weights)
  const void* residual;  // as the result lies, or null
  bool residual_bytes;
  void* out;
  bool out_bytes;
  int64_t activation;
  Finish f;
};

// The first of a block's 16 output channels within its group. The last block overlaps the one before where a group's
// channels are no multiple of 16: what both hold is computed twice.
inline int64_t first_channel(int64_t block, int64_t group_out) {
  return std::max<int64_t>(0, std::min(block * kChannels, group_out - kChannels));
}

// Packs fp32 weights [O, C / groups, taps]: q = rint(w / scale), scale per output channel, sums of q.
void pack(const float* weight, int64_t out, int64_t per_group, int64_t area, int64_t groups, int8_t* payload,
          float* scales, int32_t* sums);
// The weights that packed ones stand for.
void unpack(const int8_t* payload, const float* scales, int64_t out, int64_t per_group, int64_t area, int64_t groups,
            float* weight);
// Tiles of 4 output pixels, numbered through all images.
void dense(const Call& c, int64_t first_tile, int64_t last_tile);
// Rows of output pixels, numbered through all images.
void depthwise(const Call& c, int64_t first_row, int64_t last_row);
// Rows of pixels [rows, width, channels] of fp32 numbers with any strides -> bytes, each times `gate` if there is one.
void quantise_row(const float* x, int64_t width, int64_t channels, int64_t pixel_stride, int64_t channel_stride,
                  const float* gate, float inverse, int32_t zero, uint8_t* out);
// One output row of a max-pool over images of bytes.
void max_pool_row(const Shape& s, const uint8_t* x, int64_t row, uint8_t* out);

}  // namespace dsmp_int8
