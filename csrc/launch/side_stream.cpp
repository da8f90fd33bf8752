#include "launch/side_stream.h"

#include <algorithm>
#include <list>
#include <map>
#include <mutex>
#include <utility>

#include "launch/capture_mode.h"
#include "launch/errors.h"

namespace flashattn3 {

struct SideStream::Lent {
  const int device, priority;
  cudaStream_t stream = nullptr;
  cudaEvent_t forked = nullptr, joined = nullptr;

  Lent(int device, int priority) : device(device), priority(priority) {
    const RelaxedCaptureMode relaxed;
    check_cuda(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, priority),
               "creating a side stream");
    for (cudaEvent_t* event : {&forked, &joined}) {
      check_cuda(cudaEventCreateWithFlags(event, cudaEventDisableTiming),
                 "creating an event of a side stream");
    }
  }
};

namespace {

using Lent = SideStream::Lent;

// Side streams that no call uses, the one that was used last at the end. Never destroyed: a call
// may be the process's last.
struct Unused {
  std::mutex mutex;
  std::list<std::unique_ptr<Lent>> streams;

  static Unused& all() {
    static Unused& unused = *new Unused;
    return unused;
  }
};

// A side stream stays in the capture in which it was used, until that ends.
std::unique_ptr<Lent> lend(int device, cudaStream_t stream) {
  int priority;
  check_cuda(cudaStreamGetPriority(stream, &priority), "asking for a stream's priority");
  const unsigned long long capture = Capture::of(stream).number;
  Unused& unused = Unused::all();
  {
    const std::lock_guard lock(unused.mutex);
    const auto fits = [&](const std::unique_ptr<Lent>& lent) {
      if (lent->device != device || lent->priority != priority) return false;
      const unsigned long long its_capture = Capture::of(lent->stream).number;
      return its_capture == 0 || its_capture == capture;
    };
    const auto found = std::find_if(unused.streams.begin(), unused.streams.end(), fits);
    if (found != unused.streams.end()) {
      std::unique_ptr<Lent> lent = std::move(*found);
      unused.streams.erase(found);
      return lent;
    }
  }
  return std::make_unique<Lent>(device, priority);
}

cudaError_t wait_for(cudaStream_t waiting, cudaStream_t other, cudaEvent_t event) {
  const cudaError_t recorded = cudaEventRecord(event, other);
  return recorded != cudaSuccess ? recorded : cudaStreamWaitEvent(waiting, event, 0);
}

}  // namespace

SideStream::SideStream(int device, cudaStream_t stream)
    : stream_(stream), lent_(lend(device, stream)) {
  check_cuda(wait_for(get(), stream_, lent_->forked), "forking a side stream");
}

// Errors are those of a stream that is lost anyway; the exception that ends the call says more.
SideStream::~SideStream() {
  if (!joined_) wait_for(stream_, get(), lent_->joined);
  Unused& unused = Unused::all();
  const std::lock_guard lock(unused.mutex);
  unused.streams.push_back(std::move(lent_));
}

cudaStream_t SideStream::get() const { return lent_->stream; }

void SideStream::join() {
  check_cuda(wait_for(stream_, get(), lent_->joined), "joining a side stream");
  joined_ = true;
}

}  // namespace flashattn3
