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
  for (cudaEvent_t* event : {&forked_, &joined_}) {
    check_cuda(cudaEventCreateWithFlags(event, cudaEventDisableTiming),
               "creating an event of a side stream");
  }
}

const SideStream& SideStream::of(int device, cudaStream_t stream) {
  static std::mutex mutex;
  static std::map<std::pair<int, cudaStream_t>, std::unique_ptr<SideStream>> streams;
  const std::lock_guard lock(mutex);
  std::unique_ptr<SideStream>& found = streams[{device, stream}];
  if (found == nullptr) found.reset(new SideStream(stream));
  return *found;
}

void SideStream::fork(cudaStream_t stream) const { wait(side_, stream, forked_); }
void SideStream::join(cudaStream_t stream) const { wait(stream, side_, joined_); }

// A thread that uses the same streams may record the event in between: the wait is then for more of
// the same stream's work. So each direction has an event of its own.
void SideStream::wait(cudaStream_t waiting, cudaStream_t other, cudaEvent_t event) {
  if (event == nullptr) return;
  check_cuda(cudaEventRecord(event, other), "recording an event of a side stream");
  check_cuda(cudaStreamWaitEvent(waiting, event, 0), "waiting for an event of a side stream");
}

}  // namespace flashattn3
