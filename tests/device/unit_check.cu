// Unit tests of the primitives in csrc/tile and csrc/attention, one file of unit/ for each header.
//   unit_check [--host] [--from test] [--only part of a name]
//       prints one line for each test; --host: only those that need no GPU
// Exit code 0: all passed, 1: a test failed or none ran, 3: a test hung, 4: a CUDA error; after 3
// and 4 it prints the --from with which to continue.
#include <cstdio>

#include "command_line.h"
#include "unit/attention/alibi_test.cuh"
#include "unit/attention/bias_test.cuh"
#include "unit/attention/block_list_test.cuh"
#include "unit/attention/block_scale_test.cuh"
#include "unit/attention/descale_test.cuh"
#include "unit/attention/joined_lists_test.cuh"
#include "unit/attention/largest_score_test.cuh"
#include "unit/attention/mask_lists_test.cuh"
#include "unit/attention/seqlen_test.cuh"
#include "unit/attention/sinks_test.cuh"
#include "unit/attention/softmax_e4m3_test.cuh"
#include "unit/attention/softmax_test.cuh"
#include "unit/attention/tanh_test.cuh"
#include "unit/attention/tile_scheduler_test.cuh"
#include "unit/attention/tile_shape_test.cuh"
#include "unit/attention/tree_mask_test.cuh"
#include "unit/attention/variant_test.cuh"
#include "unit/decode/work_share_test.cuh"
#include "unit/tile/fragment_test.cuh"
#include "unit/tile/gemm_int8_test.cuh"
#include "unit/tile/gemm_mn_test.cuh"
#include "unit/tile/gemm_test.cuh"
#include "unit/tile/load_staged_test.cuh"
#include "unit/tile/permuted_v_test.cuh"
#include "unit/tile/permuted_v_tile_test.cuh"
#include "unit/tile/row_sum_columns_test.cuh"
#include "unit/tile/tma_load_test.cuh"
#include "unit/tile/tma_store_test.cuh"

int main(int argc, char** argv) {
  const CommandLine given(argc, argv);
  signal(SIGALRM, on_alarm);
  int run = 0, failed = 0;
  for (size_t i = given.number("--from"); i < unit::all_tests().size(); ++i) {
    const unit::Test& test = unit::all_tests()[i];
    if (given.has("--host") && test.where == unit::Where::kGpu) continue;
    if (!has_part(test.name, given.text("--only"))) continue;
    g_case = static_cast<int>(i);
    std::snprintf(g_now, sizeof(g_now), "%s", test.name);
    alarm(30);
    unit::Result result;
    test.run(result);
    alarm(0);
    ++run;
    if (!result.passed()) ++failed;
    std::printf("%s  %-48s %8lld values%s%s\n", result.passed() ? "PASS" : "FAIL", test.name,
                static_cast<long long>(result.num_compared()),
                result.passed() ? "" : "; worst: ", result.passed() ? "" : result.worst().c_str());
    std::fflush(stdout);
  }
  std::printf("%d tests, %d failed\n", run, failed);
  return failed != 0 || run == 0;
}
