// Runs the backward kernels without torch and compares them with fp64 on the host, or times them.
//   backward_check [--from case] [--only part of a name] [--config part of a config name] [--quiet]
//       prints one line for each case and config; --quiet: only for those that fail
//   backward_check --time [part of a config name [length]] [--deterministic] [--head-dim d]
//       prints TFLOP/s of the benchmark grid; --deterministic: also with deterministic dq sums;
//       --head-dim: of the problems, instead of the config's
// Exit code 0: all correct, 1: wrong values, 3: a case hung, 4: a CUDA error; after 3 and 4 it
// prints the --from with which to continue.
#include <array>
#include <cstdio>
#include <string>
#include <utility>

#include "backward_cases.h"
#include "backward_configs.h"
#include "backward_params.h"
#include "backward_problem.h"
#include "command_line.h"
#include "harness.cuh"

using flashattn3::BackwardParams;
using flashattn3::ForwardParams;
using flashattn3::kCheckConfigs;
using flashattn3::kNumCheckConfigs;

struct ConfigFunctions {
  void (*launch)(const BackwardParams&, cudaStream_t);
  int64_t (*workspace_bytes)(const ForwardParams&);
  int (*num_parts)(const ForwardParams&);
  const int32_t* (*tile_semaphore)(const BackwardParams&);
};
static const std::vector<ConfigFunctions> kRows =
    for_configs<kNumCheckConfigs>([]<size_t kIndex>() -> ConfigFunctions {
      return {&flashattn3::launch_check_config<kIndex>,
              &flashattn3::check_config_workspace_bytes<kIndex>,
              &flashattn3::check_config_num_parts<kIndex>,
              &flashattn3::check_config_tile_semaphore<kIndex>};
    });

static std::string config_name(int i) { return flashattn3::kCheckConfigNames[i]; }

struct Options {
  CommandLine given;
  // Part of a kernel config's name, and a length.
  const char* config = given.text("--config", given.text("--time"));
  int length = given.number("--time", 0, 2);

  bool wants(int i) const { return config_name(i).find(config) != std::string::npos; }
};

// Device memory between guard bytes; memory and guards are filled with 0xff.
struct GuardedBytes {
  static constexpr int64_t kGuardBytes = 8192;
  int64_t bytes;
  uint8_t* device = nullptr;
  explicit GuardedBytes(int64_t bytes) : bytes(bytes) {
    check(cudaMalloc(&device, bytes + 2 * kGuardBytes));
    clear();
  }
  ~GuardedBytes() { cudaFree(device); }
  GuardedBytes(const GuardedBytes&) = delete;
  uint8_t* data() const { return device + kGuardBytes; }
  void clear() { check(cudaMemset(device, 0xff, bytes + 2 * kGuardBytes)); }
  bool guards_hold() const {
    std::vector<uint8_t> found(2 * kGuardBytes);
    check(cudaMemcpy(found.data(), device, kGuardBytes, cudaMemcpyDeviceToHost));
    check(cudaMemcpy(found.data() + kGuardBytes, data() + bytes, kGuardBytes,
                     cudaMemcpyDeviceToHost));
    return std::all_of(found.begin(), found.end(), [](uint8_t x) { return x == 0xff; });
  }
};

// A problem's inputs and results on the device.
struct DeviceProblem {
  BackwardProblem& p;
  DeviceMemory memory;
  BackwardParams params;

  explicit DeviceProblem(BackwardProblem& p) : p(p) {
    for (Tensor* t : {&p.q, &p.k, &p.v, &p.out, &p.dout, &p.bias}) t->upload();
    for (Tensor* t : results()) t->upload();
    params = make_params(p, memory);
    check(cudaGetLastError());
  }

  std::array<Tensor*, 5> results() const { return {&p.dq, &p.dk, &p.dv, &p.ds, &p.dbias}; }
  void clear_results() {
    p.clear_results();
    for (Tensor* t : results()) t->upload();
  }
  void download_results() {
    for (Tensor* t : results()) t->download();
    check(cudaMemcpy(p.dsinks.data(), params.dsinks, p.dsinks.size() * 4, cudaMemcpyDeviceToHost));
  }
};

// A deterministic work tile may wait for the tiles before it, and CTAs may start in any order, so
// tile_semaphore must hand out every tile. Returns an error message, or "".
static std::string check_tile_semaphore(const BackwardProblem& p, const BackwardParams& params,
                                        int config, int num_parts) {
  const int keys = flashattn3::backward::block_n(kCheckConfigs[config]);
  int tiles = 0, taken;
  for (int b = 0; b < p.c.batch; ++b) {
    tiles += (p.rows_of(p.reference.dk, b).length + keys - 1) / keys * p.c.heads_kv * num_parts;
  }
  check(cudaMemcpy(&taken, kRows[config].tile_semaphore(params), 4, cudaMemcpyDeviceToHost));
  if (taken >= tiles) return "";
  return std::to_string(taken) + " of " + std::to_string(tiles) + " tiles were handed out in order";
}

struct Run {
  const char* name;
  bool deterministic, counted;
  int num_sms;  // 0: all
};
constexpr Run kRuns[] = {
    {"tiles from a counter", false, true, 0},
    {"fixed order", false, false, 0},
    {"fixed order on 3 SMs", false, false, 3},  // so that each CTA has many tiles
    {"deterministic", true, true, 0},
    {"deterministic, again", true, true, 0},
    {"deterministic, fixed order", true, false, 0},
    {"deterministic, fixed order on 3 SMs", true, false, 3},
};

struct Outcome {
  std::string wrong;  // a line for each error
  int num_parts = 1;  // of the query heads of a KV head, on all SMs
  GradientChecks checks;

  void add(const char* run, const std::string& text) {
    if (!text.empty()) wrong += "      " + std::string(run) + ": " + text + "\n";
  }
};

static Outcome run_config(BackwardProblem& p, DeviceProblem& device, int config, const char* label,
                          int num_sms, int* counter) {
  Outcome outcome;
  BackwardParams params = device.params;
  params.forward.num_sms = num_sms;
  GuardedBytes workspace(kRows[config].workspace_bytes(params.forward));
  params.workspace = workspace.data();
  for (const Run& run : kRuns) {
    std::snprintf(g_now, sizeof(g_now), "%s, %s", label, run.name);
    device.clear_results();
    workspace.clear();
    params.forward.deterministic = run.deterministic;
    params.forward.tile_counter = run.counted ? counter : nullptr;
    params.forward.pdl = run.counted;
    params.forward.num_sms = run.num_sms == 0 ? num_sms : run.num_sms;
    const int num_parts = kRows[config].num_parts(params.forward);
    outcome.num_parts = std::max(outcome.num_parts, num_parts);
    try {
      kRows[config].launch(params, nullptr);
    } catch (const std::exception& error) {
      outcome.add(run.name, error.what());
      return outcome;
    }
    check(cudaDeviceSynchronize());
    device.download_results();
    check(cudaGetLastError());
    outcome.add(run.name, check_counter(counter));
    if (!workspace.guards_hold()) outcome.add(run.name, "written outside the workspace");
    if (run.deterministic) {
      outcome.add(run.name, check_tile_semaphore(p, params, config, num_parts));
    }
    for (const std::string& text : outcome.checks.compare(p, run.deterministic, num_parts)) {
      outcome.add(run.name, text);
    }
  }
  return outcome;
}

// Runs the case on every kernel config of its dtype with the smallest sufficient head dim. Returns
// false on failure.
static bool run_case(const Case& c, int index, const Options& options, int num_sms, int* counter) {
  const bool quiet = options.given.has("--quiet");
  std::vector<int> rows = configs_of(c);
  std::erase_if(rows, [&](int i) { return !options.wants(i); });
  if (rows.empty()) {
    if (!quiet) std::printf("no row for %3d %s\n", index, c.name.c_str());
    return true;
  }
  g_case = index;
  std::snprintf(g_now, sizeof(g_now), "%3d %s", index, c.name.c_str());
  BackwardProblem problem(c);
  DeviceProblem device(problem);
  bool good = true;
  for (const int config : rows) {
    char label[160];
    std::snprintf(label, sizeof(label), "%3d %-43s %s", index, c.name.c_str(),
                  config_name(config).c_str());
    alarm(15);
    const Outcome outcome = run_config(problem, device, config, label, num_sms, counter);
    alarm(0);
    const bool pass = outcome.wrong.empty();
    good = good && pass;
    if (pass && quiet) continue;
    std::printf("%s  %s  in %d parts; %s\n%s", pass ? "PASS" : "FAIL", label, outcome.num_parts,
                outcome.checks.bounds().c_str(), outcome.wrong.c_str());
    std::fflush(stdout);
  }
  return good;
}

// ------------------------------------------------------------------------------------------ timing

// Random tensors of the benchmark grid, and memory for its gradients.
struct GridData {
  static constexpr int64_t kCount = 16384 * int64_t{2048};
  uint16_t* tensor[5];    // q, k, v, out, dout
  uint16_t* gradient[3];  // dq, dk, dv
  float *lse, *of_heads, *dsinks;
  uint8_t* workspace = nullptr;
  int64_t workspace_bytes = 0;

  explicit GridData(bool fp16) {
    for (int i = 0; i < 5; ++i) {
      check(cudaMalloc(&tensor[i], kCount * 2));
      if (fp16) {
        fill_normal<<<1056, 256>>>(reinterpret_cast<__half*>(tensor[i]), kCount, i);
      } else {
        fill_normal<<<1056, 256>>>(reinterpret_cast<__nv_bfloat16*>(tensor[i]), kCount, i);
      }
    }
    for (auto& pointer : gradient) check(cudaMalloc(&pointer, kCount * 2));
    check(cudaMalloc(&lse, 16384 * 32 * 4));
    std::vector<float> slopes;  // of 32 heads: 2^(-1/4), 2^(-2/4), ..., 2^-8; sinks too
    for (int h = 1; h <= 32; ++h) slopes.push_back(std::exp2(-0.25f * h));
    of_heads = device_copy(slopes), dsinks = device_copy(slopes);
    check(cudaDeviceSynchronize());
  }

  // For scores of variance 1, lse is about log(number of keys) + 1/2.
  BackwardParams params(int config, int head_dim, int seqlen, bool causal) {
    BackwardParams params{};
    ForwardParams& f = params.forward;
    f = grid_params(tensor, lse, head_dim, seqlen, causal);
    const int64_t dim_v = f.head_dim_v = std::min(head_dim, kCheckConfigs[config].head_dim_v);
    f.v_stride = f.out_stride = {seqlen * f.num_heads_q * dim_v, f.num_heads_q * dim_v, dim_v};
    const std::vector<float> values(16384 * f.num_heads_q, std::log(1.f * seqlen) + 0.5f);
    check(cudaMemcpy(lse, values.data(), values.size() * 4, cudaMemcpyHostToDevice));
    params.dout = tensor[4];
    params.dq = gradient[0], params.dk = gradient[1], params.dv = gradient[2];
    params.dq_stride = params.dk_stride = f.q_stride;
    params.dout_stride = params.dv_stride = f.v_stride;
    const int64_t bytes = kRows[config].workspace_bytes(f);
    if (bytes > workspace_bytes) {
      cudaFree(workspace);
      check(cudaMalloc(&workspace, bytes));
      workspace_bytes = bytes;
    }
    params.workspace = workspace;
    return params;
  }
};

// Prints the median of 5 rounds.
static void time_grid(const Options& options, int num_sms, int* counter) {
  constexpr int kRounds = 5;
  GridData grids[2] = {GridData(false), GridData(true)};
  std::printf("TFLOP/s at 512, 1024, 2048, 4096, 8192, 16384; microseconds of all kernels\n");
  for (const bool causal : {false, true}) {
    for (int config = 0; config < kNumCheckConfigs; ++config) {
      if (!options.wants(config) || kCheckConfigs[config].listed) continue;
      GridData& data = grids[kCheckConfigs[config].dtype == flashattn3::kFp16];
      for (const bool sinks : {false, true}) {
        const bool deterministic = options.given.has("--deterministic");
        const std::string name = config_name(config) + (causal ? " causal" : "") +
                                 (deterministic ? " ordered" : "") + (sinks ? " sinks" : "");
        GridLine line;
        for (int length = 0; length < kLengths; ++length) {
          const int seqlen = 512 << length;
          const int largest = kCheckConfigs[config].head_dim;
          const int head_dim = options.given.number("--head-dim", largest);
          if (options.length != 0 && seqlen != options.length) continue;
          BackwardParams params = data.params(config, head_dim, seqlen, causal);
          params.forward.deterministic = deterministic;
          params.forward.num_sms = num_sms;
          params.forward.tile_counter = counter;
          params.forward.pdl = true;
          if (sinks) params.forward.sinks = data.of_heads, params.dsinks = data.dsinks;
          if (kCheckConfigs[config].term == flashattn3::ScoreTerm::kSlopes) {
            params.forward.alibi_slopes = data.of_heads;
          }
          const double columns = 3.0 * head_dim + 2.0 * params.forward.head_dim_v;
          const double flop =
              2.0 * 16384 * (2048 / head_dim) * columns * seqlen * (causal ? 0.5 : 1.0);
          const int repeats = std::max(2, static_cast<int>(3e-3 / (flop / 5e14)));
          const auto launch = [&](int) { kRows[config].launch(params, nullptr); };
          const auto label = [&](int) { return name; };
          line.set(length, median_times(1, kRounds, repeats, label, launch)[0], flop);
        }
        line.print(name);
      }
    }
  }
}

int main(int argc, char** argv) {
  const Options options{{argc, argv}};
  signal(SIGALRM, on_alarm);
  int num_sms = 0, *counter;
  check(cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, 0));
  check(cudaMalloc(&counter, 8));
  check(cudaMemset(counter, 0, 8));
  if (options.given.has("--time")) {
    time_grid(options, num_sms, counter);
    return 0;
  }
  return run_cases(options.given, backward_cases(),
                   [&](const Case& c, int i) { return run_case(c, i, options, num_sms, counter); })
      .finish();
}
