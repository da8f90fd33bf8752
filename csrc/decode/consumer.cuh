// A consumer warpgroup: runs the main loop on its KV blocks of each part. Where two take them in
// turn, warpgroup 1 hands its results to warpgroup 0, which stores the work tile or this CTA's part
// of it.
#pragma once

#include "decode/combine.cuh"
#include "decode/epilogue.cuh"
#include "decode/mainloop.cuh"
#include "decode/part_queue.cuh"
#include "decode/spans.cuh"
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
      const bool is_shared = part.num_ctas > 1;
      if constexpr (kConfig.spans) {
        attend_spans(tile, sequence, part, o, softmax, write, read);
        if (is_shared && threadIdx.x == 0) storage_.pending[num_pending] = {part, sequence};
        num_pending += is_shared;
        continue;
      }
      mainloop_.attend(o, softmax, tile, sequence, part);
      if constexpr (Traits::kConsumers == 2) exchange(part.n_blocks, o, softmax, write, read);
      if (warpgroup_ == 0 && is_shared) {
        combine.store_part(num_pending, part, sequence, o, softmax.row);
      } else if (warpgroup_ == 0) {
        const StoreOf<Traits> store(args_, tile, sequence, part);
        store_out<Traits>(args_, tile, store, o, softmax.row);
      }
      num_pending += is_shared;
    }
    if constexpr (kConfig.spans) {
      combine.run_spans(num_pending);
    } else {
      combine.run(num_pending);
    }
  }

 private:
  // Joins the spans of a part that begins its work tile and stores the result, or stores the result
  // of each span.
  __device__ __forceinline__ void attend_spans(const PackedTile& tile,
                                               const CachedSequence& sequence, const Part& part,
                                               typename Mainloop<kConfig>::Out& o,
                                               typename Mainloop<kConfig>::Softmax& softmax,
                                               PipelineState<1>& write, PipelineState<1>& read) {
    const BlockRange blocks = visible_blocks<Traits::kBlockN>(args_, sequence, tile, part.n_blocks);
    const int cta = storage_.share.cta;
    const SpanSlots slots(args_, cta);
    const bool leads = cta == part.first_cta;
    const int num_rows = tile.num_rows();
    const typename Mainloop<kConfig>::RowMask mask(args_, tile, sequence, part);
    const ScoreScale scale = scale_of(args_, part);
    RowStats all[2];
    int slot = leads ? 0 : 1;
    mainloop_.wait_for_q();
    for (BlockRange span{blocks.begin, 0}; span.begin < blocks.end; span.begin = span.end) {
      span.end = min(blocks.end, (span.begin / args_.span_blocks + 1) * args_.span_blocks);
      mainloop_.start(o, softmax);
      mainloop_.attend_blocks(o, softmax, mask, scale, span);
      softmax.complete();
      if constexpr (Traits::kConsumers == 2) exchange(span, o, softmax, write, read);
      if (Traits::kConsumers == 2 && warpgroup_ != 0) continue;
      if (!leads) {
        slots.store<Traits>(slot++, num_rows, o, softmax.row);
        continue;
      }
      if (span.begin == blocks.begin) {
        all[0] = softmax.row[0], all[1] = softmax.row[1];
      } else {
        slots.join<Traits>(0, num_rows, o, all, softmax.row);
      }
      if (span.end < blocks.end || part.num_ctas > 1) slots.store<Traits>(0, num_rows, o, all);
    }
    mainloop_.release_q();
    if ((Traits::kConsumers == 1 || warpgroup_ == 0) && part.num_ctas == 1) {
      store_out<Traits>(args_, tile, RowStore(args_, tile, sequence, part), o, all);
    }
  }

  // Adds warpgroup 1's results of a part, or of a span, to those of warpgroup 0.
  __device__ __forceinline__ void exchange(const BlockRange& blocks,
                                           typename Mainloop<kConfig>::Out& o,
                                           typename Mainloop<kConfig>::Softmax& softmax,
                                           PipelineState<1>& write, PipelineState<1>& read) {
    if (blocks.end - blocks.begin == 1) return;  // warpgroup 1 has no KV block
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
