#include "launch/side_stream.h"

#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include "launch/capture_mode.h"
#include "launch/errors.h"

namespace flashattn3 {

SideStream::SideStream(cudaStream_t stream) : side_(stream) {
  if (stream == cudaStreamPerThread) return;
  const RelaxedCaptureMode relaxed;
  check_cuda(cudaStreamCreateWithFlags(&side_, cudaStreamNonBlocking), "creating a side stream");
  check_cuda(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming),
             "creating the event of a side stream");
}

const SideStream& SideStream::of(int device, cudaStream_t stream) {
  static std::mutex mutex;
  static std::map<std::pair<int, cudaStream_t>, std::unique_ptr<SideStream>> streams;
  const std::lock_guard lock(mutex);
  std::unique_ptr<SideStream>& found = streams[{device, stream}];
  if (found == nullptr) found.reset(new SideStream(stream));
  return *found;
}

void SideStream::fork(cudaStream_t stream) const { wait(side_, stream); }
void SideStream::join(cudaStream_t stream) const { wait(stream, side_); }

// A thread that uses the same streams may record the event in between: the wait is then for more.
void SideStream::wait(cudaStream_t waiting, cudaStream_t other) const {
  if (event_ == nullptr) return;
  check_cuda(cudaEventRecord(event_, other), "recording the event of a side stream");
  check_cuda(cudaStreamWaitEvent(waiting, event_, 0), "waiting for the event of a side stream");
}

}  // namespace flashattn3
