// Runs the decode kernels on the CPU (emulation/emulation.h) and compares them with fp64: the
// problems of decode_check that are short, on few and on many CTAs, which end in a random order.
//   decode_emulation [--only part of a name]
//   decode_emulation --random count [--from seed]
//       random problems instead
// Exit code 0: all correct, 1: wrong values, a deadlock, or no case.
#include <cstdio>
#include <functional>

#include "alone.h"
#include "command_line.h"
#include "decode/join_prefix.cuh"
#include "decode/kernel.cuh"
#include "decode/warp_kernel.cuh"
#include "decode/warp_share_kernel.cuh"
#include "decode_cases.h"
#include "decode_configs.h"
#include "decode_problem.h"
#include "launch/byte_arguments.h"
#include "launch/warp_arguments.h"
#include "run_grid.h"

namespace flashattn3::decode {
alignas(
    1024) thread_local uint8_t shared[emulation::kSharedBytes];  // of the kernels, which declare it
}  // namespace flashattn3::decode

using namespace flashattn3;

// The launch that launch/decode.cuh makes for a call. `params` has no workspace and no counters
// yet.
struct Launch {
  std::function<void()> (*kernel)(const DecodeParams& params);
  int num_ctas, num_threads, shared_bytes;
  int64_t workspace_bytes;
  bool is_warp_kernel = false;
  std::function<void()> (*join)(const DecodeParams& params) = nullptr;

  template <decode::Config kConfig>
  static Launch of(const DecodeParams& params) {
    Launch launch{.kernel = &kernel_of<kConfig, false>};
    if constexpr (!decode::has_one_kernel(kConfig)) {
      if (uses_warp_kernel(params, kConfig)) return of_warp_kernel<kConfig>(params);
      if constexpr (decode::has_warp_shares(kConfig)) {
        if (uses_warp_shares(params, kConfig)) return of_warp_shares<kConfig>(params);
      }
      if constexpr (!decode::has_bytes(kConfig)) {
        if (is_plain(params, kConfig)) launch.kernel = &kernel_of<kConfig, true>;
      }
    }
    const DecodeGrid grid = DecodeGrid::of(params, kConfig);
    launch.num_ctas = grid.num_ctas, launch.num_threads = decode::num_threads(kConfig);
    launch.shared_bytes = decode::smem_bytes(kConfig);
    launch.workspace_bytes = grid.workspace_bytes(params.head_dim_v);
    if constexpr (kConfig.prefix) {
      launch.workspace_bytes += result_bytes(params);
      launch.join = [](const DecodeParams& params) -> std::function<void()> {
        return [args = make_join_arguments(params)] { decode::join_prefix<kConfig.dtype>(args); };
      };
    }
    return launch;
  }

  template <decode::Config kConfig, bool kPlain>
  static std::function<void()> kernel_of(const DecodeParams& params) {
    const auto args = arguments_of<kConfig>(params, DecodeGrid::of(params, kConfig));
    return [args] { decode::decode_kernel<decode::KernelTraits<kConfig, kPlain>>(args); };
  }

  template <decode::Config kConfig>
  static Launch of_warp_kernel(const DecodeParams& params) {
    const DecodeGrid grid = warp_grid(params, kConfig);
    const int records = num_part_records(params, grid);
    Launch launch{.num_ctas = grid.num_ctas,
                  .workspace_bytes = records > 0 ? decode::PartMemory::bytes(records) : 0,
                  .is_warp_kernel = true};
    with_warp_traits<kConfig>(params, [&]<class Traits>(Traits) {
      launch.kernel = &warp_kernel_of<kConfig, Traits>;
      launch.num_threads = Traits::kThreads;
      launch.shared_bytes = sizeof(decode::WarpStorage<Traits>);
    });
    return launch;
  }

  template <decode::Config kConfig>
  static Launch of_warp_shares(const DecodeParams& params) {
    Launch launch;
    with_row_tiles<kConfig>(params, [&]<int kRowTiles>() {
      constexpr decode::Config kOfShares = decode::of_warp_shares(kConfig, kRowTiles);
      const DecodeGrid grid = DecodeGrid::of(params, kOfShares);
      launch = {.kernel = &warp_shares_of<kConfig, kRowTiles>,
                .num_ctas = grid.num_ctas,
                .num_threads = decode::WarpShareTraits<kOfShares, kRowTiles>::kThreads,
                .shared_bytes = sizeof(decode::WarpShareStorage<kOfShares, kRowTiles>),
                .workspace_bytes = grid.workspace_bytes(params.head_dim_v)};
    });
    return launch;
  }

  template <decode::Config kConfig, int kRowTiles>
  static std::function<void()> warp_shares_of(const DecodeParams& params) {
    constexpr decode::Config kOfShares = decode::of_warp_shares(kConfig, kRowTiles);
    using Traits = decode::WarpShareTraits<kOfShares, kRowTiles>;
    const auto args =
        arguments_of<kConfig>(params, DecodeGrid::of(params, kOfShares), Traits::kBlockN);
    return [args] { decode::warp_share_kernel<Traits>(args); };
  }

  template <decode::Config kConfig, class Traits>
  static std::function<void()> warp_kernel_of(const DecodeParams& params) {
    const auto args = make_warp_arguments<kConfig>(params, warp_grid(params, kConfig));
    return [args] { decode::warp_kernel<Traits>(args); };
  }
};

// Configs of float16 and bfloat16 differ in conversions alone, and each takes the compiler seconds:
// of every two, one is emulated.
constexpr bool is_emulated(const decode::Config& config) {
  const bool is_fp16 = config.dtype == ElementType::kFloat16;
  return is_fp16 == ((config.head_dim == 128) != (config.spans || decode::has_bytes(config)));
}

using LaunchOf = Launch (*)(const DecodeParams& params);
static const std::vector<LaunchOf> kLaunches =
    for_configs<kNumCheckConfigs>([]<size_t kIndex>() -> LaunchOf {
      if constexpr (is_emulated(kCheckConfigs[kIndex])) return &Launch::of<kCheckConfigs[kIndex]>;
      return nullptr;
    });

// Whether a launch finds counters as it expects them.
static bool are_between_launches(const decode::Counters& counters) {
  const auto is_zero = [](uint32_t count) { return count == 0; };
  return counters.launch % kLaunchStep == 0 &&
         std::all_of(std::begin(counters.started), std::end(counters.started), is_zero);
}

struct Turn {
  const char* name;
  int num_sms;
  bool whole_tiles;
  uint32_t seed;
  int num_resident;  // CTAs that run at a time, of a kernel in which some wait for others
};

// Runs the CTAs of one launch one after the other; several at a time of a warp kernel, which may
// wait for each other. The lengths of a raced launch change meanwhile. Returns an error message, or
// "".
static std::string run(DecodeProblem& problem, int config, const Turn& turn, bool raced) {
  ByteDecodeParams params = make_params(problem, HostMemory(), problem.lse.data());
  params.num_sms = turn.num_sms, params.whole_tiles = turn.whole_tiles;
  params.leaves_sms = turn.num_sms == 5;
  const Launch launch = kLaunches[config](params);
  // Words that no kernel would take for unwritten ones, and large numbers.
  std::vector<uint8_t> workspace(launch.workspace_bytes, 0x7f);
  static decode::Counters counters{};  // of all launches
  params.workspace = workspace.data(), params.counters = &counters;
  check_decode(kCheckConfigNames[config], kCheckConfigs[config], params);
  std::mt19937 random(turn.seed);
  std::vector<int32_t> lengths = problem.c.seqlens;
  if (raced) {
    params.cache_seqlens = lengths.data();
    // A warp of a warp kernel reads the length of its sequence in one instruction, here in turn.
    emulation::disturb = [&, any_time = !launch.is_warp_kernel](bool starts) {
      if (!starts && !any_time) return;
      const int keys = static_cast<int>(random() % 3 == 0 ? 1 : random() % (params.capacity + 1));
      lengths[random() % lengths.size()] = keys;
    };
  }
  emulation::Grid grid{launch.num_ctas, launch.num_threads};
  if (launch.is_warp_kernel || problem.c.spans > 0) grid.resident = turn.num_resident;
  grid.shared_bytes = launch.shared_bytes;
  bool ended = emulation::run(launch.kernel(params), grid, turn.seed);
  if (ended && launch.join != nullptr) {
    const int num_ctas = static_cast<int>(num_join_ctas(params));
    ended = emulation::run(launch.join(params), {num_ctas, decode::kJoinThreads}, turn.seed);
  }
  emulation::disturb = nullptr;
  if (!ended) return raced ? "deadlock of a raced launch" : "deadlock";
  return are_between_launches(counters) ? "" : "a count is left";
}

static int config_of(const DecodeCase& c) {
  const int dim = std::max(c.head_dim, c.head_dim_v);
  return config_of(c.fp16, dim, c.spans > 0, c.has_bytes(), c.tree, c.prefix >= 0);
}

static bool run_case(DecodeCase c) {
  c.fp16 = c.fp16 == is_emulated(kCheckConfigs[config_of(c)]);
  const Turn turns[] = {{"132 CTAs", 132, false, 1, 132},
                        {"132 CTAs again", 132, false, 2, 1},
                        {"5 CTAs", 5, false, 3, 3},
                        {"1 CTA", 1, false, 4, 1},
                        {"3 CTAs, whole tiles", 3, true, 5, 1}};
  DecodeProblem problem(c);
  const std::vector<RowReference> rows = reference_rows(problem);
  FirstResults first;
  bool good = true;
  for (const Turn& turn : turns) {
    const int config = config_of(c);
    std::fill(problem.out.host.begin(), problem.out.host.end(), kNaN);
    std::fill(problem.lse.begin(), problem.lse.end(), NAN);
    std::string wrong;
    if (problem.c.seqlens.size() > 1) wrong = run(problem, config, turn, true);
    wrong += run(problem, config, turn, false);
    wrong += check_coverage(problem);
    if (&turn <= turns + 1 || c.spans > 0) wrong += first.compare(problem);
    if (&turn == turns) {
      wrong += compare_alone(
          problem, [&](DecodeProblem& alone) { return run(alone, config, turns[2], false); });
    }
    char launch[80];
    std::snprintf(launch, sizeof(launch), "%-32s %-20s", c.name.c_str(), turn.name);
    good = report(launch, wrong, compare(problem, rows)) && good;
  }
  return good;
}

// Returns whether a case takes seconds at most: a KV block takes milliseconds for each tile of
// packed rows.
static bool is_short(const DecodeCase& c) {
  const int64_t keys = int64_t{c.batch} * c.heads_kv * std::min(c.capacity, 100000);
  const int64_t tiles = (int64_t{c.seqlen_q} * c.heads_q / c.heads_kv + 63) / 64;
  return keys * tiles <= 6000;
}

int main(int argc, char** argv) {
  emulation::shared_memory = decode::shared;
  std::vector<DecodeCase> cases = decode_cases();
  std::erase_if(cases, std::not_fn(is_short));
  return run_cases(
             CommandLine(argc, argv), cases, [](int seed) { return random_decode_case(seed, 60); },
             [](const DecodeCase& c, int) { return run_case(c); })
      .finish();
}
