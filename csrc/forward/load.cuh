// The producer warpgroup. Its producer thread iterates over the CTA's work tiles, publishes each
// one to the consumers, and loads Q, K and V by TMA as far ahead as stages are free; its second
// warp writes V's zero fill.
//
// Order of the loads of a work tile with n KV blocks: K0, K1, V0, K2, V1, ..., K(n-1), V(n-2),
// V(n-1). A consumer may wait for K(j+1) while it still holds V(j-1) (mainloop.cuh). Everything
// before K(j+1) in this order can then be loaded: K(j+1) and V(j-1) need at most the stages of
// K(j-1) and V(j-3), which the consumer has already released. So the waits cannot deadlock with two
// or more stages. The next tile's Q is loaded between these: early with several Q buffers, because
// the consumers have stored the last tile of a second one once they are in the second step of this
// one; at the end with one buffer.
#pragma once

#include "attention/seqlen.cuh"
#include "attention/tile_scheduler.cuh"
#include "forward/block_rotation.cuh"
#include "forward/load_listed.cuh"
#include "forward/traits.cuh"
#include "tile/permuted_v_tile.cuh"
#include "tile/tma_load.cuh"

namespace flashattn3::forward {

// Whether the V tile with the sequence's last `keys` keys needs zero fill, as a sequence that may
// end inside the tensor does (tma_load.cuh).
template <class Traits>
__device__ __forceinline__ bool needs_zero_fill(const Arguments& args, int keys) {
  return keys < Traits::kBlockN && (Traits::kQuantized || args.seqlens_k.cu_seqlens != nullptr ||
                                    args.seqlens_k.seqused != nullptr);
}

template <Config kConfig>
class Producer {
  using Traits = KernelTraits<kConfig>;
  using Tile = typename SharedStorageOf<kConfig>::Tile;
  // KV blocks before the end of a work tile at which the producer requests the next tile, and loads
  // its Q: late, so that the CTA that is ready first gets it; early enough to hide both latencies.
  static constexpr int kRequestBlocks = Traits::kJoined ? 12 : 5;  // lists are joined meanwhile
  static constexpr int kNextWorkBlocks = 4;

 public:
  __device__ __forceinline__ Producer(const Arguments& args, uint8_t* shared)
      : args_(args),
        storage_(*reinterpret_cast<SharedStorageOf<kConfig>*>(shared)),
        shared_(shared),
        tiles_(args.scheduler),
        lists_(args, shared) {}

  __device__ __forceinline__ void run() {
    Load load, next;
    bool more = next_valid_tile(load);
    if (more) load_q(load);
    while (more) {
      publish(load.tile);
      const int num_blocks = load.tile.n_blocks.count();
      const int request_at = max(0, num_blocks - kRequestBlocks);
      // A second Q buffer is free once the consumers are in this tile; the first reuse of a K stage
      // shows that.
      const int next_work_at = Traits::kJoined ? request_at + 1
                               : Traits::kQBuffers >= 2
                                   ? max(Traits::kStages, num_blocks - kNextWorkBlocks)
                                   : num_blocks;
      for (int i = 0; i < num_blocks; ++i) {
        if (i == request_at) tiles_.request();
        if (i == 0) load_k(load, 0);
        if (i + 1 < num_blocks) load_k(load, i + 1);
        load_v(load, i);
        if (i == next_work_at) more = get_next_work(next);
      }
      if (num_blocks == 0) tiles_.request();
      if (next_work_at >= num_blocks) more = get_next_work(next);
      if constexpr (Traits::kJoined) {
        if (more) load_q(next);
      }
      load = next;
    }
    Tile end{};
    end.first_row = -1;
    publish(end);
    if constexpr (Traits::kJoined) lists_.ask(0, 0, -1);
    tiles_.reset();
  }

 private:
  // A work tile with the TMA coordinates of its rows and of the KV block that is loaded first.
  struct Load {
    Tile tile;
    int q_row, kv_row, kv_head, kv_batch_coord;
    int kv_offset;  // of the sequence in k and v
    int rotation;   // of the list of blocks

    // Row of K and V, or first key, of the i-th block that is loaded.
    __device__ __forceinline__ int first_key(int i) const {
      const int last = tile.n_blocks.end - 1;
      return rotated(tile.n_blocks.block(last - i), rotation, last + 1) * Traits::kBlockN;
    }
    __device__ __forceinline__ int kv_row_of(int i) const {
      return rotation == 0 ? kv_row - i * Traits::kBlockN : kv_offset + first_key(i);
    }
  };

  __device__ __forceinline__ Load describe(int index) const {
    TileCoord coord;
    if constexpr (Traits::kListed) {
      coord = listed_tile(args_.scheduler.heads, index);
    } else {
      coord = find_tile(args_.scheduler, index);
    }
    int batch_idx = coord.batch_head_idx / args_.num_heads_q;
    int head = coord.batch_head_idx - batch_idx * args_.num_heads_q;
    if constexpr (Traits::kBias) {
      // Sequences that share a bias are neighbours, so that its tiles are read from L2.
      const auto& args = static_cast<const BiasArguments&>(args_);
      if (!args.sequences_differ) {
        head = coord.batch_head_idx / args.batch;
        batch_idx = coord.batch_head_idx - head * args.batch;
      }
    }
    const Sequence rows = find_sequence(args_.seqlens_q, batch_idx);
    const Sequence keys = find_sequence(args_.seqlens_k, batch_idx);
    Load load;
    load.tile.first_row = coord.block * Traits::kBlockM;
    load.tile.head = head;
    load.tile.batch_coord = args_.seqlens_q.cu_seqlens != nullptr ? 0 : batch_idx;
    load.tile.row_offset = rows.offset;
    load.tile.num_rows = rows.length;
    load.tile.num_keys = keys.length;
    const int last_row = min(load.tile.first_row + Traits::kBlockM, rows.length) - 1;
    load.tile.n_blocks = Mask::of(rows.length, keys.length, args_.variant.window)
                             .template n_blocks<Traits::kBlockN>(load.tile.first_row, last_row);
    load.q_row = rows.offset + load.tile.first_row;
    load.kv_row = keys.offset + (load.tile.n_blocks.end - 1) * Traits::kBlockN;
    load.kv_head = load.tile.head / args_.qhead_per_kvhead;
    load.kv_batch_coord = args_.seqlens_k.cu_seqlens != nullptr ? 0 : batch_idx;
    load.kv_offset = keys.offset;
    load.tile.batch_idx = batch_idx;
    load.rotation = rotation_of<kConfig>(args_, load.tile);
    if constexpr (Traits::kListed) lists_.place(args_, load, coord.block);
    return load;
  }

  // Gets the next tile and loads its Q; false: no tile is left.
  __device__ __forceinline__ bool get_next_work(Load& next) {
    tiles_.advance();
    if (!next_valid_tile(next)) return false;
    if constexpr (!Traits::kJoined) load_q(next);
    return true;
  }

  // Finds the next tile that has rows; in a varlen batch some have none. false: no tile is left.
  __device__ __forceinline__ bool next_valid_tile(Load& load) {
    while (!tiles_.done()) {
      load = describe(tiles_.index());
      if (load.tile.first_row < load.tile.num_rows) return true;
      tiles_.request();
      tiles_.advance();
    }
    return false;
  }

  // Sync: this WorkTile buffer is free once every reader has released the tile before last.
  __device__ __forceinline__ void publish(const Tile& tile) {
    storage_.tile_empty[tile_.index()].wait(tile_.phase());
    storage_.tile[tile_.index()] = tile;
    storage_.tile_full[tile_.index()].arrive();
    tile_.advance();
  }

  __device__ __forceinline__ void load_q(Load& load) {
    if constexpr (Traits::kJoined) lists_.finish(load.tile);
    if (load.tile.n_blocks.empty()) return;
    // Sync: every consumer warp has released this buffer.
    storage_.q_empty[q_.index()].wait(q_.phase());
    load_tile<Traits::kBlockM, Traits::kAtoms, Traits::kAtomColumns>(
        shared_ + Traits::kQOffset + q_.index() * Traits::kQBytes, &args_.q,
        storage_.q_full[q_.index()], kReadOnce, load.q_row, load.tile.head, load.tile.batch_coord);
    q_.advance();
  }

  __device__ __forceinline__ void load_k(const Load& load, int i) {
    if constexpr (Traits::kListed) {
      lists_.load_k(args_, load, i, k_);
      k_.advance();
      return;
    }
    // Sync: every consumer warp has released the stage.
    storage_.k_empty[k_.index()].wait(k_.phase());
    uint8_t* stage = shared_ + Traits::kKOffset + k_.index() * Traits::kKBytes;
    Barrier& full = storage_.k_full[k_.index()];
    full.arrive_and_expect(Traits::kKBytes + Traits::kBesideKBytes);
    copy_tile<Traits::kBlockN, Traits::kAtoms, Traits::kAtomColumns>(
        stage, &args_.k, full, kReadAgain, load.kv_row_of(i), load.kv_head, load.kv_batch_coord);
    if constexpr (Traits::kBias) {
      const auto& args = static_cast<const BiasArguments&>(args_);
      copy_tile<Traits::kBlockM, Traits::kBiasAtoms, 64>(
          shared_ + Traits::beside_k_offset(k_.index()), &args.bias, full, kReadNormally,
          load.tile.first_row, load.tile.head * args.heads_differ,
          load.tile.batch_idx * args.sequences_differ, load.first_key(i) / 64);
    }
    k_.advance();
  }

  __device__ __forceinline__ void load_v(const Load& load, int i) {
    if constexpr (Traits::kListed) {
      lists_.load_v(args_, load, i, v_);
      v_.advance();
      return;
    }
    storage_.v_empty[v_.index()].wait(v_.phase());  // Sync: as for K.
    uint8_t* stage = shared_ + Traits::kVOffset + v_.index() * Traits::kVBytes;
    const int first_key = load.first_key(i);
    const int keys = load.tile.num_keys - first_key;
    // Sync: v_full, or the barrier that the zero fill warp waits for before it arrives at v_full.
    Barrier& full = needs_zero_fill<Traits>(args_, keys) ? storage_.v_unfilled_full[v_.index()]
                                                         : storage_.v_full[v_.index()];
    if constexpr (Traits::kQuantized) {
      const int head = load.kv_batch_coord * args_.num_heads_kv + load.kv_head;
      int permuted_key = first_key;
      if (args_.seqlens_k.cu_seqlens != nullptr) {
        permuted_key += static_cast<int>(first_permuted_key(load.kv_offset, load.tile.batch_idx));
      }
      full.arrive_and_expect(Traits::kBlockN * Traits::kHeadDim);
      copy_permuted_v(stage, &args_.v, full, kReadAgain, permuted_key, head);
    } else {
      load_tile<Traits::kBlockN, Traits::kAtomsV, Traits::kAtomColumns>(
          stage, &args_.v, full, kReadAgain, load.kv_row_of(i), load.kv_head, load.kv_batch_coord);
    }
    v_.advance();
  }

  const Arguments& args_;
  SharedStorageOf<kConfig>& storage_;
  uint8_t* shared_;
  TileScheduler tiles_;
  ListLoader<kConfig> lists_;
  PipelineState<SharedStorageOf<kConfig>::kTileBuffers> tile_{1};
  PipelineState<Traits::kQBuffers> q_{1};
  PipelineState<Traits::kStages> k_{1};
  PipelineState<Traits::kStages> v_{1};
};

// Zero fill of V past the end of a sequence. The bytes there may belong to another sequence or to
// none and may be NaN, and 0 * NaN is NaN. The copy of such a tile completes v_unfilled_full; this
// warp of the producer warpgroup then writes the zeros and arrives at v_full.
template <Config kConfig>
class ZeroFill {
  using Traits = KernelTraits<kConfig>;

 public:
  __device__ __forceinline__ ZeroFill(const Arguments& args, uint8_t* shared)
      : args_(args),
        storage_(*reinterpret_cast<SharedStorageOf<kConfig>*>(shared)),
        shared_(shared) {}

  // Loop of the zero fill warp in 16-bit kernel configs, over the published work tiles. It waits
  // only for these and for copies in flight, never for a thread that waits for it.
  __device__ __forceinline__ void run() {
    PipelineState<SharedStorageOf<kConfig>::kTileBuffers> at(0);
    int stage = 0;
    while (true) {
      // Sync: the producer has written the WorkTile, as for the consumers.
      storage_.tile_full[at.index()].wait(at.phase());
      const WorkTile& tile = storage_.tile[at.index()];
      if (uniform(tile.first_row) < 0) return;
      const int num_blocks = uniform(tile.n_blocks.count());
      if (num_blocks > 0) fill(stage, tile);
      storage_.tile_empty[at.index()].arrive();
      at.advance();
      stage = (stage + num_blocks) % Traits::kStages;
    }
  }

  // Fills the work tile's first V tile, which is in this stage. Called by a warp, once per work
  // tile with keys.
  __device__ __forceinline__ void fill(int stage, const WorkTile& tile) {
    const int keys =
        uniform(tile.num_keys - tile.n_blocks.block(tile.n_blocks.end - 1) * Traits::kBlockN);
    if (!needs_zero_fill<Traits>(args_, keys)) return;
    uint8_t* values = wait_for(stage);
    const int lane = threadIdx.x % 32;
    if constexpr (Traits::kQuantized) {
      zero_fill_permuted_v<Traits::kBlockN, Traits::kHeadDim>(values, keys, lane, 32);
    } else {
      zero_fill_rows<Traits::kBlockN, Traits::kAtomsV>(values, keys, lane, 32);
    }
    arrive(stage);
  }

  // 8 bits, with lists: fills the boxes of a group that end inside, in this stage.
  template <class Group>
  __device__ __forceinline__ void fill_group(int stage, const Group& group, int num_keys) {
    if (!group.ends_inside(num_keys)) return;
    uint8_t* values = wait_for(stage);
#pragma unroll
    for (int j = 0; j < Group::kBlocks; ++j) {
      if (!group.ends_inside(j, num_keys)) continue;
      zero_fill_permuted_v<kListColumns, Traits::kHeadDim>(
          values + j * (Traits::kVBytes / Group::kBlocks), num_keys - group.first_key[j],
          threadIdx.x % 32, 32);
    }
    arrive(stage);
  }

 private:
  // Returns the V tile of a stage.
  __device__ __forceinline__ uint8_t* wait_for(int stage) {
    storage_.v_unfilled_full[stage].wait(phases_ >> stage & 1);  // Sync: V is loaded.
    phases_ ^= 1u << stage;
    return shared_ + Traits::kVOffset + stage * Traits::kVBytes;
  }
  __device__ __forceinline__ void arrive(int stage) {
    fence_async_proxy();
    __syncwarp();
    storage_.v_full[stage].arrive_warp();  // Sync: every lane has written its zeros and fenced.
  }

  const Arguments& args_;
  SharedStorageOf<kConfig>& storage_;
  uint8_t* shared_;
  uint32_t phases_ = 0;  // of v_unfilled_full, one bit per stage
};

}  // namespace flashattn3::forward
