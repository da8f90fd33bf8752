// Runs the forward kernels without torch and compares them with fp64 on the host, or times them.
//   forward_check [--from case] [--only part of a name]
//       prints one line for each case and config
//   forward_check --cached [--from case] [--only part of a name]
//   forward_check --cached --random count [--from seed]
//       the same for cached calls
//   forward_check [--fast] --time [part of a config name [length]]
//       prints TFLOP/s of the benchmark grid; --fast: 8 bits without accumulator promotion
// Exit code 0: all correct, 1: wrong values, 3: a case hung, 4: a CUDA error; after 3 and 4 it
// prints the --from with which to continue.
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <utility>

#include "command_line.h"
#include "forward/promotion.cuh"
#include "forward_cached.h"
#include "forward_cases.h"
#include "forward_launches.h"
#include "forward_params.h"
#include "forward_quantized.h"
#include "harness.cuh"
#include "launch/stream_counters.h"

using flashattn3::ElementType;
using flashattn3::ForwardParams;
using flashattn3::is_quantized;
using flashattn3::kBf16;
using flashattn3::kCheckConfigNames;
using flashattn3::kCheckConfigs;
using flashattn3::kE4m3;
using flashattn3::kFp16;
using flashattn3::kInt8;
using flashattn3::kNumCheckConfigs;

static std::string config_name(int i) { return kCheckConfigNames[i]; }
static bool finds_largest(const flashattn3::forward::Config& config) {
  return config.term == flashattn3::ScoreTerm::kLargest;
}
static bool has_slopes(const flashattn3::forward::Config& config) {
  return flashattn3::has_slopes(config.term);
}

// Checks the largest score of each head and sets it back to -inf. Returns an error message, or "".
static std::string check_largest(Problem& p, float* max_logit) {
  const size_t bytes = p.c.heads_q * sizeof(float);
  std::vector<float> found(p.c.heads_q);
  check(cudaMemcpy(found.data(), max_logit, bytes, cudaMemcpyDeviceToHost));
  const std::vector<float> none(p.c.heads_q, -INFINITY);
  check(cudaMemcpy(max_logit, none.data(), bytes, cudaMemcpyHostToDevice));
  if (p.largest.empty()) p.find_largest();
  if (p.first_largest.empty()) p.first_largest = found;
  for (int h = 0; h < p.c.heads_q; ++h) {
    const double wanted = p.largest[h], bound = 4e-6 * std::fabs(wanted) + p.largest_error[h];
    const bool near = found[h] == wanted || std::fabs(found[h] - wanted) <= bound;
    if (near && found[h] == p.first_largest[h]) continue;
    return "largest score of head " + std::to_string(h) + " is " + std::to_string(found[h]) +
           ", wanted " + std::to_string(wanted) + ", first " + std::to_string(p.first_largest[h]);
  }
  return "";
}

// Runs three times, which must be bitwise equal: tiles from a counter, in fixed order, and in fixed
// order on 3 SMs, so that each CTA has many tiles. Returns an error message, or "".
static std::string run_three_times(Problem& p, const QuantizedInputs* quantized, int config,
                                   int num_sms, int* counter) {
  float* lse;
  const size_t lse_bytes = p.lse.size() * 4;
  check(cudaMalloc(&lse, lse_bytes + 4));
  DeviceMemory memory;
  p.out.upload();
  ForwardParams params = make_params(p, lse, memory);
  const int64_t schedule_words =
      p.c.cu_q.empty() ? 0 : flashattn3::varlen_schedule_bytes(p.c.batch) / 4;
  params.varlen_schedule = const_cast<int*>(memory(std::vector<int>(schedule_words, -1)));
  params.num_sms = num_sms;
  const std::vector<float> no_scores(p.c.heads_q, -INFINITY);
  if (finds_largest(kCheckConfigs[config])) params.max_logit = device_copy(no_scores);
  void* promoted = nullptr;
  if (quantized != nullptr) {
    const int64_t bytes =
        flashattn3::forward::promoted_bytes(kCheckConfigs[config], num_sms, p.c.seqlen_k);
    if (bytes > 0) {
      check(cudaMalloc(&promoted, bytes));
      check(cudaMemset(promoted, 0xff, bytes));
    }
    quantized->fill(params, promoted);
  }
  FirstResults first;
  std::string wrong;
  for (int run = 0; run < 3; ++run) {
    check(cudaMemset(lse, 0xff, lse_bytes));
    std::fill(p.out.host.begin(), p.out.host.end(), kNaN);
    p.out.upload();
    params.tile_counter = run == 0 ? counter : nullptr;
    params.pdl = run == 0;
    params.num_sms = run == 2 ? 3 : num_sms;
    try {
      kLaunch[config](params, nullptr);
    } catch (const std::exception& error) {
      wrong = error.what();
      break;
    }
    check(cudaDeviceSynchronize());
    p.out.download();
    check(cudaMemcpy(p.lse.data(), lse, lse_bytes, cudaMemcpyDeviceToHost));
    if (params.max_logit != nullptr) wrong = check_largest(p, params.max_logit);
    if (!wrong.empty()) break;
    wrong = check_counter(counter) + first.compare(p);
    if (!wrong.empty()) {
      wrong += " launch " + std::to_string(run);
      break;
    }
  }
  cudaFree(lse), cudaFree(promoted), cudaFree(params.max_logit);
  return wrong;
}

// Runs the case on every kernel config of a dtype with the smallest sufficient head dim and a
// sufficient one of V. Returns false on failure.
static bool run_configs(const Case& c, int index, ElementType type, int num_sms, int* counter) {
  const std::vector<int> configs =
      smallest_configs(kCheckConfigs, c.head_dim, [&](const flashattn3::forward::Config& r) {
        return r.dtype == type && !r.cached && has_slopes(r) == c.slopes &&
               r.listed == (c.lists_heads != 0) && r.head_dim_v >= c.head_dim_v;
      });
  if (configs.empty()) return true;
  const int head_dim = kCheckConfigs[configs[0]].head_dim;
  bool good = true;
  Problem problem(c);
  problem.q.upload(), problem.k.upload(), problem.v.upload();
  std::unique_ptr<QuantizedInputs> quantized;
  if (is_quantized(type)) {
    const Narrow& scored = type == ElementType::kInt8 ? kToInt8 : kToE4m3;
    quantized = std::make_unique<QuantizedInputs>(scored, problem, head_dim);
    // int8 scores become whole codes, also the largest of a row: errors of up to half a code.
    const bool integer = type == ElementType::kInt8;
    problem.rounding = integer ? 0.085 : 0.06, problem.score_error = 0x1p-12;
    problem.lse_error = integer ? 0.087 : 4e-3, problem.lse_rounding = 0.032;
  }
  const std::vector<RowReference> references = compute_fp64_references(problem);
  for (const int i : configs) {
    if ((c.left >= 0 || c.right >= 0) && !kCheckConfigs[i].masked) continue;
    g_case = index;
    std::snprintf(g_now, sizeof(g_now), "%2d %-34s %s", index, c.name.c_str(),
                  config_name(i).c_str());
    alarm(30);
    std::string wrong = run_three_times(problem, quantized.get(), i, num_sms, counter);
    alarm(0);
    if (wrong.empty()) wrong = check_coverage(problem);
    good = report(g_now, wrong, compare(problem, references)) && good;
  }
  return good;
}

static bool run_case(const Case& c, int index, int num_sms, int* counter) {
  bool good = run_configs(c, index, c.fp16 ? kFp16 : kBf16, num_sms, counter);
  // TMA requires strides that are multiples of 16 bytes.
  if (c.fp16 || c.slopes || c.head_dim % 16 != 0) return good;
  for (const ElementType type : {kE4m3, kInt8}) {
    good = run_configs(c, index, type, num_sms, counter) && good;
  }
  return good;
}

// ------------------------------------------------------------------------------------------ timing

// Prints the median of 7 rounds, each over all kernel configs of a cell: 16384 tokens, heads * head
// dim 2048 or just below, bf16 and e4m3, the config's head dim of V. fast: 8 bits without
// accumulator promotion.
static void time_grid(const std::string& part, int only_length, bool fast, int num_sms,
                      int* counter) {
  constexpr int64_t kCount = 16384 * int64_t{2048};
  constexpr int kRounds = 7;
  uint16_t* data[4];
  float* lse;
  for (int i = 0; i < 4; ++i) {
    check(cudaMalloc(&data[i], kCount * 2));
    fill_normal<<<1056, 256>>>(reinterpret_cast<__nv_bfloat16*>(data[i]), kCount, i);
  }
  check(cudaMalloc(&lse, 16384 * 32 * 4));
  // The same numbers in e4m3, and q and k in int8, with a descale for each 128 tokens of each head.
  __nv_fp8_e4m3* narrow[3];
  int8_t* integer[2];
  for (int i = 0; i < 3; ++i) {
    check(cudaMalloc(&narrow[i], kCount));
    fill_normal<<<1056, 256>>>(narrow[i], kCount, i);
  }
  for (int i = 0; i < 2; ++i) {
    check(cudaMalloc(&integer[i], kCount));
    fill_normal<<<1056, 256>>>(integer[i], kCount, i);
  }
  const std::vector<float> of_e4m3(32 * 16384 / kBlockTokens, 1 / kE4m3PerOne);
  const std::vector<float> of_int8(of_e4m3.size(), 1 / kInt8PerOne);
  float *e4m3_descale = device_copy(of_e4m3), *int8_descale = device_copy(of_int8);
  std::vector<float> slopes;  // of 32 heads: 2^(-1/4), 2^(-2/4), ..., 2^-8; sinks too
  for (int h = 1; h <= 32; ++h) slopes.push_back(std::exp2(-0.25f * h));
  float* const of_heads = device_copy(slopes);
  const std::vector<float> no_scores(32, -INFINITY);
  float *const none = device_copy(no_scores), *const largest = device_copy(no_scores);
  void* promoted = nullptr;
  if (!fast) check(cudaMalloc(&promoted, num_sms * int64_t{49} * 384 * 16));
  check(cudaDeviceSynchronize());
  std::printf("TFLOP/s at 512, 1024, 2048, 4096, 8192, 16384; microseconds\n");
  for (int d : {64, 96, 128, 192, 256}) {
    for (bool causal : {false, true}) {
      std::vector<int> configs;
      std::vector<bool> has_sinks;
      for (int config = 0; config < kNumCheckConfigs; ++config) {
        const flashattn3::forward::Config& r = kCheckConfigs[config];
        const bool fits = has_slopes(r) || finds_largest(r) || r.masked == causal;
        if (r.head_dim != d || !fits || r.dtype == kFp16 || r.cached || r.listed) continue;
        if (config_name(config).find(part) == std::string::npos) continue;
        for (const bool sinks : {false, true})
          configs.push_back(config), has_sinks.push_back(sinks);
      }
      const auto name = [&](int i) {
        return config_name(configs[i]) + (has_sinks[i] ? " sinks" : "");
      };
      std::vector<GridLine> lines(configs.size());
      for (int length = 0; length < kLengths; ++length) {
        const int seqlen = 512 << length;
        if (only_length != 0 && seqlen != only_length) continue;
        ForwardParams params = grid_params(data, lse, d, seqlen, causal);
        params.num_sms = num_sms;
        params.tile_counter = counter;
        params.pdl = true;
        ForwardParams quantized = params;
        quantized.q = narrow[0], quantized.k = narrow[1], quantized.v = narrow[2];
        const int64_t blocks = seqlen / kBlockTokens;
        flashattn3::BlockDescales descales{
            e4m3_descale, 2048 / d * blocks, blocks, 1, static_cast<int>(blocks), kBlockTokens};
        quantized.quantized = {seqlen, descales, descales, descales, promoted};
        ForwardParams integers = quantized;
        integers.q = integer[0], integers.k = integer[1];
        integers.quantized.q.data = integers.quantized.k.data = int8_descale;
        ForwardParams narrower = params;  // V of fewer columns
        const auto flop = [&](int head_dim_v) {
          return 2.0 * 16384 * (2048 / d) * (d + head_dim_v) * seqlen * (causal ? 0.5 : 1.0);
        };
        const int repeats = std::max(2, static_cast<int>(2e-3 / (flop(d) / 6e14)));
        std::vector<ForwardParams> all;
        for (size_t i = 0; i < configs.size(); ++i) {
          const flashattn3::forward::Config& r = kCheckConfigs[configs[i]];
          const int64_t dim_v = r.head_dim_v;
          narrower.head_dim_v = static_cast<int>(dim_v);
          narrower.v_stride =
              narrower.out_stride = {seqlen * (2048 / d) * dim_v, (2048 / d) * dim_v, dim_v};
          ForwardParams given = r.dtype == kE4m3   ? quantized
                                : r.dtype == kInt8 ? integers
                                : dim_v < d        ? narrower
                                                   : params;
          if (has_sinks[i]) given.sinks = of_heads;
          if (finds_largest(r)) given.max_logit = largest;
          if (has_slopes(r)) given.alibi_slopes = of_heads;
          all.push_back(given);
        }
        const auto launch = [&](int i) {
          if (all[i].max_logit != nullptr) {
            cudaMemcpyAsync(largest, none, 32 * sizeof(float), cudaMemcpyDeviceToDevice);
          }
          kLaunch[configs[i]](all[i], nullptr);
        };
        const int count = static_cast<int>(configs.size());
        const std::vector<float> ms = median_times(count, kRounds, repeats, name, launch);
        for (int i = 0; i < count; ++i) {
          lines[i].set(length, ms[i], flop(kCheckConfigs[configs[i]].head_dim_v));
        }
      }
      for (size_t i = 0; i < configs.size(); ++i) lines[i].print(name(i));
    }
  }
}

// Checks that a stream that reuses the handle of a destroyed one, whose kernels may still be
// running, has counters of its own.
static bool check_counters() {
  cudaStream_t first, stream;
  check(cudaStreamCreate(&first));
  const auto* counters = flashattn3::StreamCounters(0, first).get();
  check(cudaStreamDestroy(first));
  for (int i = 0; i < 1000; ++i) {
    check(cudaStreamCreate(&stream));
    if (stream != first) continue;
    const bool good = flashattn3::StreamCounters(0, stream).get() != counters;
    std::printf("%s  counters of a stream whose handle another had\n", good ? "PASS" : "FAIL");
    return good;
  }
  std::printf("SKIP  counters of a stream whose handle another had: none was handed out again\n");
  return true;
}

int main(int argc, char** argv) {
  const CommandLine given(argc, argv);
  signal(SIGALRM, on_alarm);
  int num_sms = 0, *counter;
  check(cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, 0));
  check(cudaMalloc(&counter, sizeof(flashattn3::decode::Counters)));
  check(cudaMemset(counter, 0, sizeof(flashattn3::decode::Counters)));
  if (given.has("--time")) {
    const int length = given.number("--time", 0, 2);
    time_grid(given.text("--time"), length, given.has("--fast"), num_sms, counter);
    return 0;
  }
  if (given.has("--cached")) {
    const auto run = [&](const auto& c, int i) { return run_cached_case(c, i, num_sms, counter); };
    return run_cases(given, cached_cases(), random_cached_case, run).finish();
  }
  Tally tally = run_cases(given, forward_cases(),
                          [&](const Case& c, int i) { return run_case(c, i, num_sms, counter); });
  if (!given.has("--only") && !given.has("--from")) tally.add(check_counters());
  return tally.finish();
}
