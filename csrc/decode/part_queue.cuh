// The parts of a CTA's share, of which all of its warps must have the same: barriers count loads
// and uses of them. Lengths may change while they are read, so one thread reads those of further
// sequences and publishes the parts. The first part follows from the share, which is known to all.
#pragma once

#include "decode/traits.cuh"
#include "decode/work_share.cuh"
#include "ptx/arrival_counter.cuh"

namespace flashattn3::decode {

// The producer's side of the queue; one thread publishes.
template <Config kConfig>
class PartPublisher {
  using Storage = SharedStorageOf<kConfig>;

 public:
  __device__ __forceinline__ PartPublisher(const Arguments& args, Storage& storage, bool publishes)
      : args_(args), storage_(storage), publishes_(publishes) {
    if (!publishes) return;
    if (args.counters != nullptr) launch_ = start_launch(&args.counters->launch, gridDim.x);
    storage.unpublished = storage.share;
    Part first;
    if (!take_part<kConfig.block_n, span_step(kConfig), kConfig.prefix>(args, storage.unpublished,
                                                                        first))
      publish_next();
  }

  // Publishes the part after the last one that was published, or that there is none.
  __device__ __forceinline__ void publish_next() {
    if (!publishes_) return;
    // Sync: all warps have read the part that had the buffer.
    storage_.part_empty[at_.index()].wait(at_.phase());
    PendingPart& next = storage_.parts[at_.index()];
    publishes_ = take_part<kConfig.block_n, span_step(kConfig), kConfig.prefix>(
        args_, storage_.unpublished, next.part);
    if (publishes_) {
      next.sequence = storage_.unpublished.sequence;
    } else {
      next.part.num_ctas = 0;
      storage_.launch = launch_;
    }
    storage_.part_full[at_.index()].arrive();
    at_.advance();
  }

 private:
  const Arguments& args_;
  Storage& storage_;
  PipelineState<Storage::kPartBuffers> at_{1};
  uint64_t launch_ = 0;
  bool publishes_;  // another part, or the end
};

// The reading side, for the producer and each consumer: all lanes of all warps call next() until it
// returns false.
template <Config kConfig>
class PartQueue {
  using Storage = SharedStorageOf<kConfig>;

 public:
  __device__ __forceinline__ PartQueue(const Arguments& args, Storage& storage)
      : args_(args), storage_(storage) {}

  // Sets part to the next part; returns false if there is none.
  __device__ __forceinline__ bool next(Part& part) {
    if (is_first_) {
      is_first_ = false;
      WorkShare share = storage_.share;
      const bool any =
          take_part<kConfig.block_n, span_step(kConfig), kConfig.prefix>(args_, share, part);
      sequence_ = share.sequence;
      if (any) return true;
    }
    storage_.part_full[at_.index()].wait(at_.phase());  // Sync: the part is published.
    part = storage_.parts[at_.index()].part;
    sequence_ = storage_.parts[at_.index()].sequence;
    __syncwarp();
    storage_.part_empty[at_.index()].arrive_lanes();  // Sync: this warp has read it.
    at_.advance();
    return part.num_ctas > 0;
  }

  // The sequence of the part that next() returned last.
  __device__ __forceinline__ const CachedSequence& sequence() const { return sequence_; }

 private:
  const Arguments& args_;
  Storage& storage_;
  PipelineState<Storage::kPartBuffers> at_{0};
  CachedSequence sequence_;
  bool is_first_ = true;
};

}  // namespace flashattn3::decode
