#include "launch/stream_counters.h"

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "launch/capture_mode.h"
#include "launch/errors.h"

namespace flashattn3 {

using decode::Counters;

// The counters of a device. An object is never destroyed: a graph may outlive all static ones.
class StreamCounters::Pool {
 public:
  static Pool& of(int device) {
    static std::mutex mutex;
    static auto& pools = *new std::map<int, Pool*>;
    const std::lock_guard lock(mutex);
    Pool*& pool = pools[device];
    if (pool == nullptr) pool = new Pool;
    return *pool;
  }

  // Begins a launch.
  Counters* begin(cudaStream_t stream) {
    const Capture capture = Capture::of(stream);
    const Owner owner{capture.number, number_of(stream, capture)};
    while (true) {
      if (Counters* counters = begin(owner)) return counters;
      create(owner, capture);
    }
  }
  void end() {
    const std::lock_guard lock(mutex_);
    --num_launching_;
  }

 private:
  // Capture, stream.
  using Owner = std::pair<unsigned long long, unsigned long long>;

  // CUDA reuses the handle of a destroyed stream, whose kernels may still be running, but not its
  // ID. A captured stream tells no ID, and its handle lasts as long as the capture.
  static unsigned long long number_of(cudaStream_t stream, const Capture& capture) {
    if (capture.number != 0) return reinterpret_cast<uintptr_t>(stream);
    unsigned long long number;
    check_cuda(cudaStreamGetId(stream, &number), "asking for the stream's number");
    return number;
  }

  Counters* begin(const Owner& owner) {
    const std::lock_guard lock(mutex_);
    const auto found = counters_.find(owner);
    if (found == counters_.end()) return nullptr;
    ++num_launching_, ++num_launches_;
    return found->second;
  }

  void create(const Owner& owner, const Capture& capture) {
    const std::lock_guard creating(creating_);
    {
      const std::lock_guard lock(mutex_);
      if (counters_.contains(owner)) return;
    }
    const RelaxedCaptureMode relaxed;
    if (capture.number == 0 && num_streams_ >= kMostStreams) take_back_from_streams();
    Counters* counters = take_unused();
    if (counters == nullptr) {
      allocate();
      counters = take_unused();
    }
    {
      const std::lock_guard lock(mutex_);
      counters_[owner] = counters;
    }
    if (capture.number == 0) {
      ++num_streams_;
    } else if (num_kept_ < kMostKept) {
      ++num_kept_;
    } else {
      return_with(capture.graph, owner);
    }
  }

  Counters* take_unused() {
    const std::lock_guard lock(mutex_);
    if (unused_.empty()) return nullptr;
    Counters* counters = unused_.back();
    unused_.pop_back();
    return counters;
  }

  // A stream may be captured, so another one sets new memory. A memset in a capture would be a node
  // of the graph, 2 us of each replay.
  void allocate() {
    Counters* counters;
    constexpr size_t kBytes = kAllocated * sizeof(Counters);
    check_cuda(cudaMalloc(&counters, kBytes), "allocating counters");
    cudaStream_t stream;
    check_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "creating a stream");
    const std::unique_ptr<CUstream_st, cudaError_t (*)(cudaStream_t)> owner(stream,
                                                                            &cudaStreamDestroy);
    check_cuda(cudaMemsetAsync(counters, 0, kBytes, stream), "clearing counters");
    check_cuda(cudaStreamSynchronize(stream), "waiting for a memset");
    const std::lock_guard lock(mutex_);
    for (int i = 0; i < kAllocated; ++i) unused_.push_back(counters + i);
  }

  // Takes back the counters of all streams, since it is unknown which streams there still are; not
  // if a launch, perhaps of this thread, is on its way meanwhile, nor if the wait fails, as during
  // a capture: the next new stream tries again.
  void take_back_from_streams() {
    uint64_t before;
    {
      const std::lock_guard lock(mutex_);
      if (num_launching_ > 0) return;
      before = num_launches_;
    }
    if (cudaDeviceSynchronize() != cudaSuccess) {
      cudaGetLastError();  // the next launch reports an error of a kernel
      return;
    }
    const std::lock_guard lock(mutex_);
    if (num_launches_ != before) return;
    for (auto it = counters_.begin(); it != counters_.end() && it->first.first == 0;) {
      unused_.push_back(it->second);
      it = counters_.erase(it);
    }
    num_streams_ = 0;
  }

  // Lets a later owner have the counters when the graph, and every graph that was instantiated from
  // it, is destroyed and no longer runs.
  void return_with(cudaGraph_t graph, const Owner& owner) {
    struct Loan {
      Pool& pool;
      Owner owner;
    };
    const auto end = [](void* data) {
      const std::unique_ptr<Loan> loan(static_cast<Loan*>(data));
      loan->pool.take_back(loan->owner);
    };
    auto loan = std::make_unique<Loan>(*this, owner);
    cudaUserObject_t object;
    check_cuda(cudaUserObjectCreate(&object, loan.get(), end, 1, cudaUserObjectNoDestructorSync),
               "creating a user object of a graph");
    loan.release();
    check_cuda(cudaGraphRetainUserObject(graph, object, 1, cudaGraphUserObjectMove),
               "giving a graph a user object");
  }

  // Called by a thread of CUDA, which must not call CUDA.
  void take_back(const Owner& owner) {
    const std::lock_guard lock(mutex_);
    const auto found = counters_.find(owner);
    unused_.push_back(found->second);
    counters_.erase(found);
  }

  static constexpr int kMostStreams = 256, kMostKept = 256;
  static constexpr int kAllocated = 64;  // at a time, 0.4 MB

  std::mutex creating_;  // held while CUDA is called; of num_streams_ and num_kept_
  int num_streams_ = 0, num_kept_ = 0;
  std::mutex mutex_;                     // of what follows
  int num_launching_ = 0;                // that have begun and not ended
  uint64_t num_launches_ = 0;            // that have begun
  std::map<Owner, Counters*> counters_;  // streams come before captures
  std::vector<Counters*> unused_;
};

StreamCounters::StreamCounters(int device, cudaStream_t stream) {
  if (stream == cudaStreamPerThread) return;
  pool_ = &Pool::of(device);
  counters_ = pool_->begin(stream);
}

StreamCounters::~StreamCounters() {
  if (pool_ != nullptr) pool_->end();
}

}  // namespace flashattn3
