// Traits of options that a plain 16-bit kernel config lacks, with their shares of shared memory.
#pragma once

#include "attention/list_sizes.h"
#include "forward/config.h"

namespace flashattn3::forward {

template <Config kConfig>
struct OptionTraits {
  static constexpr bool kQuantized = is_quantized(kConfig.dtype);
  static constexpr bool kListed = kConfig.listed;
  // Whether a work tile has rows of two row blocks, whose lists are joined.
  static constexpr bool kJoined = kListed && kConfig.block_m != kListRows;
  static constexpr bool kSpans = kConfig.spans;
  static constexpr bool kTree = kConfig.tree;
  static constexpr bool kBias = kConfig.term == ScoreTerm::kBias;

  // Keys of a box of K and V: with lists a stage has any two blocks.
  static constexpr int kBoxKeys = kListed ? kListColumns : kConfig.block_n;
  // Bytes of what each K stage has beside K: a tile of the bias, atoms of 64 columns, 16 bits each,
  // or the bit tiles of a KV block.
  static constexpr int kBiasAtoms = (kConfig.block_n + 63) / 64;
  static constexpr int kBesideKBytes = kBias     ? kConfig.block_m * kBiasAtoms * 128
                                       : kListed ? kConfig.block_m * kConfig.block_n / 8
                                                 : 0;
  // Bytes of SharedStorage.
  static constexpr int kStorageBytes = kJoined                                 ? 13312
                                       : kQuantized && kConfig.head_dim <= 128 ? 2048
                                                                               : 1024;
  // Bytes of a row with spans: the total of the spans before the current one, and statistics
  // (span_total.cuh). They are in shared memory where they fit, which is faster.
  static constexpr int kSpanRowBytes = 4 * kConfig.head_dim_v + 64;
  static constexpr bool kSpansInShared = kSpans && kConfig.head_dim <= 128;
  // Whether promotion keeps its bf16 sums in the staging buffer of out (promotion.cuh). With 256
  // columns and two Q buffers it does not: the buffer is too small then.
  static constexpr bool kPromotesInSmem =
      kQuantized && (kConfig.head_dim <= 128 || kConfig.num_q_buffers == 1);

  static_assert(kQuantized || (kConfig.keys_per_descale == 0 && kConfig.promote_keys == 0));
  // With a mask a row may see no key of a block; a bias of -inf has the same effect.
  static_assert(!kBias || (kConfig.masked && !kQuantized && !kConfig.cached));
  static_assert(!kListed || (kConfig.masked && !kBias && !kConfig.cached));
  static_assert(!kListed || kConfig.block_n % kListColumns == 0);
  static_assert(!kJoined || (kConfig.block_m == kListRows * 3 / 2 && !kQuantized));
  static_assert(!kSpans || (kConfig.cached && 128 % kConfig.block_n == 0));
  static_assert(!kTree || (kConfig.cached && !kSpans));
};

}  // namespace flashattn3::forward
