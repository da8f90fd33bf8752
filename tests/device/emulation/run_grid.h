// Runs a kernel's CTAs on the CPU (emulation.h).
#pragma once

#include "emulation.h"

namespace emulation {

inline std::function<void()> kernel;
// Called, if set, when a cluster starts (true) and before a CTA goes on (false).
inline std::function<void(bool starts)> disturb;

inline void run_fiber() {
  kernel();
  if (!self().wgmmas.empty() || !self().gemms.empty() || !self().copies.empty() ||
      !self().copy_groups.empty() || !self().reads.empty() || !self().writes.empty()) {
    std::printf("thread %d ended with a GEMM or a copy in flight\n", running->thread);
    std::abort();
  }
  self().done = true;
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
  cta.random.seed(cta.seed = seed);
  cta.slow_warp = static_cast<int>(cta.random() % (num_threads / 32));
  cta.memory.assign(grid.shared_bytes, 0xff);
  for (Fiber& fiber : cta.fibers) {
    if (fiber.stack == nullptr) {
      fiber.stack = std::make_unique_for_overwrite<char[]>(kStackBytes);
    }
    fiber.done = fiber.started = false;
    fiber.has_come = nullptr;
    getcontext(&fiber.start);
    fiber.start.uc_stack.ss_sp = fiber.stack.get();
    fiber.start.uc_stack.ss_size = kStackBytes;
    fiber.start.uc_link = nullptr;
    makecontext(&fiber.start, run_fiber, 0);
  }
}

enum class State { kDone, kStuck, kRuns };

// Lets each warp of the running CTA run until its threads wait or end. Returns kStuck if nothing
// has happened and no warp sleeps.
inline State run_round() {
  Cta& cta = *running;
  const int num_warps = cta.num_threads / 32;
  const uint64_t before = progress;
  ++cta.round;
  bool any = false, sleeps = false;
  const int first = static_cast<int>(cta.random() % num_warps);
  const int step = cta.random() % 2 ? 1 : num_warps - 1;
  for (int i = 0; i < num_warps; ++i) {
    const int warp = (first + i * step) % num_warps;
    const auto fibers = cta.fibers.begin() + warp * 32;
    if (std::all_of(fibers, fibers + 32, [](const Fiber& fiber) { return fiber.done; })) continue;
    uint64_t& sleeps_until = cta.warps[warp].sleeps_until;
    const uint32_t seldom = warp == cta.slow_warp ? 4 : 32;
    if (sleeps_until < cta.round && cta.random() % seldom == 0) {
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
      resume();
    }
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

inline void print_waits() {
  std::printf("CTA %u of %u cannot go on:\n", running->block.x, running->grid.x);
  for (int i = 0; i < running->num_threads; ++i) {
    running->thread = i;
    const bool first = i % 32 == 0 || self().waits_for != running->fibers[i - 1].waits_for;
    if (!self().done && first) {
      std::printf("  thread %d waits for %s at %u\n", i, self().waits_for, self().address);
    }
  }
}

// Runs all CTAs to their end; clusters start in this order. Returns false, after a list of the
// waits, if none of the resident CTAs can go on.
inline bool run_grid(const Grid& grid, const std::vector<int>& order, uint32_t seed) {
  static std::vector<std::unique_ptr<Cta>> unused;  // with their stacks
  std::vector<std::unique_ptr<Cta>> resident;
  std::map<uint32_t, Cluster> clusters;
  std::mt19937 random(seed);
  std::memset(shared_memory, 0xff, kSharedBytes);
  size_t next = 0;
  int stuck = 0;
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
    running = resident[i].get();
    if (disturb) disturb(false);
    std::memcpy(shared_memory, running->memory.data(), running->memory.size());
    State state = State::kRuns;
    const uint64_t before = progress;
    for (int rounds = resident.size() == 1 ? 1000 : 1 + random() % 20;
         rounds > 0 && state == State::kRuns; --rounds) {
      state = run_round();
    }
    std::memcpy(running->memory.data(), shared_memory, running->memory.size());
    if (state == State::kDone) {
      running->cluster->ctas[running->rank] = nullptr;
      unused.push_back(std::move(resident[i]));
      resident.erase(resident.begin() + i);
    }
    stuck = progress == before && state != State::kDone ? stuck + 1 : 0;
    // By then each CTA has almost certainly had many turns.
    if (stuck <= 40 * static_cast<int>(resident.size() * resident.size())) continue;
    for (const auto& cta : resident) {
      running = cta.get();
      std::memcpy(shared_memory, running->memory.data(), running->memory.size());
      print_waits();
    }
    return false;
  }
}

// Runs the CTAs one after the other, without clusters.
inline bool run_ctas(const std::vector<int>& order, int num_threads, uint32_t seed) {
  return run_grid({static_cast<int>(order.size()), num_threads}, order, seed);
}

}  // namespace emulation
