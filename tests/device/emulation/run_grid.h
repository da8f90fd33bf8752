// Runs a kernel's CTAs on the CPU (emulation.h).
#pragma once

#include <numeric>

#include "emulation.h"

namespace emulation {

inline std::function<void()> kernel;
// Called, if set, when a cluster starts (true) and before a CTA goes on (false).
inline std::function<void(bool starts)> disturb;

inline void run_fiber() {
  kernel();
  const Fiber& fiber = self();
  if (!fiber.wgmmas.empty() || !fiber.copies.empty() || !fiber.copy_groups.empty() ||
      !fiber.reads.empty() || !fiber.writes.empty()) {
    std::printf("thread %d ended with a GEMM or a copy in flight\n", running->thread);
    std::abort();
  }
  self().done = true;
  ++warp_of_self().num_done;
  ++progress;
  yield();
}

struct Grid {
  int num_ctas, num_threads;
  int cluster_size = 1;
  int resident = 1;  // clusters that run at a time
  int shared_bytes = kSharedBytes;
};

inline void start_cta(Cta& cta, int block, const Grid& grid, uint32_t seed) {
  const int num_threads = grid.num_threads;
  cta.block = {static_cast<unsigned>(block), 0, 0};
  cta.grid = {static_cast<unsigned>(grid.num_ctas), 1, 1};
  cta.num_threads = num_threads;
  cta.fibers.resize(num_threads);
  cta.warps.assign(num_threads / 32, {});
  cta.barriers.clear();
  cta.in_flight.clear();
  cta.free_registers = 0;
  cta.random.seed(cta.seed = seed);
  cta.slow_warp = static_cast<int>(cta.random() % (num_threads / 32));
  cta.memory.assign(grid.shared_bytes, 0xff);
  int number = 0;
  for (Fiber& fiber : cta.fibers) {
    if (fiber.stack == nullptr) {
      fiber.stack = std::make_unique_for_overwrite<char[]>(kStackBytes);
    }
    fiber.done = false;
    fiber.wait = {};
    // At different offsets in a page: the tops of all stacks would share a few lines of the cache.
    start_with(fiber.context, run_fiber, fiber.stack.get(), kStackBytes - number++ % 61 * 64);
  }
}

enum class State { kDone, kStuck, kRuns };

// Lets each lane of a warp that does not wait run until it does. One that need not wait any more
// goes on in the next round: if warps ran further, those that read a buffer would always be faster
// than the copy that overwrites it too early.
inline void run_warp(Cta& cta, int number) {
  const Warp& warp = cta.warps[number];
  for (cta.thread = number * 32; cta.thread < number * 32 + 32; ++cta.thread) {
    Fiber& fiber = self();
    if (fiber.done || fiber.paused_in == cta.round || !fiber.wait.is_over()) continue;
    fiber.wait.word = nullptr;
    exchange(scheduler, fiber.context);
    if (warp.sleeps_until >= cta.round) return;
  }
}

// Lets each warp of the running CTA run. Returns kStuck if nothing has happened and no warp sleeps.
inline State run_round() {
  Cta& cta = *running;
  const int num_warps = cta.num_threads / 32;
  const uint64_t before = progress;
  ++cta.round;
  bool any = false, sleeps = false;
  const int first = static_cast<int>(cta.random() % num_warps);
  const int step = cta.random() % 2 ? 1 : num_warps - 1;
  for (int i = 0; i < num_warps; ++i) {
    const int number = (first + i * step) % num_warps;
    Warp& warp = cta.warps[number];
    if (warp.num_done == 32) continue;
    any = true;
    const uint32_t seldom = number == cta.slow_warp ? 4 : 32;
    if (warp.sleeps_until < cta.round && cta.random() % seldom == 0) {
      warp.sleeps_until = cta.round + random_delay(cta.random);
    }
    if (warp.sleeps_until < cta.round) run_warp(cta, number);
    sleeps |= warp.sleeps_until >= cta.round;
  }
  if (!any) return State::kDone;
  const size_t in_flight = cta.in_flight.size();
  for (size_t i = 0; i < cta.in_flight.size();) {
    if (cta.in_flight[i].round > cta.round) {
      ++i;
      continue;
    }
    cta.in_flight[i].complete();
    cta.in_flight.erase(cta.in_flight.begin() + i);
  }
  return progress != before || sleeps || in_flight > 0 ? State::kRuns : State::kStuck;
}

inline void print_waits(const Cta& cta) {
  std::printf("CTA %u of %u cannot go on:\n", cta.block.x, cta.grid.x);
  for (int i = 0; i < cta.num_threads; ++i) {
    const Fiber& fiber = cta.fibers[i];
    const bool first = i % 32 == 0 || fiber.waits_for != cta.fibers[i - 1].waits_for;
    if (!fiber.done && first) {
      std::printf("  thread %d waits for %s at %u\n", i, fiber.waits_for, fiber.address);
    }
  }
}

// Runs all CTAs to their end; clusters start in a random order. Returns false, after a list of the
// waits, if none of the resident CTAs can go on.
inline bool run(std::function<void()> of_thread, const Grid& grid, uint32_t seed) {
  static std::vector<std::unique_ptr<Cta>> unused;  // with their stacks
  std::vector<std::unique_ptr<Cta>> resident;
  std::map<uint32_t, Cluster> clusters;
  std::mt19937 random(seed);
  kernel = std::move(of_thread);
  std::vector<int> order(grid.num_ctas / grid.cluster_size);
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), random);
  std::memset(shared_memory, 0xff, kSharedBytes);
  const auto copy = [&](uint8_t* to, const uint8_t* from) {
    std::memcpy(to, from, grid.shared_bytes);
  };
  size_t next = 0;
  int stuck = 0;
  running = nullptr;
  while (true) {
    while (next < order.size() &&
           resident.size() < static_cast<size_t>(grid.resident * grid.cluster_size)) {
      if (disturb) disturb(true);
      Cluster& cluster = clusters[order[next]];
      for (int rank = 0; rank < grid.cluster_size; ++rank) {
        if (unused.empty()) unused.push_back(std::make_unique<Cta>());
        resident.push_back(std::move(unused.back()));
        unused.pop_back();
        Cta& cta = *resident.back();
        const int block = order[next] * grid.cluster_size + rank;
        start_cta(cta, block, grid, seed + block);
        cta.cluster = &cluster, cta.rank = rank;
        cluster.ctas.push_back(&cta);
      }
      ++next;
    }
    if (resident.empty()) return true;
    const size_t i = resident.size() == 1 ? 0 : random() % resident.size();
    if (running != resident[i].get()) {
      if (running != nullptr) copy(running->memory.data(), shared_memory);
      running = resident[i].get();
      copy(shared_memory, running->memory.data());
    }
    if (disturb) disturb(false);
    State state = State::kRuns;
    const uint64_t before = progress;
    for (int rounds = resident.size() == 1 ? 1000 : 1 + random() % 20;
         rounds > 0 && state == State::kRuns; --rounds) {
      state = run_round();
    }
    if (state == State::kDone) {
      running->cluster->ctas[running->rank] = nullptr;
      running = nullptr;
      unused.push_back(std::move(resident[i]));
      resident.erase(resident.begin() + i);
    }
    stuck = progress == before && state != State::kDone ? stuck + 1 : 0;
    // By then each CTA has almost certainly had many turns.
    if (stuck <= 40 * static_cast<int>(resident.size() * resident.size())) continue;
    for (const auto& cta : resident) print_waits(*cta);
    return false;
  }
}

}  // namespace emulation
