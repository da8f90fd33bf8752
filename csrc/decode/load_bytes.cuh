// The producer warpgroup of a cache of 8 bits: copies tiles of K and V into shared memory as they
// are, and widens each to fp16 once the consumer has released a stage. A thread widens the vectors
// that it has copied itself, so it waits for its own copies alone, without a barrier. Tiles in
// flight and the stages of fp16 are apart: memory is waited for with half of the bytes.
//
// Pages, hidden keys and pages that do not exist are as in load.cuh.
#pragma once

#include <cstdint>
#include <cute/arch/util.hpp>

#include "decode/load.cuh"
#include "decode/part_queue.cuh"
#include "decode/traits.cuh"
#include "decode/work_share.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/cp_async_groups.cuh"
#include "ptx/widen.cuh"

namespace flashattn3::decode {

// The descales of keys without one and of keys whose page does not exist.
static __device__ const float kOne = 1.f;
static __device__ const uint32_t kNaNDescale = 0x7fffffffu;

// Four numbers of 8 bits as fp16.
template <bool kIsInt8>
__device__ __forceinline__ uint2 widen(uint32_t bytes) {
  return kIsInt8 ? widen_int8(bytes) : widen_e4m3(bytes);
}

// Eight of them.
template <bool kIsInt8>
__device__ __forceinline__ uint4 widen_vector(uint2 bytes) {
  const uint2 low = widen<kIsInt8>(bytes.x), high = widen<kIsInt8>(bytes.y);
  return make_uint4(low.x, low.y, high.x, high.y);
}

template <Config kConfig>
class WideningProducer {
  using Traits = KernelTraits<kConfig>;
  static constexpr int kBlockN = Traits::kBlockN;
  static constexpr int kVecs = Traits::kHeadDim / 16;  // 16-byte vectors of a row
  // The warpgroup copies kStep rows of a tile at a time, a thread one vector of row_ + i * kStep.
  static constexpr int kStep = 128 / kVecs;
  static constexpr int kRowsOfWarp = 32 / kVecs;  // of each step
  static constexpr int kCount = kBlockN / kStep;  // vectors of a thread in a tile
  static constexpr int kTiles = Traits::kByteTiles;
  static constexpr int kVectorBytes = 128 * 16;  // of the warpgroup
  static_assert(kCount * kVectorBytes == Traits::kByteTileBytes);

 public:
  __device__ __forceinline__ WideningProducer(const Arguments& args, uint8_t* shared)
      : args_(args),
        storage_(*reinterpret_cast<SharedStorageOf<kConfig>*>(shared)),
        shared_(shared),
        thread_(threadIdx.x % 128),
        kv_0_(args.log2_stages, 1),
        kv_1_(args.log2_stages, 1) {
    // The row whose descale this thread copies, and whose place it finds: lane i has its warp's row
    // i, in the order in which the warp copies them.
    const int warp = thread_ / 32, lane = thread_ % 32;
    // Eight lanes that store at a time have four vectors of two rows: no two meet in a bank.
    constexpr int kOfRow = kVecs / 4;
    row_of_warp_ = lane / 8 / kOfRow * 2 + lane / 4 % 2;
    row_ = warp * kRowsOfWarp + row_of_warp_;
    vec_ = lane / 8 % kOfRow * 4 + lane % 4;
    widened_at_ = swizzled<kBlockN>(0, row_, 2 * vec_);
    own_row_ = lane / kRowsOfWarp * kStep + warp * kRowsOfWarp + lane % kRowsOfWarp;
    has_own_row_ = lane < kBlockN / 4;
  }

  __device__ __forceinline__ void run() {
    PartPublisher<kConfig> publisher(args_, storage_, thread_ == 0);
    PartQueue<kConfig> parts(args_, storage_);
    Part part;
    while (parts.next(part)) {
      const CachedSequence& sequence = parts.sequence();
      BlockRows rows = find_rows(sequence, part, part.n_blocks.begin);
      if constexpr (kConfig.prefix) {
        is_prefix_ = static_cast<const PrefixArguments&>(args_).is_prefix(part.batch_idx);
      }
      int warpgroup = 0;
#pragma unroll 1
      for (int block = part.n_blocks.begin; block < part.n_blocks.end; ++block) {
        const BlockRows now = rows;
        if (block + 1 < part.n_blocks.end) rows = find_rows(sequence, part, block + 1);
        // Rows of the block before `first` and from `last` on are hidden.
        const int first = sequence.first_key - block * kBlockN;
        const int last = sequence.num_keys - block * kBlockN;
#pragma unroll 1
        for (int tensor = 0; tensor < 2; ++tensor) {  // the code of both would not fit in registers
          const bool is_v = tensor == 1;
          copy_tile(is_v ? now.v : now.k, is_v ? args_.v.slot : args_.k.slot,
                    is_v ? now.v_descale : now.k_descale, first, last,
                    is_v ? args_.head_dim_v : args_.head_dim, is_v ? nullptr : kNaNs);
          if constexpr (Traits::kConsumers == 2) warpgroups_ |= warpgroup << num_copied_;
          if (++num_copied_ == kTiles) widen_oldest();
        }
        warpgroup = Traits::kConsumers - 1 - warpgroup;
        if (block == part.n_blocks.begin) publisher.publish_next();
      }
    }
    while (num_copied_ > 0) widen_oldest();
  }

 private:
  // Where the keys of a KV block are, as in Producer, and the descale of this thread's own row;
  // null: no query sees the key. Descales are unset unless there are some of keys.
  struct BlockRows {
    const uint8_t *k, *v;
    const void *k_descale, *v_descale;
  };

  __device__ __forceinline__ BlockRows find_rows(const CachedSequence& sequence, const Part& part,
                                                 int block) const {
    const bool even = args_.even_blocks;
    const int own_key = block * kBlockN + own_row_;
    const bool sees_own =
        has_own_row_ && own_key >= sequence.first_key && own_key < sequence.num_keys;
    const int key = even ? block * kBlockN : own_key;
    if (key >= sequence.num_keys || (!even && !sees_own)) return {};
    int page = sequence.cache_idx, slot = key;
    if (args_.page_table != nullptr && page >= 0) {
      int index;
      args_.page_size(index, slot, key);
      page = page_at<kConfig>(args_, part, page, index);
    }
    BlockRows rows{};
    if (page < 0 || page >= args_.num_pages) {
      rows.k = even ? nullptr : reinterpret_cast<const uint8_t*>(kNaNs);
      if (sees_own) rows.k_descale = &kNaNDescale;
      return rows;
    }
    const auto row_of = [&](const CacheTensor& cache) {
      return reinterpret_cast<const uint8_t*>(cache.data) + page * cache.page +
             part.kv_head * cache.head + slot * cache.slot;
    };
    rows.k = row_of(args_.k), rows.v = row_of(args_.v);
    if (args_.has_key_descales && sees_own) {
      const int own_slot = even ? slot + own_row_ : slot;
      const auto descale_of = [&](const KeyDescales& x) {
        return x.data == nullptr
                   ? &kOne
                   : x.data + page * x.page + part.kv_head * x.head + own_slot * x.slot;
      };
      rows.k_descale = descale_of(args_.k_key_descales);
      rows.v_descale = descale_of(args_.v_key_descales);
    }
    return rows;
  }

  // Copies this thread's vectors of a tile, as Producer does. slot: distance of tokens.
  __device__ __forceinline__ void copy_tile(const uint8_t* rows, int64_t slot, const void* descale,
                                            int first, int last, int head_dim, const uint4* lost) {
    const uint32_t to = cute::cast_smem_ptr_to_uint(shared_) + Traits::kByteTileOffset +
                        next_ * Traits::kByteTileBytes + thread_ * 16;
    const bool has_column = vec_ * 16 < head_dim;
    if (args_.even_blocks) {
      const uint8_t* from = rows + row_ * slot + vec_ * 16;
      int64_t step = kStep * slot;
      if (rows == nullptr) from = reinterpret_cast<const uint8_t*>(lost), step = 0;
      const bool exists = has_column && from != nullptr;
      const unsigned visible = last - first;
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const int row = row_ + i * kStep;
        const bool is_visible = static_cast<unsigned>(row - first) < visible;
        copy_keys<kConfig>(to + i * kVectorBytes, from + i * step, exists && is_visible,
                           is_prefix_);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const auto row = reinterpret_cast<const uint8_t*>(
            __shfl_sync(~0u, reinterpret_cast<uint64_t>(rows), i * kRowsOfWarp + row_of_warp_));
        copy_keys<kConfig>(to + i * kVectorBytes, row + vec_ * 16, has_column && row != nullptr,
                           is_prefix_);
      }
    }
    if (args_.has_key_descales && has_own_row_) {
      copy_word_async(cute::cast_smem_ptr_to_uint(shared_) + Traits::kByteDescaleOffset +
                          next_ * Traits::kDescaleBytes + own_row_ * 4,
                      descale == nullptr ? &kOne : descale, descale != nullptr);
    }
    commit_copies();
    next_ = next_ == kTiles - 1 ? 0 : next_ + 1;
  }

  // Waits for this thread's copies of the oldest tile.
  template <int kLater = kTiles - 1>
  __device__ __forceinline__ void wait_for_oldest() const {
    if constexpr (kLater > 0) {
      if (num_copied_ <= kLater) return wait_for_oldest<kLater - 1>();
    }
    wait_for_groups<kLater>();
  }

  __device__ __forceinline__ void widen_oldest() {
    wait_for_oldest();
    const int warpgroup = Traits::kConsumers == 1 ? 0 : warpgroups_ & 1;
    warpgroups_ >>= 1, --num_copied_;
    const StageState at = warpgroup == 0 ? kv_0_ : kv_1_;
    const int stage = warpgroup * Traits::kStages + at.index();
    Barrier& empty =
        is_v_ ? storage_.v_empty[warpgroup][at.index()] : storage_.k_empty[warpgroup][at.index()];
    empty.wait(at.phase());  // Sync: the warpgroup has finished reading the tile of this stage.
    const uint32_t tile = Traits::kKvOffset + (2 * stage + is_v_) * Traits::kKvBytes;
    if (args_.is_int8) {
      widen_tile<true>(tile);
    } else {
      widen_tile<false>(tile);
    }
    if (args_.has_key_descales && has_own_row_) {
      const int from = Traits::kByteDescaleOffset + oldest_ * Traits::kDescaleBytes;
      const int to = Traits::kDescaleOffset + (2 * stage + is_v_) * Traits::kDescaleBytes;
      reinterpret_cast<float*>(shared_ + to)[own_row_] =
          reinterpret_cast<const float*>(shared_ + from)[own_row_];
    }
    // The consumer has the proxy fence: here it would wait for the copies in flight too.
    Barrier& full =
        is_v_ ? storage_.v_full[warpgroup][at.index()] : storage_.k_full[warpgroup][at.index()];
    full.arrive();  // Sync: this thread has written its part of the tile.
    oldest_ = oldest_ == kTiles - 1 ? 0 : oldest_ + 1;
    if (is_v_) (warpgroup == 0 ? kv_0_ : kv_1_).advance();
    is_v_ = !is_v_;
  }

  template <bool kIsInt8>
  __device__ __forceinline__ void widen_tile(uint32_t tile) const {
    const auto widen_both = [](uint32_t low, uint32_t high) {
      return widen_vector<kIsInt8>(make_uint2(low, high));
    };
    const uint8_t* from =
        shared_ + Traits::kByteTileOffset + oldest_ * Traits::kByteTileBytes + thread_ * 16;
    uint4 x[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      x[i] = *reinterpret_cast<const uint4*>(from + i * kVectorBytes);
    }
    // The swizzle is the same in rows that are a multiple of 8 apart.
    static_assert(kStep % 8 == 0);
    uint8_t* low = shared_ + tile + widened_at_;
    uint8_t* high = shared_ + tile + (widened_at_ ^ 16);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      *reinterpret_cast<uint4*>(low + i * (kStep * 128)) = widen_both(x[i].x, x[i].y);
      *reinterpret_cast<uint4*>(high + i * (kStep * 128)) = widen_both(x[i].z, x[i].w);
    }
  }

  const Arguments& args_;
  SharedStorageOf<kConfig>& storage_;
  uint8_t* shared_;
  const int thread_;
  int row_of_warp_, row_, vec_, own_row_;
  uint32_t widened_at_;  // offset in a tile of the first half of this thread's first vector
  bool has_own_row_;
  int next_ = 0, oldest_ = 0;  // tiles of 8 bits, to be copied and widened
  int num_copied_ = 0;         // and not yet widened
  uint32_t warpgroups_ = 0;    // of these, bit 0 of the oldest
  bool is_v_ = false;          // the oldest
  bool is_prefix_ = false;     // the keys of the part; of a kernel with a prefix
  StageState kv_0_, kv_1_;     // of each consumer warpgroup
};

}  // namespace flashattn3::decode
