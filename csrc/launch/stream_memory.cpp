#include "launch/stream_memory.h"

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "decode/part_memory.h"
#include "launch/capture_mode.h"
#include "launch/decode_params.h"
#include "launch/errors.h"

namespace flashattn3 {
namespace {

// The capture of a stream. number: no other capture of the process has it; 0: there is none.
struct Capture {
  unsigned long long number = 0;
  cudaGraph_t graph = nullptr;

  static Capture of(cudaStream_t stream) {
    Capture capture;
    cudaStreamCaptureStatus status;
#if CUDART_VERSION >= 13000
    const auto ask = &cudaStreamGetCaptureInfo;
    const cudaError_t asked =
        ask(stream, &status, &capture.number, &capture.graph, nullptr, nullptr, nullptr);
#else
    const auto ask = &cudaStreamGetCaptureInfo_v2;
    const cudaError_t asked =
        ask(stream, &status, &capture.number, &capture.graph, nullptr, nullptr);
#endif
    check_cuda(asked, "asking whether the stream is captured");
    return status == cudaStreamCaptureStatusActive ? capture : Capture();
  }
};

// Memory of one kind, for each device, size, stream and capture. An object is never destroyed: a
// graph may outlive all static ones.
class StreamMemory {
 public:
  // Enqueues what makes new memory what a launch expects.
  using Set = void (*)(void* memory, size_t bytes, cudaStream_t stream);

  explicit StreamMemory(Set set) : set_(set) {}
  StreamMemory(const StreamMemory&) = delete;

  void* of(int device, cudaStream_t stream, size_t bytes) {
    const Capture capture = Capture::of(stream);
    const Key key{device, bytes, number_of(stream, capture), capture.number};
    if (void* found = find(key)) return found;
    const std::lock_guard creating(creating_);
    if (void* found = find(key)) return found;
    const RelaxedCaptureMode relaxed;
    void* memory = capture.number == 0 ? allocate(bytes, stream) : of_capture(device, bytes);
    {
      const std::lock_guard lock(mutex_);
      memory_[key] = memory;
    }
    if (capture.number == 0) return memory;
    const size_t allocated = std::max(bytes, kLeastAllocation);
    if (kept_bytes_ + allocated <= kMostKeptBytes) {
      kept_bytes_ += allocated;
    } else {
      return_with(capture.graph, key);
    }
    return memory;
  }

 private:
  // Device, bytes, stream, capture.
  using Key = std::tuple<int, size_t, unsigned long long, unsigned long long>;

  // CUDA reuses the handle of a destroyed stream, whose kernels may still be running, but not its
  // ID. A captured stream tells no ID, and its handle lasts as long as the capture.
  static unsigned long long number_of(cudaStream_t stream, const Capture& capture) {
    if (capture.number != 0) return reinterpret_cast<uintptr_t>(stream);
    unsigned long long number;
    check_cuda(cudaStreamGetId(stream, &number), "asking for the stream's number");
    return number;
  }

  void* find(const Key& key) {
    const std::lock_guard lock(mutex_);
    const auto found = memory_.find(key);
    return found == memory_.end() ? nullptr : found->second;
  }

  void* allocate(size_t bytes, cudaStream_t stream) {
    void* memory = nullptr;
    check_cuda(cudaMalloc(&memory, bytes), "allocating memory of a stream");
    set_(memory, bytes, stream);
    return memory;
  }

  // Returns memory of a graph that is no more, or new memory. A memset of the captured stream would
  // be a node of the graph, 2 us of each replay, so another stream sets new memory.
  void* of_capture(int device, size_t bytes) {
    {
      const std::lock_guard lock(mutex_);
      std::vector<void*>& unused = unused_[{device, bytes}];
      if (!unused.empty()) {
        void* memory = unused.back();
        unused.pop_back();
        return memory;
      }
    }
    cudaStream_t stream;
    check_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "creating a stream");
    const std::unique_ptr<CUstream_st, cudaError_t (*)(cudaStream_t)> owner(stream,
                                                                            &cudaStreamDestroy);
    void* memory = allocate(bytes, stream);
    check_cuda(cudaStreamSynchronize(stream), "waiting for a memset");
    return memory;
  }

  // Lets a later capture have the memory when the graph, and every graph that was instantiated from
  // it, is destroyed and no longer runs.
  void return_with(cudaGraph_t graph, const Key& key) {
    struct Loan {
      StreamMemory& memory;
      Key key;
    };
    const auto end = [](void* data) {
      const std::unique_ptr<Loan> loan(static_cast<Loan*>(data));
      loan->memory.take_back(loan->key);
    };
    auto loan = std::make_unique<Loan>(*this, key);
    cudaUserObject_t object;
    check_cuda(cudaUserObjectCreate(&object, loan.get(), end, 1, cudaUserObjectNoDestructorSync),
               "creating a user object of a graph");
    loan.release();
    check_cuda(cudaGraphRetainUserObject(graph, object, 1, cudaGraphUserObjectMove),
               "giving a graph a user object");
  }

  // Called by a thread of CUDA, which must not call CUDA.
  void take_back(const Key& key) {
    const std::lock_guard lock(mutex_);
    const auto found = memory_.find(key);
    unused_[{std::get<0>(key), std::get<1>(key)}].push_back(found->second);
    memory_.erase(found);
  }

  // A graph with a user object takes 1.6 us longer in each replay (H100), so the first captures
  // keep their memory, up to so many bytes.
  static constexpr size_t kMostKeptBytes = size_t{128} << 20;
  static constexpr size_t kLeastAllocation = 512;  // of cudaMalloc

  const Set set_;
  std::mutex creating_;  // held while CUDA is called, and of kept_bytes_
  size_t kept_bytes_ = 0;
  std::mutex mutex_;  // of what follows
  std::map<Key, void*> memory_;
  std::map<std::pair<int, size_t>, std::vector<void*>> unused_;  // of each device and size
};

void set_to_zero(void* memory, size_t bytes, cudaStream_t stream) {
  check_cuda(cudaMemsetAsync(memory, 0, bytes, stream), "clearing counters");
}

}  // namespace

int32_t* tile_counter(int device, cudaStream_t stream) {
  if (stream == cudaStreamPerThread) return nullptr;
  static StreamMemory& counters = *new StreamMemory(set_to_zero);
  return static_cast<int32_t*>(counters.of(device, stream, 2 * sizeof(int32_t)));
}

uint32_t* partial_counters(int device, cudaStream_t stream, int num_counters) {
  int num_sms;
  check_cuda(cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device),
             "asking for the number of SMs");
  const int most = num_sms * kPartialCountersPerSm;
  if (num_counters > most) {
    const std::string wanted = "at most " + std::to_string(most);
    expect(false, "launch", "the number of counters", wanted, num_counters);
  }
  if (stream == cudaStreamPerThread) return nullptr;
  static StreamMemory& counters = *new StreamMemory(set_to_zero);
  const size_t bytes = most * sizeof(uint32_t);
  return static_cast<uint32_t*>(counters.of(device, stream, bytes));
}

void* part_memory(int device, cudaStream_t stream, int64_t bytes) {
  if (stream == cudaStreamPerThread) return nullptr;
  static StreamMemory& parts = *new StreamMemory(set_part_memory);
  return parts.of(device, stream, static_cast<size_t>(bytes));
}

void set_part_memory(void* memory, size_t bytes, cudaStream_t stream) {
  check_cuda(cudaMemsetAsync(memory, 0xff, bytes, stream), "clearing parts");
  check_cuda(cudaMemsetAsync(memory, 0, sizeof(decode::PartMemory::started), stream),
             "clearing counters");
}

}  // namespace flashattn3
