// A second stream beside a caller's, for two kernels of one call that run at the same time.
#pragma once

#include <cuda_runtime.h>

#include <memory>

namespace flashattn3 {

// A stream of the same priority whose work runs between what the caller's stream has and what
// follows there. Both may be captured: the side stream then belongs to the capture.
//
// Side streams are kept until the process ends and lent again: there are as many of each device and
// priority as calls, or captures, used at a time. Work of a later call waits for that of an earlier
// one on the same side stream.
class SideStream {
 public:
  // Work that is enqueued on get() waits for that of `stream`, whose device must be the current
  // one.
  SideStream(int device, cudaStream_t stream);
  // Joins as well if join() was not called, such as after an exception.
  ~SideStream();
  SideStream(const SideStream&) = delete;

  cudaStream_t get() const;
  // Work that is enqueued on `stream` from here on waits for that of get().
  void join();

  struct Lent;

 private:
  const cudaStream_t stream_;
  std::unique_ptr<Lent> lent_;
  bool joined_ = false;
};

}  // namespace flashattn3
