// attention/cached_keys.cuh: numbers of keys, hidden keys, entries and places, whatever the tables
// hold.
#pragma once

#include <climits>

#include "../unit.cuh"
#include "attention/cached_keys.cuh"

namespace unit::cached_keys {

using namespace flashattn3;

// Entries of `capacity` tokens without tables.
inline CachedKeys plain(int capacity, int num_caches) {
  CachedKeys keys{};
  keys.page_size = cutlass::FastDivmod(std::max(capacity, 1));
  keys.num_pages = keys.num_caches = num_caches;
  keys.capacity = keys.seqlen_k = capacity;
  return keys;
}

// Cached and new tokens, each cut to what fits.
inline void check_lengths(Result& result) {
  const std::vector<int> lengths = {0, 1, 99, 100, 101, -1, INT_MIN, INT_MAX};
  const std::vector<int> cu_new = {0, 1, 1, 100, 90, INT_MAX, 5, 5, 6};
  for (const int seqlen_new : {0, 1, 7, 100, -3, INT_MAX}) {
    CachedKeys keys = plain(100, 8);
    keys.seqlen_new = seqlen_new;
    const int all_new = std::clamp(seqlen_new, 0, 100);
    result.equal(100, keys.num_keys(0), "without lengths", seqlen_new, 0);
    keys.seqlen_k = 40;
    result.equal(std::min(40 + all_new, 100), keys.num_keys(3), "40 cached", seqlen_new, 3);
    keys.cache_seqlens = lengths.data();
    for (int b = 0; b < 8; ++b) {
      const int cached = std::clamp(lengths[b], 0, 100);
      result.equal(cached, keys.num_cached(b), "cached", seqlen_new, b);
      result.equal(std::min(cached + all_new, 100), keys.num_keys(b), "lengths", seqlen_new, b);
    }
  }
  CachedKeys keys = plain(100, 8);
  keys.cache_seqlens = lengths.data(), keys.cu_seqlens_k_new = cu_new.data();
  keys.seqlen_new = 1000;  // not read
  for (int b = 0; b < 8; ++b) {
    const int64_t given = int64_t{cu_new[b + 1]} - cu_new[b];
    const int cached = std::clamp(lengths[b], 0, 100);
    const int64_t num_new = std::clamp<int64_t>(given, 0, 100 - cached);
    result.equal(static_cast<int>(cached + num_new), keys.num_keys(b), "new tokens", b, 0);
  }
}

inline void check_hidden_and_entries(Result& result) {
  const std::vector<int> values = {0, 1, 50, 51, -1, INT_MIN, INT_MAX, 3};
  CachedKeys keys = plain(100, 4);
  result.equal(0, keys.first_key(2, 50), "without padding");
  result.equal(2, keys.cache_idx(2), "without indices");
  result.equal(-1, keys.cache_idx(4), "without indices, past the last");
  keys.cache_leftpad = keys.cache_batch_idx = values.data();
  for (int b = 0; b < 8; ++b) {
    result.equal(std::clamp(values[b], 0, 50), keys.first_key(b, 50), "padding", b, 0);
    const bool exists = values[b] >= 0 && values[b] < 4;
    result.equal(exists ? values[b] : -1, keys.cache_idx(b), "entry", b, 0);
  }
}

inline void check_places(Result& result) {
  CachedKeys dense = plain(100, 4);
  int page, slot;
  for (const int key : {0, 63, 99}) {
    dense.find(3, key, page, slot);
    result.equal(3, page, "dense page", key, 0);
    result.equal(key, slot, "dense slot", key, 0);
  }
  dense.find(-1, 5, page, slot);
  result.equal(-1, page, "no entry");
  for (const int page_size : {1, 3, 16, 100}) {
    constexpr int kPages = 5, kStride = 7;
    std::vector<int> table(3 * kStride, -7);
    const std::vector<int> entry = {4, INT_MAX, 0, -1, 5};  // of 5 pages: 4 and 0 exist
    std::copy(entry.begin(), entry.end(), table.begin() + 2 * kStride);
    CachedKeys keys = plain(kPages * page_size, 3);
    keys.page_table = table.data(), keys.page_table_stride = kStride;
    keys.page_size = cutlass::FastDivmod(page_size);
    keys.num_pages = 5;
    for (int key = 0; key < kPages * page_size; ++key) {
      keys.find(2, key, page, slot);
      const int wanted = entry[key / page_size];
      result.equal(wanted >= 0 && wanted < 5 ? wanted : -1, page, "page", page_size, key);
      result.equal(key % page_size, slot, "slot", page_size, key);
    }
    keys.find(-1, 0, page, slot);
    result.equal(-1, page, "paged, no entry", page_size, 0);
  }
}

static const Tests kTests = {
    {"attention/cached_keys: lengths", Where::kHost, check_lengths},
    {"attention/cached_keys: hidden keys, entries", Where::kHost, check_hidden_and_entries},
    {"attention/cached_keys: places", Where::kHost, check_places}};

}  // namespace unit::cached_keys
