// flashattn3_hopper::decode_planned: a cached call that is like an earlier one, as each step of a
// generating model is like the step before. The operator finds the launch that was planned for such
// a call: it reads the tensors in less time than Python takes to make a key of them.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>
#include <tuple>

#include "launch/registry.h"
#include "torch_binding/boxed.h"
#include "torch_binding/decode_call.h"
#include "torch_binding/prepared.h"
#include "torch_binding/tensors.h"

namespace flashattn3 {
namespace {

// Returns whether the launch is planned for calls with these tensors. It compares everything that a
// plan depends on; run_decode checks the rest.
bool is_planned_for(const PlannedDecode& planned, const DecodeCall& call) {
  const CachedProblem& problem = planned.launch.problem;
  const Tensor &q = call.q, &k = call.k_cache, &v = call.v_cache;
  const bool fp16 = decode_kernel(planned.launch.config).info.dtype == ElementType::kFloat16;
  const int64_t page_size = call.page_table ? k.size(1) : 0;
  return q.get_device_index() == planned.device && q.size(1) == planned.seqlen_q &&
         dtype_of(q) == (fp16 ? aoti_torch_dtype_float16() : aoti_torch_dtype_bfloat16()) &&
         q.size(2) == problem.num_heads_q && q.size(3) == problem.head_dim &&
         k.size(2) == problem.num_heads_kv && v.size(3) == problem.head_dim_v &&
         page_size == problem.page_size;
}

std::optional<Tensor> run_planned(const Tensor& launches, const DecodeCall& call) {
  const auto all = planned_decodes("decode_planned", launches);
  const auto is_readable = [](const Tensor& x) { return x.dim() == 4 && has_aligned_rows(x); };
  if (!is_readable(call.q) || !is_readable(call.k_cache) || !is_readable(call.v_cache)) return {};
  for (const PlannedDecode& planned : all) {
    if (is_planned_for(planned, call)) return run_decode(planned.launch, call, nullptr);
  }
  return {};
}

void decode_planned(StableIValue* stack, uint64_t, uint64_t) {
  Arguments arguments(stack);
  const Tensor launches = arguments.take<Tensor>();
  DecodeCall call{.q = arguments.take<Tensor>(),
                  .k_cache = arguments.take<Tensor>(),
                  .v_cache = arguments.take<Tensor>(),
                  .cache_seqlens = arguments.take<std::optional<Tensor>>(),
                  .page_table = arguments.take<std::optional<Tensor>>()};
  call.seqlen = arguments.take<int64_t>();
  call.lse = arguments.take<std::optional<Tensor>>();
  return_results(stack, std::tuple(run_planned(launches, call)));
}

}  // namespace

// The operator has few arguments, because torch takes 100 ns for each, given or not. launches holds
// some PlannedDecode. The operator returns None if none of them is for such a call, and throws for
// tensors that do not fit each other.
STABLE_TORCH_LIBRARY_FRAGMENT(flashattn3_hopper, library) {
  library.def(
      "decode_planned(Tensor launches, Tensor q, Tensor k_cache, Tensor v_cache, "
      "Tensor? cache_seqlens, Tensor? page_table, int seqlen, Tensor(a!)? lse) -> Tensor?");
}

STABLE_TORCH_LIBRARY_IMPL(flashattn3_hopper, CUDA, library) {
  library.impl("decode_planned", decode_planned);
}

// Tensors on the CPU, for which no launch is planned, get None.
STABLE_TORCH_LIBRARY_IMPL(flashattn3_hopper, CPU, library) {
  library.impl("decode_planned", decode_planned);
}

}  // namespace flashattn3
