// The forward kernel: persistent, one CTA per SM. The last warpgroup is the producer (load.cuh),
// the others are consumers. kernel_fp8.cuh has the roles of 8-bit kernel configs, kernel_cached.cuh
// those of cached ones.
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include <cute/arch/cluster_sm90.hpp>

#include "forward/arguments.h"
#include "forward/epilogue.cuh"
#include "forward/listed_work_tile.cuh"
#include "forward/load.cuh"
#include "forward/mainloop.cuh"
#include "forward/traits.cuh"
#include "ptx/bulk_copy.cuh"
#include "ptx/pdl.cuh"

namespace flashattn3::forward {

// A consumer warpgroup: takes work tiles until none is left, runs the main loop on its 64 query
// rows of each, and stores them. The tensor cores compute S of the next tile's first block, in the
// registers of S, while this tile is stored. Mainloop: of 16-bit or of 8-bit inputs.
template <class Mainloop>
class Consumer : Mainloop {
  using Mainloop::args_, Mainloop::kStages, Mainloop::kv_, Mainloop::q_, Mainloop::shared_,
      Mainloop::staged_, Mainloop::storage_, Mainloop::tile_, Mainloop::warpgroup_;
  using typename Mainloop::Out, typename Mainloop::Probabilities, typename Mainloop::Scores;
  using typename Mainloop::Softmax, typename Mainloop::Traits, typename Mainloop::Work;

 public:
  __device__ __forceinline__ Consumer(const Arguments& args, uint8_t* shared, int warpgroup)
      : Mainloop(args, shared, warpgroup) {}

  __device__ __forceinline__ void run() {
    Scores s;
    Out o;
    Probabilities p;
    Softmax softmax;
    Work work;
    bool ahead = false;  // s already holds S of the tile's first block
    while (true) {
      if (!ahead) {
        work = get_next_work();
        if (!work.any()) return;
        if constexpr (Traits::kJoined) this->pass_above(work.above);
        this->begin_tile(this->tile());
        start_first_qk(s, work, kv_);
        warpgroup_wait<0>();
        warpgroup_fence_operand(s);
      }
      this->attend(s, o, p, softmax, work);
      // Loaded here, during the last PV GEMM.
      const int head = this->tile().head_of(warpgroup_);
      const float sink = args_.sinks.any() ? args_.sinks.at(head) : 0.f;
      if constexpr (!Traits::kOutOverQ) release_q();
      q_.advance();
      Work next{};
      if (work.below == 0) {  // else the producer needs those released before it publishes a tile
        // Sync: the producer has written the next WorkTile.
        storage_.tile_full[tile_.next().index()].wait(tile_.next().phase());
        next = work_of(storage_.tile[tile_.next().index()]);
      }
      // K tiles skipped here are loaded while V is still held: at most one per stage.
      ahead = next.any() && next.above <= kStages;
      if (ahead) {
        this->begin_tile(storage_.tile[tile_.next().index()]);
        start_first_qk(s, next, kv_.next());
        warpgroup_wait<1>();
        store_tile(o, softmax, sink);
        warpgroup_wait<0>();
        warpgroup_fence_operand(s);
      } else {
        warpgroup_wait<0>();
        store_tile(o, softmax, sink);
      }
      skip_n_blocks(work.below);
      work = next;
    }
  }

 private:
  // Returns the next work with keys and stores zeros for work tiles without; empty: none is left.
  __device__ __forceinline__ Work get_next_work() {
    this->release_staged_q();
    while (true) {
      // Sync: the producer has written the WorkTile. It stays valid until this warp has stored the
      // tile; reading it from shared memory where needed costs no registers in the main loop.
      storage_.tile_full[tile_.index()].wait(tile_.phase());
      const Work work = work_of(this->tile());
      if (work.any() || uniform(this->tile().first_row) < 0) return work;
      if (work.above > 0) {  // else the producer loads nothing for this tile, not even Q
        this->wait_for_q();  // else the warp could arrive twice in one phase of q_empty
        release_q();
        q_.advance();
        skip_n_blocks(work.above);
      }
      store_nothing<Traits>(args_, this->tile(), warpgroup_, this->warp_first_row());
      release_tile();
    }
  }

  __device__ __forceinline__ Work work_of(const typename Mainloop::Tile& tile) const {
    if constexpr (Traits::kJoined) return tile.template share<Work>(warpgroup_);
    const int first_row = uniform(tile.row_origin(warpgroup_)) + warpgroup_ * 64;
    const int num_rows = uniform(tile.num_rows);
    const BlockRange all{uniform(tile.n_blocks.begin), uniform(tile.n_blocks.end)};
    if constexpr (Traits::kListed) return {all, 0, 0};
    const BlockRange mine =
        tile.mask(num_rows, uniform(tile.num_keys), args_.variant.window)
            .template n_blocks<Traits::kBlockN>(first_row, min(first_row + 63, num_rows - 1));
    if (mine.empty()) return {mine, all.count(), 0};
    if constexpr (Traits::kSpans) return {mine, mine.begin - all.begin, all.end - mine.end};
    return {mine, all.end - mine.end, mine.begin - all.begin};
  }

  // Load and QK^T of the first block. at: stage of the work tile's first K.
  __device__ __forceinline__ void start_first_qk(Scores& s, const Work& work,
                                                 PipelineState<kStages> at) {
    this->wait_for_q();
    this->skip_k(at, work.above);
    this->wait_for_k(at);
    this->gemm_qk(s, at);
  }

  // Skips K and V tiles that only other warpgroups need.
  __device__ __forceinline__ void skip_n_blocks(int count) {
    for (int i = 0; i < count; ++i) {
      this->wait_for_k(kv_);
      this->release_k(kv_);
      this->skip_v(1);
    }
  }

  __device__ __forceinline__ void release_q() {
    __syncwarp();
    storage_.q_empty[q_.index()].arrive_warp();  // Sync: this warp's QK GEMMs are all complete.
  }

  __device__ __forceinline__ void release_tile() {
    storage_.tile_empty[tile_.index()].arrive();  // Sync: this thread has finished reading it.
    tile_.advance();
  }

  // Stores the tile. O is complete; q_ is at the next tile's Q.
  __device__ __forceinline__ void store_tile(Out& o, Softmax& softmax, float sink) {
    warpgroup_fence_operand(o);
    this->finish(o, softmax);
    this->release_v(kv_);
    kv_.advance();
    uint8_t* rows = this->staged_out();
    if constexpr (Traits::kOutOverQ) {
      // Sync: all four warps have finished reading their 64 rows of Q.
      named_barrier_sync(1 + warpgroup_, 128);
      rows = shared_ + Traits::kQOffset + q_.before(1).index() * Traits::kQBytes +
             threadIdx.x / 32 * kRowsOfWarp * 128;
      staged_ = true;
    } else {
      if (threadIdx.x % 32 == 0) wait_for_stores();
      __syncwarp();
    }
    constexpr int kAtomStride = (Traits::kOutOverQ ? Traits::kBlockM : kRowsOfWarp) * 128;
    store_rows<Traits>(args_, this->tile(), warpgroup_, this->warp_first_row(), o, softmax,
                       this->out_scale(), sink, rows, kAtomStride);
    release_tile();
  }
};

__device__ __forceinline__ void prefetch_descriptors(const Arguments& args) {
  cute::prefetch_tma_descriptor(&args.q);
  cute::prefetch_tma_descriptor(&args.k);
  cute::prefetch_tma_descriptor(&args.v);
  cute::prefetch_tma_descriptor(&args.out_map);
}

// The warps of the producer warpgroup, whose first warp has one thread.
template <Config kConfig, class SecondWarp>
__device__ __forceinline__ void run_producer_warp(const Arguments& args, uint8_t* shared,
                                                  int warp) {
  if (warp == 0) {
    if (!cute::elect_one_sync()) return;
    prefetch_descriptors(args);
    // The consumers access no device memory before this thread has published a work tile.
    launch_dependents();
    griddepcontrol_wait();
    Producer<kConfig>(args, shared).run();
  } else if (warp == 1) {
    SecondWarp(args, shared).run();
  }
}

// The roles of the warps of a CTA for 16-bit inputs.
template <Config kConfig>
struct Roles {
  using Traits = KernelTraits<kConfig>;
  using Storage = SharedStorageOf<kConfig>;
  using Mainloop = forward::Mainloop<kConfig, Storage>;
  using Arguments = forward::Arguments;

  // All threads call it before the CTA's first __syncthreads.
  static __device__ __forceinline__ void init(uint8_t*) {}

  // warp: of the producer warpgroup.
  static __device__ __forceinline__ void run_producer(const Arguments& args, uint8_t* shared,
                                                      int warp) {
    using SecondWarp = std::conditional_t<Traits::kJoined, ListJoiner<kConfig>, ZeroFill<kConfig>>;
    run_producer_warp<kConfig, SecondWarp>(args, shared, warp);
  }
};

// The template argument is a type, not a Config: the host stub that nvcc 13.0 generates for a
// kernel with a struct as a template value argument does not compile.
template <class Roles>
__global__ void __launch_bounds__(Roles::Traits::kThreads, 1)
    attention_kernel(const __grid_constant__ typename Roles::Arguments args) {
  using Traits = typename Roles::Traits;
  extern __shared__ __align__(1024) uint8_t shared[];
  static_assert(sizeof(typename Roles::Storage) <= Traits::kQOffset);

  auto& storage = *reinterpret_cast<typename Roles::Storage*>(shared);
  if (threadIdx.x == 0) storage.init(Traits::kConsumerWarps, Traits::kQuantized);
  Roles::init(shared);
  // Sync: no thread uses a barrier before it is initialised.
  __syncthreads();

  const int warpgroup = uniform(threadIdx.x / 128);
  if (warpgroup == Traits::kConsumers) {
    cutlass::arch::warpgroup_reg_dealloc<Traits::kProducerRegisters>();
    Roles::run_producer(args, shared, uniform(threadIdx.x % 128 / 32));
  } else {
    cutlass::arch::warpgroup_reg_alloc<Traits::kConsumerRegisters>();
    Consumer<typename Roles::Mainloop>(args, shared, warpgroup).run();
  }
}

}  // namespace flashattn3::forward
