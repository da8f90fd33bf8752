// The share of each CTA in the work of a cached call, at most 2^31 - 1 units.
//
// A unit of work is one KV block of one work tile (sequence, KV head, tile of packed rows). The
// units of one KV head are numbered in that order, and each share is U / S of them, or one more, in
// the order of the shares: equal shares, however unequal the sequences (the partition of
// FlashInfer, arXiv 2501.01005). So a CTA ends in the middle of at most one work tile and begins in
// the middle of at most one. The part of a work tile in one CTA is a Part; the parts of a work tile
// that several CTAs share are in consecutive CTAs.
//
// Neighbouring CTAs have the same share of neighbouring KV heads (a group of heads; the groups are
// numbered where the KV heads stand above): they read the same tokens at the same time, and the
// heads of a token are neighbours in memory. CTAs are numbered head by head.
//
// Lengths are read on the device, so a captured launch is right for other lengths.
#pragma once

#include <algorithm>
#include <cstdint>

#include "attention/block_list.cuh"
#include "attention/seqlen.cuh"
#include "decode/arguments.h"
#include "decode/config.h"

namespace flashattn3::decode {

// One sequence of the batch.
struct CachedSequence {
  int cache_idx;        // entry of the page table or of the dense cache; -1: there is no such entry
  int first_query;      // token in q and out
  int num_queries;      // they are the last positions of the sequence
  int num_keys;         // cached and new
  int first_key;        // no query sees a key before it
  BlockRange n_blocks;  // that a query may see; at least one, even without keys
  int row_tiles;        // tiles of packed rows of a KV head
  int num_tiles;        // work tiles of one head of each group: head_groups x row_tiles

  // Position of a query among the keys; negative if there are more queries than keys.
  __host__ __device__ __forceinline__ int position(int query) const {
    return num_keys - num_queries + query;
  }
};

// Returns a sequence whose keys and queries are inside the tensors, whatever the tables hold.
template <int kBlockN>
__host__ __device__ __forceinline__ CachedSequence find_cached_sequence(const Arguments& args,
                                                                        int batch_idx) {
  CachedSequence found;
  const Sequence queries = find_sequence(args.seqlens_q, batch_idx);
  found.first_query = queries.offset;
  found.num_queries = queries.length;

  const int given = args.cache_seqlens == nullptr ? args.seqlen_k : args.cache_seqlens[batch_idx];
  const int cached = min(max(given, 0), args.capacity);
  int num_new = args.seqlen_new;
  if (args.cu_seqlens_k_new != nullptr) {
    num_new = args.cu_seqlens_k_new[batch_idx + 1] - args.cu_seqlens_k_new[batch_idx];
  }
  found.num_keys = cached + min(max(num_new, 0), args.capacity - cached);

  const int leftpad = args.cache_leftpad == nullptr ? 0 : args.cache_leftpad[batch_idx];
  // The first query sees the earliest keys. The subtraction cannot overflow: the left operand is at
  // least -2^30 (params.h).
  const int window_begin = args.window_left == INT_MAX ? 0 : found.position(0) - args.window_left;
  found.first_key = min(max(max(leftpad, window_begin), 0), found.num_keys);

  const int cache_idx =
      args.cache_batch_idx == nullptr ? batch_idx : args.cache_batch_idx[batch_idx];
  found.cache_idx = cache_idx >= 0 && cache_idx < args.num_caches ? cache_idx : -1;

  const int begin = found.first_key / kBlockN;
  found.n_blocks = {begin, max(begin + 1, (found.num_keys + kBlockN - 1) / kBlockN)};
  const int tokens = args.rows.tokens;
  found.row_tiles = args.rows.tokens.div(found.num_queries + tokens - 1) * args.rows.head_tiles;
  found.num_tiles = found.num_queries > args.max_queries ? 0 : args.head_groups * found.row_tiles;
  return found;
}

// Returns the prefix as a sequence. With an axis for the batch, batch_idx * q_batch is the end of
// q.
template <int kBlockN>
__host__ __device__ __forceinline__ CachedSequence find_prefix(const PrefixArguments& args) {
  CachedSequence found;
  const int given = args.prefix_seqlen == nullptr ? args.prefix_len : args.prefix_seqlen[0];
  found.cache_idx = 0;
  found.first_query = args.seqlens_q.cu_seqlens == nullptr ? -args.total_q : 0;
  found.num_queries = args.total_q;
  found.num_keys = min(max(given, 0), args.prefix_capacity);
  found.first_key = 0;
  found.n_blocks = {0, max(1, (found.num_keys + kBlockN - 1) / kBlockN)};
  const int tokens = args.rows.tokens;
  found.row_tiles = args.rows.tokens.div(args.total_q + tokens - 1) * args.rows.head_tiles;
  found.num_tiles = args.head_groups * found.row_tiles;
  return found;
}

// kPrefix: of a kernel with a prefix, whose arguments are PrefixArguments.
template <int kBlockN, bool kPrefix>
__host__ __device__ __forceinline__ CachedSequence find_keys(const Arguments& args, int batch_idx) {
  if constexpr (kPrefix) {
    const auto& all = static_cast<const PrefixArguments&>(args);
    if (all.is_prefix(batch_idx)) return find_prefix<kBlockN>(all);
  }
  return find_cached_sequence<kBlockN>(args, batch_idx);
}

// The spans of which a work tile of the sequence has a KV block, counted from key 0.
__host__ __device__ __forceinline__ BlockRange spans_of(const Arguments& args,
                                                        const BlockRange& n_blocks) {
  return {n_blocks.begin / args.span_blocks, (n_blocks.end - 1) / args.span_blocks + 1};
}

// Units of one work tile of the sequence. kSpanStep: 0, or of a kernel with spans, whose units they
// are, the KV blocks that its warpgroups take at a time.
template <int kSpanStep = 0>
__host__ __device__ __forceinline__ int units_of_tile(const Arguments& args,
                                                      const CachedSequence& sequence) {
  if (args.whole_tiles) return 1;
  const BlockRange units = kSpanStep > 0 ? spans_of(args, sequence.n_blocks) : sequence.n_blocks;
  return units.end - units.begin;
}

template <int kSpanStep = 0>
__host__ __device__ __forceinline__ int units_of_sequence(const Arguments& args,
                                                          const CachedSequence& sequence) {
  return sequence.num_tiles * units_of_tile<kSpanStep>(args, sequence);
}

// Units begin to end - 1 of one head of a group belong to this CTA, or are left of them. The first
// of them is in sequence batch_idx, whose first unit is first_unit; these are unset without units.
struct WorkShare {
  int begin, end;
  unsigned units, rest;  // of each share; the first `rest` shares have one more
  int head;              // of a group
  int cta, first_cta;    // number of this CTA, and of the first one of its head
  int batch_idx, first_unit;
  CachedSequence sequence;  // batch_idx

  // total: units of a head. block: of the launch. With fewer units than shares the last ones are
  // empty, so that the CTAs that share a work tile follow each other.
  template <int kSpanStep = 0>
  __host__ __device__ __forceinline__ void set(int total, int block, const Arguments& args) {
    int mine;
    args.share_heads(mine, head, block);
    first_cta = head * args.num_shares;
    cta = first_cta + mine;
    const int of_each = args.num_shares.div(total);
    const int longer = total - of_each * args.num_shares;  // shares with one more
    // One unit for each of the first shares, as if they were all.
    const bool few = of_each == 0;
    units = few ? 1 : of_each;
    rest = few ? 0 : longer;
    begin = mine * of_each + min(mine, longer);
    end = begin + of_each + (mine < longer ? 1 : 0);
    if (kSpanStep > 0 && args.whole_tiles) begin = min(mine, total), end = total;
  }
  // The first unit of a share of this head.
  __host__ __device__ __forceinline__ int begin_of(int share) const {
    return share * static_cast<int>(units) + min(share, static_cast<int>(rest));
  }
  // The CTA of this head that has a unit.
  __host__ __device__ __forceinline__ int cta_of(int unit) const {
    const unsigned of_longer = rest * (units + 1);  // units of the first `rest` shares
    const unsigned at = unit;
    return first_cta + (at < of_longer ? at / (units + 1) : rest + (at - of_longer) / units);
  }
};

// The KV blocks of one work tile that one CTA reads.
struct Part {
  int batch_idx, kv_head, row_tile;
  BlockRange n_blocks;
  int first_cta;  // of the CTAs that share the work tile
  int num_ctas;   // 1: the part is the whole work tile
};

// Takes the next part off the share: sets part, whose sequence share.sequence then is. Returns
// false if there is none. The first part follows from the share alone, of others the lengths are
// read.
template <int kBlockN, int kSpanStep = 0, bool kPrefix = false>
__host__ __device__ __forceinline__ bool take_part(const Arguments& args, WorkShare& share,
                                                   Part& part) {
  if (share.begin >= share.end) return false;
  int units = units_of_tile<kSpanStep>(args, share.sequence);
  while (share.begin - share.first_unit >= share.sequence.num_tiles * units) {
    if (share.batch_idx + 1 >= args.batch) return false;  // the lengths have changed
    share.first_unit += share.sequence.num_tiles * units;
    share.sequence = find_keys<kBlockN, kPrefix>(args, ++share.batch_idx);
    units = units_of_tile<kSpanStep>(args, share.sequence);
  }
  // Unsigned, which takes fewer instructions.
  const int tile =
      static_cast<unsigned>(share.begin - share.first_unit) / static_cast<unsigned>(units);
  const int first_of_tile = share.first_unit + tile * units;
  const int begin = share.begin - first_of_tile;
  const int count = min(units - begin, share.end - share.begin);
  const int row_tiles = share.sequence.row_tiles;
  part.batch_idx = share.batch_idx;
  const int group = row_tiles == 1 ? tile : tile / row_tiles;
  part.kv_head = group * args.share_heads + share.head;
  part.row_tile = tile - group * row_tiles;
  part.n_blocks = share.sequence.n_blocks;
  if (!args.whole_tiles && kSpanStep > 0) {
    const int first = spans_of(args, part.n_blocks).begin + begin;
    part.n_blocks = {max(part.n_blocks.begin, first * args.span_blocks),
                     min(part.n_blocks.end, (first + count) * args.span_blocks)};
  } else if (!args.whole_tiles) {
    part.n_blocks.begin += begin;
    part.n_blocks.end = part.n_blocks.begin + count;
  }
  // A span's KV blocks fall to the same warpgroups, whatever key is the first.
  if constexpr (kSpanStep > 1) part.n_blocks.begin -= part.n_blocks.begin % kSpanStep;
  part.first_cta = share.cta_of(first_of_tile);
  const int last_cta = share.cta_of(first_of_tile + units - 1);
  // No other CTA than those of the head, even if the lengths have changed.
  part.num_ctas = min(last_cta, share.first_cta + args.num_shares - 1) - part.first_cta + 1;
  share.begin += count;
  if (kSpanStep > 0 && args.whole_tiles) {  // a tile in num_shares, for their sizes differ
    share.begin += args.num_shares - count;
    part.first_cta = share.cta, part.num_ctas = 1;
  }
  return true;
}

}  // namespace flashattn3::decode
