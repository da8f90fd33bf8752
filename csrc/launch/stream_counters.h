// Device memory that the launches of a stream share: counters, 5.5 KB. All else that a launch needs
// is a workspace, which torch allocates.
#pragma once

#include <cuda_runtime.h>

#include "decode/counters.h"

namespace flashattn3 {

// The counters of a device and stream, for one launch: no other stream gets them while the object
// lives, which is until the launch is enqueued. They are set once; each launch leaves them as it
// found them, or as if they were.
//
// Up to 256 streams of a device have counters. The next one waits until the device is idle, and all
// are taken back; a stream that goes on then gets others. So streams may come and go.
//
// A captured stream gets counters of the capture: its launches run one after the other in every
// replay, and no other graph has these counters. The first 256 captures keep them until the process
// ends. Those of a further one serve later captures when the graph, and all that were instantiated
// from it, are destroyed; a replay of such a graph takes 1.6 us longer (H100).
class StreamCounters {
 public:
  // The stream's device must be the current one.
  StreamCounters(int device, cudaStream_t stream);
  ~StreamCounters();
  StreamCounters(const StreamCounters&) = delete;

  // Null for cudaStreamPerThread, which names the streams of many threads.
  decode::Counters* get() const { return counters_; }

 private:
  class Pool;
  Pool* pool_ = nullptr;
  decode::Counters* counters_ = nullptr;
};

}  // namespace flashattn3
