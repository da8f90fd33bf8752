// Runs the backward kernels on the CPU (emulation/emulation.h) and compares them with fp64: the
// problems of backward_check that are short, with several orders of the CTAs.
//   backward_emulation [--only part of a name] [--config part of a config name] [--steps number]
//                      [--seed number]
//       --steps: runs problems of at most so many steps (64 queries x 64 keys x 64 columns)
//       --seed: of other schedules
//   backward_emulation --overlapping
//       checks that the kernels end where cu_seqlens is wrong: sequences overlap, and have more
//       work tiles than the grid was made for
// Exit code 0: all correct, 1: wrong values, a deadlock, or no case.
#include <cstdio>
#include <cstring>

#include "backward_cases.h"
#include "backward_configs.h"
#include "backward_params.h"
#include "command_line.h"
#include "launch/backward.cuh"
#include "launch/varlen_arguments.h"
#include "run_grid.h"

// The shared memory of the kernels, which declare it.
namespace flashattn3::backward {
alignas(1024) thread_local uint8_t shared[emulation::kSharedBytes];
}
namespace flashattn3::backward::cluster2 {
alignas(1024) thread_local uint8_t shared[emulation::kSharedBytes];
}

using namespace flashattn3;

// The launches of a backward.
struct Launches {
  std::function<void()> preprocess, main, postprocess;
  std::function<void()> reduce_bias;  // if there is one
  emulation::Grid grid;               // of the main kernel
  int num_m_blocks;
  int num_parts;  // of the query heads of a KV head
  uint8_t* shared;
};

template <backward::Config kConfig>
static Launches prepare(const BackwardParams& params) {
  const BackwardSizes sizes = backward_sizes<kConfig>("emulation", params.forward);
  const auto args = make_backward_arguments<kConfig>(sizes, params);
  const backward::PreprocessArguments before = make_preprocess_arguments<kConfig>(sizes, params);
  const int num_ctas = backward_num_ctas<kConfig>(params.forward, sizes.num_tiles);
  const bool cluster = backward::uses_cluster2(kConfig);
  const bool sinks = params.dsinks != nullptr;
  const emulation::Grid grid{num_ctas, backward::num_threads(kConfig), cluster ? 2 : 1, 1,
                             backward::smem_bytes(kConfig)};
  return {[before, sinks] {
            if (sinks) return backward::preprocess_kernel<kConfig.dtype, true>(before);
            backward::preprocess_kernel<kConfig.dtype, false>(before);
          },
          [args] { backward_kernel<kConfig>()(args); },
          [args] { backward::postprocess_kernel<BackwardTraitsOf<kConfig>>(args); },
          [sums = make_reduce_bias_arguments(params)] {
            backward::reduce_bias_kernel<kConfig.dtype>(sums);
          },
          grid,
          static_cast<int>(sizes.num_m_blocks()),
          sizes.num_head_parts,
          cluster ? backward::cluster2::shared : backward::shared};
}

// Configs of float16 and bfloat16 differ in conversions alone: of every two, one is emulated. Large
// scores and sums of query heads overflow float16, which the plain configs have.
constexpr bool is_emulated(const backward::Config& config) {
  const bool is_plain = config.term == ScoreTerm::kNone && !config.listed;
  const bool has_fp16 = config.head_dim >= 128 || (config.head_dim == 64 && is_plain);
  return (config.dtype == ElementType::kFloat16) == has_fp16;
}

struct ConfigFunctions {
  Launches (*prepare)(const BackwardParams&);
  LaunchSize (*size)(const char*, const AttentionProblem&);
};
static const std::vector<ConfigFunctions> kFunctions =
    for_configs<kNumCheckConfigs>([]<size_t kIndex>() -> ConfigFunctions {
      constexpr backward::Config kConfig = kCheckConfigs[kIndex];
      if constexpr (is_emulated(kConfig)) return {&prepare<kConfig>, &backward_size<kConfig>};
      return {};
    });

struct Turn {
  const char* name;
  bool deterministic;
  int num_sms, resident;
  uint32_t seed;
};
constexpr Turn kTurns[] = {{"one cluster after the other", false, 132, 1, 1},
                           {"3 SMs", false, 3, 3, 2},
                           {"deterministic", true, 132, 2, 3},
                           {"deterministic, 3 SMs", true, 3, 3, 4}};

// Runs the kernels and sets num_parts. Returns an error message, or "".
static std::string run(BackwardProblem& p, int config, const Turn& turn, uint32_t seed,
                       int& num_parts) {
  const HostMemory memory;
  BackwardParams params = make_params(p, memory);
  params.forward.num_sms = turn.num_sms;
  params.forward.deterministic = turn.deterministic;
  constexpr int64_t kGuardBytes = 1024;
  const int64_t bytes = kFunctions[config].size("emulation", params.forward).workspace_bytes;
  std::vector<uint8_t> workspace(bytes + 2 * kGuardBytes, 0xff);
  params.workspace = workspace.data() + kGuardBytes;
  const int64_t terms = num_bias_terms(params.forward);
  if (terms == 2) std::memset(params.dbias, 0, bias_gradient_bytes(params));
  Launches launches = kFunctions[config].prepare(params);
  num_parts = launches.num_parts;
  emulation::shared_memory = launches.shared;
  if (params.forward.varlen) {
    const int block_n = backward::block_n(kCheckConfigs[config]);
    const varlen::Arguments args = make_prepare_arguments(params, block_n);
    if (!emulation::run([args] { varlen::prepare(args); },
                        {num_prepare_ctas(params.forward), varlen::kThreads}, seed)) {
      return "deadlock in varlen::prepare";
    }
  }
  const int num_m_blocks = launches.num_m_blocks;
  if (!emulation::run(launches.preprocess, {num_m_blocks, backward::kPreprocessThreads}, seed)) {
    return "deadlock in preprocess";
  }
  launches.grid.resident = turn.resident;
  if (kCheckConfigs[config].listed && turn.deterministic) {
    launches.grid.resident = std::max(turn.resident, backward::kWave);
  }
  if (!emulation::run(launches.main, launches.grid, seed)) return "deadlock";
  if (!emulation::run(launches.postprocess, {num_m_blocks, 128}, seed)) {
    return "deadlock in postprocess";
  }
  if (params.ds != nullptr || (params.dbias != nullptr && terms == 1 && params.forward.masked())) {
    const auto ctas = num_reduce_bias_ctas(make_reduce_bias_arguments(params));
    emulation::run(launches.reduce_bias, {static_cast<int>(ctas), backward::kReduceBiasThreads},
                   seed);
  }
  const auto touched = [](uint8_t x) { return x != 0xff; };
  if (std::any_of(workspace.begin(), workspace.begin() + kGuardBytes, touched) ||
      std::any_of(workspace.end() - kGuardBytes, workspace.end(), touched)) {
    return "written outside the workspace";
  }
  return "";
}

static bool run_case(const Case& c, int config, uint32_t seed) {
  BackwardProblem p(c);
  GradientChecks checks;
  for (const Turn& turn : kTurns) {
    int num_parts = 0;
    std::vector<std::string> wrong{run(p, config, turn, seed + turn.seed, num_parts)};
    if (wrong[0].empty()) wrong = checks.compare(p, turn.deterministic, num_parts);
    std::printf("%s  %-40s %-28s %-27s in %d parts; %s\n", wrong.empty() ? "PASS" : "FAIL",
                c.name.c_str(), kCheckConfigNames[config], turn.name, num_parts,
                checks.bounds().c_str());
    for (const std::string& text : wrong) std::printf("      %s\n", text.c_str());
    std::fflush(stdout);
    if (!wrong.empty()) return false;
  }
  return true;
}

static int64_t num_steps(const Case& c, int head_dim) {
  int64_t steps = 0;
  for (int b = 0; b < c.batch; ++b) {
    steps += int64_t{c.seqlen_q / 64 + 1} * (c.seqlen_k / 64 + 1) * c.heads_q;
  }
  return steps * head_dim / 64;
}

static std::vector<Case> all_cases() {
  std::vector<Case> cases = backward_cases();
  for (const int head_dim : {64, 128, 192, 256}) {
    cases.push_back({.name = "heads of opposite signs, fp16",
                     .fp16 = true,
                     .seqlen_q = 64,
                     .seqlen_k = 16,
                     .heads_q = 4,
                     .head_dim = head_dim,
                     .data = Data::kOpposite});
  }
  cases = with_defaults(cases);
  for (Case& c : cases) c.fp16 = c.fp16 == is_emulated(kCheckConfigs[configs_of(c)[0]]);
  return cases;
}

static bool ends_with_overlapping_sequences(int config, const Turn& turn) {
  const backward::Config& of = kCheckConfigs[config];
  const std::vector<Case> cases = with_defaults({{.name = "overlapping sequences",
                                                  .fp16 = of.dtype == ElementType::kFloat16,
                                                  .batch = 3,
                                                  .seqlen_q = 300,
                                                  .seqlen_k = 300,
                                                  .head_dim = of.head_dim,
                                                  .head_dim_v = of.head_dim_v,
                                                  .slopes = of.term == ScoreTerm::kSlopes,
                                                  .cu_q = {0, 300, 0, 300},
                                                  .cu_k = {0, 300, 0, 300},
                                                  .total_q = 300,
                                                  .total_k = 300}});
  BackwardProblem p(cases[0]);
  int num_parts = 0;
  const std::string wrong = run(p, config, turn, turn.seed, num_parts);
  std::printf("%s  %-28s %s %s\n", wrong.empty() ? "PASS" : "FAIL", kCheckConfigNames[config],
              turn.name, wrong.c_str());
  std::fflush(stdout);
  return wrong.empty();
}

static int run_overlapping_sequences() {
  Tally tally;
  for (int config = 0; config < kNumCheckConfigs; ++config) {
    const backward::Config& of = kCheckConfigs[config];
    if (!backward::uses_cluster2(of) || !is_emulated(of)) continue;
    if (of.listed) continue;  // lists have no cu_seqlens
    for (const Turn& turn : kTurns) tally.add(ends_with_overlapping_sequences(config, turn));
  }
  return tally.finish();
}

int main(int argc, char** argv) {
  const CommandLine given(argc, argv);
  if (given.has("--overlapping")) return run_overlapping_sequences();
  const int steps = given.number("--steps", 100), seed = given.number("--seed");
  Tally tally;
  for (const Case& c : all_cases()) {
    if (!has_part(c.name, given.text("--only"))) continue;
    for (const int config : configs_of(c)) {
      if (!has_part(kCheckConfigNames[config], given.text("--config"))) continue;
      if (num_steps(c, kCheckConfigs[config].head_dim) > steps) continue;
      tally.add(run_case(c, config, seed));
    }
  }
  return tally.finish();
}
