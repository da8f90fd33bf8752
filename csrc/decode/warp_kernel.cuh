// The decode kernel for few rows and few sequences: the CTAs of a KV head are divided among the
// sequences, in proportion to their keys, and the warps of a sequence's CTAs take its KV blocks in
// turn (warp_mainloop.cuh). The warps of a single sequence know their first KV block before its
// length, so they load K and V at once. The results of warps and CTAs are joined by warp_join.cuh;
// another warp counts the CTAs that have started, so that the others do not wait for its memory
// fence.
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include "decode/epilogue.cuh"
#include "decode/warp_join.cuh"
#include "decode/warp_results.cuh"
#include "decode/warp_traits.cuh"
#include "ptx/pdl.cuh"
#include "ptx/warp_sum.cuh"

namespace flashattn3::decode {

template <class Traits>
struct WarpStorage {
  WarpResults<Traits> results;
  Split split;
  CachedSequence sequence;
  Turn turn;
  bool some_declined;
};

template <class Traits>
class WarpKernel {
  using Storage = WarpStorage<Traits>;
  static constexpr int kRowTiles = Traits::kRowTiles;

 public:
  __device__ __forceinline__ WarpKernel(const Arguments& args, Storage& storage)
      : args_(args), storage_(storage) {}

  __device__ __forceinline__ void run() {
    const int warp = uniform(threadIdx.x / 32);
    launch_dependents();
    griddepcontrol_wait();
    int cta;
    Part part{};
    args_.share_heads(cta, part.kv_head, blockIdx.x);
    const Split split = find_split(cta);
    part.batch_idx = max(split.batch_idx, 0);
    const WarpJoin<Traits> join(args_, split, part.kv_head, cta);
    if (warp < Traits::kWarps) {
      cutlass::arch::warpgroup_reg_alloc<Traits::kRegisters>();
      run_loader(join, split, part, warp);
    } else {
      cutlass::arch::warpgroup_reg_dealloc<Traits::kControlRegisters>();
      run_control(join, warp == Traits::kWarps);
    }
  }

 private:
  // Some work tile has several CTAs.
  __device__ __forceinline__ bool has_parts() const { return args_.part_records > 0; }

  // The warps that load and multiply.
  __device__ __forceinline__ void run_loader(const WarpJoin<Traits>& join, const Split& split,
                                             const Part& part, int warp) const {
    const CachedSequence sequence =
        divides() ? storage_.sequence
                  : find_cached_sequence<Traits::kBlockN>(args_, part.batch_idx);
    const PackedTile tile = PackedTile::of(args_, sequence, part);
    const bool has_work = split.batch_idx >= 0;
    if (has_work) attend(split, warp, part, sequence, tile);
    __syncthreads();  // Sync: all warps have stored O and its statistics.

    const RowStore store(args_, tile, sequence, part);
    if (has_work) {
      storage_.results.add(args_, tile,
                           [&](int i, int row, int vector, const float4& sum, const RowStats& all) {
                             if (join.is_split()) {
                               join.store_part(i, sum, all);
                             } else {
                               store.template store<Traits::kElement>(row, 4 * vector, sum, all);
                             }
                           });
    }
    if (!has_parts()) return;
    __syncthreads();  // Sync: the turn is known, and all threads have stored the part.
    const Turn turn = storage_.turn;
    if (turn == Turn::kDone || turn == Turn::kDeclines) return;
    if (join.is_split()) join.join_blocks(tile, store);
    if (turn == Turn::kJoins) return;
    __syncthreads();  // Sync: it is known whether a CTA declined.
    if (storage_.some_declined) join.join_declined(sequence);
  }

  // The other warps, one of which counts the CTAs.
  __device__ __forceinline__ void run_control(const WarpJoin<Traits>& join, bool counts) const {
    StartOrder order{};
    if (has_parts() && counts) order = join.start();
    __syncthreads();
    if (!has_parts()) return;
    if (counts) {
      const Turn turn = join.turn(order);
      if (threadIdx.x % 32 == 0) storage_.turn = turn;
    }
    __syncthreads();
    if (storage_.turn != Turn::kJoinsLast) return;
    if (counts) {
      const bool some_declined = join.some_declined();
      if (threadIdx.x % 32 == 0) storage_.some_declined = some_declined;
    }
    __syncthreads();
  }

  // Computes O and the row statistics of a warp's KV blocks.
  __device__ __forceinline__ void attend(const Split& split, int warp, const Part& part,
                                         const CachedSequence& sequence,
                                         const PackedTile& tile) const {
    typename MainloopOf<Traits>::Out o;
    RowStats row[kRowTiles];
    MainloopOf<Traits> mainloop(args_);
    const int n_block = sequence.n_blocks.begin + warp * split.count + split.index;
    if (n_block * Traits::kBlockN < args_.capacity) {
      mainloop.load(mainloop.find_place(sequence, n_block), part.kv_head);
    }
    mainloop.load_q(tile, args_.q + part.batch_idx * args_.q_batch);
    if constexpr (Traits::kHasBytes) mainloop.widen_q();
    mainloop.attend(o, row, tile, sequence, part.kv_head, scale_of(args_, part), n_block,
                    Traits::kWarps * split.count, sequence.num_keys);
    storage_.results.store(o, row, warp);
  }

  // Returns whether the assignment of sequences to CTAs depends on the lengths.
  __device__ __forceinline__ bool divides() const {
    return args_.batch > 1 && args_.batch != args_.num_shares;
  }

  // cta: among those of its KV head. All threads of the CTA call it. One warp reads the lengths of
  // several sequences: they may change, and all warps must have the same.
  __device__ __forceinline__ Split find_split(int cta) const {
    if (!divides()) return args_.batch == 1 ? Split{0, cta, args_.num_shares} : Split{cta, 0, 1};
    if (threadIdx.x < 32) divide_ctas(cta);
    __syncthreads();  // Sync: split and sequence are written.
    return storage_.split;
  }

  // Each sequence gets one CTA, and the others by its share of the KV blocks. All threads of a warp
  // call it; lane b computes for sequence b, and stores it if it is this CTA's.
  __device__ __forceinline__ void divide_ctas(int cta) const {
    const int num_ctas = args_.num_shares;
    const int lane = threadIdx.x % 32;
    CachedSequence sequence{};
    if (lane < args_.batch) sequence = find_cached_sequence<Traits::kBlockN>(args_, lane);
    const int n_blocks = sequence.n_blocks.end - sequence.n_blocks.begin;
    const int total = __reduce_add_sync(~0u, n_blocks);
    // The factor is a little too large, so that whole numbers stay whole: no sum of quotients that
    // are rounded down exceeds the CTAs by it.
    const float per_block = static_cast<float>(num_ctas - args_.batch) * (1.f + 0x1p-16f) / total;
    const int mine = lane < args_.batch ? 1 + static_cast<int>(n_blocks * per_block) : 0;
    const int end = inclusive_sum_of_warp(mine);
    const uint32_t later = __ballot_sync(~0u, cta < end);
    const int batch_idx = __ffs(later) - 1;  // -1: none
    if (lane != max(batch_idx, 0)) return;
    storage_.sequence = sequence;
    storage_.split = batch_idx < 0 ? Split{-1, 0, 0} : Split{batch_idx, cta - (end - mine), mine};
  }

  const Arguments& args_;
  Storage& storage_;
};

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    warp_kernel(const __grid_constant__ Arguments args) {
  extern __shared__ __align__(1024) uint8_t shared[];
  auto& storage = *reinterpret_cast<WarpStorage<Traits>*>(shared);
  if constexpr (Traits::kPlain) {
    WarpKernel<Traits>(plain<Traits::kHeadDim>(args), storage).run();
  } else {
    WarpKernel<Traits>(args, storage).run();
  }
}

}  // namespace flashattn3::decode
