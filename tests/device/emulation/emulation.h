// Runs a kernel's source on the CPU: each thread of a CTA as a fiber. Some CTAs are resident at a
// time and take turns; all CTAs of a cluster are. A wait that can never end is reported instead of
// hanging. Warps run in a random order and sleep at times, so that a missing wait shows as wrong
// values.
//
// The headers in this folder shadow those of csrc that contain PTX: barriers, copies, WGMMA. They
// behave as the PTX ISA allows at worst: copies complete late and leave NaN behind until then, and
// a WGMMA reads shared memory only when its thread waits for it.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <array>
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

#include "context.h"

using std::max;
using std::min;

inline float __uint_as_float(uint32_t bits) { return std::bit_cast<float>(bits); }
inline uint32_t __float_as_uint(float x) { return std::bit_cast<uint32_t>(x); }
inline int __float_as_int(float x) { return std::bit_cast<int>(x); }
inline float __int_as_float(int x) { return std::bit_cast<float>(x); }
using std::isnan;
inline float __log2f(float x) { return std::log2(x); }
inline float __fmul_rn(float x, float y) { return x * y; }

#define __launch_bounds__(...)
#undef __cluster_dims__
#define __cluster_dims__(...)
#undef __shared__
#define __shared__ thread_local  // one variable for all fibers
#undef __grid_constant__
#define __grid_constant__

namespace emulation {

constexpr int kStackBytes = 256 << 10;
constexpr int kSharedBytes = 232448;
// A GPU's NaN has one value, whatever NaN it comes from.
const float kCanonicalNan = __uint_as_float(0x7fffffffu);

// Threads that wait for each other.
struct Rendezvous {
  int arrived = 0;
  uint32_t generation = 0;
};

// A thread waits until the masked bits of a word differ from a value.
struct Wait {
  const uint32_t* word = nullptr;  // null: it does not wait
  uint32_t mask = 0, value = 0;

  bool is_over() const { return word == nullptr || (*word & mask) != value; }
};

struct Fiber;

// A WGMMA instruction of a thread. Those of a warp's lanes have the same operands in shared memory.
struct Wgmma {
  void (*run)(Fiber* lanes, size_t index);
  uint32_t group;
  bool accumulates;
  float* d;
  uint64_t a, b;                  // descriptors
  std::array<uint32_t, 4> words;  // of A in registers
};

// A copy to shared memory by a thread, of zeros if it reads nothing.
struct Copy {
  uint8_t* to;
  const void* from;
  size_t bytes;

  void complete() const {
    if (from != nullptr) {
      std::memcpy(to, from, bytes);
    } else {
      std::memset(to, 0, bytes);
    }
  }
};

struct Fiber {
  Context context;
  std::unique_ptr<char[]> stack;
  bool done = false;
  Wait wait;
  uint64_t paused_in = 0;  // round in which it does not go on
  const char* waits_for = "";
  uint32_t address = 0;                        // of an mbarrier
  std::vector<Wgmma> wgmmas;                   // not yet waited for
  uint32_t num_groups = 0;                     // of WGMMAs, committed
  std::vector<Copy> copies;                    // issued, not yet tied to a barrier
  std::vector<std::vector<Copy>> copy_groups;  // committed, not yet waited for
  // Bulk copies to global memory: that have not read shared memory; that have not written.
  std::vector<std::function<void()>> reads, writes;
  uint32_t cluster_generation = 0;  // of its last arrival at the cluster's barrier
};

struct Warp {
  Rendezvous shuffle;
  uint64_t slot[2][32];
  int num_done = 0;           // lanes
  uint64_t sleeps_until = 0;  // round
};

// Copies that complete together in some round.
struct CopyGroup {
  std::function<void()> complete;
  uint64_t round;
};

struct Cta;

// The CTAs of a cluster.
struct Cluster {
  std::vector<Cta*> ctas;
  Rendezvous barrier;
};

// While a CTA does not run, `memory` holds its shared memory.
struct Cta {
  uint3 block{}, grid{1, 1, 1};
  int num_threads = 0, thread = 0;
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  std::map<int, Rendezvous> barriers;  // named barriers; 0: __syncthreads
  std::vector<CopyGroup> in_flight;
  uint64_t round = 0;
  uint32_t seed = 0;
  std::mt19937 random;
  int free_registers = 0;  // given back by all threads since the launch
  int vote = 0;            // __syncthreads_or
  int slow_warp = 0;       // sleeps more often than others
  Cluster* cluster = nullptr;
  uint32_t rank = 0;  // in the cluster
  std::vector<uint8_t> memory;
};
inline Cta* running;
inline uint64_t progress = 0;  // of all resident CTAs
inline Context scheduler;
inline uint8_t* shared_memory;  // kSharedBytes, at a multiple of 1024; of the CTA that runs

inline Fiber& self() { return running->fibers[running->thread]; }

// Lets other threads run.
inline void yield() { exchange(self().context, scheduler); }
// Lets the other warps run, too.
inline void pause(const char* what) {
  self().waits_for = what;
  self().paused_in = running->round;
  yield();
}

// A thread has as many registers at the launch as if its CTA had the SM alone. It waits for more
// until others have given back enough; they do not at their end.
inline void change_registers(int registers) {
  const int more = registers - 65536 / running->num_threads / 8 * 8;
  while (running->free_registers < more) pause("registers");
  running->free_registers -= more;
  ++progress;
}

// Shared memory is NaN until the copy is complete.
inline void start_copy(uint32_t to, const void* from, size_t bytes) {
  std::memset(shared_memory + to, 0xff, bytes);
  self().copies.push_back({shared_memory + to, from, bytes});
}

inline void wait_for(const Wait& wait, const char* what, uint32_t address = 0) {
  if (wait.is_over()) return;
  Fiber& fiber = self();
  fiber.waits_for = what, fiber.address = address;
  fiber.wait = wait;
  yield();
}

// The last thread to come does the work first.
template <class Work>
void meet(Rendezvous& at, int count, const char* what, Work work) {
  const uint32_t generation = at.generation;
  if (++at.arrived == count) {
    work();
    at.arrived = 0, ++at.generation, ++progress;
  } else {
    wait_for({&at.generation, ~0u, generation}, what);
  }
}
inline void meet(Rendezvous& at, int count, const char* what) {
  meet(at, count, what, [] {});
}

inline Warp& warp_of_self() { return running->warps[running->thread / 32]; }

// Lets the last lane to come do the work of the warp, of which `mine` is the calling lane's.
template <class Lane, class Work>
void meet_warp(Lane& mine, Work work) {
  Warp& warp = warp_of_self();
  uint64_t (&slot)[32] = warp.slot[warp.shuffle.generation % 2];
  slot[running->thread % 32] = reinterpret_cast<uint64_t>(&mine);
  meet(warp.shuffle, 32, "shuffle or __syncwarp",
       [&] { work([&](int lane) -> Lane& { return *reinterpret_cast<Lane*>(slot[lane]); }); });
}
inline void meet_warp() { meet(warp_of_self().shuffle, 32, "shuffle or __syncwarp"); }

// Returns the value of the lane that `source` gives for the calling one.
template <class Value>
Value shuffle(Value value, int source) {
  static_assert(sizeof(Value) <= 8);
  Warp& warp = warp_of_self();
  uint64_t (&slot)[32] = warp.slot[warp.shuffle.generation % 2];
  std::memcpy(&slot[running->thread % 32], &value, sizeof(value));
  meet(warp.shuffle, 32, "shuffle or __syncwarp");
  std::memcpy(&value, &slot[source], sizeof(value));
  return value;
}

// Returns the values of all lanes, until the warp's next shuffle but one.
inline const uint64_t (&of_warp(uint64_t value))[32] {
  Warp& warp = warp_of_self();
  uint64_t (&slot)[32] = warp.slot[warp.shuffle.generation % 2];
  slot[running->thread % 32] = value;
  meet(warp.shuffle, 32, "shuffle or __syncwarp");
  return slot;
}

// Rounds that something takes: mostly few, sometimes many.
template <class Random>
uint64_t random_delay(Random&& random) {
  return random() % (random() % 4 == 0 ? 200 : 4);
}

// The calling warp sometimes sleeps here.
inline void linger() {
  Warp& warp = warp_of_self();
  meet(warp.shuffle, 32, "shuffle or __syncwarp", [&] {
    if (running->random() % 8 != 0) return;
    warp.sleeps_until = running->round + random_delay(running->random);
  });
  if (warp.sleeps_until >= running->round) yield();
}

// A CTA of the running CTA's cluster, and its shared memory.
inline Cta& cta_of_rank(uint32_t rank) {
  Cta* const cta = running->cluster->ctas[rank];
  if (cta == nullptr) {
    std::printf("access to CTA %u of the cluster, which has ended\n", rank);
    std::abort();
  }
  return *cta;
}
inline uint8_t* memory_of(uint32_t rank) {
  return rank == running->rank ? shared_memory : cta_of_rank(rank).memory.data();
}

// The cluster's barrier.
inline void arrive_at_cluster() {
  Rendezvous& barrier = running->cluster->barrier;
  self().cluster_generation = barrier.generation;
  if (++barrier.arrived < running->num_threads * static_cast<int>(running->cluster->ctas.size())) {
    return;
  }
  barrier.arrived = 0, ++barrier.generation, ++progress;
}
inline void wait_for_cluster() {
  const Rendezvous& barrier = running->cluster->barrier;
  const uint32_t generation = self().cluster_generation;
  wait_for({&barrier.generation, ~0u, generation}, "cluster barrier");
}

}  // namespace emulation

#define threadIdx (uint3{static_cast<unsigned>(emulation::running->thread), 0, 0})
#define blockIdx emulation::running->block
// No macro: a member of another type has this name.
inline struct {
  struct X {
    operator unsigned() const { return emulation::running->grid.x; }
  } x;
} gridDim;

inline void __syncthreads() {
  emulation::meet(emulation::running->barriers[0], emulation::running->num_threads,
                  "__syncthreads");
}
inline int __syncthreads_or(int condition) {
  emulation::Cta& cta = *emulation::running;
  cta.vote |= condition;
  __syncthreads();
  const int any = cta.vote;
  __syncthreads();
  cta.vote = 0;
  __syncthreads();
  return any;
}
inline void __syncwarp() { emulation::meet_warp(); }
template <class Value>
Value __shfl_sync(uint32_t, Value value, int lane) {
  return emulation::shuffle(value, lane);
}
template <class Value>
Value __shfl_xor_sync(uint32_t, Value value, int mask) {
  return emulation::shuffle(value, emulation::running->thread % 32 ^ mask);
}
template <class Value>
Value __shfl_up_sync(uint32_t, Value value, int distance) {
  const int lane = emulation::running->thread % 32;
  return emulation::shuffle(value, lane < distance ? lane : lane - distance);
}
inline uint32_t __ballot_sync(uint32_t, bool condition) {
  uint32_t bits = 0;
  const uint64_t (&conditions)[32] = emulation::of_warp(condition);
  for (int lane = 0; lane < 32; ++lane) bits |= static_cast<uint32_t>(conditions[lane]) << lane;
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
  for (const uint64_t x : emulation::of_warp(value)) sum += static_cast<int>(x);
  return sum;
}
inline int __reduce_max_sync(uint32_t, int value) {
  int most = value;
  for (const uint64_t x : emulation::of_warp(value)) most = max(most, static_cast<int>(x));
  return most;
}
// CTAs run one after the other.
inline int atomicAdd(int* at, int value) { return std::exchange(*at, *at + value); }
inline int atomicMax(int* at, int value) { return std::exchange(*at, std::max(*at, value)); }
inline unsigned atomicMin(unsigned* at, unsigned value) {
  return std::exchange(*at, std::min(*at, value));
}
inline unsigned atomicOr(unsigned* at, unsigned bits) { return std::exchange(*at, *at | bits); }
inline int atomicExch(int* at, int value) { return std::exchange(*at, value); }
inline void __threadfence() {}
template <class Value>
Value __ldcg(const Value* at) {
  return *at;
}
template <class Value>
Value __ldg(const Value* at) {
  return *at;
}
template <class Value>
Value __ldcs(const Value* at) {
  return *at;
}
inline int __popc(uint32_t bits) { return std::popcount(bits); }
inline int __ffs(uint32_t bits) { return bits == 0 ? 0 : std::countr_zero(bits) + 1; }
inline uint32_t __byte_perm(uint32_t x, uint32_t y, uint32_t selector) {
  const uint64_t bytes = uint64_t{y} << 32 | x;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) {
    result |= static_cast<uint32_t>(bytes >> (selector >> 4 * i & 7) * 8 & 0xff) << 8 * i;
  }
  return result;
}
inline void __nanosleep(unsigned) { emulation::pause("__nanosleep"); }
