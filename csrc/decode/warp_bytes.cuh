// A warp kernel widens K and V of a cache of 8 bits to fp16 in the registers that an MMA reads.
// Each row of Q is fp16 numbers and a factor of S, and descales of keys multiply columns of S and
// of P (scale_columns.cuh).
#pragma once

#include <cstdint>

#include "attention/softmax.cuh"
#include "decode/arguments.h"
#include "decode/descale_unit.cuh"
#include "decode/load_bytes.cuh"
#include "decode/warp_traits.cuh"
#include "decode/widen_queries.cuh"
#include "ptx/widen.cuh"

namespace flashattn3::decode {

// Where the keys of a KV block are: with kUneven lane i has the place of key i, else all lanes have
// that of the first one.
struct BlockPlace {
  int page, slot;  // page: of a dense cache the sequence's entry
  int last;        // keys of the KV block that the cache has, less one; not with kUneven
};

struct NoBytes {};

template <class Traits>
class WarpBytes {
  static constexpr int kRowTiles = Traits::kRowTiles;
  static constexpr int kKeyTiles = Traits::kBlockN / 8;  // of 8 keys
  static constexpr int kKeys = 2 * kKeyTiles;            // of a lane: v_key(i) of WarpMainloop

 public:
  template <int kVecs>
  __device__ __forceinline__ void widen_q(uint4 (&q)[kRowTiles][kVecs]) {
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
      row_factor_[r] = 1.f;
      if constexpr (Traits::kElement == ElementType::kBFloat16) {
        row_factor_[r] = take_power_out<4>(q[r]);
      }
    }
    unit_.reset();
  }

  __device__ __forceinline__ void load_k_descales(const Arguments& args, const BlockPlace& place,
                                                  int kv_head) {
    load_descales(args, args.k_key_descales, place, kv_head, k_);
  }
  __device__ __forceinline__ void load_v_descales(const Arguments& args, const BlockPlace& place,
                                                  int kv_head) {
    load_descales(args, args.v_key_descales, place, kv_head, v_);
  }
  // The lane's i-th key of V is hidden.
  __device__ __forceinline__ void hide_v(int i) { v_[i] = 0.f; }

  __device__ __forceinline__ void scale_scores(const Arguments& args,
                                               float (&s)[kKeyTiles][4]) const {
#pragma unroll
    for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 2 * kRowTiles; ++i) {
        s[n][i] *= row_factor_[i / 2];
        if (args.has_key_descales) s[n][i] *= k_[2 * n + i % 2];
      }
    }
  }

  // factor: of O.
  __device__ __forceinline__ void scale_probabilities(const Arguments& args,
                                                      float (&s)[kKeyTiles][4],
                                                      float (&factor)[kRowTiles]) {
    if (!args.has_key_descales) return;
    float largest = 0.f;
#pragma unroll
    for (int i = 0; i < kKeys; ++i) largest = fmaxf(largest, fabsf(v_[i]));
    const float change = unit_.raise(quad_max(largest));
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) factor[r] *= change;
    const float inverse = unit_.inverse();
#pragma unroll
    for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 2 * kRowTiles; ++i) s[n][i] *= v_[2 * n + i % 2] * inverse;
    }
  }

  template <class Out>
  __device__ __forceinline__ void end(const Arguments& args, Out& o) const {
    if (!args.has_key_descales) return;
    float* first = &o[0][0][0][0];
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(Out) / sizeof(float)); ++i) {
      first[i] *= unit_.value();
    }
  }

 private:
  __device__ __forceinline__ void load_descales(const Arguments& args, const KeyDescales& descales,
                                                const BlockPlace& place, int kv_head,
                                                float (&into)[kKeys]) const {
    if (!args.has_key_descales) return;
    const float* first = &kOne;
    int64_t slot = 0;
    if (place.page < 0 || place.page >= args.num_pages) {
      first = reinterpret_cast<const float*>(&kNaNDescale);
    } else if (descales.data != nullptr) {
      first = descales.data + place.page * descales.page + kv_head * descales.head +
              place.slot * descales.slot;
      slot = descales.slot;
    }
    const int t = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < kKeys; ++i) {
      const int key = 2 * t + i % 2 + i / 2 * 8;
      if constexpr (Traits::kPages == Pages::kUneven) {
        into[i] = *reinterpret_cast<const float*>(
            __shfl_sync(~0u, reinterpret_cast<uint64_t>(first), key));
      } else {
        into[i] = first[min(key, place.last) * slot];
      }
    }
  }

  float row_factor_[kRowTiles];
  float k_[kKeys], v_[kKeys];  // descales of the lane's keys
  DescaleUnit unit_;
};

}  // namespace flashattn3::decode
