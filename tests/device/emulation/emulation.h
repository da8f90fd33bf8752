// Runs a kernel's source on the CPU: one CTA at a time, each of its threads as a fiber. A wait that
// can never end is reported instead of hanging. Warps run in a random order and sleep at times, so
// that a missing wait shows as wrong values.
//
// The headers in this folder shadow those of csrc that contain PTX: barriers, copies, WGMMA. They
// behave as the PTX ISA allows at worst: copies complete late and leave NaN behind until then, and
// a WGMMA reads shared memory only when its thread waits for it.
#pragma once

#include <cuda_runtime.h>
#include <ucontext.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <utility>
#include <vector>

using std::max;
using std::min;

inline float __uint_as_float(uint32_t bits) { return std::bit_cast<float>(bits); }
inline uint32_t __float_as_uint(float x) { return std::bit_cast<uint32_t>(x); }
inline int __float_as_int(float x) { return std::bit_cast<int>(x); }
inline float __log2f(float x) { return std::log2(x); }

#define __launch_bounds__(...)
#undef __grid_constant__
#define __grid_constant__

namespace emulation {

constexpr int kStackBytes = 256 << 10;
constexpr int kSharedBytes = 232448;

// Threads that wait for each other.
struct Rendezvous {
  int arrived = 0;
  uint32_t generation = 0;
};

struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  bool done = false;
  // What a waiting thread waits for, and whether that has come; null: it does not wait.
  const char* waits_for = "";
  uint32_t address = 0;  // of an mbarrier
  bool (*has_come)(void* condition) = nullptr;
  void* condition = nullptr;
  std::vector<std::function<void()>> gemms;   // started, not yet waited for
  std::vector<std::function<void()>> copies;  // issued, not yet tied to a barrier
};

struct Warp {
  Rendezvous shuffle;
  uint64_t slot[2][32];
  uint64_t sleeps_until = 0;  // round
};

// Copies that complete together in some round.
struct CopyGroup {
  std::function<void()> complete;
  uint64_t round;
};

// The CTA that runs.
struct Cta {
  uint3 block{}, grid{1, 1, 1};
  int num_threads = 0, thread = 0;
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  std::map<int, Rendezvous> barriers;  // named barriers; 0: __syncthreads
  std::vector<CopyGroup> in_flight;
  ucontext_t scheduler;
  uint64_t progress = 0, round = 0;
  uint32_t seed = 0;
  std::mt19937 random;
};
inline Cta cta;
inline uint8_t* shared_memory;  // kSharedBytes, at a multiple of 1024

inline Fiber& self() { return cta.fibers[cta.thread]; }

inline void yield() { swapcontext(&self().context, &cta.scheduler); }

template <class Condition>
void wait_until(Condition condition, const char* what, uint32_t address = 0) {
  if (condition()) return;
  Fiber& fiber = self();
  fiber.waits_for = what, fiber.address = address;
  fiber.condition = &condition;
  fiber.has_come = [](void* at) { return (*static_cast<Condition*>(at))(); };
  yield();
  fiber.has_come = nullptr;
}

inline void meet(Rendezvous& at, int count, const char* what) {
  const uint32_t generation = at.generation;
  if (++at.arrived == count) {
    at.arrived = 0, ++at.generation, ++cta.progress;
  } else {
    wait_until([&] { return at.generation != generation; }, what);
  }
}

// Returns the value of the lane that `source` gives for the calling one.
template <class Value>
Value shuffle(Value value, int source) {
  static_assert(sizeof(Value) <= 8);
  Warp& warp = cta.warps[cta.thread / 32];
  uint64_t (&slot)[32] = warp.slot[warp.shuffle.generation % 2];
  std::memcpy(&slot[cta.thread % 32], &value, sizeof(value));
  meet(warp.shuffle, 32, "shuffle or __syncwarp");
  std::memcpy(&value, &slot[source], sizeof(value));
  return value;
}

inline void meet_warp() { shuffle(0, 0); }

// Rounds that something takes: mostly few, sometimes many.
template <class Random>
uint64_t random_delay(Random&& random) {
  return random() % (random() % 4 == 0 ? 200 : 4);
}

inline std::function<void()> kernel;

inline void run_fiber() {
  kernel();
  if (!self().gemms.empty() || !self().copies.empty()) {
    std::printf("thread %d ended with a GEMM or a copy in flight\n", cta.thread);
    std::abort();
  }
  self().done = true;
  ++cta.progress;
  yield();
}

// Runs one CTA to its end. Returns false, after a list of the waits, if none of its threads can go
// on.
inline bool run_cta(int block, int grid, int num_threads, uint32_t seed) {
  cta.block = {static_cast<unsigned>(block), 0, 0};
  cta.grid = {static_cast<unsigned>(grid), 1, 1};
  cta.num_threads = num_threads;
  cta.fibers.resize(num_threads);
  cta.warps.assign(num_threads / 32, {});
  cta.barriers.clear();
  cta.in_flight.clear();
  cta.random.seed(cta.seed = seed);
  std::memset(shared_memory, 0xff, kSharedBytes);
  for (Fiber& fiber : cta.fibers) {
    if (fiber.stack == nullptr) fiber.stack = std::make_unique<char[]>(kStackBytes);
    fiber.done = false;
    fiber.has_come = nullptr;
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.uc_stack.ss_size = kStackBytes;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, run_fiber, 0);
  }
  const int num_warps = num_threads / 32;
  while (true) {
    const uint64_t before = cta.progress;
    ++cta.round;
    bool any = false, sleeps = false;
    const int first = static_cast<int>(cta.random() % num_warps);
    const int step = cta.random() % 2 ? 1 : num_warps - 1;
    for (int i = 0; i < num_warps; ++i) {
      const int warp = (first + i * step) % num_warps;
      uint64_t& sleeps_until = cta.warps[warp].sleeps_until;
      if (sleeps_until < cta.round && cta.random() % 32 == 0) {
        sleeps_until = cta.round + random_delay(cta.random);
      }
      if (sleeps_until >= cta.round) {
        any = sleeps = true;
        continue;
      }
      for (int lane = 0; lane < 32; ++lane) {
        cta.thread = warp * 32 + lane;
        const Fiber& fiber = self();
        if (fiber.done) continue;
        any = true;
        if (fiber.has_come != nullptr && !fiber.has_come(fiber.condition)) continue;
        swapcontext(&cta.scheduler, &self().context);
      }
    }
    if (!any) return true;
    const size_t in_flight = cta.in_flight.size();
    for (size_t i = 0; i < cta.in_flight.size();) {
      if (cta.in_flight[i].round > cta.round) {
        ++i;
        continue;
      }
      cta.in_flight[i].complete();
      cta.in_flight.erase(cta.in_flight.begin() + i);
    }
    if (cta.progress != before || sleeps || in_flight > 0) continue;
    std::printf("CTA %d of %d cannot go on:\n", block, grid);
    for (int i = 0; i < num_threads; i += 32) {
      cta.thread = i;
      if (self().done) {
        std::printf("  thread %d has ended\n", i);
      } else {
        std::printf("  thread %d waits for %s at %u\n", i, self().waits_for, self().address);
      }
    }
    return false;
  }
}

}  // namespace emulation

#define threadIdx (uint3{static_cast<unsigned>(emulation::cta.thread), 0, 0})
#define blockIdx emulation::cta.block
inline const uint3& gridDim = emulation::cta.grid;  // no macro: a member of another type

inline void __syncthreads() {
  emulation::meet(emulation::cta.barriers[0], emulation::cta.num_threads, "__syncthreads");
}
inline void __syncwarp() { emulation::meet_warp(); }
template <class Value>
Value __shfl_sync(uint32_t, Value value, int lane) {
  return emulation::shuffle(value, lane);
}
template <class Value>
Value __shfl_xor_sync(uint32_t, Value value, int mask) {
  return emulation::shuffle(value, emulation::cta.thread % 32 ^ mask);
}
template <class Value>
Value __shfl_up_sync(uint32_t, Value value, int distance) {
  const int lane = emulation::cta.thread % 32;
  return emulation::shuffle(value, lane < distance ? lane : lane - distance);
}
inline uint32_t __ballot_sync(uint32_t, bool condition) {
  uint32_t bits = 0;
  for (int lane = 0; lane < 32; ++lane) {
    bits |= static_cast<uint32_t>(emulation::shuffle(condition, lane)) << lane;
  }
  return bits;
}
inline bool __any_sync(uint32_t mask, bool condition) {
  return __ballot_sync(mask, condition) != 0;
}
inline bool __all_sync(uint32_t mask, bool condition) {
  return __ballot_sync(mask, condition) == ~0u;
}
inline int __vimax3_s32(int a, int b, int c) { return max(max(a, b), c); }
inline int __reduce_add_sync(uint32_t, int value) {
  int sum = 0;
  for (int lane = 0; lane < 32; ++lane) sum += emulation::shuffle(value, lane);
  return sum;
}
// CTAs run one after the other.
inline int atomicAdd(int* at, int value) { return std::exchange(*at, *at + value); }
inline int atomicExch(int* at, int value) { return std::exchange(*at, value); }
inline void __threadfence() {}
template <class Value>
Value __ldcg(const Value* at) {
  return *at;
}
