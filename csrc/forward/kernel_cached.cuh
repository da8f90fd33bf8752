// The roles of the forward kernel for cached calls, whose K and V are in a paged or dense cache.
#pragma once

#include <type_traits>

#include "forward/kernel.cuh"
#include "forward/load_cached.cuh"
#include "forward/mainloop_spans.cuh"

namespace flashattn3::forward {

template <Config kConfig>
struct CachedRoles : Roles<kConfig> {
  using Storage = CachedStorageOf<kConfig>;
  using Mainloop = std::conditional_t<kConfig.spans, SpanMainloop<kConfig, Storage>,
                                      forward::Mainloop<kConfig, Storage>>;
  using Arguments = CachedArgumentsOf<kConfig>;

  static __device__ __forceinline__ void init(uint8_t* shared) {
    if (threadIdx.x != 0) return;
    reinterpret_cast<Storage*>(shared)->tile_ends.init(1);
    fence_barrier_init();
  }

  static __device__ __forceinline__ void run_producer(const Arguments& args, uint8_t* shared,
                                                      int warp) {
    if (warp == 0) {
      if (!cute::elect_one_sync()) return;
      prefetch_descriptors(args);
      launch_dependents();
      griddepcontrol_wait();
      CachedTiles<kConfig>(args, shared).run();
    } else if (warp == 1) {
      zero_fill_cached_v<kConfig>(args, shared);
    } else if (warp == 2) {
      griddepcontrol_wait();
      load_cached_k<kConfig>(args, shared);
    } else {
      griddepcontrol_wait();
      load_cached_v<kConfig>(args, shared);
    }
  }
};

}  // namespace flashattn3::forward
