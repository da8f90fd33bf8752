// The producer warpgroup of cached kernel configs, whose K and V are in a paged or dense cache. One
// thread of its first warp publishes the CTA's work tiles and loads Q, the second warp writes V's
// zero fill, the third loads K and the fourth V.
//
// A K or V tile arrives as TMA boxes of so many keys that no box crosses a page: where the cache
// allows it (CacheTile) with all swizzle atoms of the keys, else with one. The 32 lanes of a warp
// issue them: of one thread a box takes an SM 200 cycles, of 32 lanes 36 and 4 for each row of an
// atom (H100). The warps wait for the consumers and for published work tiles, never for each
// other's loads, so no order of the loads can deadlock. Q has a buffer besides the one in use or,
// with one buffer, is loaded once the consumers have released it.
#pragma once

#include <bit>
#include <cute/arch/copy_sm90_tma.hpp>
#include <utility>

#include "attention/tile_scheduler.cuh"
#include "forward/traits_cached.cuh"
#include "tile/tma_load.cuh"

namespace flashattn3::forward {

// Rows of a V tile whose keys some query of the sequence sees. The others are stale and may be NaN,
// and 0 * NaN is NaN, so they become zeros.
struct SeenRows {
  int begin, end;

  template <int kBlockN>
  static __device__ __forceinline__ SeenRows of(const CachedWorkTile& tile, int block) {
    return {tile.first_key - block * kBlockN, tile.num_keys - block * kBlockN};
  }
  template <int kBlockN>
  __device__ __forceinline__ bool all() const {
    return begin <= 0 && end >= kBlockN;
  }
};

// Byte offset of a row of an atom in a tile.
__device__ __forceinline__ uint32_t row_offset(const TileStrides& strides, int row, int atom) {
  return row / 8 * strides.group * 16 + row % 8 * 128 + atom * strides.atom * 16;
}

// Sets the rows of a tile before `begin` and from `end` on to 0, as zero_fill_rows (tma_load.cuh).
template <int kRows, int kAtoms>
__device__ __forceinline__ void zero_fill_rows_outside(uint8_t* values, const TileStrides& strides,
                                                       int begin, int end, uint32_t thread,
                                                       int num_threads) {
  const uint32_t offset = thread % 8 * 16;
  for (int row = static_cast<int>(thread / 8); row < kRows; row += num_threads / 8) {
    if (row >= begin && row < end) continue;
#pragma unroll
    for (int atom = 0; atom < kAtoms; ++atom) {
      *reinterpret_cast<uint4*>(values + row_offset(strides, row, atom) + offset) =
          make_uint4(0, 0, 0, 0);
    }
  }
}

// Loads the K or V tiles of cached sequences; the 32 lanes of a warp call it.
template <Config kConfig>
class PageLoader {
  using Traits = KernelTraits<kConfig>;

 public:
  __device__ __forceinline__ PageLoader(const CachedArguments& args, const void* tensor_map,
                                        const CacheTile& cache_tile)
      : args_(args), tensor_map_(tensor_map), cache_tile_(cache_tile) {}

  // Waits for a free stage and loads a KV block of the work tile into it. full: its phase ends when
  // the tile has arrived; one arrival. kMarksLost: keys that a query may see but whose page does
  // not exist become NaN instead of zeros.
  template <bool kMarksLost>
  __device__ __forceinline__ void load(const CachedWorkTile& tile, int block, uint8_t* stage,
                                       const Barrier& empty, uint32_t phase, Barrier& full) const {
    const int lane = threadIdx.x % 32;
    const int log2_rows = args_.log2_box_rows;
    const bool all_atoms = cache_tile_.page_groups > 0;  // in one box
    const int log2_atoms = all_atoms ? 0 : kLog2Atoms;   // boxes beside each other
    const int num_boxes = Traits::kBlockN >> log2_rows << log2_atoms;
    const int first_key = block * Traits::kBlockN;
    const int box_bytes = Traits::kAtoms * 128 << log2_rows >> log2_atoms;
    const auto row_of_box = [&](int box) { return box >> log2_atoms << log2_rows; };
    // The table is read before the wait, which hides the latency.
    int page = kHidden, slot = 0;
    if (lane < num_boxes) find(tile, first_key + row_of_box(lane), page, slot);
    empty.wait(phase);  // Sync: every consumer warp has released the stage.
    int bytes = 0;
    for (int box = lane; box < num_boxes; box += 32) {
      const int row = row_of_box(box), atom = box & (1 << log2_atoms) - 1;
      if (box != lane) find(tile, first_key + row, page, slot);
      uint8_t* const to = stage + row_offset(cache_tile_.strides, row, atom);
      if (kMarksLost && page == kLost) {
        mark_lost(stage, row, 1 << log2_rows);
        continue;
      }
      // Hidden and lost keys are outside the tensor and arrive as zeros.
      if (all_atoms) {
        const int group = page < 0 ? -Traits::kBlockN : page * cache_tile_.page_groups + slot / 8;
        cute::SM90_TMA_LOAD_5D::copy(tensor_map_, &full.word, kReadAgain, to, 0, 0, 0, group,
                                     tile.kv_head);
      } else {
        cute::SM90_TMA_LOAD_4D::copy(tensor_map_, &full.word, kReadAgain, to,
                                     atom * Traits::kAtomColumns, slot, tile.kv_head, page);
      }
      bytes += box_bytes;
    }
    __syncwarp();
    // V's boxes are always all of them.
    bytes = kMarksLost ? __reduce_add_sync(~0u, bytes) : Traits::kVBytes;
    // Sync: the phase cannot end before this arrival, so bytes may have arrived before it.
    if (lane == 0) full.arrive_and_expect(bytes);
  }

 private:
  static constexpr int kLog2Atoms = std::countr_zero(static_cast<unsigned>(Traits::kAtoms));
  static_assert(1 << kLog2Atoms == Traits::kAtoms);
  static constexpr int kHidden = -1;  // no query sees the keys of the box
  static constexpr int kLost = -2;    // their page does not exist

  __device__ __forceinline__ void find(const CachedWorkTile& tile, int key, int& page,
                                       int& slot) const {
    page = kHidden, slot = 0;
    if (key >= tile.num_keys) return;  // the table has no entry for it
    args_.keys.find(tile.cache_idx, key, page, slot);
    if (page < 0) page = kLost;
  }

  // A NaN in a row of K makes all of its scores NaN.
  __device__ __forceinline__ void mark_lost(uint8_t* stage, int begin, int num_rows) const {
    for (int row = begin; row < begin + num_rows; ++row) {
      *reinterpret_cast<uint4*>(stage + row_offset(cache_tile_.strides, row, 0)) =
          make_uint4(0x7fff7fffu, 0x7fff7fffu, 0x7fff7fffu, 0x7fff7fffu);
    }
    fence_async_proxy();
  }

  const CachedArguments& args_;
  const void* tensor_map_;
  const CacheTile& cache_tile_;
};

// The first warp, one thread of it: publishes the CTA's work tiles, after the last one a tile with
// first_row -1, and loads Q of each.
template <Config kConfig>
class CachedTiles {
  using Traits = KernelTraits<kConfig>;
  using Storage = CachedStorageOf<kConfig>;

 public:
  __device__ __forceinline__ CachedTiles(const CachedArguments& args, uint8_t* shared)
      : args_(args),
        storage_(*reinterpret_cast<Storage*>(shared)),
        shared_(shared),
        tiles_(args.scheduler) {}

  __device__ __forceinline__ void run() {
    CachedWorkTile tile;
    for (uint32_t phase = 0; next_valid_tile(tile); phase ^= 1) {
      load_q(tile);
      publish(tile);
      // Sync: the last K tiles of this work tile are being loaded. The CTA that is ready first gets
      // the next one.
      storage_.tile_ends.wait(phase);
      tiles_.request();
      tiles_.advance();
    }
    CachedWorkTile end{};  // without rows and keys: the consumers stop at a tile without work
    end.first_row = -1;
    publish(end);
    tiles_.reset();
  }

 private:
  // Finds the next tile that has rows; in a varlen batch some have none. false: no tile is left.
  __device__ __forceinline__ bool next_valid_tile(CachedWorkTile& tile) {
    while (!tiles_.done()) {
      describe(tile, tiles_.index());
      if (tile.first_row < tile.num_rows) return true;
      tiles_.request();
      tiles_.advance();
    }
    return false;
  }

  __device__ __forceinline__ void describe(CachedWorkTile& tile, int index) const {
    const TileCoord coord = find_tile(args_.scheduler, index);
    const int batch_idx = coord.batch_head_idx / args_.num_heads_kv;
    const Sequence rows = find_sequence(args_.seqlens_q, batch_idx);
    tile.kv_head = coord.batch_head_idx - batch_idx * args_.num_heads_kv;
    const int last_row = describe_slices(tile, coord.block, rows.length);
    tile.batch_coord = args_.seqlens_q.cu_seqlens != nullptr ? 0 : batch_idx;
    tile.row_offset = rows.offset;
    tile.num_rows = rows.length;
    tile.num_keys = args_.keys.num_keys(batch_idx);
    tile.batch_idx = batch_idx;
    tile.cache_idx = args_.keys.cache_idx(batch_idx);
    const int padding = args_.keys.first_key(batch_idx, tile.num_keys);
    const Mask mask = Mask::of(rows.length, tile.num_keys, args_.variant.window, padding);
    tile.first_key = min(mask.begin(0), tile.num_keys);  // the first query sees the earliest keys
    tile.n_blocks = mask.template n_blocks<Traits::kBlockN>(tile.first_row, last_row);
  }

  // Sets the slices of a work tile of tile.kv_head. Returns the last row of the last one that has
  // rows.
  __device__ __forceinline__ int describe_slices(CachedWorkTile& tile, int block,
                                                 int num_rows) const {
    const int num_heads = args_.qhead_per_kvhead, first_head = tile.kv_head * num_heads;
    const int first_slice = block * args_.slices_of_tile;
    int row = first_slice / num_heads * kSliceRows, head = first_slice % num_heads;
    tile.first_row = row;
    tile.head = first_head + head;
    int last_row = -1;
#pragma unroll
    for (int i = 0; i < Traits::kConsumers; ++i) {
      const bool has_rows = i < args_.slices_of_tile && row < num_rows;
      tile.slices[i] = {has_rows ? row - i * kSliceRows : num_rows, first_head + head};
      if (has_rows) last_row = min(row + kSliceRows, num_rows) - 1;
      if (++head == num_heads) head = 0, row += kSliceRows;
    }
    return last_row;
  }

  __device__ __forceinline__ void load_q(const CachedWorkTile& tile) {
    if (tile.n_blocks.empty()) return;
    // Sync: every consumer warp has released this buffer.
    storage_.q_empty[q_.index()].wait(q_.phase());
    Barrier& full = storage_.q_full[q_.index()];
    uint8_t* const buffer = shared_ + Traits::kQOffset + q_.index() * Traits::kQBytes;
    int num_slices = 0;  // that have rows
#pragma unroll
    for (int i = 0; i < Traits::kConsumers; ++i) num_slices += row_of(tile, i) < tile.num_rows;
    full.arrive_and_expect(num_slices * (Traits::kQBytes / Traits::kConsumers));
#pragma unroll
    for (int i = 0; i < Traits::kConsumers; ++i) {
      if (i >= num_slices) break;
      copy_tile<kSliceRows, Traits::kAtoms, Traits::kAtomColumns, Traits::kBlockM>(
          buffer + i * kSliceRows * 128, &args_.q, full, kReadOnce,
          tile.row_offset + row_of(tile, i), tile.slices[i].head, tile.batch_coord);
    }
    q_.advance();
  }

  // Sync: this WorkTile buffer is free once every reader has released the tile before last.
  __device__ __forceinline__ void publish(const CachedWorkTile& tile) {
    storage_.tile_empty[tile_.index()].wait(tile_.phase());
    storage_.tile[tile_.index()] = tile;
    storage_.tile_full[tile_.index()].arrive();
    tile_.advance();
  }

  static constexpr int kSliceRows = query_box_rows(kConfig);
  static __device__ __forceinline__ int row_of(const CachedWorkTile& tile, int slice) {
    return tile.slices[slice].row_origin + slice * kSliceRows;
  }

  const CachedArguments& args_;
  Storage& storage_;
  uint8_t* shared_;
  TileScheduler tiles_;
  PipelineState<CachedStorageOf<kConfig>::kTileBuffers> tile_{1};
  PipelineState<Traits::kQBuffers> q_{1};
};

// Iterates over the published work tiles as the consumers do: calls visit(tile) for each, by a
// whole warp.
template <Config kConfig, class Visit>
__device__ __forceinline__ void for_each_tile(CachedStorageOf<kConfig>& storage, Visit visit) {
  PipelineState<CachedStorageOf<kConfig>::kTileBuffers> at(0);
  while (true) {
    // Sync: the first warp has written the WorkTile.
    storage.tile_full[at.index()].wait(at.phase());
    const CachedWorkTile& tile = storage.tile[at.index()];
    if (uniform(tile.first_row) < 0) return;
    visit(tile);
    storage.tile_empty[at.index()].arrive();  // Sync: this lane has finished reading it.
    at.advance();
  }
}

// The KV blocks begin to end - 1 of a work tile are loaded from the last to the first, with spans
// from the first to the last.
template <Config kConfig>
struct LoadOrder {
  static constexpr int kStep = kConfig.spans ? 1 : -1;
  int begin, end;

  __device__ __forceinline__ int first() const { return kConfig.spans ? begin : end - 1; }
  __device__ __forceinline__ bool has(int block) const {
    return kConfig.spans ? block < end : block >= begin;
  }
};

// The third warp: K.
template <Config kConfig>
__device__ __forceinline__ void load_cached_k(const CachedArguments& args, uint8_t* shared) {
  using Traits = KernelTraits<kConfig>;
  // K tiles before the end of a work tile at which the first warp looks for the next one: late, so
  // that the CTA that is ready first gets it; early enough to hide both latencies.
  constexpr int kEndBlocks = 5;
  auto& storage = *reinterpret_cast<CachedStorageOf<kConfig>*>(shared);
  const PageLoader<kConfig> loader(args, &args.k, args.k_tile);
  PipelineState<Traits::kStages> at(1);
  for_each_tile<kConfig>(storage, [&](const CachedWorkTile& tile) {
    const int begin = uniform(tile.n_blocks.begin), end = uniform(tile.n_blocks.end);
    const int end_at =
        kConfig.spans ? max(begin, end - 1 - kEndBlocks) : min(end - 1, begin + kEndBlocks);
    const LoadOrder<kConfig> order{begin, end};
    for (int block = order.first(); order.has(block); block += order.kStep) {
      if (block == end_at) storage.tile_ends.arrive_warp();
      loader.template load<true>(
          tile, block, shared + Traits::kKOffset + at.index() * Traits::kKBytes,
          storage.k_empty[at.index()], at.phase(), storage.k_full[at.index()]);
      at.advance();
    }
    if (begin == end) storage.tile_ends.arrive_warp();
  });
}

// The fourth warp: V.
template <Config kConfig>
__device__ __forceinline__ void load_cached_v(const CachedArguments& args, uint8_t* shared) {
  using Traits = KernelTraits<kConfig>;
  auto& storage = *reinterpret_cast<CachedStorageOf<kConfig>*>(shared);
  const PageLoader<kConfig> loader(args, &args.v, args.v_tile);
  PipelineState<Traits::kStages> at(1);
  for_each_tile<kConfig>(storage, [&](const CachedWorkTile& tile) {
    const LoadOrder<kConfig> order{uniform(tile.n_blocks.begin), uniform(tile.n_blocks.end)};
    for (int block = order.first(); order.has(block); block += order.kStep) {
      const bool all = SeenRows::of<Traits::kBlockN>(tile, block).template all<Traits::kBlockN>();
      // Sync: v_full, or the barrier that the zero fill warp waits for before it arrives at v_full.
      Barrier& full = all ? storage.v_full[at.index()] : storage.v_unfilled_full[at.index()];
      loader.template load<false>(tile, block,
                                  shared + Traits::kVOffset + at.index() * Traits::kVBytes,
                                  storage.v_empty[at.index()], at.phase(), full);
      at.advance();
    }
  });
}

// The second warp: zero fill of V's rows that no query sees, before the first key and past the last
// one. Only the first and the last V tile of a work tile have such rows. The warp waits only for
// published work tiles and for copies in flight.
template <Config kConfig>
__device__ __forceinline__ void zero_fill_cached_v(const CachedArguments& args, uint8_t* shared) {
  using Traits = KernelTraits<kConfig>;
  auto& storage = *reinterpret_cast<CachedStorageOf<kConfig>*>(shared);
  int first_stage = 0;  // of the work tile
  uint32_t phases = 0;  // of v_unfilled_full, one bit per stage
  const auto fill = [&](const CachedWorkTile& tile, int block, int stage) {
    const SeenRows rows = SeenRows::of<Traits::kBlockN>(tile, block);
    if (rows.template all<Traits::kBlockN>()) return;
    storage.v_unfilled_full[stage].wait(phases >> stage & 1);  // Sync: V is loaded.
    phases ^= 1u << stage;
    uint8_t* values = shared + Traits::kVOffset + stage * Traits::kVBytes;
    zero_fill_rows_outside<Traits::kBlockN, Traits::kAtoms>(values, args.v_tile.strides, rows.begin,
                                                            rows.end, threadIdx.x % 32, 32);
    fence_async_proxy();
    __syncwarp();
    storage.v_full[stage].arrive_warp();  // Sync: every lane has written its zeros and fenced.
  };
  for_each_tile<kConfig>(storage, [&](const CachedWorkTile& tile) {
    int last = uniform(tile.n_blocks.end) - 1, first = uniform(tile.n_blocks.begin);
    const int num_blocks = last + 1 - first;
    if constexpr (kConfig.spans) std::swap(first, last);
    if (num_blocks > 0) fill(tile, last, first_stage);
    first_stage = (first_stage + num_blocks) % Traits::kStages;
    if (num_blocks > 1) fill(tile, first, (first_stage + Traits::kStages - 1) % Traits::kStages);
  });
}

}  // namespace flashattn3::forward
