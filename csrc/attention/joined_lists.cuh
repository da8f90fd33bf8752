// The lists of two neighbouring row blocks (mask_lists.cuh), joined for a work tile that has rows
// of both: 192 rows are one and a half row blocks.
#pragma once

#include <cstdint>

#include "attention/mask_lists.cuh"
#include "ptx/warp_sum.cuh"

namespace flashattn3 {

// The stages of a joined list, in order: `excess` stages of blocks that one list alone has, `pairs`
// times one of that list alone and one of the other alone, and `both` stages of blocks that both
// have. So no list but the one with less of its own passes more than one stage at a time.
struct JoinedStages {
  int excess, pairs, both;
  int longer;  // the list with more stages of its own

  __host__ __device__ __forceinline__ static JoinedStages of(int only_first, int only_second,
                                                             int both) {
    const int pairs = min(only_first, only_second);
    return {max(only_first, only_second) - pairs, pairs, both, only_second > only_first};
  }
  __host__ __device__ __forceinline__ int count() const { return excess + 2 * pairs + both; }
  // The owner of the i-th stage, a list that alone has its blocks, or 2 for both, and how many of
  // the owner's stages come before.
  __host__ __device__ __forceinline__ int owner(int i, int& before) const {
    before = i;
    if (i < excess) return longer;
    const int in_pairs = i - excess;
    before = in_pairs - 2 * pairs;
    if (before >= 0) return 2;
    const int second = in_pairs & 1;
    before = in_pairs / 2 + (second ? 0 : excess);
    return longer ^ second;
  }
};

// The stages of one of the lists, from the first on: those of pairs that are the other list's are
// passed.
struct JoinedWalk {
  int position, last;
  int first_pair, in_pairs;  // stages
  int passed;                // of each pair: 0 or 1
  int shift;                 // of the list in the kinds of a stage
  uint32_t kinds = 0;        // of the blocks of this stage
  bool has_passed = false;   // whether a stage was passed before this one

  __host__ __device__ __forceinline__ JoinedWalk(const JoinedStages& stages, int list)
      : position(0),
        first_pair(stages.excess),
        in_pairs(2 * stages.pairs),
        passed(stages.longer == list),
        shift(8 * list) {
    const int end = stages.count();
    // The last stage is the other list's if it is of a pair, or of the excess.
    const bool lacks_last = stages.both == 0 && (stages.pairs > 0 ? passed : !passed);
    last = lacks_last ? (passed ? end - 2 : -1) : end - 1;
    if (!passed) position = first_pair + (stages.pairs > 0);
  }
  __host__ __device__ __forceinline__ bool has_this() const { return position <= last; }
  __host__ __device__ __forceinline__ bool has_next() const { return position < last; }
  __host__ __device__ __forceinline__ bool passes_next() const {
    const int in_pair = position + 1 - first_pair;
    return has_next() && static_cast<uint32_t>(in_pair) < static_cast<uint32_t>(in_pairs) &&
           (in_pair & 1) == passed;
  }
  __host__ __device__ __forceinline__ void advance() {
    has_passed = passes_next();
    position += 1 + has_passed;
  }
  __host__ __device__ __forceinline__ int block() const { return position; }
};

// The kinds of a stage's blocks in a list, two bits each, if all are full. A stage has a byte for
// each list.
template <int kBlocks>
constexpr uint32_t kAllFull = kFullBlock * (kBlocks == 1 ? 1 : 5);

// The blocks of a stage, and where the bits of the partial ones are in either list.
template <int kBlocks>
struct alignas(16) JoinedStage {
  int column_block[kBlocks];  // -1: there is none
  int tile[kBlocks][2];
  uint32_t kinds;
};

// Which blocks of columns either list has, a bit for each one, in shared memory. All lanes of a
// warp call the methods.
template <int kWords>
struct JoinedLists {
  uint32_t seen[2][kWords], partial[2][kWords];
  int first_tile[2][kWords];  // of the partial blocks of a word
  int before[3][kWords];      // blocks of the words before, of each owner

  // blocks: of either list. Returns how many blocks each owner has.
  __device__ __forceinline__ int3 join(const ListedBlocks (&blocks)[2], int num_words) {
    const int lane = threadIdx.x % 32;
    for (int w = lane; w < num_words; w += 32) {
#pragma unroll
      for (int i = 0; i < 2; ++i) seen[i][w] = partial[i][w] = 0;
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const ListedBlocks& list = blocks[i];
#pragma unroll 4
      for (int j = lane; j < list.num_blocks; j += 32) {
        const int block = min(max(__ldg(list.entries + j), 0), 32 * num_words - 1);
        const uint32_t bit = 1u << block % 32;
        atomicOr(&seen[i][block / 32], bit);
        if (j >= list.num_full) atomicOr(&partial[i][block / 32], bit);
      }
    }
    __syncwarp();
    int tiles[2] = {blocks[0].first_tile, blocks[1].first_tile}, count[3] = {0, 0, 0};
    for (int first = 0; first < num_words; first += 32) {
      const int w = first + lane;
      const bool inside = w < num_words;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int begin = sum_before(inside ? __popc(partial[i][w]) : 0, tiles[i]);
        if (inside) first_tile[i][w] = begin;
      }
#pragma unroll
      for (int i = 0; i < 3; ++i) {
        const int begin = sum_before(inside ? __popc(owned(i, w)) : 0, count[i]);
        if (inside) before[i][w] = begin;
      }
    }
    __syncwarp();
    return make_int3(count[0], count[1], count[2]);
  }

  // The stage of an owner that begins with its rank-th block. count: of the owner's blocks.
  template <int kBlocks>
  __device__ __forceinline__ JoinedStage<kBlocks> stage(int owner, int rank, int count,
                                                        int num_words) const {
    JoinedStage<kBlocks> found{};
#pragma unroll
    for (int j = 0; j < kBlocks; ++j) {
      found.column_block[j] = -1;
      if (rank + j >= count) continue;
      int w = 0;  // the last word with before <= rank + j
      for (int high = num_words; high - w > 1;) {
        const int middle = (w + high) / 2;
        (before[owner][middle] <= rank + j ? w : high) = middle;
      }
      const int at = nth_bit(owned(owner, w), rank + j - before[owner][w]);
      found.column_block[j] = 32 * w + at;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint32_t bits = partial[i][w];
        const uint32_t is_partial = bits >> at & 1, is_seen = seen[i][w] >> at & 1;
        found.kinds |= (2 * is_seen - is_partial) << (8 * i + 2 * j);
        found.tile[j][i] = first_tile[i][w] + __popc(bits & ((1u << at) - 1));
      }
    }
    return found;
  }

 private:
  __device__ __forceinline__ uint32_t owned(int owner, int w) const {
    return owner == 2 ? seen[0][w] & seen[1][w] : seen[owner][w] & ~seen[1 - owner][w];
  }
  // The sum of `total` and the counts of the lanes before; adds the counts of all to `total`.
  static __device__ __forceinline__ int sum_before(int count, int& total) {
    const int until = inclusive_sum_of_warp(count);
    const int begin = total + until - count;
    total += __shfl_sync(~0u, until, 31);
    return begin;
  }
  // The n-th bit that is set, from 0 on; some bit if there are fewer.
  static __device__ __forceinline__ int nth_bit(uint32_t bits, int n) {
    int at = 0;
#pragma unroll
    for (int width = 16; width > 0; width /= 2) {
      const int below = __popc(bits >> at & ((1u << width) - 1));
      if (n >= below) n -= below, at += width;
    }
    return at;
  }
};

}  // namespace flashattn3
