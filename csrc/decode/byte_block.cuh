// A KV block of a cache of 8 bits in the registers of a warp, 16 or 32 keys, as the main loop
// (byte_mainloop.cuh) multiplies them. With g = lane / 4 and t = lane % 4: of K a lane has keys
// g + 8 i, 16 neighbouring dims at a time; of V keys 2 t and 2 t + 1 of every eight, 16 dims at a
// time or, where rows are short, eight.
#pragma once

#include <algorithm>
#include <cstdint>

#include "decode/load.cuh"
#include "decode/load_bytes.cuh"
#include "decode/warp_place.cuh"
#include "decode/warp_traits.cuh"
#include "ptx/stream_load.cuh"

namespace flashattn3::decode {

template <class Traits>
class ByteBlock {
  static constexpr int kKeys = Traits::kBlockN / 8;  // of K, of a lane
  static constexpr int kKeyVecs = Traits::kVecs / 4, kValueVecs = Traits::kVecs / 8;

 public:
  // Vectors of V that a lane loads at a time: 16 bytes, or the 8 that it has of a short row.
  static constexpr int kValueWidth = kValueVecs > 1 ? 2 : 1;

  // The vector of V that a lane has as number j.
  static constexpr __device__ __forceinline__ int value_vec(int g, int j) {
    return kValueWidth * (g + 8 * (j / kValueWidth)) + j % kValueWidth;
  }

  // The vector of K that a lane has as number i; two neighbours are loaded at a time.
  static constexpr __device__ __forceinline__ int key_vec(int t, int i) {
    return 2 * (t + 4 * (i / 2)) + i % 2;
  }
  // The lane's i-th key of K, and of V.
  __device__ __forceinline__ int score_key(int i) const { return g_ + 8 * i; }
  __device__ __forceinline__ int value_key(int i) const { return 2 * t_ + i % 2 + i / 2 * 8; }

  // Columns past the head dims are those of the last vector that exists: Q is 0 there, and O is not
  // stored.
  __device__ __forceinline__ explicit ByteBlock(const Arguments& args)
      : args_(args), g_(threadIdx.x % 32 / 4), t_(threadIdx.x % 4) {
#pragma unroll
    for (int i = 0; i < kKeyVecs / 2; ++i) {
      key_at_[i] = std::min(8 * key_vec(t_, 2 * i), args.head_dim - 16);
    }
#pragma unroll
    for (int j = 0; j < kValueVecs / kValueWidth; ++j) {
      value_at_[j] =
          std::min(8 * value_vec(g_, kValueWidth * j), args.head_dim_v - 8 * kValueWidth);
    }
  }

  __device__ __forceinline__ void load_k(const BlockPlace& place, int kv_head) {
    const uint8_t* at[kKeys];
    find_keys(at, args_.k, place, kv_head, kNaNs, [&](int i) { return score_key(i); });
#pragma unroll
    for (int n = 0; n < kKeys; ++n) {
#pragma unroll
      for (int i = 0; i < kKeyVecs / 2; ++i) k[n][i] = policy_.load(at[n] + key_at_[i]);
    }
    if (args_.has_key_descales) load_descales(args_.k_key_descales, place, kv_head, k_descale);
  }

  __device__ __forceinline__ void load_v(const BlockPlace& place, int kv_head) {
    const uint8_t* at[2 * kKeys];
    find_keys(at, args_.v, place, kv_head, kZeros, [&](int i) { return value_key(i); });
#pragma unroll
    for (int n = 0; n < 2 * kKeys; ++n) {
#pragma unroll
      for (int j = 0; j < kValueVecs; j += kValueWidth) {
        const uint8_t* from = at[n] + value_at_[j / kValueWidth];
        if constexpr (kValueWidth == 1) {
          v[n][j] = policy_.load_half(from);
        } else {
          const uint4 both = policy_.load(from);
          v[n][j] = make_uint2(both.x, both.y), v[n][j + 1] = make_uint2(both.z, both.w);
        }
      }
    }
    if (args_.has_key_descales) load_descales(args_.v_key_descales, place, kv_head, v_descale);
  }

  // Replaces V of keys that no query sees by zeros: unused memory may hold NaN.
  __device__ __forceinline__ void hide_values(const CachedSequence& sequence, int first) {
    const auto hidden = [&](int key) {
      return first + key < sequence.first_key || first + key >= sequence.num_keys;
    };
#pragma unroll
    for (int i = 0; i < 2 * kKeys; ++i) {
      if (!hidden(value_key(i))) continue;
#pragma unroll
      for (int j = 0; j < kValueVecs; ++j) v[i][j] = {};
    }
#pragma unroll
    for (int i = 0; i < kKeys; ++i) {
      if (hidden(score_key(i))) v_descale[i] = 0.f;
    }
  }

  uint4 k[kKeys][kKeyVecs / 2];
  uint2 v[2 * kKeys][kValueVecs];
  float k_descale[kKeys], v_descale[kKeys];  // of keys score_key(i), if keys have descales

 private:
  // Sets at[i] to the address of the lane's key key_of(i); that of the last key for one past the
  // end of the cache. lost: what stands for the keys of a page that does not exist.
  template <int kCount, class KeyOf>
  __device__ __forceinline__ void find_keys(const uint8_t* (&at)[kCount], const CacheTensor& cache,
                                            const BlockPlace& place, int kv_head, const uint4* lost,
                                            KeyOf&& key_of) const {
    const auto* first = reinterpret_cast<const uint8_t*>(cache.data) + place.page * cache.page +
                        kv_head * cache.head + place.slot * cache.slot;
    uint32_t slot = static_cast<uint32_t>(cache.slot);  // it fits: has_near_tokens in launch/
    if (place.page < 0 || place.page >= args_.num_pages) {
      first = reinterpret_cast<const uint8_t*>(lost);
      slot = 0;
    }
    if (is_uneven<Traits>(args_)) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        at[i] = reinterpret_cast<const uint8_t*>(
            __shfl_sync(~0u, reinterpret_cast<uint64_t>(first), key_of(i)));
      }
    } else {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        at[i] = first + uint64_t{static_cast<uint32_t>(min(key_of(i), place.last))} * slot;
      }
    }
  }

  __device__ __forceinline__ void load_descales(const KeyDescales& descales,
                                                const BlockPlace& place, int kv_head,
                                                float (&into)[kKeys]) const {
    const float* first = &kOne;
    int64_t slot = 0;
    if (place.page < 0 || place.page >= args_.num_pages) {
      first = reinterpret_cast<const float*>(&kNaNDescale);
    } else if (descales.data != nullptr) {
      first = descales.data + place.page * descales.page + kv_head * descales.head +
              place.slot * descales.slot;
      slot = descales.slot;
    }
#pragma unroll
    for (int i = 0; i < kKeys; ++i) {
      if (is_uneven<Traits>(args_)) {
        into[i] = *reinterpret_cast<const float*>(
            __shfl_sync(~0u, reinterpret_cast<uint64_t>(first), score_key(i)));
      } else {
        into[i] = first[min(score_key(i), place.last) * slot];
      }
    }
  }

  const Arguments& args_;
  const StreamPolicy policy_{};
  const int g_, t_;
  // Bytes of a key before the lane's vectors.
  int key_at_[kKeyVecs / 2], value_at_[kValueVecs / kValueWidth];
};

}  // namespace flashattn3::decode
