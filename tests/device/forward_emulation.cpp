// Runs the cached forward kernels, and those whose mask is lists, on the CPU
// (emulation/emulation.h) and compares them with fp64: the problems of forward_check, with and
// without --cached, that are short, on few and on many CTAs, one after the other.
//   forward_emulation [--spans] [--only part of a name]
//       --spans: of the cached problems with spans (split_tokens), which the decode kernels then
//       compute too: every row must get the same bits
//   forward_emulation [--spans] --random count [--from seed]
//       random cached problems instead
// Exit code 0: all correct, 1: wrong values, a deadlock, or no case.
#include <cstdio>

#include "command_line.h"
#include "decode/kernel.cuh"
#include "decode_check_configs.h"
#include "forward_cached_cases.h"
#include "forward_cases.h"
#include "forward_configs.h"
#include "forward_params.h"
#include "launch/byte_arguments.h"
#include "launch/forward_cached.cuh"
#include "launch/varlen_arguments.h"
#include "run_grid.h"

// The shared memory of the kernels, which declare it.
namespace flashattn3::forward {
alignas(1024) thread_local uint8_t shared[emulation::kSharedBytes];
}
namespace flashattn3::decode {
alignas(1024) thread_local uint8_t shared[emulation::kSharedBytes];
}

using namespace flashattn3;

// How to run a launch. memory: of its workspace.
struct Launch {
  emulation::Grid grid;
  std::function<void()> kernel;
  int num_prepare_ctas = 0;  // 0: not varlen
  std::function<void()> varlen_prepare = {};
  uint8_t* shared = forward::shared;
};
using Memory = std::vector<uint8_t>;

// Configs of float16 and bfloat16 differ in conversions alone: of every two, one is emulated; of
// those with spans the one that decode_emulation has not.
constexpr bool is_emulated(const forward::Config& config) {
  const bool is_fp16 = config.dtype == ElementType::kFloat16;
  if (config.spans) return is_fp16 == (config.head_dim == 128);
  return is_fp16 == (config.head_dim != (config.listed ? 192 : 128));
}

template <forward::Config kConfig>
static Launch prepare_listed(const ForwardParams& params) {
  const auto args = make_forward_arguments<kConfig>(params);
  return {{num_persistent_ctas(params, args.scheduler.num_tiles), forward::num_threads(kConfig)},
          [args] { forward::attention_kernel<forward::RolesOf<kConfig>>(args); }};
}

template <forward::Config kConfig>
static Launch prepare_cached(DecodeParams params, Memory& memory) {
  memory.assign(cached_forward_size<kConfig>("cached forward", params).workspace_bytes, 0xff);
  params.workspace = memory.data();
  const ForwardParams forward = forward_params_of(params);
  const auto args = make_cached_arguments<kConfig>(params, forward);
  const varlen::Arguments before =
      make_prepare_arguments(forward, forward_tile_shape<kConfig>(forward), 0, nullptr);
  return {{num_persistent_ctas(forward, args.scheduler.num_tiles), forward::num_threads(kConfig)},
          [args] { forward::attention_kernel<forward::RolesOf<kConfig>>(args); },
          forward.varlen ? num_prepare_ctas(forward) : 0,
          [before] { varlen::prepare(before); }};
}

template <decode::Config kConfig>
static Launch prepare_decode(DecodeParams params, Memory& memory) {
  static decode::Counters counters{};
  const DecodeGrid grid = DecodeGrid::of(params, kConfig);
  memory.assign(grid.workspace_bytes(params.head_dim_v), 0x7f);
  params.workspace = memory.data(), params.counters = &counters;
  check_decode("decode", kConfig, params);
  const decode::Arguments args = arguments_of<kConfig>(params, grid);
  return {{grid.num_ctas, decode::num_threads(kConfig), 1, 1, decode::smem_bytes(kConfig)},
          [args] { decode::decode_kernel<decode::KernelTraits<kConfig>>(args); },
          0,
          {},
          decode::shared};
}

// The decode config that gives rows the bits of a config with spans.
constexpr decode::Config decode_config_of(const forward::Config& config) {
  for (const decode::Config& other : decode::kCheckConfigs) {
    const bool fits = other.dtype == config.dtype && other.head_dim == config.head_dim;
    if (other.spans && fits) return other;
  }
  return {};
}

struct Prepare {
  Launch (*listed)(const ForwardParams&);
  Launch (*cached)(DecodeParams, Memory&);
  Launch (*decode)(DecodeParams, Memory&);  // of a config with spans
};
static const std::vector<Prepare> kPrepare =
    for_configs<kNumCheckConfigs>([]<size_t kIndex>() -> Prepare {
      constexpr forward::Config kConfig = kCheckConfigs[kIndex];
      if constexpr (!is_emulated(kConfig) || is_quantized(kConfig.dtype)) {
        return {};
      } else if constexpr (kConfig.spans) {
        return {nullptr, &prepare_cached<kConfig>, &prepare_decode<decode_config_of(kConfig)>};
      } else if constexpr (kConfig.cached) {
        return {nullptr, &prepare_cached<kConfig>, nullptr};
      } else if constexpr (kConfig.listed) {
        return {&prepare_listed<kConfig>, nullptr, nullptr};
      } else {
        return {};
      }
    });

struct Turn {
  const char* name;
  int num_sms;
  bool counted;
  uint32_t seed;
  // Of decode kernels.
  int resident = 0;  // CTAs that run at a time; 0: of a forward kernel
  bool whole_tiles = false;

  bool decodes() const { return resident > 0; }
};
constexpr Turn kTurns[] = {{"counted", 132, true, 1},
                           {"fixed order", 132, false, 2},
                           {"3 SMs", 3, false, 3},
                           {"1 SM, counted", 1, true, 4},
                           {"decode, 132 SMs", 132, false, 1, 132},
                           {"decode, 5 CTAs", 132, false, 7, 5},
                           {"decode, 3 SMs", 3, false, 2, 1},
                           {"decode, whole tiles", 132, false, 3, 1, true}};

static Launch prepare_turn(DecodeProblem& problem, int config, const Turn& turn,
                           decode::Counters& counters, Memory& memory) {
  DecodeParams params = make_params(problem, HostMemory(), problem.lse.data());
  params.num_sms = turn.num_sms, params.whole_tiles = turn.whole_tiles;
  params.counters = turn.counted ? &counters : nullptr;
  if (!turn.decodes()) return kPrepare[config].cached(params, memory);
  Launch launch = kPrepare[config].decode(params, memory);
  launch.grid.resident = turn.resident;
  return launch;
}

static Launch prepare_turn(Problem& problem, int config, const Turn& turn,
                           decode::Counters& counters, Memory&) {
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
  Memory memory;
  const Launch launch = prepare_turn(problem, config, turn, counters, memory);
  emulation::shared_memory = launch.shared;
  if (launch.num_prepare_ctas > 0 &&
      !emulation::run(launch.varlen_prepare, {launch.num_prepare_ctas, varlen::kThreads},
                      turn.seed)) {
    return "deadlock in varlen::prepare";
  }
  if (!emulation::run(launch.kernel, launch.grid, turn.seed)) return "deadlock";
  if (counters.tile[0] != 0 || counters.tile[1] != 0) return "the tile counter was not put back";
  return "";
}

// Runs every turn, which must give the same bits. spans: also those of decode kernels.
template <class AnyProblem>
static bool run_turns(AnyProblem& problem, int config, bool spans,
                      const std::vector<RowReference>& rows) {
  FirstResults first;
  for (const Turn& turn : kTurns) {
    if (turn.decodes() && !spans) break;
    std::string wrong = run(problem, config, turn);
    wrong += first.compare(problem);
    if (!turn.decodes() || problem.c.cu_q.empty()) wrong += check_coverage(problem);
    char launch[80];
    std::snprintf(launch, sizeof(launch), "%-44s %-20s", problem.c.name.c_str(), turn.name);
    if (!report(launch, wrong, compare(problem, rows))) return false;
  }
  return true;
}

static bool run_case(DecodeCase c) {
  const auto config_of = [&] {
    return cached_config(c.fp16, std::max(c.head_dim, c.head_dim_v), c.tree, c.spans > 0);
  };
  c.fp16 = c.fp16 == is_emulated(kCheckConfigs[config_of()]);
  DecodeProblem problem(c);
  return run_turns(problem, config_of(), c.spans > 0, reference_rows(problem));
}

// Runs all kernel configs of the case's smallest sufficient head dim.
static bool run_listed_case(Case c) {
  c.fp16 = c.fp16 == is_emulated(kCheckConfigs[listed_configs(c)[0]]);
  Problem problem(c);
  const std::vector<RowReference> rows = compute_fp64_references(problem);
  for (const int config : listed_configs(c)) {
    if (!run_turns(problem, config, false, rows)) return false;
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

// Gives a case spans. Returns whether there are kernels for it.
static bool add_spans(DecodeCase& c, uint32_t seed) {
  std::mt19937 random(seed);
  c.tree = false;
  c.spans = 128 * (1 + static_cast<int>(random() % 4));
  c.sinks = random() % 3 == 0;
  return cached_config(c.fp16, std::max(c.head_dim, c.head_dim_v), false, true) >= 0;
}

int main(int argc, char** argv) {
  const CommandLine given(argc, argv);
  const bool spans = given.has("--spans");
  const auto run_short = [&](DecodeCase c, int i) -> std::optional<bool> {
    if ((spans && !add_spans(c, i)) || !is_short(c)) return std::nullopt;
    return run_case(c);
  };
  const auto run_listed = [](const Case& c, int) -> std::optional<bool> {
    if (c.lists_heads == 0 || num_blocks(c) > kMostBlocks) return std::nullopt;
    return run_listed_case(c);
  };
  Tally tally = run_cases(given, cached_cases(), random_cached_case, run_short);
  if (!spans && !given.has("--random")) tally.add(run_cases(given, forward_cases(), run_listed));
  return tally.finish();
}
