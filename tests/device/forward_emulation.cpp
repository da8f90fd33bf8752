// Runs the cached forward kernels on the CPU (emulation/emulation.h) and compares them with fp64:
// the problems of forward_check --cached that are short, on few and on many CTAs, one after the
// other.
//   forward_emulation [--only part of a name]
//   forward_emulation --random count [first]
//       random problems instead, with seeds from `first` on
// Exit code 0: all correct, 1: wrong values, a deadlock, or no case.
#include <cstdio>
#include <cstring>
#include <numeric>
#include <utility>

#include "forward_cached_cases.h"
#include "forward_configs.h"
#include "launch/forward_cached.cuh"
#include "launch/varlen_arguments.h"
#include "run_grid.h"

namespace flashattn3::forward {
alignas(
    1024) thread_local uint8_t shared[emulation::kSharedBytes];  // of the kernel, which declares it
}  // namespace flashattn3::forward

using namespace flashattn3;

// CTAs of a launch, and how to run one.
struct Launch {
  int num_ctas, num_threads;
  std::function<void()> kernel;
  int num_prepare_ctas;  // 0: not varlen
  std::function<void()> varlen_prepare;
};

template <forward::Config kConfig>
static Launch prepare(const char* name, const DecodeParams& params) {
  if constexpr (kConfig.cached) {
    check_cached_forward<kConfig>(name, params);
    const ForwardParams forward = forward_params_of(params);
    const forward::CachedArguments args = make_cached_arguments<kConfig>(params, forward);
    const varlen::Arguments before =
        make_prepare_arguments(forward, forward_tile_shape<kConfig>(forward), 0, nullptr);
    return {num_persistent_ctas(forward, args.scheduler.num_tiles), forward::num_threads(kConfig),
            [args] { forward::attention_kernel<forward::RolesOf<kConfig>>(args); },
            forward.varlen ? num_prepare_ctas(forward) : 0, [before] { varlen::prepare(before); }};
  } else {
    return {};
  }
}

using Prepare = Launch (*)(const char*, const DecodeParams&);
template <size_t... kIndex>
static std::vector<Prepare> prepares(std::index_sequence<kIndex...>) {
  return {&prepare<kCheckConfigs[kIndex]>...};
}
static const std::vector<Prepare> kPrepare = prepares(std::make_index_sequence<kNumCheckConfigs>());

struct Turn {
  const char* name;
  int num_sms;
  bool counted;
  uint32_t seed;
};

static bool run_in_order(const std::function<void()>& kernel, std::vector<int> order,
                         int num_threads, uint32_t seed) {
  emulation::kernel = kernel;
  return emulation::run_ctas(order, num_threads, seed);
}

// Runs the CTAs of one call one after the other. Returns an error message, or "".
static std::string run(DecodeProblem& problem, int config, const Turn& turn) {
  DecodeParams params = make_params(problem, HostMemory(), problem.lse.data());
  std::vector<int32_t> schedule(varlen_schedule_bytes(params.batch) / 4, -1);
  decode::Counters counters{};
  params.num_sms = turn.num_sms, params.workspace = schedule.data();
  params.counters = turn.counted ? &counters : nullptr;
  const Launch launch = kPrepare[config](kCheckConfigNames[config], params);
  std::mt19937 random(turn.seed);
  const auto shuffled = [&](int count) {
    std::vector<int> order(count);
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), random);
    return order;
  };
  if (launch.num_prepare_ctas > 0 &&
      !run_in_order(launch.varlen_prepare, shuffled(launch.num_prepare_ctas), varlen::kThreads,
                    turn.seed)) {
    return "deadlock in varlen::prepare";
  }
  if (!run_in_order(launch.kernel, shuffled(launch.num_ctas), launch.num_threads, turn.seed)) {
    return "deadlock";
  }
  if (counters.tile[0] != 0 || counters.tile[1] != 0) return "the tile counter was not put back";
  return "";
}

static bool run_case(const DecodeCase& c) {
  const Turn turns[] = {{"counted", 132, true, 1},
                        {"fixed order", 132, false, 2},
                        {"3 SMs", 3, false, 3},
                        {"1 SM, counted", 1, true, 4}};
  DecodeProblem problem(c);
  const int config = cached_config(c.fp16, std::max(c.head_dim, c.head_dim_v));
  const std::vector<DecodeRow> rows = reference_rows(problem);
  FirstResults first;
  for (const Turn& turn : turns) {
    std::fill(problem.out.host.begin(), problem.out.host.end(), kNaN);
    std::fill(problem.lse.begin(), problem.lse.end(), NAN);
    std::string wrong = run(problem, config, turn);
    wrong += stray_elements(problem) + first.compare(problem);
    char launch[80];
    std::snprintf(launch, sizeof(launch), "%-44s %-14s", c.name.c_str(), turn.name);
    if (!report(launch, wrong, compare(problem, rows))) return false;
  }
  return true;
}

// Whether a problem takes seconds: a KV block of a work tile takes about 10 milliseconds.
static bool is_short(const DecodeCase& c) {
  int64_t blocks = 0;
  for (int b = 0; b < c.batch; ++b) {
    const int keys = c.seqlens.empty() ? c.capacity : std::clamp(c.seqlens[b], 0, c.capacity);
    blocks += keys / 64 + 1;
  }
  return blocks * c.heads_q * ((c.seqlen_q + 191) / 192) * c.head_dim / 64 <= 400;
}

int main(int argc, char** argv) {
  std::vector<DecodeCase> cases;
  if (argc >= 3 && !std::strcmp(argv[1], "--random")) {
    const int first = argc > 3 ? std::atoi(argv[3]) : 0;
    for (int i = first; i < first + std::atoi(argv[2]); ++i) {
      const DecodeCase c = random_cached_case(i);
      if (is_short(c)) cases.push_back(c);
    }
  } else {
    const char* part = argc == 3 && !std::strcmp(argv[1], "--only") ? argv[2] : "";
    for (const DecodeCase& c : cached_cases()) {
      if (c.name.find(part) != std::string::npos && is_short(c)) cases.push_back(c);
    }
  }
  emulation::shared_memory = forward::shared;
  int failed = 0;
  for (const DecodeCase& c : cases) failed += !run_case(c);
  std::printf("%zu cases, %d failed\n", cases.size(), failed);
  return failed != 0 || cases.empty();
}
