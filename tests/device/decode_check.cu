// Runs the decode kernels without torch and compares them with fp64 on the host, or times them.
//   decode_check [--from case] [--only part of a name]
//       prints one line for each case and number of SMs
//   decode_check --random count [--from seed]
//       random problems instead
//   decode_check --time [--only part of a name]
//       prints microseconds of decode steps beside those of a kernel that only reads as many bytes
// Exit code 0: all correct, 1: wrong values, 3: a case hung, 4: a CUDA error; after 3 and 4 it
// prints the --from with which to continue.
#include <unistd.h>

#include <cstdio>
#include <cstring>
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

// ------------------------------------------------------------------------------------------ timing

// Reads the memory and stores a word that depends on it.
__global__ void __launch_bounds__(512)
    read_kernel(const uint4* data, int64_t count, uint32_t* sum) {
  uint32_t x = 0;
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  for (; i + 3 * step < count; i += 4 * step) {
    const uint4 a = __ldcs(data + i), b = __ldcs(data + i + step), c = __ldcs(data + i + 2 * step),
                d = __ldcs(data + i + 3 * step);
    x ^= a.x ^ b.y ^ c.z ^ d.w;
  }
  for (; i < count; i += step) x ^= __ldcs(data + i).x;
  if (x == 0x12345678) *sum = x;
}

// Fills memory with e4m3 numbers below 2, of any bits otherwise.
__global__ void fill_e4m3(uint32_t* words, int64_t count) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * blockDim.x) {
    words[i] = static_cast<uint32_t>((i + 1) * 0x9e3779b97f4a7c15u >> 32) & 0xbfbfbfbfu;
  }
}

// Microseconds of one call: calls on different copies of the cache, more than L2 holds, one after
// the other in a CUDA graph.
template <class Call>
static float time_calls(Call call, int copies, cudaStream_t stream) {
  cudaGraph_t graph;
  cudaGraphExec_t executable;
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  for (int copy = 0; copy < copies; ++copy) call(copy);
  check(cudaStreamEndCapture(stream, &graph));
  check(cudaGraphInstantiate(&executable, graph, 0));
  cudaEvent_t begin, end;
  check(cudaEventCreate(&begin));
  check(cudaEventCreate(&end));
  std::vector<float> us;
  for (int round = 0; round < 8; ++round) {
    check(cudaEventRecord(begin, stream));
    check(cudaGraphLaunch(executable, stream));
    check(cudaEventRecord(end, stream));
    check(cudaEventSynchronize(end));
    float ms;
    check(cudaEventElapsedTime(&ms, begin, end));
    if (round > 0) us.push_back(ms * 1e3f / copies);  // the first is a warm-up
  }
  std::sort(us.begin(), us.end());
  cudaEventDestroy(begin), cudaEventDestroy(end);
  cudaGraphExecDestroy(executable), cudaGraphDestroy(graph);
  return us[us.size() / 2];
}

static void time_cell(const DecodeCase& cell, int num_sms, cudaStream_t stream) {
  // Of K, and of V.
  const int64_t elements = int64_t{cell.batch} * cell.capacity * cell.heads_kv * cell.head_dim;
  const int element_bytes = cell.e4m3 ? 1 : 2;
  const int64_t bytes = 2 * elements * element_bytes;
  const int copies = static_cast<int>(std::clamp<int64_t>((int64_t{400} << 20) / bytes, 2, 40));
  std::snprintf(g_now, sizeof(g_now), "timing %s", cell.name.c_str());
  alarm(60);
  uint8_t* cache;
  float* descales = nullptr;
  check(cudaMalloc(&cache, bytes * copies));
  if (cell.e4m3) {
    fill_e4m3<<<1056, 256>>>(reinterpret_cast<uint32_t*>(cache), bytes * copies / 4);
  } else {
    fill_normal<<<1056, 256>>>(reinterpret_cast<__nv_bfloat16*>(cache), 2 * elements * copies, 1);
  }
  const int64_t num_descales = elements / cell.head_dim;
  if (cell.token_descales) {
    check(cudaMalloc(&descales, 2 * num_descales * copies * 4));
    check(cudaMemset(descales, 0x3c, 2 * num_descales * copies * 4));
  }
  uint16_t *q, *out;
  const int64_t q_elements = int64_t{cell.batch} * cell.heads_q * cell.head_dim;
  check(cudaMalloc(&q, q_elements * 2));
  check(cudaMalloc(&out, q_elements * 2));
  fill_normal<<<1056, 256>>>(reinterpret_cast<__nv_bfloat16*>(q), q_elements, 2);
  Workspace workspace(num_sms);
  DeviceMemory memory;
  flashattn3::ByteDecodeParams params{timed_params(cell, q, out, num_sms, memory)};
  params.workspace = workspace.memory, params.counters = workspace.counters;
  const int config = config_of(false, cell.head_dim, false, cell.e4m3);
  const auto decode = [&](int copy) {
    params.k.data = cache + copy * bytes;
    params.v.data = cache + copy * bytes + bytes / 2;
    if (descales != nullptr) {
      const float* of_keys = descales + copy * 2 * num_descales;
      const int64_t page = cell.page_size ? cell.page_size : cell.capacity;
      const flashattn3::Strides stride{page * cell.heads_kv, cell.heads_kv, 1};
      params.k_key_descale = {of_keys, stride};
      params.v_key_descale = {of_keys + num_descales, stride};
    }
    kLaunch[config](params, stream);
  };
  const auto read = [&](int copy) {
    read_kernel<<<4 * num_sms, 512, 0, stream>>>(
        reinterpret_cast<const uint4*>(cache + copy * bytes), bytes / 16,
        static_cast<uint32_t*>(workspace.memory));
  };
  decode(0);
  check(cudaStreamSynchronize(stream));
  const float of_read = time_calls(read, copies, stream);
  const float plain = time_calls(decode, copies, stream);
  params.pdl = true;
  const float early = time_calls(decode, copies, stream);
  params.pdl = false;
  // With an L2 that holds neither tables nor instructions either, as between a model's layers.
  constexpr int64_t kFlushedBytes = 128 << 20;
  void* flushed;
  check(cudaMalloc(&flushed, kFlushedBytes));
  const auto flush = [&](int) { check(cudaMemsetAsync(flushed, 0, kFlushedBytes, stream)); };
  const float of_flush = time_calls(flush, 20, stream);
  const auto after_flush = [&](auto call) {
    const auto both = [&](int copy) { flush(copy), call(copy % copies); };
    return time_calls(both, 20, stream) - of_flush;
  };
  const float cold_read = after_flush(read), cold = after_flush(decode);
  alarm(0);
  std::printf(
      "%-34s %8.1f MB  read %8.2f us  decode %8.2f us (%.3f of read, + %.2f)  pdl %8.2f us  "
      "after a flush of L2: read %8.2f us, decode %8.2f us\n",
      cell.name.c_str(), bytes * 1e-6, of_read, plain, plain / of_read, plain - of_read, early,
      cold_read, cold);
  std::fflush(stdout);
  cudaFree(cache), cudaFree(q), cudaFree(out), cudaFree(flushed), cudaFree(descales);
}

// Calls that are timed; seqlens: batch and length of each.
constexpr const char* kTimed = R"(
32/8 | heads 32 8, seqlens 1 1024 1 2048 1 4096 1 8192 1 16384 1 131072 4 1024 4 4096 8 4096 16 512,
    seqlens 32 128 32 256 32 4096 64 16384 128 256 128 1024
32/8, page 1 | heads 32 8, page 1, seqlens 1 16384 32 4096
32/8, page 16 | heads 32 8, page 16, seqlens 1 4096 1 16384 1 131072 8 4096 32 4096
32/8, page 128 | heads 32 8, page 128, seqlens 32 4096
8/1 | heads 8, seqlens 1 1024 1 2048 1 4096 1 16384 1 131072 32 8192 128 8192
32/32 | heads 32 32, seqlens 1 4096 16 4096
64/8 | heads 64 8, seqlens 1 524288
64/1 | heads 64, seqlens 32 8192
64/8, d64 | heads 64 8, d 64, seqlens 1 4096 1 16384 32 4096
64/8, d64, window 128 | heads 64 8, d 64, window 128 -1, seqlens 32 8192
8/1, d256 | heads 8, d 256, seqlens 1 4096 32 4096
8/4, d256 | heads 8 4, d 256, seqlens 1 16384
32/8, tokens | heads 32 8, token_descales, seqlens 32 4096
32/8, tokens, page 16 | heads 32 8, page 16, token_descales, seqlens 32 4096
)";

// Times each call with a cache of 16 bits, which has no descales, and of 8.
static void time_cells(const char* part, int num_sms) {
  cudaStream_t stream;
  check(cudaStreamCreate(&stream));
  for (const bool e4m3 : {false, true}) {
    for (const DecodeCase& row : read_cases<DecodeCase>(kTimed)) {
      if (row.token_descales && !e4m3) continue;
      for (size_t i = 0; i < row.seqlens.size(); i += 2) {
        DecodeCase cell = row;
        cell.e4m3 = e4m3, cell.batch = row.seqlens[i], cell.capacity = row.seqlens[i + 1];
        const int length = cell.capacity;
        cell.name = (e4m3 ? "e4m3, " : "") + std::to_string(cell.batch) + " x " +
                    std::to_string(length < 1024 ? length : length / 1024) +
                    (length < 1024 ? ", " : "k, ") + row.name;
        if (has_part(cell.name, part)) time_cell(cell, num_sms, stream);
      }
    }
  }
}

int main(int argc, char** argv) {
  const CommandLine given(argc, argv);
  signal(SIGALRM, on_alarm);
  int num_sms = 0;
  check(cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, 0));
  if (given.has("--time")) {
    time_cells(given.text("--only"), num_sms);
    return 0;
  }
  return run_cases(
             given, decode_cases(), [](int seed) { return random_decode_case(seed, 5000); },
             [&](const DecodeCase& c, int i) { return run_case(c, i, num_sms); })
      .finish();
}
