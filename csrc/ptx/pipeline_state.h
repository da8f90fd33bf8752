// The state of one side of a pipeline: the current buffer and its phase.
#pragma once

#include <cstdint>

namespace flashattn3 {

// State of a pipeline of kStages buffers: the index of a buffer, and the phase to wait for. A
// consumer waits with it at the full barrier and starts with phase 0, which waits for data; a
// producer waits at the empty barrier and starts with phase 1, as all buffers are free.
template <int kStages>
class PipelineState {
 public:
  __device__ __forceinline__ explicit PipelineState(uint32_t first_phase)
      : index_(0), phase_(first_phase) {}

  __device__ __forceinline__ uint32_t index() const { return index_; }
  __device__ __forceinline__ uint32_t phase() const { return phase_; }
  __device__ __forceinline__ PipelineState next() const {
    PipelineState position = *this;
    position.advance();
    return position;
  }
  __device__ __forceinline__ void advance() {
    const bool wraps = index_ == kStages - 1;
    index_ = wraps ? 0 : index_ + 1;
    phase_ ^= wraps;
  }
  // Returns the state `steps` steps ago; at most kStages.
  __device__ __forceinline__ PipelineState before(uint32_t steps) const {
    PipelineState position = *this;
    const bool wraps = index_ < steps;
    position.index_ += (wraps ? kStages : 0) - steps;
    position.phase_ ^= wraps;
    return position;
  }

 private:
  uint32_t index_;
  uint32_t phase_;
};

// If kStages is a power of 2, one register that counts the steps holds both index and phase.
template <int kStages>
  requires((kStages & (kStages - 1)) == 0)
class PipelineState<kStages> {
 public:
  __device__ __forceinline__ explicit PipelineState(uint32_t first_phase)
      : uses_(first_phase * kStages) {}
  // Returns a consumer's state after so many steps, so that pipelines can share one counter.
  __device__ __forceinline__ static PipelineState after_steps(uint32_t steps) {
    PipelineState state(0);
    state.uses_ = steps;
    return state;
  }

  __device__ __forceinline__ uint32_t index() const { return uses_ % kStages; }
  __device__ __forceinline__ uint32_t phase() const { return uses_ / kStages % 2; }
  __device__ __forceinline__ PipelineState next() const {
    PipelineState position = *this;
    position.advance();
    return position;
  }
  __device__ __forceinline__ void advance() { ++uses_; }
  __device__ __forceinline__ PipelineState before(uint32_t steps) const {
    PipelineState position = *this;
    position.uses_ -= steps;
    return position;
  }

 private:
  uint32_t uses_;
};

}  // namespace flashattn3
