// flashattn3_hopper::keep_decode, decode_kept, decode_kept_with and append_kept: a cached
// call that is like an earlier one, as each step of a generating model is like the step before. The
// operators find the launch of such a call: they read the tensors in less time than Python takes to
// make a key of them.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <array>
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
#include "torch_binding/launch_cache.h"
#include "torch_binding/launch_record.h"
#include "torch_binding/tensors.h"

namespace flashattn3 {
namespace {

// The options of a call and what else a plan depends on.
#define FLASHATTN3_WORD(field) +1
using Key = std::array<int64_t, 1 FLASHATTN3_CACHED_PLAN(FLASHATTN3_WORD)>;
#undef FLASHATTN3_WORD

// Call: DecodeCall, all of whose rows are aligned, or PlanOf. check_decode checks the rest of a
// call.
template <class Call>
Key key_of(int64_t options, const Call& call) {
#define FLASHATTN3_VALUE(field) , call.field()
  return {options FLASHATTN3_CACHED_PLAN(FLASHATTN3_VALUE)};
#undef FLASHATTN3_VALUE
}

// The calls of a launch: those with seqlen_q queries of each sequence, or of the longest of a
// varlen batch, on the GPU of this index.
struct PlanOf {
  const CachedLaunch& launch;
  int64_t device_index, queries;

  int64_t device() const { return device_index; }
  int64_t dtype() const {
    const bool fp16 = decode_kernel(launch.config).info.dtype == ElementType::kFloat16;
    return fp16 ? aoti_torch_dtype_float16() : aoti_torch_dtype_bfloat16();
  }
  int64_t seqlen_q() const { return queries; }
  int64_t num_heads_q() const { return launch.problem.num_heads_q; }
  int64_t num_heads_kv() const { return launch.problem.num_heads_kv; }
  int64_t head_dim() const { return launch.problem.head_dim; }
  int64_t head_dim_v() const { return launch.problem.head_dim_v; }
  int64_t page_size() const { return launch.problem.page_size; }
  int64_t byte_cache() const { return launch.problem.byte_cache; }
};

// options_hash: as in DecodeCall. It follows from the key. after_prefix: of such calls with a
// prefix and up to prefix_rows packed rows of all sequences; none: Python plans these.
struct KeptDecode {
  CachedLaunch launch;
  int64_t options_hash;
  std::optional<CachedLaunch> after_prefix;
  int64_t prefix_rows;
};

LaunchCache<Key, KeptDecode>& launch_cache() {
  static auto* cache = new LaunchCache<Key, KeptDecode>;  // threads may outlive static objects
  return *cache;
}

void keep_decode(StableIValue* stack, uint64_t, uint64_t) {
  Arguments arguments(stack);
  const int64_t options = arguments.take<int64_t>();
  const Tensor tensor = arguments.take<Tensor>();
  const CachedLaunch& launch = cached_launch("keep_decode", tensor);
  const int64_t device = arguments.take<int64_t>(), seqlen_q = arguments.take<int64_t>();
  KeptDecode kept{.launch = launch, .options_hash = arguments.take<int64_t>()};
  if (const auto after_prefix = arguments.take<std::optional<Tensor>>()) {
    kept.after_prefix = cached_launch("keep_decode", *after_prefix);
  }
  kept.prefix_rows = arguments.take<int64_t>();
  launch_cache().keep(key_of(options, PlanOf{launch, device, seqlen_q}), kept);
  return_results(stack, std::tuple<>());
}

// A call and the number of its options.
struct RepeatedCall {
  int64_t options;
  DecodeCall call;
  std::optional<Tensor> out;

  // The arguments that all operators begin with.
  static RepeatedCall take(Arguments& arguments) {
    using Optional = std::optional<Tensor>;
    RepeatedCall repeated{.options = arguments.take<int64_t>(),
                          .call = {.q = arguments.take<Tensor>(),
                                   .k_cache = arguments.take<Tensor>(),
                                   .v_cache = arguments.take<Tensor>(),
                                   .cache_seqlens = arguments.take<Optional>(),
                                   .page_table = arguments.take<Optional>()}};
    repeated.call.seqlen = arguments.take<int64_t>();
    repeated.call.lse = arguments.take<Optional>();
    return repeated;
  }

  // The arguments that follow in two of the operators; in decode_kept_with descales come next.
  void take_more(Arguments& arguments) {
    out = arguments.take<std::optional<Tensor>>();
    call.max_seqlen_q = arguments.take<int64_t>();
    call.cache_batch_idx = arguments.take<std::optional<Tensor>>();
    call.cache_leftpad = arguments.take<std::optional<Tensor>>();
    call.cu_seqlens_q = arguments.take<std::optional<Tensor>>();
    call.sinks = arguments.take<std::optional<Tensor>>();
    call.scheduler_metadata = arguments.take<std::optional<Tensor>>();
  }

  // The arguments with which both end.
  void take_prefix(Arguments& arguments) {
    call.prefix_page_table = arguments.take<std::optional<Tensor>>();
    call.prefix_seqlen = arguments.take<std::optional<Tensor>>();
    call.prefix_len = arguments.take<int64_t>();
  }

  bool q_has_its_axes() const { return call.q.dim() == (call.varlen() ? 3 : 4); }

  static bool is_cache(const Tensor& x) {
    return x.dim() == 4 && has_aligned_rows(x, has_bytes(x) ? 1 : 2);
  }

  // Whether the kernels read the descale where it lies. int8 has one.
  static bool is_readable(const std::optional<Tensor>& descale, const Tensor& cache) {
    if (!descale) return dtype_of(cache) != aoti_torch_dtype_int8();
    if (dtype_of(*descale) != aoti_torch_dtype_float32()) return false;
    return descale->dim() == 3 ? has_bytes(cache) : descale->dim() == 2 || is_one_number(*descale);
  }

  // Returns whether each sequence has descales of its own.
  static bool is_of_sequences(const std::optional<Tensor>& descale) {
    return descale && descale->dim() == 2;
  }

  // Returns whether one launch reads the prefix too. The launch takes up to most_rows packed rows,
  // one stride between tokens and no descales of sequences, which are left to Python's error, as a
  // length beyond the pages is.
  bool is_after_prefix(int64_t most_rows) const {
    const Tensor &q = call.q, &pages = *call.prefix_page_table;
    if (pages.dim() != 2 || is_of_sequences(call.k_descale) || is_of_sequences(call.v_descale)) {
      return false;
    }
    const bool in_pages =
        call.prefix_len >= 0 && call.prefix_len <= pages.size(1) * call.page_size();
    const bool one_stride =
        call.varlen() || q.size(0) <= 1 || q.stride(0) == q.size(1) * q.stride(1);
    const int64_t tokens = call.varlen() ? q.size(0) : q.size(0) * q.size(1);
    const int64_t rows = tokens * call.num_heads_q() / call.num_heads_kv();
    return in_pages && one_stride && rows <= most_rows;
  }

  // Sets what given metadata must hold. None if no launch is kept for such a call.
  std::optional<CachedLaunch> find() {
    const bool readable = q_has_its_axes() && has_aligned_rows(call.q) && is_cache(call.k_cache) &&
                          is_cache(call.v_cache) && is_readable(call.k_descale, call.k_cache) &&
                          is_readable(call.v_descale, call.v_cache);
    if (!readable) return std::nullopt;
    const std::optional<KeptDecode> kept = launch_cache().find(key_of(options, call));
    if (!kept) return std::nullopt;
    if (call.scheduler_metadata) call.options_hash = kept->options_hash;
    if (!call.prefix_page_table) return kept->launch;
    return is_after_prefix(kept->prefix_rows) ? kept->after_prefix : std::nullopt;
  }

  std::optional<Tensor> run() {
    const std::optional<CachedLaunch> launch = find();
    if (!launch) return {};
    return run_decode(*launch, call, out);
  }
};

void decode_kept(StableIValue* stack, uint64_t, uint64_t) {
  Arguments arguments(stack);
  RepeatedCall repeated = RepeatedCall::take(arguments);
  return_results(stack, std::tuple(repeated.run()));
}

void decode_kept_with(StableIValue* stack, uint64_t, uint64_t) {
  Arguments arguments(stack);
  RepeatedCall repeated = RepeatedCall::take(arguments);
  repeated.take_more(arguments);
  repeated.call.k_descale = arguments.take<std::optional<Tensor>>();
  repeated.call.v_descale = arguments.take<std::optional<Tensor>>();
  repeated.take_prefix(arguments);
  return_results(stack, std::tuple(repeated.run()));
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

constexpr char kAppend[] = "append_kept";

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
  const std::optional<CachedLaunch> launch = repeated.find();
  if (!launch) return {};
  const CheckedAppend checked = CheckedAppend::of(append);
  call.cu_seqlens_k_new = append.cu_seqlens_k_new;
  call.seqlen_new = append.cu_seqlens_k_new ? 0 : append.k.size(1);
  check_decode(*launch, call, repeated.out);
  checked.launch();
  return run_checked_decode(*launch, call, repeated.out);
}

void append_kept(StableIValue* stack, uint64_t, uint64_t) {
  Arguments arguments(stack);
  RepeatedCall repeated = RepeatedCall::take(arguments);
  repeated.take_more(arguments);
  AppendCall append = take_append(arguments, repeated.call);
  repeated.take_prefix(arguments);
  return_results(stack, std::tuple(append_and_run(std::move(repeated), std::move(append))));
}

}  // namespace

// options: Python's number of the options of a call (flashattn3/run/launches.py).
// decode_kept has few arguments, because torch takes 100 ns for each, given or not. An operator
// returns None, and writes nothing, if no launch is kept for such a call, and throws for tensors
// that do not fit each other. A given out is the result.
STABLE_TORCH_LIBRARY_FRAGMENT(flashattn3_hopper, library) {
#define FA3_CALL "Tensor? cache_seqlens, Tensor? page_table, int seqlen, Tensor(a!)? lse"
#define FA3_MORE                                                                        \
  "Tensor(b!)? out, int max_seqlen_q, Tensor? cache_batch_idx, Tensor? cache_leftpad, " \
  "Tensor? cu_seqlens_q, Tensor? sinks, Tensor? scheduler_metadata"
#define FA3_DESCALES "Tensor? k_descale, Tensor? v_descale"
#define FA3_PREFIX "Tensor? prefix_page_table=None, Tensor? prefix_seqlen=None, int prefix_len=0"
#define FA3_NEW_TOKENS                                                                     \
  "Tensor k, Tensor v, Tensor? cu_seqlens_k_new, Tensor? rotary_cos, Tensor? rotary_sin, " \
  "bool rotary_interleaved, bool one_q_position"
  const std::string read = "(int options, Tensor q, Tensor k_cache, Tensor v_cache, " FA3_CALL;
  const std::string written =
      "(int options, Tensor q, Tensor(c!) k_cache, Tensor(d!) v_cache, " FA3_CALL;
  // launch, after_prefix: of prepare_decode. device: index of the GPU, -1 of another device.
  library.def(
      "keep_decode(int options, Tensor launch, int device, int seqlen_q, int options_hash, "
      "Tensor? after_prefix=None, int prefix_rows=0) -> ()");
  library.def(("decode_kept" + read + ") -> Tensor?").c_str());
  library.def(("decode_kept_with" + read +
               ", " FA3_MORE ", " FA3_DESCALES ", " FA3_PREFIX ") -> Tensor(b!)?")
                  .c_str());
  library.def(("append_kept" + written +
               ", " FA3_MORE ", " FA3_NEW_TOKENS ", " FA3_PREFIX ") -> Tensor(b!)?")
                  .c_str());
#undef FA3_CALL
#undef FA3_MORE
#undef FA3_DESCALES
#undef FA3_PREFIX
#undef FA3_NEW_TOKENS
}

STABLE_TORCH_LIBRARY_IMPL(flashattn3_hopper, CUDA, library) {
  library.impl("decode_kept", decode_kept);
  library.impl("decode_kept_with", decode_kept_with);
  library.impl("append_kept", append_kept);
}

// Tensors on the CPU, for which no launch is kept, get None.
STABLE_TORCH_LIBRARY_IMPL(flashattn3_hopper, CPU, library) {
  library.impl("decode_kept", decode_kept);
  library.impl("decode_kept_with", decode_kept_with);
  library.impl("append_kept", append_kept);
}

STABLE_TORCH_LIBRARY_IMPL(flashattn3_hopper, CompositeExplicitAutograd, library) {
  library.impl("keep_decode", keep_decode);
}

}  // namespace flashattn3
