// The main loop of a warp of the warp kernel: from S = Q K^T to O for KV blocks of 8 to 32 keys.
//
// K and V go from global memory into the registers that mma.sync reads: no shared memory, no
// barrier, and few instructions before the first load. A GEMM sums over head dims (QK) or keys (PV)
// in any order, so a lane takes 16 neighbouring bytes of a row where the fragment layout names
// columns 2 t, 2 t + 1, ...: a warp's loads are whole sectors.
//
// Fragments (PTX ISA, mma.m16n8k16), with g = lane / 4 and t = lane % 4:
//   S = Q K^T: Q is the 16-row operand, rows g and g + 8; 8 keys are the columns. The lane loads
//     vectors t + 4 i of Q rows g, g + 8 and of key g: each is two steps of 16 columns.
//   O^T = V^T P^T: 16 head dims by 8 rows. S holds keys 2 t, 2 t + 1 of row g, as P^T wants them.
//     The lane loads vectors g + 8 j of keys 2 t, 2 t + 1, and the GEMM of a pair of dims (2 p,
//     2 p + 1 of each vector) takes the halves of two keys' words.
// O: element [tile][j][p] has dims 8 (g + 8 j) + 2 p and + 1 of rows 8 tile + 2 t and + 1.
// byte_mainloop.cuh has the loop for a cache of 8 bits.
#pragma once

#include <cstdint>

#include "attention/softmax.cuh"
#include "attention/variant.cuh"
#include "decode/load.cuh"
#include "decode/packed_tile.cuh"
#include "decode/softmax.cuh"
#include "decode/warp_place.cuh"
#include "decode/warp_traits.cuh"
#include "ptx/convert_16bit.cuh"
#include "ptx/mma_sync.cuh"
#include "ptx/stream_load.cuh"

namespace flashattn3::decode {

template <class Traits>
class WarpMainloop {
  static constexpr ElementType kElement = Traits::kElement;
  static constexpr Pages kPages = Traits::kPages;
  static constexpr int kBlockN = Traits::kBlockN, kRowTiles = Traits::kRowTiles;
  static constexpr int kKeyTiles = kBlockN / 8;  // of 8 keys
  static constexpr int kKeyVecs = Traits::kVecs / 4, kValueVecs = Traits::kVecs / 8;
  using Scores = float[kKeyTiles][4];

 public:
  using Out = float[kRowTiles][kValueVecs][4][4];

  // The vector of V that a lane has as number j.
  static constexpr __device__ __forceinline__ int value_vec(int g, int j) { return g + 8 * j; }

  __device__ __forceinline__ explicit WarpMainloop(const Arguments& args)
      : args_(args), g_(threadIdx.x % 32 / 4), t_(threadIdx.x % 4) {}

  // Loads a KV block of the cache.
  __device__ __forceinline__ void load(const BlockPlace& place, int kv_head) {
    load_k(place, kv_head);
    load_v(place, kv_head);
  }

  // q: of the sequence.
  __device__ __forceinline__ void load_q(const PackedTile& tile, const uint16_t* q) {
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
      const int row = g_ + 8 * r;
      const uint16_t* from =
          q + tile.query_of(row) * args_.q_seq + tile.head_of(row) * args_.q_head + t_ * 8;
#pragma unroll
      for (int i = 0; i < kKeyVecs; ++i) {
        q_[r][i] = make_uint4(0, 0, 0, 0);
        if (tile.has(row) && has_column(t_ + 4 * i, args_.head_dim)) {
          q_[r][i] = *reinterpret_cast<const uint4*>(from + 32 * i);
        }
      }
    }
  }

  // Computes O and the row statistics of KV blocks n_block, n_block + step, ... that begin before
  // key num_keys. The first one is loaded. O is relative to the maximum of its row.
  __device__ __forceinline__ void attend(Out& o, RowStats (&row)[kRowTiles], const PackedTile& tile,
                                         const CachedSequence& sequence, int kv_head,
                                         const ScoreScale& scale, int n_block, int step,
                                         int num_keys) {
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
      row[r] = {-INFINITY, 0.f};
#pragma unroll
      for (int i = 0; i < kValueVecs * 16; ++i) (&o[r][0][0][0])[i] = 0.f;
    }
    KeyRange visible[kRowTiles];
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
      const int query = min(tile.query_of(g_ + 8 * r), tile.first_query + tile.num_queries - 1);
      visible[r] = visible_keys(args_, sequence, query);
    }
    // Keys that all rows see.
    const int begin = visible_keys(args_, sequence, tile.first_query + tile.num_queries - 1).begin;
    const int end = visible_keys(args_, sequence, tile.first_query).end;
    // The page table is read a step ahead.
    BlockPlace next{};
    if ((n_block + step) * kBlockN < num_keys) next = find_place(sequence, n_block + step);
#pragma unroll 1
    for (; n_block * kBlockN < num_keys; n_block += step) {
      const int first = n_block * kBlockN;
      Scores s;
      gemm_qk(s);
      const BlockPlace place = next;
      const bool more = (n_block + step) * kBlockN < num_keys;
      if (more) {
        load_k(place, kv_head);
        if ((n_block + 2 * step) * kBlockN < num_keys) {
          next = find_place(sequence, n_block + 2 * step);
        }
      }
      const bool whole = first >= begin && first + kBlockN <= end;
      convert_scores(s, visible, scale, first, whole);
      float factor[kRowTiles];
      update(s, row, factor);
      if (!whole) zero_fill_v(sequence, first);
      rescale(o, factor);
      gemm_pv(o, s);
      if (more) load_v(place, kv_head);
    }
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) row[r].sum = quad_sum(row[r].sum);
  }

  // n_block: one of which the cache has a key.
  __device__ __forceinline__ BlockPlace find_place(const CachedSequence& sequence,
                                                   int n_block) const {
    return place_of<Traits>(args_, sequence, n_block);
  }

 private:
  static __device__ __forceinline__ bool has_column(int vec, int head_dim) {
    return Traits::kPlain || vec * 8 < head_dim;
  }

  // Addresses of the keys of a KV block in K or V. lost: what stands for the keys of a page that
  // does not exist.
  struct Addresses {
    const uint16_t* first;
    int64_t slot;  // 0: the page does not exist
    int last;

    __device__ __forceinline__ Addresses(const Arguments& args, const CacheTensor& cache,
                                         const BlockPlace& place, int kv_head, const uint4* lost)
        : first(cache.data + place.page * cache.page + kv_head * cache.head +
                place.slot * cache.slot),
          slot(cache.slot),
          last(place.last) {
      constexpr bool kAlwaysThere = Traits::kPlain && kPages == Pages::kNone;
      if (!kAlwaysThere && (place.page < 0 || place.page >= args.num_pages)) {
        first = reinterpret_cast<const uint16_t*>(lost);
        slot = 0;
      }
    }
    // Returns the address of key i; that of the last key for one past the end of the cache.
    __device__ __forceinline__ const uint16_t* at(int i) const {
      if constexpr (kPages == Pages::kUneven) {
        return reinterpret_cast<const uint16_t*>(
            __shfl_sync(~0u, reinterpret_cast<uint64_t>(first), i));
      }
      return first + min(i, last) * slot;
    }
  };

  __device__ __forceinline__ uint4 load(const uint16_t* key, int vec, int head_dim) const {
    return has_column(vec, head_dim) ? policy_.load(key + vec * 8) : uint4{};
  }

  __device__ __forceinline__ void load_k(const BlockPlace& place, int kv_head) {
    const Addresses keys(args_, args_.k, place, kv_head, kNaNs);
#pragma unroll
    for (int n = 0; n < kKeyTiles; ++n) {
      const uint16_t* key = keys.at(g_ + 8 * n);
#pragma unroll
      for (int i = 0; i < kKeyVecs; ++i) k_[n][i] = load(key, t_ + 4 * i, args_.head_dim);
    }
  }

  // The lane's i-th key of V.
  __device__ __forceinline__ int v_key(int i) const { return 2 * t_ + i % 2 + i / 2 * 8; }

  __device__ __forceinline__ void load_v(const BlockPlace& place, int kv_head) {
    const Addresses keys(args_, args_.v, place, kv_head, kZeros);
#pragma unroll
    for (int i = 0; i < 2 * kKeyTiles; ++i) {
      const uint16_t* key = keys.at(v_key(i));
#pragma unroll
      for (int j = 0; j < kValueVecs; ++j) v_[i][j] = load(key, g_ + 8 * j, args_.head_dim_v);
    }
  }

  // Replaces V of keys that no query sees by zeros: unused memory may hold NaN.
  __device__ __forceinline__ void zero_fill_v(const CachedSequence& sequence, int first) {
#pragma unroll
    for (int i = 0; i < 2 * kKeyTiles; ++i) {
      const int key = first + v_key(i);
      if (key >= sequence.first_key && key < sequence.num_keys) continue;
#pragma unroll
      for (int j = 0; j < kValueVecs; ++j) v_[i][j] = {};
    }
  }

  // s: [n][i] is key 8 n + 2 t + i % 2 of row g + 8 (i / 2).
  __device__ __forceinline__ void gemm_qk(Scores& s) const {
    // Two sums, because an MMA waits for the one whose sum it adds to.
    float part[kKeyTiles][2][4] = {};
#pragma unroll
    for (int i = 0; i < kKeyVecs; ++i) {
      const uint4 a = q_[0][i];
      const uint4 b = kRowTiles == 2 ? q_[kRowTiles - 1][i] : make_uint4(0, 0, 0, 0);
#pragma unroll
      for (int n = 0; n < kKeyTiles; ++n) {
        const uint4 k = k_[n][i];
        mma_fragment<kElement>(part[n][0], {a.x, b.x, a.y, b.y}, {k.x, k.y});
        mma_fragment<kElement>(part[n][1], {a.z, b.z, a.w, b.w}, {k.z, k.w});
      }
    }
#pragma unroll
    for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) s[n][i] = part[n][0][i] + part[n][1][i];
    }
  }

  // Scales, caps and masks the scores. whole: all rows see all keys.
  __device__ __forceinline__ void convert_scores(Scores& s, const KeyRange (&visible)[kRowTiles],
                                                 const ScoreScale& scale, int first,
                                                 bool whole) const {
    if (args_.score_scale.caps()) {
#pragma unroll
      for (int n = 0; n < kKeyTiles; ++n) cap_scores(s[n], scale.tanh_scale);
    }
#pragma unroll
    for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 2 * kRowTiles; ++i) {
        s[n][i] *= scale.factor;
        const int key = first + 8 * n + 2 * t_ + i % 2;
        if (!whole && (key < visible[i / 2].begin || key >= visible[i / 2].end)) {
          s[n][i] = -INFINITY;
        }
      }
    }
  }

  // Replaces scores by probabilities. factor: of O.
  __device__ __forceinline__ void update(Scores& s, RowStats (&row)[kRowTiles],
                                         float (&factor)[kRowTiles]) const {
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
      float highest = -INFINITY;
#pragma unroll
      for (int n = 0; n < kKeyTiles; ++n) {
        highest = fmaxf(highest, fmaxf(s[n][2 * r], s[n][2 * r + 1]));
      }
      const float max = fmaxf(row[r].max, quad_max(highest));
      const float reference = reference_of(max);
      factor[r] = rescale_factor(row[r].max, max);
      row[r].max = max;
      row[r].sum *= factor[r];
#pragma unroll
      for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
        for (int i = 2 * r; i < 2 * r + 2; ++i) {
          s[n][i] = exp2_approx(s[n][i] - reference);
          row[r].sum += s[n][i];
        }
      }
    }
  }

  // factor: of row g + 8 r. O has rows 2 t and 2 t + 1.
  __device__ __forceinline__ void rescale(Out& o, const float (&factor)[kRowTiles]) const {
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
      if (__all_sync(~0u, factor[r] == 1.f)) continue;
      const float even = __shfl_sync(~0u, factor[r], 8 * t_);
      const float odd = __shfl_sync(~0u, factor[r], 8 * t_ + 4);
#pragma unroll
      for (int i = 0; i < kValueVecs * 16; ++i) (&o[r][0][0][0])[i] *= i % 2 == 0 ? even : odd;
    }
  }

  __device__ __forceinline__ void gemm_pv(Out& o, const Scores& s) const {
    uint32_t probabilities[kRowTiles][kKeyTiles];
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
      for (int n = 0; n < kKeyTiles; ++n) {
        probabilities[r][n] = pack<kElement>(s[n][2 * r], s[n][2 * r + 1]);
      }
    }
    constexpr int kStep = kKeyTiles == 1 ? 1 : 2;  // key tiles of an MMA
#pragma unroll
    for (int n = 0; n < kKeyTiles; n += kStep) {
#pragma unroll
      for (int j = 0; j < kValueVecs; ++j) {
        uint4 v[2 * kStep];  // of the keys of this step
#pragma unroll
        for (int i = 0; i < 2 * kStep; ++i) v[i] = v_[2 * n + i][j];
#pragma unroll
        for (int p = 0; p < 4; ++p) {
          // Dims 2 p, then 2 p + 1, of two keys.
          uint32_t pairs[2 * kStep];
#pragma unroll
          for (int i = 0; i < kStep; ++i) {
            const uint32_t even = (&v[2 * i].x)[p], odd = (&v[2 * i + 1].x)[p];
            pairs[2 * i] = __byte_perm(even, odd, 0x5410);
            pairs[2 * i + 1] = __byte_perm(even, odd, 0x7632);
          }
#pragma unroll
          for (int r = 0; r < kRowTiles; ++r) {
            if constexpr (kStep == 2) {
              mma_fragment<kElement>(o[r][j][p], pairs,
                                     {probabilities[r][n], probabilities[r][n + 1]});
            } else {
              mma_half_fragment<kElement>(o[r][j][p], pairs, probabilities[r][n]);
            }
          }
        }
      }
    }
  }

  const Arguments& args_;
  const StreamPolicy policy_{};
  const int g_, t_;
  uint4 q_[kRowTiles][kKeyVecs];
  uint4 k_[kKeyTiles][kKeyVecs];
  uint4 v_[2 * kKeyTiles][kValueVecs];
};

}  // namespace flashattn3::decode
