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
#include <array>
#include <cstdio>
#include <cstring>
#include <map>
#include <numeric>
#include <utility>

#include "backward_cases.h"
#include "backward_configs.h"
#include "backward_params.h"
#include "launch/backward.cuh"
#include "launch/varlen_arguments.h"
#include "run_grid.h"

// Of the kernels, which declare it.
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
template <size_t kIndex>
constexpr ConfigFunctions functions_of() {
  constexpr backward::Config kConfig = kCheckConfigs[kIndex];
  if constexpr (is_emulated(kConfig)) return {&prepare<kConfig>, &backward_size<kConfig>};
  return {};
}
template <size_t... kIndex>
static std::vector<ConfigFunctions> config_functions(std::index_sequence<kIndex...>) {
  return {functions_of<kIndex>()...};
}
static const std::vector<ConfigFunctions> kFunctions =
    config_functions(std::make_index_sequence<kNumCheckConfigs>());

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

static bool run_in_order(const std::function<void()>& kernel, int num_ctas, int num_threads,
                         uint32_t seed) {
  std::vector<int> order(num_ctas);
  std::iota(order.begin(), order.end(), 0);
  emulation::kernel = kernel;
  return emulation::run_ctas(order, num_threads, seed);
}

// Runs the kernels and sets num_parts. Returns an error message, or "".
static std::string run(BackwardProblem& p, int config, const Turn& turn, uint32_t seed,
                       int& num_parts) {
  const Case& c = p.c;
  const HostMemory memory;
  const int64_t seq = p.q.seq;
  const Strides stride{seq * c.heads_q, 1, seq};
  BackwardParams params = make_params(p,
                                      {p.lse.data(), p.dlse.data(), stride, stride, memory(c.cu_q),
                                       memory(c.cu_k), memory(c.used_q), memory(c.used_k)},
                                      memory);
  std::vector<int32_t> schedule(varlen_schedule_bytes(c.batch) / 4, -1);
  params.forward.varlen_schedule = schedule.data();
  params.forward.num_sms = turn.num_sms;
  std::vector<float> dsinks(p.sinks.size(), NAN);
  params.forward.sinks = memory(p.sinks), params.forward.alibi_slopes = memory(p.slopes);
  params.dsinks = dsinks.empty() ? nullptr : dsinks.data();
  if (p.mask.heads != 0)
    params.lists = p.lists.params(memory), params.turns = memory(p.lists.turns);
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
    if (!run_in_order([args] { varlen::prepare(args); }, num_prepare_ctas(params.forward),
                      varlen::kThreads, seed)) {
      return "deadlock in varlen::prepare";
    }
  }
  if (!run_in_order(launches.preprocess, launches.num_m_blocks, backward::kPreprocessThreads,
                    seed)) {
    return "deadlock in preprocess";
  }
  std::vector<int> order(launches.grid.num_ctas / launches.grid.cluster_size);
  std::iota(order.begin(), order.end(), 0);
  std::mt19937 random(seed);
  std::shuffle(order.begin(), order.end(), random);
  launches.grid.resident = turn.resident;
  emulation::kernel = launches.main;
  if (!emulation::run_grid(launches.grid, order, seed)) return "deadlock";
  if (!run_in_order(launches.postprocess, launches.num_m_blocks, 128, seed)) {
    return "deadlock in postprocess";
  }
  if (params.ds != nullptr || (params.dbias != nullptr && terms == 1 && params.forward.masked())) {
    const auto ctas = num_reduce_bias_ctas(make_reduce_bias_arguments(params));
    run_in_order(launches.reduce_bias, static_cast<int>(ctas), backward::kReduceBiasThreads, seed);
  }
  const auto touched = [](uint8_t x) { return x != 0xff; };
  if (std::any_of(workspace.begin(), workspace.begin() + kGuardBytes, touched) ||
      std::any_of(workspace.end() - kGuardBytes, workspace.end(), touched)) {
    return "written outside the workspace";
  }
  for (size_t h = 0; h < dsinks.size(); ++h) {
    const double off = std::fabs(dsinks[h] - p.reference.dsinks[h]);
    if (!(off <= p.reference.dsinks_bound[h])) return "wrong gradient of a sink";
  }
  return "";
}

// Turns that are alike deterministic must give the same bits: dk and dv where query heads are
// divided alike, for which the number of SMs counts, and dq if they are deterministic.
static bool run_case(const Case& c, int config, uint32_t seed) {
  BackwardProblem p(c);
  Gradient* gradients[] = {&p.reference.dq, &p.reference.dk, &p.reference.dv, &p.reference.dbias};
  std::map<std::array<int, 3>, std::vector<uint16_t>> first;  // (gradient, deterministic, parts)
  bool good = true;
  for (const Turn& turn : kTurns) {
    p.clear_results();
    int num_parts = 0;
    std::string wrong = run(p, config, turn, seed + turn.seed, num_parts);
    double ratio[4] = {};
    for (int i = 0; i < 4 && wrong.empty(); ++i) {
      Gradient& g = *gradients[i];
      if (i > 0 || turn.deterministic) {
        auto& bits = first[{i, turn.deterministic, i > 0 ? num_parts : 0}];
        if (bits.empty()) bits = p.tensor(g).host;
        wrong += difference("other bits", g, p.tensor(g), bits, c.fp16);
      }
      wrong += check_coverage(p, g);
      const Worst worst = compare(p, g);
      ratio[i] = worst.ratio;
      if (worst.wrong > 0) wrong += describe(g, worst);
    }
    good = good && wrong.empty();
    std::printf(
        "%s  %-40s %-28s %-27s in %d parts; of the bounds: dq %.2f dk %.2f dv %.2f dbias %.2f\n",
        wrong.empty() ? "PASS" : "FAIL", c.name.c_str(), kCheckConfigNames[config], turn.name,
        num_parts, ratio[0], ratio[1], ratio[2], ratio[3]);
    if (!wrong.empty()) std::printf("      %s\n", wrong.c_str());
    std::fflush(stdout);
    if (!wrong.empty()) break;
  }
  return good;
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
  int run = 0, failed = 0;
  for (int config = 0; config < kNumCheckConfigs; ++config) {
    const backward::Config& of = kCheckConfigs[config];
    if (!backward::uses_cluster2(of) || !is_emulated(of)) continue;
    if (of.listed) continue;  // lists have no cu_seqlens
    for (const Turn& turn : kTurns) {
      ++run;
      failed += !ends_with_overlapping_sequences(config, turn);
    }
  }
  std::printf("%d cases, %d failed\n", run, failed);
  return failed != 0 || run == 0;
}

int main(int argc, char** argv) {
  if (argc == 2 && !std::strcmp(argv[1], "--overlapping")) return run_overlapping_sequences();
  const char *part = "", *config_part = "";
  int64_t steps = 100;
  uint32_t seed = 0;
  for (int i = 1; i + 1 < argc; i += 2) {
    if (!std::strcmp(argv[i], "--only")) part = argv[i + 1];
    if (!std::strcmp(argv[i], "--config")) config_part = argv[i + 1];
    if (!std::strcmp(argv[i], "--steps")) steps = std::atoi(argv[i + 1]);
    if (!std::strcmp(argv[i], "--seed")) seed = std::atoi(argv[i + 1]);
  }
  int run = 0, failed = 0;
  for (const Case& c : all_cases()) {
    if (c.name.find(part) == std::string::npos) continue;
    for (const int config : configs_of(c)) {
      if (std::strstr(kCheckConfigNames[config], config_part) == nullptr) continue;
      if (num_steps(c, kCheckConfigs[config].head_dim) > steps) continue;
      ++run;
      failed += !run_case(c, config, seed);
    }
  }
  std::printf("%d cases, %d failed\n", run, failed);
  return failed != 0 || run == 0;
}
