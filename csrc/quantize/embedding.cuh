// Steps of q and k between a projection and their quantization, in fp32: RMSNorm (Zhang and
// Sennrich, arXiv 1910.07467) and rotary position embedding (Su et al., arXiv 2104.09864).
#pragma once

#include <cmath>
#include <cstdint>

#include "attention/rotary_angles.cuh"
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

  // All threads of the CTA call it. pairs: of the head's columns.
  template <ElementType kType>
  __device__ __forceinline__ void stage(const Embedding& embedding, const QuantizedTensor& tensor,
                                        const WorkTile& tile) const {
    constexpr int kPairs = 4;
    const int half = embedding.half, vecs = half / kPairs;
    for (int i = threadIdx.x; i < kTileTokens * vecs; i += blockDim.x) {
      const int token = i / vecs, pair = i % vecs * kPairs;
      const int known = min(token, tile.num_tokens() - 1);
      Angles<kType, kPairs> angles;
      angles.load(embedding.tables, find_position(embedding, tile, known), pair);
      float sign[kPairs] = {1.f, 1.f, 1.f, 1.f};
      if (tensor.signs != nullptr) {
#pragma unroll
        for (int j = 0; j < kPairs; ++j) {
          const bool neighbours = embedding.tables.interleaved;
          const int first = neighbours ? 2 * (pair + j) : pair + j;
          sign[j] = tensor.signs[first] * tensor.signs[first + (neighbours ? 1 : half)];
        }
      }
      const int at = token * stride + pair;
      *reinterpret_cast<float4*>(cos + at) =
          make_float4(angles.cos[0], angles.cos[1], angles.cos[2], angles.cos[3]);
      *reinterpret_cast<float4*>(sin + at) =
          make_float4(sign[0] * angles.sin[0], sign[1] * angles.sin[1], sign[2] * angles.sin[2],
                      sign[3] * angles.sin[3]);
    }
  }

 private:
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

// FloatValues of normalized and rotated tokens. Except for the order of a norm's sum the values are
// those of flashattn3/quantization/embedding.py: each operation is rounded once. The head dim, the
// addresses and the strides have whole vectors. kApart: a thread's vectors between the first and
// the second columns of pairs, half / 32; kInterleaved: pairs are neighbours, half is a multiple
// of 4. Known at compile time, so that values are widened where they are rotated: all of them and
// the angles do not fit into registers.
template <ElementType kType, int kColumns, int kApart>
struct EmbeddedValues : FloatValues<kType, kColumns> {
  using Base = FloatValues<kType, kColumns>;
  using Positions = typename Base::Positions;
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

  __device__ EmbeddedValues(const LoadedVecs& loaded, const QuantizedTensor& tensor,
                            const Embedding& embedding, const TileAngles& angles,
                            const Columns& columns) {
#pragma unroll
    for (int u = 0; u < kVecsOfThread; u += kVecsOfToken) {
      float factor = 1.f;
      if (embedding.weight != nullptr) {
        factor = inverse_norm(loaded, u, tensor.x.head_dim, embedding.eps);
      }
      embed(loaded, u, factor, tensor.x.head_dim, embedding, angles, columns);
    }
    if (tensor.mean != nullptr) this->subtract(columns.means);
    this->transform(tensor);
  }

 private:
  static constexpr int kVecsOfToken = Positions::kVecsOfToken;
  static_assert(2 * kApart <= kVecsOfToken);

  // The token of vectors u to u + kVecsOfToken - 1.
  __device__ __forceinline__ void embed(const LoadedVecs& loaded, int u, float factor, int head_dim,
                                        const Embedding& embedding, const TileAngles& angles,
                                        const Columns& columns) {
    const int row = Positions::token(u) * angles.stride;
    constexpr int kDistance = kApart > 0 ? kApart : 0;
#pragma unroll
    for (int part = 0; part < kVecsOfToken; ++part) {
      const int column = Positions::column(part);
      if (part >= kApart && part < 2 * kApart) continue;  // the second of a pair
      widen(loaded, u, part, factor, head_dim, embedding, columns);
      if (part < kApart) {
        widen(loaded, u, part + kDistance, factor, head_dim, embedding, columns);
#pragma unroll
        for (int i = 0; i < kVec; i += 4) {
          const float4 cos = load_vector<float4>(angles.cos + row + column + i);
          const float4 sin = load_vector<float4>(angles.sin + row + column + i);
          float *first = x[u + part] + i, *second = x[u + part + kDistance] + i;
          turn(first[0], second[0], cos.x, sin.x);
          turn(first[1], second[1], cos.y, sin.y);
          turn(first[2], second[2], cos.z, sin.z);
          turn(first[3], second[3], cos.w, sin.w);
        }
      } else if (kApart == kInterleaved && column < 2 * embedding.half) {
        const float4 cos = load_vector<float4>(angles.cos + row + column / 2);
        const float4 sin = load_vector<float4>(angles.sin + row + column / 2);
        float* pairs = x[u + part];
        turn(pairs[0], pairs[1], cos.x, sin.x);
        turn(pairs[2], pairs[3], cos.y, sin.y);
        turn(pairs[4], pairs[5], cos.z, sin.z);
        turn(pairs[6], pairs[7], cos.w, sin.w);
      }
    }
  }

  // A vector of a token in fp32, with the signs of its columns, normalized.
  __device__ __forceinline__ void widen(const LoadedVecs& loaded, int u, int part, float factor,
                                        int head_dim, const Embedding& embedding,
                                        const Columns& columns) {
    const int column = Positions::column(part);
    VecWords<uint16_t> flips;
    load_vec<uint16_t>(flips, reinterpret_cast<const uint16_t*>(&columns.flips[column / kVec]));
    float (&vec)[kVec] = x[u + part];
#pragma unroll
    for (int i = 0; i < kVec; i += 2) {
      const float2 two = Pair<kType>::floats(loaded[u + part][i / 2] ^ flips[i / 2]);
      vec[i] = two.x;
      vec[i + 1] = two.y;
    }
    if (embedding.weight == nullptr || column >= head_dim) return;
#pragma unroll
    for (int i = 0; i < kVec; i += 4) {
      const float4 weight = load_vector<float4>(embedding.weight + column + i);
      vec[i] = vec[i] * factor * weight.x;
      vec[i + 1] = vec[i + 1] * factor * weight.y;
      vec[i + 2] = vec[i + 2] * factor * weight.z;
      vec[i + 3] = vec[i + 3] * factor * weight.w;
    }
  }

  // Factor of the token of vectors u to u + kVecsOfToken - 1.
  __device__ __forceinline__ static float inverse_norm(const LoadedVecs& loaded, int u,
                                                       int head_dim, float eps) {
    float sum = 0.f;
#pragma unroll
    for (int part = 0; part < kVecsOfToken; ++part) {
#pragma unroll
      for (int i = 0; i < kVec / 2; ++i) {
        const float2 two = Pair<kType>::floats(loaded[u + part][i]);
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
