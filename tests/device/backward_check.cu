// Runs the backward kernels without torch and compares them with fp64 on the host, or times them.
//   backward_check [--from case] [--only part of a name] [--config part of a config name] [--quiet]
//       prints one line for each case and config; --quiet: only for those that fail
//   backward_check --time [part of a config name [length]] [--deterministic] [--head-dim d]
//       prints TFLOP/s of the benchmark grid; --deterministic: also with deterministic dq sums;
//       --head-dim: of the problems, instead of the config's
//   backward_check --repeat times [part of a config name [length]]
//       runs one causal problem many times and reports results that change in any bit
//   backward_check --self [part of a name]
//       checks the reference and its bounds themselves; needs no GPU
// Exit code 0: all correct, 1: wrong values, 3: a case hung, 4: a CUDA error; after 3 and 4 it
// prints the --from with which to continue.
#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <utility>

#include "backward_cases.h"
#include "backward_configs.h"
#include "backward_params.h"
#include "backward_problem.h"
#include "backward_self.h"
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
template <size_t... kIndex>
static std::vector<ConfigFunctions> config_functions(std::index_sequence<kIndex...>) {
  return {{&flashattn3::launch_check_config<kIndex>,
           &flashattn3::check_config_workspace_bytes<kIndex>,
           &flashattn3::check_config_num_parts<kIndex>,
           &flashattn3::check_config_tile_semaphore<kIndex>}...};
}
static const std::vector<ConfigFunctions> kRows =
    config_functions(std::make_index_sequence<kNumCheckConfigs>());

static std::string config_name(int i) { return flashattn3::kCheckConfigNames[i]; }

struct Options {
  int from = 0, length = 0, repeats = 0, head_dim = 0;
  bool quiet = false, time = false, deterministic = false, self = false;
  const char* part = nullptr;    // part of a case's name
  const char* config = nullptr;  // part of a kernel config's name
  bool wants(int i) const {
    return config == nullptr || config_name(i).find(config) != std::string::npos;
  }
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

// One float per row, on the device, in (heads, seq) order or with heads_last (seq, heads).
struct RowFloats {
  float* device = nullptr;
  flashattn3::Strides stride;
  RowFloats(const Inputs& inputs, const std::vector<float>& values, bool heads_last) {
    const int64_t seq = inputs.q.seq, heads = inputs.c.heads_q;
    stride = {seq * heads, 1, seq};
    std::vector<float> strided = values;
    if (heads_last) {
      stride = {seq * heads, heads, 1};
      for (size_t i = 0; i < values.size(); ++i) {
        const int64_t batch_coord = i / (seq * heads), h = i / seq % heads, s = i % seq;
        strided[batch_coord * seq * heads + s * heads + h] = values[i];
      }
    }
    check(cudaMalloc(&device, strided.size() * 4 + 4));
    check(cudaMemcpy(device, strided.data(), strided.size() * 4, cudaMemcpyHostToDevice));
  }
  ~RowFloats() { cudaFree(device); }
  RowFloats(const RowFloats&) = delete;
};

// The kernel's inputs and outputs of a problem, on the device.
struct DeviceProblem {
  BackwardProblem& p;
  RowFloats lse, dlse;
  int *cu_q, *cu_k, *used_q, *used_k, *varlen_schedule;
  float *sinks, *slopes, *dsinks;
  DeviceMemory memory;
  flashattn3::MaskListParams lists;
  const int* turns;

  explicit DeviceProblem(BackwardProblem& p)
      : p(p), lse(p, p.lse, false), dlse(p, p.dlse, p.c.other_strides) {
    const Case& c = p.c;
    for (Tensor* t : {&p.q, &p.k, &p.v, &p.out, &p.dout, &p.bias}) t->upload();
    clear_results();
    cu_q = device_copy(c.cu_q), cu_k = device_copy(c.cu_k);
    used_q = device_copy(c.used_q), used_k = device_copy(c.used_k);
    const int64_t schedule_words =
        c.cu_q.empty() ? 0 : flashattn3::varlen_schedule_bytes(c.batch) / 4;
    varlen_schedule = device_copy(std::vector<int>(schedule_words, -1));
    sinks = device_copy(p.sinks), slopes = device_copy(p.slopes);
    dsinks = device_copy(std::vector<float>(p.sinks.size(), NAN));
    if (p.mask.heads != 0) lists = p.lists.params(memory);
    turns = memory(p.lists.turns);
    check(cudaGetLastError());
  }
  ~DeviceProblem() {
    for (float* each : {sinks, slopes, dsinks}) cudaFree(each);
    for (int* table : {cu_q, cu_k, used_q, used_k, varlen_schedule}) cudaFree(table);
  }
  DeviceProblem(const DeviceProblem&) = delete;

  void clear_results() {
    p.clear_results();
    for (Tensor* t : {&p.dq, &p.dk, &p.dv, &p.ds, &p.dbias}) t->upload();
  }
  void download_results() {
    for (Tensor* t : {&p.dq, &p.dk, &p.dv, &p.dbias}) t->download();
  }

  // Their gradient has the same bits in every run. Returns an error message, or "".
  std::string check_sinks(const std::string& prefix) {
    std::vector<float> found(p.sinks.size());
    check(cudaMemcpy(found.data(), dsinks, found.size() * 4, cudaMemcpyDeviceToHost));
    if (first_dsinks.empty()) first_dsinks = found;
    for (size_t h = 0; h < found.size(); ++h) {
      const double wanted = p.reference.dsinks[h];
      const bool near = std::fabs(found[h] - wanted) <= p.reference.dsinks_bound[h];
      if (near && found[h] == first_dsinks[h]) continue;
      return prefix + "the sink of head " + std::to_string(h) + " has gradient " +
             std::to_string(found[h]) + ", wanted " + std::to_string(wanted) + ", first " +
             std::to_string(first_dsinks[h]);
    }
    return "";
  }
  std::vector<float> first_dsinks;

  BackwardParams params(int num_sms) {
    BackwardParams params = make_params(
        p, {lse.device, dlse.device, lse.stride, dlse.stride, cu_q, cu_k, used_q, used_k},
        [](Tensor& tensor) { return tensor.data(); });
    params.forward.varlen_schedule = varlen_schedule;
    params.forward.sinks = sinks, params.forward.alibi_slopes = slopes;
    params.dsinks = dsinks;
    params.lists = lists, params.turns = turns;
    params.forward.num_sms = num_sms;
    return params;
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
  std::string wrong;     // a line for each error
  int num_parts = 1;     // of the query heads of a KV head, on all SMs
  double ratio[4] = {};  // error / bound of dq, dk, dv, dbias
  void add(const std::string& text) {
    if (!text.empty()) wrong += "      " + text + "\n";
  }
};

// dk and dv must be bitwise equal in all nondeterministic runs with as many parts of the query
// heads (their number depends on that of the SMs); dk and dv likewise in deterministic ones, and dq
// in all of these.
static Outcome run_config(BackwardProblem& p, DeviceProblem& device, int config, const char* label,
                          int num_sms, int* counter) {
  Outcome outcome;
  Gradient* gradients[] = {&p.reference.dq, &p.reference.dk, &p.reference.dv, &p.reference.dbias};
  BackwardParams params = device.params(num_sms);
  GuardedBytes workspace(kRows[config].workspace_bytes(params.forward));
  params.workspace = workspace.data();
  // Bits of the first run for each (gradient, deterministic, number of parts).
  std::map<std::array<int, 3>, std::vector<uint16_t>> first;
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
      outcome.add(error.what());
      return outcome;
    }
    check(cudaDeviceSynchronize());
    device.download_results();
    check(cudaGetLastError());
    const std::string prefix = std::string(run.name) + ": ";
    int counts[2];
    check(cudaMemcpy(counts, counter, 8, cudaMemcpyDeviceToHost));
    if (counts[0] != 0 || counts[1] != 0) outcome.add(prefix + "the tile counter was not put back");
    if (!workspace.guards_hold()) outcome.add(prefix + "written outside the workspace");
    const std::string tile_semaphore =
        run.deterministic ? check_tile_semaphore(p, params, config, num_parts) : "";
    if (!tile_semaphore.empty()) outcome.add(prefix + tile_semaphore);
    outcome.add(device.check_sinks(prefix));
    for (int i = 0; i < 4; ++i) {
      Gradient& g = *gradients[i];
      Tensor& tensor = p.tensor(g);
      std::vector<uint16_t>& bits = first[{i, run.deterministic, i > 0 ? num_parts : 0}];
      if (bits.empty()) {
        bits = tensor.host;
      } else if (i > 0 || run.deterministic) {
        const std::string what = difference(run.name, g, tensor, bits, p.c.fp16);
        outcome.add(what);
        if (what.empty()) continue;
      }
      const std::string uncovered = check_coverage(p, g);
      if (!uncovered.empty()) outcome.add(prefix + uncovered);
      const Worst worst = compare(p, g);
      outcome.ratio[i] = std::max(outcome.ratio[i], worst.ratio);
      if (worst.wrong > 0) outcome.add(prefix + describe(g, worst));
    }
  }
  return outcome;
}

// Runs the case on every kernel config of its dtype with the smallest sufficient head dim. Returns
// false on failure.
static bool run_case(const Case& c, int index, const Options& options, int num_sms, int* counter) {
  std::vector<int> rows = configs_of(c);
  std::erase_if(rows, [&](int i) { return !options.wants(i); });
  if (rows.empty()) {
    if (!options.quiet) std::printf("no row for %3d %s\n", index, c.name.c_str());
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
    if (pass && options.quiet) continue;
    std::printf("%s  %s  in %d parts; of the bounds: dq %.2f dk %.2f dv %.2f dbias %.2f\n%s",
                pass ? "PASS" : "FAIL", label, outcome.num_parts, outcome.ratio[0],
                outcome.ratio[1], outcome.ratio[2], outcome.ratio[3], outcome.wrong.c_str());
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
  constexpr int kLengths = 6, kRounds = 5;
  GridData grids[2] = {GridData(false), GridData(true)};
  std::printf("TFLOP/s at 512, 1024, 2048, 4096, 8192, 16384; microseconds of all kernels\n");
  for (const bool causal : {false, true}) {
    for (int config = 0; config < kNumCheckConfigs; ++config) {
      if (!options.wants(config) || kCheckConfigs[config].listed) continue;
      GridData& data = grids[kCheckConfigs[config].dtype == flashattn3::kFp16];
      for (const bool sinks : {false, true}) {
        const bool deterministic = options.deterministic;
        const std::string name = config_name(config) + (causal ? " causal" : "") +
                                 (deterministic ? " ordered" : "") + (sinks ? " sinks" : "");
        double rate[kLengths] = {}, spent[kLengths] = {};
        for (int length = 0; length < kLengths; ++length) {
          const int seqlen = 512 << length;
          const int largest = kCheckConfigs[config].head_dim;
          const int head_dim = options.head_dim != 0 ? options.head_dim : largest;
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
          std::vector<float> ms;
          for (int round = 0; round < kRounds; ++round) {
            std::snprintf(g_now, sizeof(g_now), "timing %s at %d", name.c_str(), seqlen);
            alarm(15);
            usleep(3000);  // idle, as beside slower providers: not always at the power limit
            const auto launch = [&] { kRows[config].launch(params, nullptr); };
            if (round == 0) time_launch(launch, 2);
            ms.push_back(time_launch(launch, repeats));
            alarm(0);
          }
          std::sort(ms.begin(), ms.end());
          spent[length] = ms[kRounds / 2] * 1e3;
          rate[length] = flop / spent[length] * 1e-6;
        }
        std::printf("%-44s", name.c_str());
        for (const double x : rate) std::printf("%5.0f", x);
        std::printf("  |");
        for (const double x : spent) std::printf("%7.0f", x);
        std::printf("\n");
        std::fflush(stdout);
      }
    }
  }
}

struct Change {
  unsigned long long count;   // elements whose bits differ
  unsigned long long broken;  // elements not finite
  int largest;                // largest distance, as the bits of a float
};
template <bool kFp16>
static __global__ void find_changes(const uint16_t* a, const uint16_t* b, int64_t count,
                                    Change* change) {
  const auto value = [](uint16_t bits) {
    return kFp16 ? __half2float(__ushort_as_half(bits))
                 : __bfloat162float(__ushort_as_bfloat16(bits));
  };
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * blockDim.x) {
    if (!isfinite(value(b[i]))) atomicAdd(&change->broken, 1);
    if (a[i] == b[i]) continue;
    atomicAdd(&change->count, 1);
    const float distance = fabsf(value(a[i]) - value(b[i]));
    if (distance > 0) atomicMax(&change->largest, __float_as_int(distance));
  }
}

// Runs one causal problem many times. dk and dv must not change; dq may if not deterministic.
static bool repeat(const Options& options, int num_sms, int* counter) {
  GridData grids[2] = {GridData(false), GridData(true)};
  uint16_t* kept[3];
  for (auto& pointer : kept) check(cudaMalloc(&pointer, GridData::kCount * 2));
  Change* found;
  check(cudaMalloc(&found, 3 * sizeof(Change)));
  bool good = true;
  for (int config = 0; config < kNumCheckConfigs; ++config) {
    if (!options.wants(config) || kCheckConfigs[config].listed) continue;
    const bool fp16 = kCheckConfigs[config].dtype == flashattn3::kFp16;
    GridData& data = grids[fp16];
    for (const bool deterministic : {false, true}) {
      const int head_dim = kCheckConfigs[config].head_dim;
      BackwardParams params =
          data.params(config, head_dim, options.length != 0 ? options.length : 2048, true);
      params.forward.deterministic = deterministic;
      params.forward.num_sms = num_sms;
      params.forward.tile_counter = counter;
      params.forward.pdl = true;
      const int64_t rows = int64_t{16384} * params.forward.num_heads_q;
      const int64_t counts[3] = {rows * head_dim, rows * head_dim,
                                 rows * params.forward.head_dim_v};
      check(cudaMemset(found, 0, 3 * sizeof(Change)));
      for (int time = 0; time < options.repeats; ++time) {
        std::snprintf(g_now, sizeof(g_now), "repeating %s, time %d", config_name(config).c_str(),
                      time);
        alarm(15);
        for (int i = 0; i < 3; ++i) check(cudaMemset(data.gradient[i], 0xff, counts[i] * 2));
        check(cudaMemset(data.workspace, 0xff, data.workspace_bytes));
        kRows[config].launch(params, nullptr);
        for (int i = 0; i < 3; ++i) {
          if (time == 0) {
            check(cudaMemcpy(kept[i], data.gradient[i], counts[i] * 2, cudaMemcpyDeviceToDevice));
          }
          const auto find = fp16 ? find_changes<true> : find_changes<false>;
          find<<<1056, 256>>>(kept[i], data.gradient[i], counts[i], found + i);
        }
        check(cudaDeviceSynchronize());
        alarm(0);
      }
      Change changes[3];
      check(cudaMemcpy(changes, found, sizeof(changes), cudaMemcpyDeviceToHost));
      std::printf("%s%s, %d times:", config_name(config).c_str(), deterministic ? " ordered" : "",
                  options.repeats);
      for (int i = 0; i < 3; ++i) {
        float largest;
        std::memcpy(&largest, &changes[i].largest, 4);
        std::printf("  %s %llu changed, by %.3g at most, %llu not finite",
                    i == 0   ? "dq"
                    : i == 1 ? "dk"
                             : "dv",
                    changes[i].count, largest, changes[i].broken);
        if (changes[i].broken > 0 || (changes[i].count > 0 && (i > 0 || deterministic)))
          good = false;
      }
      std::printf("\n");
      std::fflush(stdout);
    }
  }
  return good;
}

static Options read_options(int argc, char** argv) {
  Options o;
  int i = 1;
  const auto next = [&]() -> const char* {
    return i + 1 < argc && std::strncmp(argv[i + 1], "--", 2) != 0 ? argv[++i] : nullptr;
  };
  const auto next_number = [&] {
    const char* text = next();
    return text == nullptr ? 0 : std::atoi(text);
  };
  for (; i < argc; ++i) {
    const std::string name = argv[i];
    if (name == "--from") {
      o.from = next_number();
    } else if (name == "--only") {
      o.part = next();
    } else if (name == "--config") {
      o.config = next();
    } else if (name == "--quiet") {
      o.quiet = true;
    } else if (name == "--deterministic") {
      o.deterministic = true;
    } else if (name == "--head-dim") {
      o.head_dim = next_number();
    } else if (name == "--self") {
      o.self = true;
      o.part = next();
    } else if (name == "--time" || name == "--repeat") {
      o.time = name == "--time";
      if (!o.time) o.repeats = next_number();
      o.config = next();
      o.length = next_number();
    } else {
      std::printf("unknown: %s\n", argv[i]);
      std::exit(2);
    }
  }
  return o;
}

int main(int argc, char** argv) {
  const Options options = read_options(argc, argv);
  const std::vector<Case> cases = backward_cases();
  if (options.self) return !test_self(cases, options.part);
  signal(SIGALRM, on_alarm);
  int num_sms = 0, *counter;
  check(cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, 0));
  check(cudaMalloc(&counter, 8));
  check(cudaMemset(counter, 0, 8));
  if (options.time) {
    time_grid(options, num_sms, counter);
    return 0;
  }
  if (options.repeats > 0) return !repeat(options, num_sms, counter);
  int failed = 0, run = 0;
  for (int i = options.from; i < static_cast<int>(cases.size()); ++i) {
    const bool wanted =
        options.part == nullptr || cases[i].name.find(options.part) != std::string::npos;
    if (!wanted) continue;
    ++run;
    if (!run_case(cases[i], i, options, num_sms, counter)) ++failed;
  }
  std::printf("%d cases, %d failed\n", run, failed);
  return failed != 0;
}
