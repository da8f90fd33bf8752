// Steps of q and k between a projection and their quantization, in fp32: RMSNorm (Zhang and
// Sennrich, arXiv 1910.07467) and rotary position embedding (Su et al., arXiv 2104.09864).
#pragma once

#include <cmath>
#include <cstdint>

#include "attention/rotary_angles.cuh"
#include "quantize/staged_tile.cuh"
#include "quantize/values.cuh"

namespace flashattn3::quantize {

constexpr int kInterleaved = 0;

// cos and sin of the CTA's tokens and pairs in shared memory, which its heads share. The sine has
// the product of the signs of its columns: the signs are given to 16-bit columns before the
// rotation, s x cos - s s' (s' y) sin = s (x cos - y sin). NaN where the tables lack a position.
struct TileAngles {
  float *cos, *sin;
  int stride;  // floats between tokens

  // 16 bytes more than a row: the lanes of two tokens read from different banks.
  __host__ __device__ static constexpr int stride_of(int half) { return half + 4; }
  __host__ __device__ static constexpr int bytes(int half) {
    return 2 * kTileTokens * stride_of(half) * static_cast<int>(sizeof(float));
  }

  __device__ TileAngles(void* memory, int half)
      : cos(static_cast<float*>(memory)),
        sin(cos + kTileTokens * stride_of(half)),
        stride(stride_of(half)) {}

  // All threads of the CTA call it. ready(): called while the angles are on their way; after it
  // the signs in `flips` are read. kInterleaved: pairs are neighbours.
  template <ElementType kType, int kColumns, bool kInterleaved, class Ready>
  __device__ __forceinline__ void stage(const Embedding& embedding, const WorkTile& tile,
                                        const uint16_t* flips, Ready ready) const {
    if (embedding.tables.is_fp32) {
      stage_as<kType, kColumns, kInterleaved, float4>(embedding, tile, flips, ready);
    } else {
      stage_as<kType, kColumns, kInterleaved, uint2>(embedding, tile, flips, ready);
    }
  }

 private:
  static constexpr int kPairs = 4;  // of a vector

  // The row and the pair of a thread's vectors, one after the other.
  struct Walk {
    int token, vec;
    __device__ Walk(int vecs) : token(threadIdx.x / vecs), vec(threadIdx.x % vecs) {}
    __device__ void advance(int vecs, int tokens, int rest) {
      token += tokens, vec += rest;
      if (vec >= vecs) ++token, vec -= vecs;
    }
  };

  template <ElementType kType, int kColumns, bool kInterleaved, class Vector, class Ready>
  __device__ __forceinline__ void stage_as(const Embedding& embedding, const WorkTile& tile,
                                           const uint16_t* flips, Ready ready) const {
    // A thread's vectors; all of them are loaded before the first is stored.
    constexpr int kThreads = quantize_threads(kColumns);
    constexpr int kVectors = kTileTokens * kColumns / (2 * kPairs) / kThreads;
    const RotaryTables& tables = embedding.tables;
    const int half = embedding.half, vecs = half / kPairs;
    const int tokens = kThreads / vecs, rest = kThreads % vecs;
    Vector cosines[kVectors], sines[kVectors];
    int position[kVectors];
    Walk walk(vecs);
#pragma unroll
    for (int i = 0; i < kVectors; ++i, walk.advance(vecs, tokens, rest)) {
      position[i] = find_position(embedding, tile, min(walk.token, tile.num_tokens() - 1));
    }
    uint32_t known = 0;
    walk = Walk(vecs);
#pragma unroll
    for (int i = 0; i < kVectors; ++i, walk.advance(vecs, tokens, rest)) {
      if (walk.token >= kTileTokens) continue;
      known |= (position[i] != kNoPosition ? 1u : 0u) << i;
      const int64_t at = max(position[i], 0) * tables.stride / kPairs + walk.vec;
      cosines[i] = load_vector<Vector>(static_cast<const Vector*>(tables.cos) + at);
      sines[i] = load_vector<Vector>(static_cast<const Vector*>(tables.sin) + at);
    }
    ready();
    walk = Walk(vecs);
#pragma unroll
    for (int i = 0; i < kVectors; ++i, walk.advance(vecs, tokens, rest)) {
      if (walk.token >= kTileTokens) continue;
      const int pair = walk.vec * kPairs, at = walk.token * stride + pair;
      float4 of_cos = widen<kType>(cosines[i]), of_sin = widen<kType>(sines[i]);
      if ((known >> i & 1) == 0) of_cos = of_sin = make_float4(NAN, NAN, NAN, NAN);
      *reinterpret_cast<float4*>(cos + at) = of_cos;
      *reinterpret_cast<float4*>(sin + at) = with_signs<kInterleaved>(of_sin, flips, pair, half);
    }
  }

  // Sines of pairs, from `pair` on, times the product of the signs of their two columns.
  template <bool kInterleaved>
  __device__ __forceinline__ static float4 with_signs(float4 x, const uint16_t* flips, int pair,
                                                      int half) {
    const auto flip = [](float x, uint32_t word) {
      return __uint_as_float(__float_as_uint(x) ^ (word & 0x80000000));
    };
    if constexpr (kInterleaved) {
      const uint4 both = load_vector<uint4>(flips + 2 * pair);
      return make_float4(flip(x.x, both.x ^ both.x << 16), flip(x.y, both.y ^ both.y << 16),
                         flip(x.z, both.z ^ both.z << 16), flip(x.w, both.w ^ both.w << 16));
    } else {
      const uint2 first = load_vector<uint2>(flips + pair);
      const uint2 second = load_vector<uint2>(flips + pair + half);
      const uint32_t low = first.x ^ second.x, high = first.y ^ second.y;
      return make_float4(flip(x.x, low << 16), flip(x.y, low), flip(x.z, high << 16),
                         flip(x.w, high));
    }
  }

  template <ElementType kType>
  __device__ static float4 widen(float4 x) {
    return x;
  }
  template <ElementType kType>
  __device__ static float4 widen(uint2 x) {
    const float2 low = unpack<kType>(x.x), high = unpack<kType>(x.y);
    return make_float4(low.x, low.y, high.x, high.y);
  }

  __device__ __forceinline__ static int find_position(const Embedding& embedding,
                                                      const WorkTile& tile, int token) {
    int64_t position = tile.first + token;
    if (embedding.positions != nullptr) {
      const int64_t at =
          tile.batch_idx * embedding.positions_batch + tile.sequence.offset + position;
      position = embedding.wide_positions ? static_cast<const int64_t*>(embedding.positions)[at]
                                          : static_cast<const int32_t*>(embedding.positions)[at];
    }
    const bool known = position >= 0 && position < embedding.tables.num_positions;
    return known ? static_cast<int>(position) : kNoPosition;
  }
};

// FloatValues of a normalized and rotated token. Except for the order of a norm's sum the values
// are those of flashattn3/quantization/embedding.py: each operation is rounded once. The head dim,
// the addresses and the strides have whole vectors. kApart: a thread's vectors between the first
// and the second columns of pairs, 8 half / kColumns; kInterleaved: pairs are neighbours, half is a
// multiple of 4. Known at compile time, so that values are widened where they are rotated.
template <ElementType kType, int kColumns, int kApart>
struct EmbeddedValues : FloatValues<kType, kColumns, RowPositions<kColumns>> {
  using Base = FloatValues<kType, kColumns, RowPositions<kColumns>>;
  using Positions = RowPositions<kColumns>;
  using Staged = StagedTile<Positions>;
  using Base::x;

  // The tensor's data in shared memory that the values need.
  struct Columns {
    typename Base::Flips flips;
    typename Base::Means means;
  };

  __device__ __forceinline__ static void stage(const QuantizedTensor& tensor, const WorkTile& tile,
                                               Columns& columns) {
    Base::stage_columns(tensor, tile, columns.flips, columns.means);
  }

  // transform() is left to be called.
  __device__ EmbeddedValues(const Staged& staged, const QuantizedTensor& tensor,
                            const WorkTile& tile, const Embedding& embedding,
                            const TileAngles& angles, const Columns& columns)
      : exists_(Positions::token(0) < tile.num_tokens()) {
    const int head_dim = tensor.x.head_dim;
    if (embedding.weight != nullptr) {
      embed<true>(staged, inverse_norm(staged, head_dim, embedding.eps), head_dim, embedding,
                  angles, columns);
    } else {
      embed<false>(staged, 1.f, head_dim, embedding, angles, columns);
    }
    if (tensor.mean != nullptr) this->subtract(columns.means);
  }

  // 0 past the last token, where a mean or a norm may have left other values.
  template <bool kNan>
  __device__ float largest() const {
    const float found = Base::template largest<kNan>();
    return exists_ ? found : 0.f;
  }

 private:
  static_assert(2 * kApart <= kVecsOfThread);
  bool exists_;

  // kNorm: the embedding has a weight. Apart, as predicated multiplications would take their turn.
  template <bool kNorm>
  __device__ __forceinline__ void embed(const Staged& staged, float factor, int head_dim,
                                        const Embedding& embedding, const TileAngles& angles,
                                        const Columns& columns) {
    const int row = Positions::token(0) * angles.stride;
    constexpr int kDistance = kApart > 0 ? kApart : 0;
#pragma unroll
    for (int u = 0; u < kVecsOfThread; ++u) {
      const int column = Positions::column(u);
      if (u >= kApart && u < 2 * kApart) continue;  // the second of a pair
      widen<kNorm>(staged, u, factor, head_dim, embedding, columns);
      if (u < kApart) {
        widen<kNorm>(staged, u + kDistance, factor, head_dim, embedding, columns);
#pragma unroll
        for (int i = 0; i < kVec; i += 4) {
          const float4 cos = load_vector<float4>(angles.cos + row + column + i);
          const float4 sin = load_vector<float4>(angles.sin + row + column + i);
          float *first = x[u] + i, *second = x[u + kDistance] + i;
          turn(first[0], second[0], cos.x, sin.x);
          turn(first[1], second[1], cos.y, sin.y);
          turn(first[2], second[2], cos.z, sin.z);
          turn(first[3], second[3], cos.w, sin.w);
        }
      } else if (kApart == kInterleaved && column < 2 * embedding.half) {
        const float4 cos = load_vector<float4>(angles.cos + row + column / 2);
        const float4 sin = load_vector<float4>(angles.sin + row + column / 2);
        float* pairs = x[u];
        turn(pairs[0], pairs[1], cos.x, sin.x);
        turn(pairs[2], pairs[3], cos.y, sin.y);
        turn(pairs[4], pairs[5], cos.z, sin.z);
        turn(pairs[6], pairs[7], cos.w, sin.w);
      }
    }
  }

  // A vector of the token in fp32, with the signs of its columns, normalized.
  template <bool kNorm>
  __device__ __forceinline__ void widen(const Staged& staged, int u, float factor, int head_dim,
                                        const Embedding& embedding, const Columns& columns) {
    const int column = Positions::column(u);
    VecWords<uint16_t> word, flips;
    staged.load(word, u);
    load_vec<uint16_t>(flips, reinterpret_cast<const uint16_t*>(&columns.flips[column / kVec]));
    float (&vec)[kVec] = x[u];
#pragma unroll
    for (int i = 0; i < kVec; i += 2) {
      const float2 two = Pair<kType>::floats(word[i / 2] ^ flips[i / 2]);
      vec[i] = two.x;
      vec[i + 1] = two.y;
    }
    if (!kNorm || column >= head_dim) return;
#pragma unroll
    for (int i = 0; i < kVec; i += 4) {
      const float4 weight = load_vector<float4>(embedding.weight + column + i);
      vec[i] = vec[i] * factor * weight.x;
      vec[i + 1] = vec[i + 1] * factor * weight.y;
      vec[i + 2] = vec[i + 2] * factor * weight.z;
      vec[i + 3] = vec[i + 3] * factor * weight.w;
    }
  }

  // Factor of the token.
  __device__ __forceinline__ static float inverse_norm(const Staged& staged, int head_dim,
                                                       float eps) {
    float sum = 0.f;
#pragma unroll
    for (int u = 0; u < kVecsOfThread; ++u) {
      VecWords<uint16_t> word;
      staged.load(word, u);
#pragma unroll
      for (int i = 0; i < kVec / 2; ++i) {
        const float2 two = Pair<kType>::floats(word[i]);
        sum = fmaf(two.x, two.x, fmaf(two.y, two.y, sum));
      }
    }
#pragma unroll
    for (int lanes = 1; lanes < Positions::kLanes; lanes *= 2) {
      sum += __shfl_xor_sync(0xffffffff, sum, lanes);
    }
    return rsqrtf(sum / head_dim + eps);
  }

  // Rotates a pair; without fused operations, as torch has none.
  __device__ static void turn(float& first, float& second, float cos, float sin) {
    const float turned = __fsub_rn(__fmul_rn(first, cos), __fmul_rn(second, sin));
    second = __fadd_rn(__fmul_rn(first, sin), __fmul_rn(second, cos));
    first = turned;
  }
};

}  // namespace flashattn3::quantize
