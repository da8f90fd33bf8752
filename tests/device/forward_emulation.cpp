// Runs the cached forward kernels, and those whose mask is lists, on the CPU
// (emulation/emulation.h) and compares them with fp64: the problems of forward_check, with and
// without --cached, that are short, on few and on many CTAs, one after the other.
//   forward_emulation [--only part of a name]
//   forward_emulation --random count [first]
//       random problems instead, with seeds from `first` on
// Exit code 0: all correct, 1: wrong values, a deadlock, or no case.
#include <cstdio>
#include <utility>

#include "command_line.h"
#include "forward_cached_cases.h"
#include "forward_cases.h"
#include "forward_configs.h"
#include "forward_params.h"
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

// Configs of float16 and bfloat16 differ in conversions alone: of every two, one is emulated.
// Those of spans are in span_emulation.
constexpr bool is_emulated(const forward::Config& config) {
  const bool is_fp16 = config.dtype == ElementType::kFloat16;
  return !config.spans && is_fp16 == (config.head_dim != (config.listed ? 192 : 128));
}

template <forward::Config kConfig>
static Launch prepare_listed(const ForwardParams& params) {
  if constexpr (kConfig.listed && !is_quantized(kConfig.dtype) && is_emulated(kConfig)) {
    const auto args = make_forward_arguments<kConfig>(params);
    return {num_persistent_ctas(params, args.scheduler.num_tiles),
            forward::num_threads(kConfig),
            [args] { forward::attention_kernel<forward::RolesOf<kConfig>>(args); },
            0,
            {}};
  } else {
    return {};
  }
}

template <forward::Config kConfig>
static Launch prepare(const char* name, const DecodeParams& params) {
  if constexpr (kConfig.cached && is_emulated(kConfig)) {
    check_cached_forward<kConfig>(name, params);
    const ForwardParams forward = forward_params_of(params);
    const auto args = make_cached_arguments<kConfig>(params, forward);
    const varlen::Arguments before =
        make_prepare_arguments(forward, forward_tile_shape<kConfig>(forward), 0, nullptr);
    return {num_persistent_ctas(forward, args.scheduler.num_tiles), forward::num_threads(kConfig),
            [args] { forward::attention_kernel<forward::RolesOf<kConfig>>(args); },
            forward.varlen ? num_prepare_ctas(forward) : 0, [before] { varlen::prepare(before); }};
  } else {
    return {};
  }
}

struct Prepare {
  Launch (*cached)(const char*, const DecodeParams&);
  Launch (*listed)(const ForwardParams&);
};
template <size_t... kIndex>
static std::vector<Prepare> prepares(std::index_sequence<kIndex...>) {
  return {{&prepare<kCheckConfigs[kIndex]>, &prepare_listed<kCheckConfigs[kIndex]>}...};
}
static const std::vector<Prepare> kPrepare = prepares(std::make_index_sequence<kNumCheckConfigs>());

struct Turn {
  const char* name;
  int num_sms;
  bool counted;
  uint32_t seed;
};
constexpr Turn kTurns[] = {{"counted", 132, true, 1},
                           {"fixed order", 132, false, 2},
                           {"3 SMs", 3, false, 3},
                           {"1 SM, counted", 1, true, 4}};

static Launch prepare_turn(DecodeProblem& problem, int config, const Turn& turn,
                           decode::Counters& counters, std::vector<int32_t>& schedule) {
  DecodeParams params = make_params(problem, HostMemory(), problem.lse.data());
  schedule.assign(varlen_schedule_bytes(params.batch) / 4, -1);
  params.num_sms = turn.num_sms, params.workspace = schedule.data();
  params.counters = turn.counted ? &counters : nullptr;
  return kPrepare[config].cached(kCheckConfigNames[config], params);
}

static Launch prepare_turn(Problem& problem, int config, const Turn& turn,
                           decode::Counters& counters, std::vector<int32_t>&) {
  const HostMemory memory;
  ForwardParams params = make_params(problem, problem.lse.data(), memory);
  params.num_sms = turn.num_sms;
  params.tile_counter = turn.counted ? counters.tile : nullptr;
  return kPrepare[config].listed(params);
}

// Runs the CTAs of one call one after the other. Returns an error message, or "".
template <class AnyProblem>
static std::string run(AnyProblem& problem, int config, const Turn& turn) {
  std::fill(problem.out.host.begin(), problem.out.host.end(), kNaN);
  std::fill(problem.lse.begin(), problem.lse.end(), NAN);
  decode::Counters counters{};
  std::vector<int32_t> schedule;
  const Launch launch = prepare_turn(problem, config, turn, counters, schedule);
  if (launch.num_prepare_ctas > 0 &&
      !emulation::run(launch.varlen_prepare, {launch.num_prepare_ctas, varlen::kThreads},
                      turn.seed)) {
    return "deadlock in varlen::prepare";
  }
  if (!emulation::run(launch.kernel, {launch.num_ctas, launch.num_threads}, turn.seed)) {
    return "deadlock";
  }
  if (counters.tile[0] != 0 || counters.tile[1] != 0) return "the tile counter was not put back";
  return "";
}

static bool run_case(DecodeCase c) {
  const auto config_of = [&] {
    return cached_config(c.fp16, std::max(c.head_dim, c.head_dim_v), c.tree);
  };
  c.fp16 = c.fp16 == is_emulated(kCheckConfigs[config_of()]);
  const int config = config_of();
  DecodeProblem problem(c);
  const std::vector<DecodeRow> rows = reference_rows(problem);
  FirstResults first;
  for (const Turn& turn : kTurns) {
    std::string wrong = run(problem, config, turn);
    wrong += stray_elements(problem) + first.compare(problem);
    char launch[80];
    std::snprintf(launch, sizeof(launch), "%-44s %-14s", c.name.c_str(), turn.name);
    if (!report(launch, wrong, compare(problem, rows))) return false;
  }
  return true;
}

// Returns whether all kernel configs of the case's smallest sufficient head dim are right, with the
// same bits in every turn.
static bool run_listed_case(Case c) {
  c.fp16 = c.fp16 == is_emulated(kCheckConfigs[listed_configs(c)[0]]);
  Problem problem(c);
  const std::vector<Fp64Reference> references = compute_fp64_references(problem);
  for (const int config : listed_configs(c)) {
    std::vector<uint16_t> first;
    for (const Turn& turn : kTurns) {
      std::string wrong = run(problem, config, turn);
      if (first.empty()) first = problem.out.host;
      if (wrong.empty() && first != problem.out.host) wrong = "other bits";
      if (wrong.empty()) wrong = check_coverage(problem);
      const Worst worst = compare(problem, references);
      const bool good = wrong.empty() && worst.ratio <= 1;
      std::printf("%s  %-44s %-14s worst %.3f of the bound\n", good ? "PASS" : "FAIL",
                  c.name.c_str(), turn.name, worst.ratio);
      if (!good) {
        std::printf("      %s; %s\n", kCheckConfigNames[config],
                    (wrong.empty() ? worst.describe() : wrong).c_str());
        return false;
      }
    }
  }
  return true;
}

// Problems of more blocks of 64 keys and a work tile take seconds: one takes about 10 milliseconds.
constexpr int64_t kMostBlocks = 400;

static int64_t num_blocks(const Case& c) {
  const int64_t tiles = int64_t{c.batch} * c.heads_q * ((c.seqlen_q + 127) / 128);
  return tiles * (c.seqlen_k / 64 + 1) * c.head_dim / 64;
}

static bool is_short(const DecodeCase& c) {
  int64_t blocks = 0;
  for (int b = 0; b < c.batch; ++b) {
    const int keys = c.seqlens.empty() ? c.capacity : std::clamp(c.seqlens[b], 0, c.capacity);
    blocks += keys / 64 + 1;
  }
  return blocks * c.heads_q * ((c.seqlen_q + 191) / 192) * c.head_dim / 64 <= kMostBlocks;
}

int main(int argc, char** argv) {
  std::vector<DecodeCase> cases;
  std::vector<Case> listed;
  const CommandLine given(argc, argv);
  if (given.has("--random")) {
    for (int i = 0; i < given.number("--random"); ++i) {
      const DecodeCase c = random_cached_case(given.number("--random", 0, 2) + i);
      if (is_short(c)) cases.push_back(c);
    }
  } else {
    const char* part = given.text("--only");
    for (const DecodeCase& c : cached_cases()) {
      if (c.name.find(part) != std::string::npos && is_short(c)) cases.push_back(c);
    }
    for (const Case& c : forward_cases()) {
      if (c.lists_heads == 0 || c.name.find(part) == std::string::npos) continue;
      if (num_blocks(c) <= kMostBlocks) listed.push_back(c);
    }
  }
  emulation::shared_memory = forward::shared;
  int failed = 0;
  for (const DecodeCase& c : cases) failed += !run_case(c);
  for (const Case& c : listed) failed += !run_listed_case(c);
  const size_t run = cases.size() + listed.size();
  std::printf("%zu cases, %d failed\n", run, failed);
  return failed != 0 || run == 0;
}
