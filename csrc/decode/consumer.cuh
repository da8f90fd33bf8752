// A consumer warpgroup: runs the main loop on its KV blocks of each part. Warpgroup 1 hands its
// results to warpgroup 0, which stores the work tile or this CTA's part of it.
#pragma once

#include "decode/combine.cuh"
#include "decode/epilogue.cuh"
#include "decode/mainloop.cuh"
#include "decode/part_queue.cuh"
#include "decode/traits.cuh"

namespace flashattn3::decode {

template <Config kConfig>
class Consumer {
  using Traits = KernelTraits<kConfig>;

 public:
  __device__ __forceinline__ Consumer(const Arguments& args, uint8_t* shared, int warpgroup)
      : args_(args),
        storage_(*reinterpret_cast<SharedStorageOf<kConfig>*>(shared)),
        exchange_(shared),
        mainloop_(args, shared, warpgroup),
        warpgroup_(warpgroup) {}

  __device__ __forceinline__ void run() {
    typename Mainloop<kConfig>::Out o;
    typename Mainloop<kConfig>::Softmax softmax;
    const Combine<Traits, SharedStorageOf<kConfig>> combine(args_, storage_);
    PipelineState<1> write(1), read(0);
    PartQueue<kConfig> parts(args_, storage_);
    int num_pending = 0;
    Part part;
    while (parts.next(part)) {
      const CachedSequence& sequence = parts.sequence();
      const PackedTile tile = PackedTile::of(args_, sequence, part);
      mainloop_.attend(o, softmax, tile, sequence, part);
      if constexpr (Traits::kConsumers == 2) exchange(part, o, softmax, write, read);
      const bool is_shared = part.num_ctas > 1;
      if (warpgroup_ == 0 && is_shared) {
        combine.store_part(num_pending, part, sequence, o, softmax.row);
      } else if (warpgroup_ == 0) {
        store_out<Traits>(args_, tile, RowStore(args_, tile, sequence, part), o, softmax.row);
      }
      num_pending += is_shared;
    }
    combine.run(num_pending);
  }

 private:
  // Adds warpgroup 1's results of a part to those of warpgroup 0.
  __device__ __forceinline__ void exchange(const Part& part, typename Mainloop<kConfig>::Out& o,
                                           typename Mainloop<kConfig>::Softmax& softmax,
                                           PipelineState<1>& write, PipelineState<1>& read) {
    if (part.n_blocks.end - part.n_blocks.begin == 1) return;  // warpgroup 1 has no KV block
    if (warpgroup_ == 1) {
      storage_.exchange_empty.wait(write.phase());  // Sync: warpgroup 0 has read the last O.
      exchange_.write(o, softmax.row);
      __syncwarp();
      storage_.exchange_full.arrive_lanes();  // Sync: this warp has written its O.
      write.advance();
    } else {
      storage_.exchange_full.wait(read.phase());  // Sync: warpgroup 1 has written its O.
      exchange_.add_to(o, softmax.row);
      __syncwarp();
      storage_.exchange_empty.arrive_lanes();  // Sync: this warp has read it.
      read.advance();
    }
  }

  const Arguments& args_;
  SharedStorageOf<kConfig>& storage_;
  Exchange<Traits> exchange_;
  Mainloop<kConfig> mainloop_;
  const int warpgroup_;
};

}  // namespace flashattn3::decode
