// Runs the decode kernels without torch and compares them with fp64 on the host.
//   decode_check [--from case] [--only part of a name]
//       prints one line for each case and number of SMs
//   decode_check --random count [--from seed]
//       random problems instead
// Exit code 0: all correct, 1: wrong values, 3: a case hung, 4: a CUDA error; after 3 and 4 it
// prints the --from with which to continue.
#include <unistd.h>

#include <cstdio>
#include <string>

#include "cached_runs.cuh"
#include "command_line.h"
#include "decode_cases.h"
#include "decode_configs.h"
#include "decode_problem.h"
#include "harness.cuh"
#include "launch/decode.cuh"

using flashattn3::config_of;
using flashattn3::DecodeParams;
using flashattn3::kCheckConfigNames;
using flashattn3::kNumCheckConfigs;

using Launch = void (*)(const DecodeParams&, cudaStream_t);
static const std::vector<Launch> kLaunch = for_configs<kNumCheckConfigs>(
    []<size_t kIndex>() -> Launch { return &flashattn3::launch_check_config<kIndex>; });

// Workspace and counters of launches on up to num_sms CTAs; the workspace has words that no kernel
// would take for unwritten ones, and large numbers.
struct Workspace {
  void* memory = nullptr;
  flashattn3::decode::Counters* counters = nullptr;
  int num_sms;
  int64_t bytes;

  // slots: partial results of each CTA, of which an SM has two at most.
  // rows: with results beside those, of a call with a prefix.
  explicit Workspace(int num_sms, int slots = 1, int64_t rows = 0)
      : num_sms(num_sms),
        bytes((int64_t{2} * slots * num_sms * flashattn3::decode::kBlockM + 2 * rows) *
              (256 * 4 + 16)) {
    const size_t counter_bytes = sizeof(*counters);
    check(cudaMalloc(&memory, bytes));
    check(cudaMalloc(&counters, counter_bytes));
    check(cudaMemset(counters, 0, counter_bytes));
    poison();
  }
  ~Workspace() { cudaFree(memory), cudaFree(counters); }
  Workspace(const Workspace&) = delete;
  void poison() { check(cudaMemset(memory, 0x7f, bytes)); }
  bool counters_are_set() const {
    flashattn3::decode::Counters found;
    check(cudaMemcpy(&found, counters, sizeof(found), cudaMemcpyDeviceToHost));
    return found.launch % flashattn3::kLaunchStep == 0 &&
           std::all_of(std::begin(found.started), std::end(found.started),
                       [](uint32_t x) { return x == 0; });
  }
};

// Holds all SMs but three for a millisecond. CTAs of a warp kernel then find that others have not
// started.
__global__ void hold_kernel() {
  uint64_t begin, now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin));
  do {
    __nanosleep(1000);
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  } while (now - begin < 1'000'000);
}
static void hold_sms(int num_sms) {
  static cudaStream_t stream = [] {
    cudaStream_t stream;
    check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    return stream;
  }();
  constexpr int kAllShared = 232448;
  check(cudaFuncSetAttribute(hold_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kAllShared));
  hold_kernel<<<num_sms - 3, 32, kAllShared, stream>>>();
  usleep(100);  // until it runs
}

// Runs the case on all SMs twice, and while a kernel holds most of them, which must be bitwise
// equal, then on 1 and 3 SMs, so that each CTA has many parts, and without splits. Returns false on
// failure.
static bool run_case(const DecodeCase& c, int index, int num_sms) {
  struct Turn {
    const char* name;
    int num_sms;
    bool whole_tiles, pdl, held = false;
  };
  const Turn turns[] = {{"all SMs", num_sms, false, true},
                        {"again", num_sms, false, false},
                        {"held SMs", num_sms, false, false, true},
                        {"3 SMs", 3, false, false},
                        {"1 SM", 1, false, false},
                        {"whole tiles", num_sms, true, false}};
  const int dim = std::max(c.head_dim, c.head_dim_v);
  const int config = config_of(c.fp16, dim, c.spans > 0, c.has_bytes(), c.tree, c.prefix >= 0);
  CachedRuns runs(c);
  bool good = true;
  for (const Turn& turn : turns) {
    const int64_t rows = runs.problem.lse.size();
    Workspace workspace(turn.num_sms, c.spans > 0 ? 1 + (c.capacity + 127) / 128 : 1, rows);
    const auto launch = [&](flashattn3::ByteDecodeParams& params, DeviceMemory&) {
      params.num_sms = turn.num_sms, params.workspace = workspace.memory;
      params.leaves_sms = turn.num_sms == 3;
      params.counters = workspace.counters;
      params.whole_tiles = turn.whole_tiles, params.pdl = turn.pdl;
      if (turn.held) hold_sms(num_sms);
      kLaunch[config](params, nullptr);
    };
    std::string wrong = runs.run(index, kCheckConfigNames[config], turn.name, launch);
    if (!workspace.counters_are_set()) wrong += " a count is left;";
    if (c.spans > 0 || (turn.num_sms == num_sms && !turn.whole_tiles)) {
      wrong += runs.first.compare(runs.problem);
    }
    good = report(g_now, wrong, compare(runs.problem, runs.rows)) && good;
  }
  return good;
}

int main(int argc, char** argv) {
  const CommandLine given(argc, argv);
  signal(SIGALRM, on_alarm);
  int num_sms = 0;
  check(cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, 0));
  return run_cases(
             given, decode_cases(), [](int seed) { return random_decode_case(seed, 5000); },
             [&](const DecodeCase& c, int i) { return run_case(c, i, num_sms); })
      .finish();
}
