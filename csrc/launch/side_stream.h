// A second stream beside a caller's, for two kernels of one call that run at the same time.
#pragma once

#include <cuda_runtime.h>

namespace flashattn3 {

// A stream whose work runs between what the caller's stream has and what follows there. Both may be
// captured: the side stream then belongs to the capture until it is joined.
class SideStream {
 public:
  // The side stream of a device and stream; the first call for the pair creates it, and it is kept
  // until the process ends. The stream's device must be the current one. cudaStreamPerThread, which
  // names the streams of many threads, is its own side stream.
  static const SideStream& of(int device, cudaStream_t stream);

  cudaStream_t stream() const { return side_; }
  // Work that is enqueued on stream() from here on waits for that of `stream`.
  void fork(cudaStream_t stream) const;
  // Work that is enqueued on `stream` from here on waits for that of stream().
  void join(cudaStream_t stream) const;

 private:
  explicit SideStream(cudaStream_t stream);
  static void wait(cudaStream_t waiting, cudaStream_t other, cudaEvent_t event);

  cudaStream_t side_;
  cudaEvent_t forked_ = nullptr, joined_ = nullptr;  // null: the stream is its own side stream
};

}  // namespace flashattn3
