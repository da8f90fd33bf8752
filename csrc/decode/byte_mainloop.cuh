// The main loop of a warp that reads a cache of 8 bits: from S^T = K Q^T to O for KV blocks of 16
// or 32 keys, and one or two row tiles of 8 packed rows.
//
// As in warp_mainloop.cuh, K and V go from global memory into the registers of mma.sync, where they
// are widened to fp16, which holds all numbers of 8 bits; Q is fp16 numbers and a factor of each
// row. Descales of keys multiply columns of S and of P.
//
// Fragments (PTX ISA, mma.m16n8k16), with g = lane / 4 and t = lane % 4:
//   S^T = K Q^T: 16 keys by a row tile. Of key g and key g + 8 the lane has 16 neighbouring dims at
//     a time, and the same dims of row g of Q: a sum over dims may have any order. S holds keys g
//     and g + 8 of rows 2 t and 2 t + 1.
//   O^T = V^T P^T: 16 head dims by a row tile. P^T wants keys 2 t, 2 t + 1 of row g, so 8 x 8
//     numbers of P are transposed. The lane has vectors of keys 2 t, 2 t + 1, 2 t + 8 and 2 t + 9,
//     and the GEMM of a pair of dims (2 p, 2 p + 1 of each vector) takes the bytes of two keys.
// O: element [r][j][p] has dims 2 p and 2 p + 1 of vector value_vec(g, j), of rows 2 t and 2 t + 1
// of row tile r. A vector has eight elements.
#pragma once

#include <cstdint>

#include "attention/tanh.cuh"
#include "attention/variant.cuh"
#include "decode/byte_block.cuh"
#include "decode/descale_unit.cuh"
#include "decode/load_bytes.cuh"
#include "decode/packed_tile.cuh"
#include "decode/softmax.cuh"
#include "decode/warp_place.cuh"
#include "decode/warp_traits.cuh"
#include "decode/widen_queries.cuh"
#include "ptx/convert_16bit.cuh"
#include "ptx/mma_sync.cuh"
#include "ptx/transpose.cuh"

namespace flashattn3::decode {

template <class Traits>
class ByteMainloop {
  static constexpr ElementType kHalf = ElementType::kFloat16;
  static constexpr int kBlockN = Traits::kBlockN;
  static constexpr int kKeyTiles = kBlockN / 16;  // of 16 keys
  static constexpr int kKeys = 2 * kKeyTiles;     // of S, of a lane
  static constexpr int kKeyVecs = Traits::kVecs / 4, kValueVecs = Traits::kVecs / 8;
  static constexpr int kRowTiles = Traits::kRowTiles;
  static_assert(kBlockN % 16 == 0 && kKeyVecs % 2 == 0);
  using Block = ByteBlock<Traits>;
  using Scores = float[kKeyTiles][4];  // of a row tile
  using OutOfTile = float[kValueVecs][4][4];

 public:
  using Out = OutOfTile[kRowTiles];

  __device__ __forceinline__ explicit ByteMainloop(const Arguments& args)
      : args_(args), block_(args), g_(threadIdx.x % 32 / 4), t_(threadIdx.x % 4) {}

  // The vector of V that a lane has as number j.
  static constexpr __device__ __forceinline__ int value_vec(int g, int j) {
    return Block::value_vec(g, j);
  }

  // Loads a KV block of the cache.
  __device__ __forceinline__ void load(const BlockPlace& place, int kv_head) {
    block_.load_k(place, kv_head);
    block_.load_v(place, kv_head);
  }

  // q: of the sequence.
  __device__ __forceinline__ void load_q(const PackedTile& tile, const uint16_t* q) {
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
      const int row = 8 * r + g_;
      const uint16_t* from =
          q + tile.query_of(row) * args_.q_seq + tile.head_of(row) * args_.q_head;
#pragma unroll
      for (int i = 0; i < kKeyVecs; ++i) {
        const int vec = Block::key_vec(t_, i);
        q_[r][i] = make_uint4(0, 0, 0, 0);
        if (tile.has(row) && vec * 8 < args_.head_dim) {
          q_[r][i] = *reinterpret_cast<const uint4*>(from + vec * 8);
        }
      }
    }
  }

  // Makes fp16 numbers and a factor of each row of Q.
  __device__ __forceinline__ void widen_q() {
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
      float factor = 1.f;
      if constexpr (Traits::kElement == ElementType::kBFloat16) factor = take_power_out<4>(q_[r]);
#pragma unroll
      for (int i = 0; i < 2; ++i) row_factor_[r][i] = __shfl_sync(~0u, factor, 4 * (2 * t_ + i));
    }
    unit_.reset();
  }

  // Computes O and the row statistics of KV blocks n_block, n_block + step, ... that begin before
  // key num_keys, at most the sequence's. The first one is loaded. O is relative to the maximum of
  // its row. row: of row g of each row tile.
  __device__ __forceinline__ void attend(Out& o, RowStats (&row)[kRowTiles], const PackedTile& tile,
                                         const CachedSequence& sequence, int kv_head,
                                         const ScoreScale& scale, int n_block, int step,
                                         int num_keys) {
    RowStats rows[kRowTiles][2];
    float factor_of_s[kRowTiles][2];
    const float of_scores = args_.score_scale.caps() ? 1.f : scale.factor;
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
      rows[r][0] = rows[r][1] = {-INFINITY, 0.f};
#pragma unroll
      for (int i = 0; i < kValueVecs * 16; ++i) (&o[r][0][0][0])[i] = 0.f;
#pragma unroll
      for (int i = 0; i < 2; ++i) factor_of_s[r][i] = row_factor_[r][i] * of_scores;
    }
    const int last_query = tile.first_query + tile.num_queries - 1;
    // Keys that all rows see.
    const int begin = visible_keys(args_, sequence, last_query).begin;
    const int end = visible_keys(args_, sequence, tile.first_query).end;
    // The page table is read a step ahead.
    BlockPlace next{};
    if ((n_block + step) * kBlockN < num_keys) next = find_place(sequence, n_block + step);
#pragma unroll 1
    for (; n_block * kBlockN < num_keys; n_block += step) {
      const int first = n_block * kBlockN;
      Scores s[kRowTiles];
      if (args_.is_int8) {
        gemm_qk<true>(s);
      } else {
        gemm_qk<false>(s);
      }
      if (args_.has_key_descales) scale_scores(s);
      const BlockPlace place = next;
      const bool more = (n_block + step) * kBlockN < num_keys;
      if (more) {
        block_.load_k(place, kv_head);
        if ((n_block + 2 * step) * kBlockN < num_keys) {
          next = find_place(sequence, n_block + 2 * step);
        }
      }
      const bool whole = first >= begin && first + kBlockN <= end;
      if (!whole) block_.hide_values(sequence, first);
      float change = 1.f;
      if (args_.has_key_descales) change = unit_.raise(largest_value_descale());
#pragma unroll
      for (int r = 0; r < kRowTiles; ++r) {
        convert_scores(s[r], factor_of_s[r], scale);
        if (!whole) hide_scores(s[r], 8 * r, tile, sequence, first);
        float factor[2];
        update(s[r], rows[r], factor);
        if (args_.has_key_descales) {
          scale_probabilities(s[r]);
          factor[0] *= change, factor[1] *= change;
        }
        rescale(o[r], factor);
      }
      if (args_.is_int8) {
        gemm_pv<true>(o, s);
      } else {
        gemm_pv<false>(o, s);
      }
      if (more) block_.load_v(place, kv_head);
    }
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
      if (args_.has_key_descales) multiply(o[r], {unit_.value(), unit_.value()});
      row[r] = stats_of_row(rows[r]);
    }
  }

  // n_block: one of which the cache has a key.
  __device__ __forceinline__ BlockPlace find_place(const CachedSequence& sequence,
                                                   int n_block) const {
    return place_of<Traits>(args_, sequence, n_block);
  }

 private:
  // s: [r][m][i] is key 16 m + g + 8 (i / 2) of row 2 t + i % 2 of row tile r, the lane's key
  // number 2 m + i / 2.
  template <bool kIsInt8>
  __device__ __forceinline__ void gemm_qk(Scores (&s)[kRowTiles]) const {
    // Two sums, because an MMA waits for the one whose sum it adds to.
    float part[kRowTiles][kKeyTiles][2][4] = {};
#pragma unroll
    for (int i = 0; i < kKeyVecs; ++i) {
#pragma unroll
      for (int m = 0; m < kKeyTiles; ++m) {
        const uint4 low = widen_half<kIsInt8>(block_.k[2 * m][i / 2], i % 2);
        const uint4 high = widen_half<kIsInt8>(block_.k[2 * m + 1][i / 2], i % 2);
#pragma unroll
        for (int r = 0; r < kRowTiles; ++r) {
          const uint4& q = q_[r][i];
          mma_fragment<kHalf>(part[r][m][0], {low.x, high.x, low.y, high.y}, {q.x, q.y});
          mma_fragment<kHalf>(part[r][m][1], {low.z, high.z, low.w, high.w}, {q.z, q.w});
        }
      }
    }
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
      for (int m = 0; m < kKeyTiles; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) s[r][m][i] = part[r][m][0][i] + part[r][m][1][i];
      }
    }
  }
  template <bool kIsInt8>
  static __device__ __forceinline__ uint4 widen_half(const uint4& bytes, int half) {
    return widen_vector<kIsInt8>(half == 0 ? make_uint2(bytes.x, bytes.y)
                                           : make_uint2(bytes.z, bytes.w));
  }

  __device__ __forceinline__ void scale_scores(Scores (&s)[kRowTiles]) const {
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
      for (int m = 0; m < kKeyTiles; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) s[r][m][i] *= block_.k_descale[2 * m + i / 2];
      }
    }
  }

  // Scales and caps the scores. factor: of rows, that of all scores too if they are not capped.
  __device__ __forceinline__ void convert_scores(Scores& s, const float (&factor)[2],
                                                 const ScoreScale& scale) const {
#pragma unroll
    for (int m = 0; m < kKeyTiles; ++m) {
#pragma unroll
      for (int i = 0; i < 4; ++i) s[m][i] *= factor[i % 2];
      if (args_.score_scale.caps()) {
        cap_scores(s[m], scale.tanh_scale);
#pragma unroll
        for (int i = 0; i < 4; ++i) s[m][i] *= scale.factor;
      }
    }
  }

  // Replaces scores of keys that a row does not see. It finds these anew: most KV blocks have none.
  // first_row: of the row tile.
  __device__ __forceinline__ void hide_scores(Scores& s, int first_row, const PackedTile& tile,
                                              const CachedSequence& sequence, int first) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int query =
          min(tile.query_of(first_row + 2 * t_ + r), tile.first_query + tile.num_queries - 1);
      const KeyRange visible = visible_keys(args_, sequence, query);
#pragma unroll
      for (int i = 0; i < kKeys; ++i) {
        const int key = first + block_.score_key(i);
        if (key < visible.begin || key >= visible.end) s[i / 2][i % 2 * 2 + r] = -INFINITY;
      }
    }
  }

  // Replaces scores by probabilities. sum: over the lane's keys. factor: of O.
  __device__ __forceinline__ void update(Scores& s, RowStats (&rows)[2], float (&factor)[2]) const {
    float highest[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int m = 0; m < kKeyTiles; ++m) {
#pragma unroll
      for (int i = 0; i < 4; ++i) highest[i % 2] = fmaxf(highest[i % 2], s[m][i]);
    }
    factor[0] = factor[1] = 1.f;
    if (__any_sync(~0u, highest[0] > rows[0].max || highest[1] > rows[1].max)) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float max = fmaxf(rows[r].max, max_of_keys(highest[r]));
        factor[r] = rescale_factor(rows[r].max, max);
        rows[r] = {max, rows[r].sum * factor[r]};
      }
    }
    const float reference[2] = {reference_of(rows[0].max), reference_of(rows[1].max)};
#pragma unroll
    for (int m = 0; m < kKeyTiles; ++m) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        s[m][i] = exp2_approx(s[m][i] - reference[i % 2]);
        rows[i % 2].sum += s[m][i];
      }
    }
  }
  // Over the lanes with keys of the same rows.
  static __device__ __forceinline__ float max_of_keys(float x) {
#pragma unroll
    for (int distance = 4; distance < 32; distance *= 2) {
      x = fmaxf(x, __shfl_xor_sync(~0u, x, distance));
    }
    return x;
  }
  __device__ __forceinline__ RowStats stats_of_row(const RowStats (&rows)[2]) const {
    float sum[2] = {rows[0].sum, rows[1].sum};
#pragma unroll
    for (int distance = 4; distance < 32; distance *= 2) {
#pragma unroll
      for (int r = 0; r < 2; ++r) sum[r] += __shfl_xor_sync(~0u, sum[r], distance);
    }
    // A lane with row g among its two rows.
    const int lane = g_ / 2;
    const RowStats even{__shfl_sync(~0u, rows[0].max, lane), __shfl_sync(~0u, sum[0], lane)};
    const RowStats odd{__shfl_sync(~0u, rows[1].max, lane), __shfl_sync(~0u, sum[1], lane)};
    return g_ % 2 == 0 ? even : odd;
  }

  __device__ __forceinline__ float largest_value_descale() const {
    float largest = 0.f;
#pragma unroll
    for (int i = 0; i < kKeys; ++i) largest = fmaxf(largest, fabsf(block_.v_descale[i]));
    return max_of_keys(largest);
  }
  __device__ __forceinline__ void scale_probabilities(Scores& s) const {
    const float inverse = unit_.inverse();
#pragma unroll
    for (int m = 0; m < kKeyTiles; ++m) {
#pragma unroll
      for (int i = 0; i < 4; ++i) s[m][i] *= block_.v_descale[2 * m + i / 2] * inverse;
    }
  }

  static __device__ __forceinline__ void rescale(OutOfTile& o, const float (&factor)[2]) {
    if (__all_sync(~0u, factor[0] == 1.f && factor[1] == 1.f)) return;
    multiply(o, factor);
  }
  static __device__ __forceinline__ void multiply(OutOfTile& o, const float (&factor)[2]) {
#pragma unroll
    for (int i = 0; i < kValueVecs * 16; ++i) (&o[0][0][0])[i] *= factor[i % 2];
  }

  template <bool kIsInt8>
  __device__ __forceinline__ void gemm_pv(Out& o, const Scores (&s)[kRowTiles]) const {
#pragma unroll
    for (int m = 0; m < kKeyTiles; ++m) {
      uint32_t probabilities[kRowTiles][2];
#pragma unroll
      for (int r = 0; r < kRowTiles; ++r) {
        probabilities[r][0] = transpose_8x8(pack<kHalf>(s[r][m][0], s[r][m][1]));
        probabilities[r][1] = transpose_8x8(pack<kHalf>(s[r][m][2], s[r][m][3]));
      }
#pragma unroll
      for (int j = 0; j < kValueVecs; ++j) {
#pragma unroll
        for (int p = 0; p < 4; ++p) {
          const uint2 low = pairs<kIsInt8>(block_.v[4 * m][j], block_.v[4 * m + 1][j], p);
          const uint2 high = pairs<kIsInt8>(block_.v[4 * m + 2][j], block_.v[4 * m + 3][j], p);
#pragma unroll
          for (int r = 0; r < kRowTiles; ++r) {
            mma_fragment<kHalf>(o[r][j][p], {low.x, low.y, high.x, high.y}, probabilities[r]);
          }
        }
      }
    }
  }
  // Returns dims 2 p, then 2 p + 1, of a vector of two keys.
  template <bool kIsInt8>
  static __device__ __forceinline__ uint2 pairs(const uint2& even, const uint2& odd, int p) {
    const uint32_t a = p < 2 ? even.x : even.y, b = p < 2 ? odd.x : odd.y;
    return widen<kIsInt8>(__byte_perm(a, b, p % 2 == 0 ? 0x5140 : 0x7362));
  }

  const Arguments& args_;
  Block block_;
  const int g_, t_;
  uint4 q_[kRowTiles][kKeyVecs];
  float row_factor_[kRowTiles][2];
  DescaleUnit unit_;
};

}  // namespace flashattn3::decode
