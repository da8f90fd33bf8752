// Where the keys of each sequence are in a cache: how many there are, and in which pages.
#pragma once

#include <cutlass/fast_math.h>

#include <cstdint>

namespace flashattn3 {

// A paged cache, or a dense one, which has a page for each of its entries and no table. Values of
// the tables may be anything: no value causes an access outside the tensors.
struct CachedKeys {
  const int32_t* page_table;  // (num_caches, max_pages); null: the cache is dense
  int64_t page_table_stride;  // between its first dimension's entries
  cutlass::FastDivmod page_size;
  int num_pages;   // of the cache; dense: num_caches
  int num_caches;  // entries of the page table or of the dense cache
  int capacity;    // tokens of one entry

  const int32_t* cache_seqlens;     // (batch), or null: seqlen_k
  const int32_t* cu_seqlens_k_new;  // (batch + 1), or null: seqlen_new
  const int32_t* cache_leftpad;     // (batch), or null
  const int32_t* cache_batch_idx;   // (batch), or null: batch_idx
  int seqlen_k, seqlen_new;

  // Keys of a sequence without the new ones; at most capacity.
  __host__ __device__ __forceinline__ int num_cached(int batch_idx) const {
    const int given = cache_seqlens == nullptr ? seqlen_k : cache_seqlens[batch_idx];
    return min(max(given, 0), capacity);
  }

  // Keys of a sequence, cached and new; at most capacity.
  __host__ __device__ __forceinline__ int num_keys(int batch_idx) const {
    const int cached = num_cached(batch_idx);
    int num_new = seqlen_new;
    if (cu_seqlens_k_new != nullptr) {
      num_new = cu_seqlens_k_new[batch_idx + 1] - cu_seqlens_k_new[batch_idx];
    }
    return cached + min(max(num_new, 0), capacity - cached);
  }

  // The first key that a sequence with this many keys does not hide; at most num_keys.
  __host__ __device__ __forceinline__ int first_key(int batch_idx, int num_keys) const {
    const int leftpad = cache_leftpad == nullptr ? 0 : cache_leftpad[batch_idx];
    return min(max(leftpad, 0), num_keys);
  }

  // The entry of a sequence; -1: there is no such entry.
  __host__ __device__ __forceinline__ int cache_idx(int batch_idx) const {
    const int found = cache_batch_idx == nullptr ? batch_idx : cache_batch_idx[batch_idx];
    return found >= 0 && found < num_caches ? found : -1;
  }

  // Finds the place of a key below capacity. page: -1 if the key has none.
  __host__ __device__ __forceinline__ void find(int cache_idx, int key, int& page,
                                                int& slot) const {
    int index;
    page_size(index, slot, key);
    page = cache_idx;
    if (page_table != nullptr && cache_idx >= 0) {
      page = page_table[cache_idx * page_table_stride + index];
    }
    if (page < 0 || page >= num_pages) page = -1;
  }
};

}  // namespace flashattn3
