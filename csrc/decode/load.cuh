// The producer warpgroup: copies Q, K and V of each part into shared memory, 16 bytes per thread at
// a time. Rows that no query sees become zeros; without that, NaN of unused memory would reach O
// as 0 * NaN.
//
// With 16-byte cp.async pages of any size take the same path, at 2.7 to 2.9 TB/s; TMA is no faster
// from 64 tokens a page on and far slower below (H100, loads alone, docs/log/hopper-decode.md).
#pragma once

#include <cstdint>
#include <cute/arch/util.hpp>

#include "decode/packed_tile.cuh"
#include "decode/part_queue.cuh"
#include "decode/traits.cuh"
#include "decode/work_share.cuh"
#include "ptx/cp_async.cuh"

namespace flashattn3::decode {

// Copied in place of K where the page table or cache_batch_idx is wrong: a row that sees the key
// becomes NaN.
constexpr uint4 kNaN = {0x7fff7fffu, 0x7fff7fffu, 0x7fff7fffu, 0x7fff7fffu};
static __device__ const uint4 kNaNs[] = {
    kNaN, kNaN, kNaN, kNaN, kNaN, kNaN, kNaN, kNaN, kNaN, kNaN, kNaN, kNaN, kNaN, kNaN, kNaN, kNaN,
    kNaN, kNaN, kNaN, kNaN, kNaN, kNaN, kNaN, kNaN, kNaN, kNaN, kNaN, kNaN, kNaN, kNaN, kNaN, kNaN};
// The same for V: zeros.
static __device__ const uint4 kZeros[32] = {};

// Address in shared memory of a 16-byte vector of a row, in the layout of tile/gemm.cuh.
template <int kRows>
__device__ __forceinline__ uint32_t swizzled(uint32_t tile, int row, int vec) {
  return tile + vec / 8 * (kRows * 128) + row * 128 + ((vec % 8) ^ (row % 8)) * 16;
}

// Page number `index` of an entry of the page table, or of the prefix.
template <Config kConfig>
__device__ __forceinline__ int page_at(const Arguments& args, const Part& part, int entry,
                                       int index) {
  if constexpr (kConfig.prefix) {
    const auto& all = static_cast<const PrefixArguments&>(args);
    if (all.is_prefix(part.batch_idx)) return all.prefix_pages[index];
  }
  return args.page_table[entry * args.page_table_stride + index];
}

// Copies 16 bytes of K or V, which other CTAs read too if they are of the prefix.
template <Config kConfig>
__device__ __forceinline__ void copy_keys(uint32_t to, const void* from, bool exists,
                                          bool is_prefix) {
  if constexpr (kConfig.prefix) {
    copy_async(to, from, exists, is_prefix);
  } else {
    copy_async(to, from, exists);
  }
}

template <Config kConfig>
class Producer {
  using Traits = KernelTraits<kConfig>;
  static constexpr int kBlockN = Traits::kBlockN;
  static constexpr int kVecs = Traits::kVecs;
  // The warpgroup copies kStep rows of a tile at a time, a thread one vector of row_ + i * kStep.
  static constexpr int kStep = 128 / kVecs;
  static constexpr int kRowsOfWarp = 32 / kVecs;  // of each step

 public:
  __device__ __forceinline__ Producer(const Arguments& args, uint8_t* shared)
      : args_(args),
        storage_(*reinterpret_cast<SharedStorageOf<kConfig>*>(shared)),
        shared_(cute::cast_smem_ptr_to_uint(shared)),
        row_(threadIdx.x % 128 / kVecs),
        vec_(threadIdx.x % kVecs),
        kv_0_(args.log2_stages, 1),
        kv_1_(args.log2_stages, 1) {}

  __device__ __forceinline__ void run() {
    PartPublisher<kConfig> publisher(args_, storage_, threadIdx.x % 128 == 0);
    PartQueue<kConfig> parts(args_, storage_);
    Part part;
    while (parts.next(part)) {
      const CachedSequence& sequence = parts.sequence();
      BlockRows rows = find_rows(sequence, part, part.n_blocks.begin);
      if constexpr (kConfig.prefix) {
        is_prefix_ = static_cast<const PrefixArguments&>(args_).is_prefix(part.batch_idx);
      }
      int warpgroup = 0, end = part.n_blocks.end;
      if constexpr (kConfig.spans) {
        const PackedTile tile = PackedTile::of(args_, sequence, part);
        end = visible_blocks<kBlockN>(args_, sequence, tile, part.n_blocks).end;
      }
#pragma unroll 1
      for (int block = part.n_blocks.begin; block < end; ++block) {
        rows = load_kv(sequence, part, block, rows, warpgroup);
        warpgroup = Traits::kConsumers - 1 - warpgroup;
        if (block == part.n_blocks.begin) publisher.publish_next();
      }
    }
    wait_for_copies();  // no thread exits with a copy in flight
  }

 private:
  // Where the keys of a KV block are. With even_blocks: its first row, in all threads; null: its
  // page does not exist. Else lane i has its warp's row i, in the order in which the warp copies
  // them; null: no query sees the key.
  struct BlockRows {
    const uint16_t *k, *v;
  };

  __device__ __forceinline__ void load_q(const PackedTile& tile, const CachedSequence& sequence,
                                         const Part& part) {
    // Sync: all QK GEMMs of the part that had this buffer are complete.
    storage_.q_empty[q_.index()].wait(q_.phase());
    copy_q(tile, sequence, part, shared_ + Traits::kQOffset + q_.index() * Traits::kQBytes);
    arrive_when_copied(storage_.q_full[q_.index()]);
    q_.advance();
  }

  // to: where in shared memory.
  __device__ __forceinline__ void copy_q(const PackedTile& tile, const CachedSequence& sequence,
                                         const Part& part, uint32_t to) const {
    const uint16_t* q = args_.q + part.batch_idx * args_.q_batch + vec_ * 8;
    const int num_rows = tile.num_rows();
#pragma unroll 2
    for (int i = 0; i < kBlockM / kStep; ++i) {
      const int row = row_ + i * kStep;
      const uint16_t* from = args_.q;
      bool exists = false;
      if (i * kStep < num_rows) {  // nearly always false but for the first
        exists = tile.has(row) && vec_ * 8 < args_.head_dim;
        if (exists) {
          from = q + (sequence.first_query + tile.query_of(row)) * args_.q_seq +
                 tile.head_of(row) * args_.q_head;
        }
      }
      copy_async(swizzled<kBlockM>(to, row, vec_), from, exists);
    }
  }

  // Copies a KV block, and Q behind the first K tile of a part, for which the address is known
  // earlier. Returns where the rows of the next block are: the page table is read before the thread
  // waits for the next stage.
  __device__ __forceinline__ BlockRows load_kv(const CachedSequence& sequence, const Part& part,
                                               int block, const BlockRows& rows, int warpgroup) {
    const StageState at = warpgroup == 0 ? kv_0_ : kv_1_;
    const uint32_t tiles = shared_ + Traits::kKvOffset +
                           (warpgroup * Traits::kStages + at.index()) * (2 * Traits::kKvBytes);
    // Rows of the block before `first` and from `last` on are hidden.
    const int first = sequence.first_key - block * kBlockN;
    const int last = sequence.num_keys - block * kBlockN;
    // Sync: the warpgroup has finished reading the K tile, and below the V tile, of this stage.
    storage_.k_empty[warpgroup][at.index()].wait(at.phase());
    copy_tile(args_.k, rows.k, first, last, args_.head_dim, tiles, kNaNs);
    arrive_when_copied(storage_.k_full[warpgroup][at.index()]);
    if (block == part.n_blocks.begin) {
      load_q(PackedTile::of(args_, sequence, part), sequence, part);
    }
    BlockRows next{};
    if (block + 1 < part.n_blocks.end) next = find_rows(sequence, part, block + 1);
    storage_.v_empty[warpgroup][at.index()].wait(at.phase());
    copy_tile(args_.v, rows.v, first, last, args_.head_dim_v, tiles + Traits::kKvBytes, nullptr);
    arrive_when_copied(storage_.v_full[warpgroup][at.index()]);
    if (warpgroup == 0) {
      kv_0_.advance();
    } else {
      kv_1_.advance();
    }
    return next;
  }

  __device__ __forceinline__ BlockRows find_rows(const CachedSequence& sequence, const Part& part,
                                                 int block) const {
    int key = block * kBlockN;
    if (!args_.even_blocks) {
      const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
      key += lane / kRowsOfWarp * kStep + warp * kRowsOfWarp + lane % kRowsOfWarp;
      if (key < sequence.first_key) return {};
    }
    if (key >= sequence.num_keys) return {};
    int page = sequence.cache_idx, slot = key;
    if (args_.page_table != nullptr && page >= 0) {
      int index;
      args_.page_size(index, slot, key);
      page = page_at<kConfig>(args_, part, page, index);
    }
    if (page < 0 || page >= args_.num_pages) {
      return {args_.even_blocks ? nullptr : reinterpret_cast<const uint16_t*>(kNaNs), nullptr};
    }
    const auto row_of = [&](const CacheTensor& cache) {
      return cache.data + page * cache.page + part.kv_head * cache.head + slot * cache.slot;
    };
    return {row_of(args_.k), row_of(args_.v)};
  }

  // Copies this thread's vectors of a K or V tile. first, last: rows before and from there on are
  // hidden. lost: a row that stands for those of a page that does not exist; null: zeros.
  __device__ __forceinline__ void copy_tile(const CacheTensor& cache, const uint16_t* rows,
                                            int first, int last, int head_dim, uint32_t tile,
                                            const uint4* lost) const {
    const bool has_column = vec_ * 8 < head_dim;
    if (args_.even_blocks) {
      const uint16_t* from = rows + row_ * cache.slot + vec_ * 8;
      int64_t step = kStep * cache.slot;
      if (rows == nullptr) from = reinterpret_cast<const uint16_t*>(lost), step = 0;
      const bool exists = has_column && from != nullptr;
#pragma unroll
      for (int i = 0; i < kBlockN / kStep; ++i) {
        const int row = row_ + i * kStep;
        copy_keys<kConfig>(swizzled<kBlockN>(tile, row, vec_), from + i * step,
                           exists && row >= first && row < last, is_prefix_);
      }
    } else {
      const int lane = threadIdx.x % 32;
#pragma unroll
      for (int i = 0; i < kBlockN / kStep; ++i) {
        const auto row = reinterpret_cast<const uint16_t*>(
            __shfl_sync(~0u, reinterpret_cast<uint64_t>(rows), i * kRowsOfWarp + lane / kVecs));
        copy_keys<kConfig>(swizzled<kBlockN>(tile, row_ + i * kStep, vec_), row + vec_ * 8,
                           has_column && row != nullptr, is_prefix_);
      }
    }
  }

  const Arguments& args_;
  SharedStorageOf<kConfig>& storage_;
  uint32_t shared_;
  const int row_, vec_;
  PipelineState<Traits::kQBuffers> q_{1};
  StageState kv_0_, kv_1_;  // of each consumer warpgroup
  bool is_prefix_ = false;  // the keys of the part; of a kernel with a prefix
};

}  // namespace flashattn3::decode
