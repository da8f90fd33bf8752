// The producer warpgroup: copies Q, K and V of each part into shared memory, 16 bytes per thread at
// a time. Rows that no query sees become zeros; without that, NaN of unused memory would reach O
// as 0 * NaN.
//
// With 16-byte cp.async pages of any size take the same path, at 2.7 to 2.9 TB/s; TMA is no faster
// from 64 tokens a page on and far slower below (H100, loads alone, docs/log/decode.md).
#pragma once

#include <cstdint>
#include <cute/arch/util.hpp>

#include "decode/packed_tile.cuh"
#include "decode/traits.cuh"
#include "decode/work_share.cuh"
#include "ptx/cp_async.cuh"

namespace flashattn3::decode {

// Copied in place of K where the page table or cache_batch_idx is wrong: a row that sees the key
// becomes NaN.
static __device__ const uint4 kNaNs = {0x7fff7fffu, 0x7fff7fffu, 0x7fff7fffu, 0x7fff7fffu};

// Address in shared memory of a 16-byte vector of a row, in the layout of tile/gemm.cuh.
template <int kRows>
__device__ __forceinline__ uint32_t swizzled(uint32_t tile, int row, int vec) {
  return tile + vec / 8 * (kRows * 128) + row * 128 + ((vec % 8) ^ (row % 8)) * 16;
}

template <Config kConfig>
class Producer {
  using Traits = KernelTraits<kConfig>;
  static constexpr int kBlockN = Traits::kBlockN;
  static constexpr int kVecs = Traits::kVecs;
  static constexpr int kRowsOfLoader = kBlockN / 4;  // keys of a KV block that a warp copies

 public:
  __device__ __forceinline__ Producer(const Arguments& args, uint8_t* shared)
      : args_(args),
        storage_(*reinterpret_cast<SharedStorageOf<kConfig>*>(shared)),
        shared_(cute::cast_smem_ptr_to_uint(shared)) {}

  __device__ __forceinline__ void run(PartIterator<kBlockN> parts) {
    Part part;
    while (parts.next(part)) {
      const CachedSequence& sequence = parts.sequence();
      load_q(PackedTile::of(args_, sequence, part), sequence, part);
      for (int block = part.n_blocks.begin; block < part.n_blocks.end; block += kConsumers) {
        load_kv(sequence, part, block, 0, kv_0_);
        if (block + 1 < part.n_blocks.end) load_kv(sequence, part, block + 1, 1, kv_1_);
      }
    }
    wait_for_copies();  // no thread exits with a copy in flight
  }

 private:
  // Where a key is. page: of the paged or dense cache, kHidden or kLost.
  struct KeyPlace {
    int page, slot;
  };
  static constexpr int kHidden = -1;  // no query sees it
  static constexpr int kLost = -2;    // its page does not exist

  __device__ __forceinline__ void load_q(const PackedTile& tile, const CachedSequence& sequence,
                                         const Part& part) {
    // Sync: all QK GEMMs of the part that had this buffer are complete.
    storage_.q_empty[q_.index()].wait(q_.phase());
    const uint32_t to = shared_ + Traits::kQOffset + q_.index() * Traits::kQBytes;
    const uint16_t* q = args_.q + part.batch_idx * args_.q_batch;
#pragma unroll 4
    for (int i = threadIdx.x % 128; i < kBlockM * kVecs; i += 128) {
      const int row = i / kVecs, vec = i % kVecs;
      const bool exists = tile.has(row) && vec * 8 < args_.head_dim;
      const int64_t offset = exists ? (sequence.first_query + tile.query_of(row)) * args_.q_seq +
                                          tile.head_of(row) * args_.q_head + vec * 8
                                    : 0;
      copy_async(swizzled<kBlockM>(to, row, vec), q + offset, exists);
    }
    arrive_when_copied(storage_.q_full[q_.index()]);
    q_.advance();
  }

  __device__ __forceinline__ void load_kv(const CachedSequence& sequence, const Part& part,
                                          int block, int warpgroup,
                                          PipelineState<Traits::kStages>& at) {
    const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
    // Lane i finds the place of the warp's key i % kRowsOfLoader.
    const KeyPlace place =
        find_key(sequence, block * kBlockN + warp * kRowsOfLoader + lane % kRowsOfLoader);
    const uint32_t tiles = shared_ + Traits::kKvOffset +
                           (warpgroup * Traits::kStages + at.index()) * (2 * Traits::kKvBytes);
    // Sync: the warpgroup has finished reading the K tile, and below the V tile, of this stage.
    storage_.k_empty[warpgroup][at.index()].wait(at.phase());
    copy_tile(args_.k, place, part.kv_head, args_.head_dim, tiles, &kNaNs);
    arrive_when_copied(storage_.k_full[warpgroup][at.index()]);
    storage_.v_empty[warpgroup][at.index()].wait(at.phase());
    copy_tile(args_.v, place, part.kv_head, args_.head_dim_v, tiles + Traits::kKvBytes, nullptr);
    arrive_when_copied(storage_.v_full[warpgroup][at.index()]);
    at.advance();
  }

  __device__ __forceinline__ KeyPlace find_key(const CachedSequence& sequence, int key) const {
    if (key < sequence.first_key || key >= sequence.num_keys) return {kHidden, 0};
    if (sequence.cache_idx < 0) return {kLost, 0};
    if (args_.page_table == nullptr) return {sequence.cache_idx, key};
    int index, slot;
    args_.page_size(index, slot, key);
    const int page = args_.page_table[sequence.cache_idx * args_.page_table_stride + index];
    return {page >= 0 && page < args_.num_pages ? page : kLost, slot};
  }

  // Copies the warp's rows of a K or V tile. place: of the key of this lane. lost: 16 bytes that
  // fill the rows of lost keys; null: zeros.
  __device__ __forceinline__ void copy_tile(const CacheTensor& from, KeyPlace place, int kv_head,
                                            int head_dim, uint32_t tile, const uint4* lost) {
    const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
    const uint16_t* head = from.data + kv_head * from.head;
#pragma unroll
    for (int i = 0; i < kRowsOfLoader * kVecs / 32; ++i) {
      const int row = (i * 32 + lane) / kVecs, vec = (i * 32 + lane) % kVecs;
      const int page = __shfl_sync(~0u, place.page, row);
      const int slot = __shfl_sync(~0u, place.slot, row);
      const bool is_lost = lost != nullptr && page == kLost;
      const bool exists = is_lost || (page >= 0 && vec * 8 < head_dim);
      const uint16_t* at = head + (page >= 0 ? page * from.page + slot * from.slot + vec * 8 : 0);
      copy_async(swizzled<kBlockN>(tile, warp * kRowsOfLoader + row, vec),
                 is_lost ? static_cast<const void*>(lost) : at, exists);
    }
  }

  const Arguments& args_;
  SharedStorageOf<kConfig>& storage_;
  uint32_t shared_;
  PipelineState<Traits::kQBuffers> q_{1};
  PipelineState<Traits::kStages> kv_0_{1}, kv_1_{1};  // stages of each consumer warpgroup
};

}  // namespace flashattn3::decode
