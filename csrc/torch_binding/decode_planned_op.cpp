// flashattn3_hopper::decode_planned, decode_planned_with and append_planned: a cached call that
// is like an earlier one, as each step of a generating model is like the step before. The operators
// find the launch of such a call: they read the tensors in less time than Python
// takes to make a key of them.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <utility>

#include "call_tensors.h"
#include "launch/errors.h"
#include "launch/registry.h"
#include "torch_binding/append_call.h"
#include "torch_binding/boxed.h"
#include "torch_binding/decode_call.h"
#include "torch_binding/launch_record.h"
#include "torch_binding/tensors.h"

namespace flashattn3 {
namespace {

// The calls of a launch, in the words of FLASHATTN3_CACHED_PLAN.
class PlanOf {
 public:
  explicit PlanOf(const KeptLaunch& kept) : kept_(kept) {}

  int64_t device() const { return kept_.device; }
  int64_t dtype() const {
    const bool fp16 = decode_kernel(kept_.launch.config).info.dtype == ElementType::kFloat16;
    return fp16 ? aoti_torch_dtype_float16() : aoti_torch_dtype_bfloat16();
  }
  int64_t seqlen_q() const { return kept_.seqlen_q; }
  int64_t num_heads_q() const { return problem().num_heads_q; }
  int64_t num_heads_kv() const { return problem().num_heads_kv; }
  int64_t head_dim() const { return problem().head_dim; }
  int64_t head_dim_v() const { return problem().head_dim_v; }
  int64_t page_size() const { return problem().page_size; }

 private:
  const CachedProblem& problem() const { return kept_.launch.problem; }

  const KeptLaunch& kept_;
};

// Returns whether the launch is that of calls with these tensors, all of whose rows are
// aligned. check_decode checks the rest.
bool is_launch_of(const PlanOf& plan, const DecodeCall& call) {
#define FLASHATTN3_EQUAL(field) &&plan.field() == call.field()
  return true FLASHATTN3_CACHED_PLAN(FLASHATTN3_EQUAL);
#undef FLASHATTN3_EQUAL
}

// A call and some KeptLaunch of its options, of which one may be for it.
struct RepeatedCall {
  Tensor launches;
  DecodeCall call;
  std::optional<Tensor> out;

  // The arguments that all operators begin with.
  static RepeatedCall take(Arguments& arguments) {
    using Optional = std::optional<Tensor>;
    RepeatedCall repeated{.launches = arguments.take<Tensor>(),
                          .call = {.q = arguments.take<Tensor>(),
                                   .k_cache = arguments.take<Tensor>(),
                                   .v_cache = arguments.take<Tensor>(),
                                   .cache_seqlens = arguments.take<Optional>(),
                                   .page_table = arguments.take<Optional>()}};
    repeated.call.seqlen = arguments.take<int64_t>();
    repeated.call.lse = arguments.take<Optional>();
    return repeated;
  }

  // Those that follow in two of them.
  void take_more(Arguments& arguments) {
    out = arguments.take<std::optional<Tensor>>();
    call.max_seqlen_q = arguments.take<int64_t>();
    call.cache_batch_idx = arguments.take<std::optional<Tensor>>();
    call.cache_leftpad = arguments.take<std::optional<Tensor>>();
    call.cu_seqlens_q = arguments.take<std::optional<Tensor>>();
  }

  bool q_has_its_axes() const { return call.q.dim() == (call.varlen() ? 3 : 4); }

  // Null if no launch is for this call.
  const CachedLaunch* find(const char* function) const {
    const auto all = kept_launches(function, launches);
    const auto is_cache = [](const Tensor& x) { return x.dim() == 4 && has_aligned_rows(x); };
    const bool readable = q_has_its_axes() && has_aligned_rows(call.q) && is_cache(call.k_cache) &&
                          is_cache(call.v_cache);
    if (!readable) return nullptr;
    for (const KeptLaunch& kept : all) {
      if (is_launch_of(PlanOf(kept), call)) return &kept.launch;
    }
    return nullptr;
  }

  std::optional<Tensor> run(const char* function) const {
    const CachedLaunch* launch = find(function);
    if (launch == nullptr) return {};
    return run_decode(*launch, call, out);
  }
};

void decode_planned(StableIValue* stack, uint64_t, uint64_t) {
  Arguments arguments(stack);
  const RepeatedCall repeated = RepeatedCall::take(arguments);
  return_results(stack, std::tuple(repeated.run("decode_planned")));
}

void decode_planned_with(StableIValue* stack, uint64_t, uint64_t) {
  Arguments arguments(stack);
  RepeatedCall repeated = RepeatedCall::take(arguments);
  repeated.take_more(arguments);
  return_results(stack, std::tuple(repeated.run("decode_planned_with")));
}

// Takes the arguments of the new tokens; the call says where they go.
AppendCall take_append(Arguments& arguments, const DecodeCall& call) {
  using Optional = std::optional<Tensor>;
  AppendCall append{.k = arguments.take<Tensor>(),
                    .v = arguments.take<Tensor>(),
                    .k_cache = call.k_cache,
                    .v_cache = call.v_cache,
                    .cache_seqlens = call.cache_seqlens,
                    .page_table = call.page_table,
                    .cache_batch_idx = call.cache_batch_idx,
                    .seqlen = call.seqlen};
  append.cu_seqlens_k_new = arguments.take<Optional>();
  append.rotary_cos = arguments.take<Optional>();
  append.rotary_sin = arguments.take<Optional>();
  append.rotary_interleaved = arguments.take<bool>();
  append.one_q_position = arguments.take<bool>();
  return append;
}

constexpr char kAppend[] = "append_planned";

// Both launches are checked before the first.
std::optional<Tensor> append_and_run(RepeatedCall repeated, AppendCall append) {
  DecodeCall& call = repeated.call;
  if (!repeated.q_has_its_axes()) return {};
  expect(call.cache_seqlens || call.seqlen >= 0, kAppend, "cache_seqlens",
         "a tensor, or seqlen a length, where new tokens are written", "None");
  if (append.rotary_cos) {
    append.q = call.q;
    append.cu_seqlens_q = call.cu_seqlens_q;
    append.q_out = call.q = new_rows(call, call.q.size(call.q.dim() - 1));
  }
  const CachedLaunch* launch = repeated.find(kAppend);
  if (launch == nullptr) return {};
  const CheckedAppend checked = CheckedAppend::of(append);
  call.cu_seqlens_k_new = append.cu_seqlens_k_new;
  call.seqlen_new = append.cu_seqlens_k_new ? 0 : append.k.size(1);
  check_decode(*launch, call, repeated.out);
  checked.launch();
  return run_checked_decode(*launch, call, repeated.out);
}

void append_planned(StableIValue* stack, uint64_t, uint64_t) {
  Arguments arguments(stack);
  RepeatedCall repeated = RepeatedCall::take(arguments);
  repeated.take_more(arguments);
  AppendCall append = take_append(arguments, repeated.call);
  return_results(stack, std::tuple(append_and_run(std::move(repeated), std::move(append))));
}

}  // namespace

// decode_planned has few arguments, because torch takes 100 ns for each, given or not. launches
// holds some KeptLaunch. An operator returns None, and writes nothing, if none of them is for
// such a call, and throws for tensors that do not fit each other. A given out is the result.
STABLE_TORCH_LIBRARY_FRAGMENT(flashattn3_hopper, library) {
#define FA3_CALL "Tensor? cache_seqlens, Tensor? page_table, int seqlen, Tensor(a!)? lse"
#define FA3_MORE                                                                        \
  "Tensor(b!)? out, int max_seqlen_q, Tensor? cache_batch_idx, Tensor? cache_leftpad, " \
  "Tensor? cu_seqlens_q"
#define FA3_NEW_TOKENS                                                                     \
  "Tensor k, Tensor v, Tensor? cu_seqlens_k_new, Tensor? rotary_cos, Tensor? rotary_sin, " \
  "bool rotary_interleaved, bool one_q_position"
  const std::string read = "(Tensor launches, Tensor q, Tensor k_cache, Tensor v_cache, " FA3_CALL;
  const std::string written =
      "(Tensor launches, Tensor q, Tensor(c!) k_cache, Tensor(d!) v_cache, " FA3_CALL;
  library.def(("decode_planned" + read + ") -> Tensor?").c_str());
  library.def(("decode_planned_with" + read + ", " FA3_MORE ") -> Tensor(b!)?").c_str());
  library.def(
      ("append_planned" + written + ", " FA3_MORE ", " FA3_NEW_TOKENS ") -> Tensor(b!)?").c_str());
#undef FA3_CALL
#undef FA3_MORE
#undef FA3_NEW_TOKENS
}

STABLE_TORCH_LIBRARY_IMPL(flashattn3_hopper, CUDA, library) {
  library.impl("decode_planned", decode_planned);
  library.impl("decode_planned_with", decode_planned_with);
  library.impl("append_planned", append_planned);
}

// Tensors on the CPU, for which no launch is kept, get None.
STABLE_TORCH_LIBRARY_IMPL(flashattn3_hopper, CPU, library) {
  library.impl("decode_planned", decode_planned);
  library.impl("decode_planned_with", decode_planned_with);
  library.impl("append_planned", append_planned);
}

}  // namespace flashattn3
