// The warp kernel of equal shares, for few rows of any number of sequences beside a cache of 8
// bits. Each CTA takes an equal share of the KV blocks of the batch as in the decode kernel
// (work_share.cuh, combine.cuh), and its warps take those of a part in turn as in the warp kernel
// (byte_mainloop.cuh): bytes are widened in the registers of an MMA. In shared memory each byte
// would be written, read, written as two and read as two again, which binds.
//
// No warp waits for others at the end of a part: it stores its results, and adds those of all warps
// once it has computed the next part, whose loads then have begun. Warps take KV blocks in turn
// across parts, so that a CTA's share is divided equally.
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include "decode/byte_mainloop.cuh"
#include "decode/combine.cuh"
#include "decode/epilogue.cuh"
#include "decode/find_share.cuh"
#include "decode/part_queue.cuh"
#include "decode/traits.cuh"
#include "decode/warp_results.cuh"
#include "decode/warp_traits.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/pdl.cuh"

namespace flashattn3::decode {

// Barriers. results_full: 1 per loading warp, after it has stored its results of a part; those
// warps wait. A buffer is free again once a warp has seen the barrier of the next part: all have
// added the results in it by then.
template <Config kConfig, int kRowTiles>
struct WarpShareStorage {
  using Traits = WarpShareTraits<kConfig, kRowTiles>;
  SharedStorageOf<kConfig> share;
  Barrier results_full[2];
  WarpResults<Traits> results[2];
  // The parts that the results belong to. One is written while slower warps add the last but two.
  PendingPart parts[4];

  // Called by one thread, before the CTA's first __syncthreads.
  __device__ __forceinline__ void init() {
    share.init();
    for (Barrier& barrier : results_full) barrier.init(Traits::kWarps * kArrivalsPerWarp);
  }
};

template <Config kConfig, int kRowTiles>
class WarpShareKernel {
  using Traits = WarpShareTraits<kConfig, kRowTiles>;
  using Storage = WarpShareStorage<kConfig, kRowTiles>;
  static constexpr int kWarps = Traits::kWarps;

 public:
  __device__ __forceinline__ WarpShareKernel(const Arguments& args, Storage& storage)
      : args_(args), storage_(storage) {}

  __device__ __forceinline__ void run() {
    if (threadIdx.x == 0) storage_.init();
    launch_dependents();
    griddepcontrol_wait();  // every thread reads lengths that a kernel before may write
    // Sync: find_share has CTA barriers, so no thread uses an mbarrier before it is initialised.
    find_share<kConfig.block_n>(args_, storage_.share);
    const int warp = uniform(threadIdx.x / 32);
    if (warp < kWarps) {
      cutlass::arch::warpgroup_reg_alloc<Traits::kRegisters>();
      run_loader(warp);
    } else {
      cutlass::arch::warpgroup_reg_dealloc<Traits::kControlRegisters>();
      run_control();
    }
  }

 private:
  // A part, and the KV blocks of the calling warp in it: n_block, n_block + kWarps, ... before key
  // num_keys. turn: of the warp, 0 of the one that has the first block.
  struct Work {
    Part part;
    int turn, n_block, num_keys;
  };

  // Sets work to the next part, loads its Q and this warp's first KV block, and sets next_turn to
  // the warp's turn behind it. count: parts before it. Returns false if there is none.
  __device__ __forceinline__ bool begin(PartQueue<kConfig>& parts, ByteMainloop<Traits>& mainloop,
                                        int count, int& next_turn, Work& work) const {
    if (!parts.next(work.part)) return false;
    const CachedSequence& sequence = parts.sequence();
    if (threadIdx.x == 0) storage_.parts[count % 4] = {work.part, sequence};
    const BlockRange& units = work.part.n_blocks;
    const int first = units.begin * Traits::kBlocksOfUnit;
    work.turn = next_turn;
    work.n_block = first + work.turn;
    work.num_keys = min(sequence.num_keys, units.end * kConfig.block_n);
    const int last = (work.num_keys + Traits::kBlockN - 1) / Traits::kBlockN;
    next_turn = (work.turn + kWarps - max(last - first, 0) % kWarps) % kWarps;
    if (work.n_block < last) {
      mainloop.load(mainloop.find_place(sequence, work.n_block), work.part.kv_head);
    }
    const PackedTile tile = PackedTile::of(args_, sequence, work.part);
    mainloop.load_q(
        tile, args_.q + work.part.batch_idx * args_.q_batch + sequence.first_query * args_.q_seq);
    return true;
  }

  // The warps that load and multiply.
  __device__ __forceinline__ void run_loader(int warp) const {
    const Combine<Traits, SharedStorageOf<kConfig>> combine(args_, storage_.share);
    ByteMainloop<Traits> mainloop(args_);
    PartQueue<kConfig> parts(args_, storage_.share);
    int count = 0, num_pending = 0, next_turn = warp;
    Work work;
    bool more = begin(parts, mainloop, 0, next_turn, work);
    for (; more; ++count) {
      typename ByteMainloop<Traits>::Out o;
      RowStats row[kRowTiles];
      const int turn = work.turn;
      mainloop.widen_q();
      mainloop.attend(o, row, PackedTile::of(args_, parts.sequence(), work.part), parts.sequence(),
                      work.part.kv_head, scale_of(args_, work.part), work.n_block, kWarps,
                      work.num_keys);
      more = begin(parts, mainloop, count + 1, next_turn, work);
      if (count > 0) num_pending += add(combine, count - 1, num_pending);
      storage_.results[count % 2].store(o, row, turn);
      __syncwarp();
      storage_.results_full[count % 2].arrive_lanes();  // Sync: this warp has stored its results.
    }
    if (count > 0) num_pending += add(combine, count - 1, num_pending);
    combine.run(num_pending);
  }

  // Adds and stores the results of a part. Returns whether it is pending part num_pending.
  __device__ __forceinline__ bool add(const Combine<Traits, SharedStorageOf<kConfig>>& combine,
                                      int count, int num_pending) const {
    storage_.results_full[count % 2].wait(count / 2 % 2);  // Sync: all warps have stored theirs.
    const PendingPart& of = storage_.parts[count % 4];
    const Part part = of.part;
    const PackedTile tile = PackedTile::of(args_, of.sequence, part);
    const bool is_shared = part.num_ctas > 1;
    const RowStore store(args_, tile, of.sequence, part);
    storage_.results[count % 2].template add<4>(
        args_, tile, [&](int, int row, int vector, const float4& sum, const RowStats& all) {
          if (is_shared) {
            combine.store_part(part, row, 4 * vector, sum, all);
          } else {
            store.template store<Traits::kElement>(row, 4 * vector, sum, all);
          }
        });
    if (is_shared && threadIdx.x == 0) storage_.share.pending[num_pending] = of;
    return is_shared;
  }

  // The other warps, a thread of which publishes the parts.
  __device__ __forceinline__ void run_control() const {
    PartPublisher<kConfig> publisher(args_, storage_.share, threadIdx.x == 32 * kWarps);
    PartQueue<kConfig> parts(args_, storage_.share);
    Part part;
    while (parts.next(part)) publisher.publish_next();
  }

  const Arguments& args_;
  Storage& storage_;
};

// The template argument is a type, not a Config: see forward/kernel.cuh.
template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    warp_share_kernel(const __grid_constant__ Arguments args) {
  constexpr Config kConfig = Traits::kConfig;
  constexpr int kRowTiles = Traits::kRowTiles;
  extern __shared__ __align__(1024) uint8_t shared[];
  auto& storage = *reinterpret_cast<WarpShareStorage<kConfig, kRowTiles>*>(shared);
  WarpShareKernel<kConfig, kRowTiles>(args, storage).run();
}

}  // namespace flashattn3::decode
