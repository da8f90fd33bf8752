// Runs the kernels with spans (split_tokens) on the CPU (emulation/emulation.h): cached calls on
// the decode kernel and on the cached forward kernel of a dtype, which must give every row the same
// bits, within the bounds of fp64.
//   span_emulation [--only part of a name]
//   span_emulation --random count [first]
//       random problems instead, with seeds from `first` on
// Exit code 0: all correct, 1: wrong values, other bits, a deadlock, or no case.
#include <cstdio>
#include <utility>

#include "command_line.h"
#include "decode/kernel.cuh"
#include "forward_cached_cases.h"
#include "launch/byte_arguments.h"
#include "launch/forward_cached.cuh"
#include "launch/varlen_arguments.h"
#include "run_grid.h"
#include "span_emulation_configs.h"

namespace flashattn3 {
namespace decode {
alignas(1024) thread_local uint8_t shared[emulation::kSharedBytes];  // of the kernels
}
namespace forward {
alignas(1024) thread_local uint8_t shared[emulation::kSharedBytes];
}
}  // namespace flashattn3

using namespace flashattn3;

struct Turn {
  const char* name;
  bool decodes;
  int num_sms;
  bool whole_tiles;
  uint32_t seed;
  int num_resident = 1;  // CTAs of a decode kernel that run at a time
};

template <decode::Config kConfig>
static std::string run_decode(DecodeParams params, const Turn& turn) {
  const DecodeGrid grid = DecodeGrid::of(params, kConfig);
  std::vector<uint8_t> workspace(grid.workspace_bytes(params.head_dim_v), 0x7f);
  static decode::Counters counters{};
  params.workspace = workspace.data(), params.counters = &counters;
  check_decode("decode", kConfig, params);
  const decode::Arguments args = arguments_of<kConfig>(params, grid);
  const auto kernel = [&] { decode::decode_kernel<decode::KernelTraits<kConfig>>(args); };
  emulation::shared_memory = decode::shared;
  return emulation::run(kernel,
                        {grid.num_ctas, decode::num_threads(kConfig), 1, turn.num_resident,
                         decode::smem_bytes(kConfig)},
                        turn.seed)
             ? ""
             : "deadlock;";
}

template <forward::Config kConfig>
static std::string run_forward(DecodeParams params, const Turn& turn) {
  std::vector<int32_t> schedule(varlen_schedule_bytes(params.batch) / 4, -1);
  params.workspace = schedule.data();
  check_cached_forward<kConfig>("forward", params);
  const ForwardParams forward = forward_params_of(params);
  const forward::CachedArguments args = make_cached_arguments<kConfig>(params, forward);
  emulation::shared_memory = forward::shared;
  if (forward.varlen) {
    const varlen::Arguments before =
        make_prepare_arguments(forward, forward_tile_shape<kConfig>(forward), 0, nullptr);
    if (!emulation::run([&] { varlen::prepare(before); },
                        {num_prepare_ctas(forward), varlen::kThreads}, turn.seed)) {
      return "deadlock in varlen::prepare;";
    }
  }
  const emulation::Grid grid{num_persistent_ctas(forward, args.scheduler.num_tiles),
                             forward::num_threads(kConfig)};
  return emulation::run([&] { forward::attention_kernel<forward::RolesOf<kConfig>>(args); }, grid,
                        turn.seed)
             ? ""
             : "deadlock;";
}

constexpr Turn kTurns[] = {{"decode, 132 SMs", true, 132, false, 1, 132},
                           {"decode, 5 CTAs at a time", true, 132, false, 7, 5},
                           {"decode, 3 SMs", true, 3, false, 2},
                           {"decode, whole tiles", true, 132, true, 3},
                           {"forward, 132 SMs", false, 132, false, 4},
                           {"forward, 3 SMs", false, 3, false, 5},
                           {"forward, 1 SM", false, 1, false, 6}};

using Run = std::string (*)(DecodeParams, const Turn&);
struct Runs {
  Run decode, forward;
};
// Configs of float16 and bfloat16 differ in conversions alone: of every two, one is emulated, the
// one that decode_emulation has not.
constexpr bool is_emulated(const forward::Config& config) {
  return (config.dtype == ElementType::kFloat16) == (config.head_dim == 128);
}
template <size_t kIndex>
constexpr Runs runs_of() {
  constexpr forward::Config kConfig = kForwardConfigs[kIndex];
  if constexpr (is_emulated(kConfig))
    return {&run_decode<kDecodeConfigs[kIndex]>, &run_forward<kConfig>};
  return {};
}
template <size_t... kIndex>
static std::vector<Runs> all_runs(std::index_sequence<kIndex...>) {
  return {runs_of<kIndex>()...};
}
static const std::vector<Runs> kRuns = all_runs(std::make_index_sequence<kNumSpanConfigs>());

// Index of the kernels of a case; -1: there are none.
static int config_of(const DecodeCase& c) {
  const auto fits = [&](const forward::Config& config) {
    return (config.dtype == ElementType::kFloat16) == c.fp16 &&
           config.head_dim >= std::max(c.head_dim, c.head_dim_v);
  };
  const auto* found = std::find_if(std::begin(kForwardConfigs), std::end(kForwardConfigs), fits);
  return found == std::end(kForwardConfigs) ? -1 : static_cast<int>(found - kForwardConfigs);
}

static bool run_case(DecodeCase c) {
  c.fp16 = c.fp16 == is_emulated(kForwardConfigs[config_of(c)]);
  DecodeProblem problem(c);
  const std::vector<DecodeRow> rows = reference_rows(problem);
  FirstResults first;
  for (const Turn& turn : kTurns) {
    std::fill(problem.out.host.begin(), problem.out.host.end(), kNaN);
    std::fill(problem.lse.begin(), problem.lse.end(), NAN);
    ByteDecodeParams params = make_params(problem, HostMemory(), problem.lse.data());
    params.num_sms = turn.num_sms, params.whole_tiles = turn.whole_tiles;
    const Runs& run = kRuns[config_of(c)];
    std::string wrong = (turn.decodes ? run.decode : run.forward)(params, turn);
    if (!turn.decodes || c.cu_q.empty()) wrong += stray_elements(problem);
    wrong += first.compare(problem);
    char launch[80];
    std::snprintf(launch, sizeof(launch), "%-44s %-20s", c.name.c_str(), turn.name);
    if (!report(launch, wrong, compare(problem, rows))) return false;
  }
  return true;
}

// Gives a case spans and sinks; whether it has kernels and is short.
static bool make_span_case(DecodeCase& c, uint32_t seed) {
  std::mt19937 random(seed);
  c.tree = false;
  c.spans = 128 * (1 + static_cast<int>(random() % 4));
  c.sinks = random() % 3 == 0;
  int64_t blocks = 0;
  for (int b = 0; b < c.batch; ++b) {
    const int keys = c.seqlens.empty() ? c.capacity : std::clamp(c.seqlens[b], 0, c.capacity);
    blocks += keys / 64 + 1;
  }
  return config_of(c) >= 0 && blocks * c.heads_q * ((c.seqlen_q + 191) / 192) <= 200;
}

int main(int argc, char** argv) {
  std::vector<DecodeCase> cases;
  const CommandLine given(argc, argv);
  if (given.has("--random")) {
    const int first = given.number("--random", 0, 2);
    for (int i = first; i < first + given.number("--random"); ++i) {
      DecodeCase c = random_cached_case(i);
      if (make_span_case(c, i)) cases.push_back(c);
    }
  } else {
    const char* part = given.text("--only");
    uint32_t seed = 0;
    for (DecodeCase c : cached_cases()) {
      if (make_span_case(c, ++seed) && c.name.find(part) != std::string::npos) cases.push_back(c);
    }
  }
  int failed = 0;
  for (const DecodeCase& c : cases) failed += !run_case(c);
  std::printf("%zu cases, %d failed\n", cases.size(), failed);
  return failed != 0 || cases.empty();
}
