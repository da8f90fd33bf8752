// flashattn3_hopper::decode, decode_into and decode_size: fill DecodeParams from a prepared launch
// and the tensors of a cached call, and launch on torch's current stream. The notes in
// forward_op.cpp apply.
//
// Nothing depends on a length on the host, so a captured call is right for other lengths. The
// workspace is torch's, in a capture of the graph's pool; counters, which outlast a launch, belong
// to the stream (launch/stream_counters.h).
#include <cuda_runtime.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <limits>
#include <optional>
#include <string>
#include <tuple>

#include "launch/byte_decode_params.h"
#include "launch/errors.h"
#include "launch/fill_rows.h"
#include "launch/registry.h"
#include "launch/widen_cache.h"
#include "torch_binding/attention_call.h"
#include "torch_binding/boxed.h"
#include "torch_binding/decode_call.h"
#include "torch_binding/decode_checks.h"
#include "torch_binding/decode_launch.h"
#include "torch_binding/launch_record.h"
#include "torch_binding/tensors.h"

namespace flashattn3 {
namespace {

Shape rows_shape(const CachedProblem& problem, const DecodeCall& call, int64_t columns) {
  const int64_t total = call.total_q(), heads = problem.num_heads_q;
  return call.varlen() ? Shape{3, {total, heads, columns}}
                       : Shape{4, {call.batch(), total, heads, columns}};
}

// Throws for a tensor that is not on a GPU, or on another one than q.
int device_of(const DecodeCall& call) {
  const int device = call.q.get_device_index();
  const auto check = [&](const char* name, const Tensor& tensor) {
    expect_on_gpu(kName, name, tensor, device, "the GPU of q");
  };
  check("q.device", call.q);
  check("k_cache.device", call.k_cache);
  check("v_cache.device", call.v_cache);
  const auto check_given = [&](const char* name, const std::optional<Tensor>& tensor) {
    if (tensor) check(name, *tensor);
  };
  check_given("lse.device", call.lse);
  check_given("cache_seqlens.device", call.cache_seqlens);
  check_given("page_table.device", call.page_table);
  check_given("cache_batch_idx.device", call.cache_batch_idx);
  check_given("cache_leftpad.device", call.cache_leftpad);
  check_given("cu_seqlens_q.device", call.cu_seqlens_q);
  check_given("cu_seqlens_k_new.device", call.cu_seqlens_k_new);
  check_given("q_descale.device", call.q_descale);
  check_given("k_descale.device", call.k_descale);
  check_given("v_descale.device", call.v_descale);
  check_given("sinks.device", call.sinks);
  check_given("scheduler_metadata.device", call.scheduler_metadata);
  check_given("tree_mask.device", call.tree_mask);
  check_given("prefix_page_table.device", call.prefix_page_table);
  check_given("prefix_seqlen.device", call.prefix_seqlen);
  return device;
}

void check_call(const CachedProblem& problem, const KernelInstance& kernel,
                const DecodeCall& call) {
  const ElementType dtype = kernel.dtype;
  const bool of_bytes = problem.byte_cache;
  const bool varlen = call.varlen();
  expect(call.q.dim() == (varlen ? 3 : 4), kName, "the number of axes of q", varlen ? 3 : 4,
         call.q.dim());
  const int32_t int32 = aoti_torch_dtype_int32(), fp32 = aoti_torch_dtype_float32();
  if (varlen) {
    expect(call.cu_seqlens_q->numel() >= 1, kName, "cu_seqlens_q.shape[0]", "at least 1", 0);
  }
  const int64_t batch = call.batch(), total = call.total_q();
  const int64_t heads_q = problem.num_heads_q, heads_kv = problem.num_heads_kv;
  check_rows("q", call.q, dtype, rows_shape(problem, call, problem.head_dim));
  if (call.lse) {
    expect_shape(kName, "lse", *call.lse,
                 varlen ? Shape{2, {heads_q, total}} : Shape{3, {batch, heads_q, total}});
    expect_dtype("lse.dtype", *call.lse, fp32, "float32");
  }

  expect(call.k_cache.dim() == 4, kName, "the number of axes of k_cache", 4, call.k_cache.dim());
  const int64_t caches = call.k_cache.size(0), tokens = call.k_cache.size(1);
  const Shape k_shape{4, {caches, tokens, heads_kv, problem.head_dim}};
  const Shape v_shape{4, {caches, tokens, heads_kv, problem.head_dim_v}};
  if (of_bytes) {
    check_byte_caches(call, k_shape, v_shape);
  } else {
    check_rows("k_cache", call.k_cache, dtype, k_shape);
    check_rows("v_cache", call.v_cache, dtype, v_shape);
  }
  const bool paged = problem.page_size > 0;
  expect(call.page_table.has_value() == paged, kName, "page_table",
         paged ? "a tensor of a paged launch" : "None of a dense launch",
         paged ? "None" : "a tensor");
  int64_t entries = caches;
  if (paged) {
    expect(tokens == problem.page_size, kName, "k_cache.shape[1]", problem.page_size, tokens);
    check_pages(*call.page_table);
    entries = call.page_table->size(0);
  }
  if (call.prefix_page_table) {
    check_pages(*call.prefix_page_table);
    expect(call.prefix_page_table->size(0) == 1, kName, "prefix_page_table.shape[0]", 1,
           call.prefix_page_table->size(0));
  }
  check_dense("prefix_seqlen", call.prefix_seqlen, int32, {1, {1}});
  if (!call.cache_batch_idx) {
    expect(entries == batch, kName, "the number of caches", batch, entries);
  }
  check_dense("cache_seqlens", call.cache_seqlens, int32, {1, {batch}});
  check_dense("cache_batch_idx", call.cache_batch_idx, int32, {1, {batch}});
  check_dense("cache_leftpad", call.cache_leftpad, int32, {1, {batch}});
  check_dense("cu_seqlens_q", call.cu_seqlens_q, int32, {1, {batch + 1}});
  check_dense("cu_seqlens_k_new", call.cu_seqlens_k_new, int32, {1, {batch + 1}});
  check_descale("q_descale", call.q_descale, call, false);
  check_descale("k_descale", call.k_descale, call, of_bytes);
  check_descale("v_descale", call.v_descale, call, of_bytes);
  check_dense("sinks", call.sinks, fp32, {1, {heads_q}});
  check_dense("scheduler_metadata", call.scheduler_metadata, int32, {1, {2 + 4 * batch}});
  check_tree(call);
}

const float* floats(const std::optional<Tensor>& tensor) {
  return tensor ? static_cast<const float*>(tensor->data_ptr()) : nullptr;
}

void set_descale(const std::optional<Tensor>& descale, const float*& data, DescaleStrides& stride) {
  data = floats(descale);
  if (!descale || is_one_number(*descale)) return;
  stride = {.batch = to_int(kName, "the stride of a descale", descale->stride(0)),
            .head = to_int(kName, "the stride of a descale", descale->stride(1))};
}

// Sets the descales of heads, or those of keys if the tensor has three axes.
void set_descale(const std::optional<Tensor>& descale, const float*& of_heads,
                 DescaleStrides& stride, KeyDescaleParams& of_keys) {
  if (!descale || descale->dim() != 3) return set_descale(descale, of_heads, stride);
  of_keys = {.data = floats(descale),
             .stride = {.batch = descale->stride(0),
                        .seq = descale->size(1) == 1 ? 0 : descale->stride(1),
                        .head = descale->stride(2)}};
}

// Page numbers of a call with a prefix. Kernels read a table without pages as one, not as none.
const int32_t* table_of(const Tensor& pages) {
  static constexpr int32_t kNoPage = -1;
  return pages.numel() > 0 ? static_cast<const int32_t*>(pages.data_ptr()) : &kNoPage;
}

// Sizes and pointers of a call that check_call accepted; workspace, counters and pdl are unset.
ByteDecodeParams make_params(const CachedProblem& problem, const DecodeCall& call,
                             const Tensor& out) {
  const bool varlen = call.varlen(), paged = call.page_table.has_value();
  ByteDecodeParams params{decode_params_of(problem)};
  params.q = call.q.data_ptr();
  params.out = out.data_ptr();
  params.q_stride = row_strides(call.q, varlen);
  params.out_stride = row_strides(out, varlen);
  if (call.lse) {
    params.lse = static_cast<float*>(call.lse->data_ptr());
    params.lse_stride = {.batch = varlen ? 0 : call.lse->stride(0),
                         .seq = call.lse->stride(varlen ? 1 : 2),
                         .head = call.lse->stride(varlen ? 0 : 1)};
  }
  params.k = {call.k_cache.data_ptr(), row_strides(call.k_cache, false)};
  params.v = {call.v_cache.data_ptr(), row_strides(call.v_cache, false)};
  set_descale(call.q_descale, params.q_descale, params.q_descale_stride);
  set_descale(call.k_descale, params.k_descale, params.k_descale_stride, params.k_key_descale);
  set_descale(call.v_descale, params.v_descale, params.v_descale_stride, params.v_key_descale);
  params.is_int8 = dtype_of(call.k_cache) == aoti_torch_dtype_int8();
  params.page_table = indices(call.page_table);
  params.cache_seqlens = indices(call.cache_seqlens);
  params.cu_seqlens_q = indices(call.cu_seqlens_q);
  params.cu_seqlens_k_new = indices(call.cu_seqlens_k_new);
  params.cache_leftpad = indices(call.cache_leftpad);
  params.cache_batch_idx = indices(call.cache_batch_idx);
  params.page_table_stride = paged ? call.page_table->stride(0) : 0;
  params.sinks = floats(call.sinks);
  if (call.tree_mask) {
    const Tensor& tree = *call.tree_mask;
    params.tree_mask = indices(tree);
    params.tree_words = static_cast<int>(tree.size(tree.dim() - 1));
    params.tree_stride = {.batch = varlen ? 0 : tree.stride(0), .seq = tree.stride(varlen ? 0 : 1)};
  }

  if (call.prefix_page_table) {
    const Tensor& pages = *call.prefix_page_table;
    if (paged) params.page_table = table_of(*call.page_table);
    params.prefix_pages = table_of(pages);
    params.prefix_seqlen = indices(call.prefix_seqlen);
    params.prefix_capacity =
        to_int(kName, "the tokens of a prefix", pages.size(1) * problem.page_size);
    params.prefix_len =
        static_cast<int>(std::min<int64_t>(call.prefix_len, params.prefix_capacity));
  }

  const int64_t caches = call.k_cache.size(0), tokens = call.k_cache.size(1);
  params.batch = to_int(kName, "the batch", call.batch());
  params.total_q = to_int(kName, "the tokens of q", call.total_q());
  params.seqlen_q = to_int(kName, "max_seqlen_q", call.seqlen_q());
  params.num_caches =
      to_int(kName, "the number of caches", paged ? call.page_table->size(0) : caches);
  params.num_pages = to_int(kName, "the number of pages", paged ? caches : 0);
  params.capacity = to_int(kName, "the capacity of a cache",
                           paged ? call.page_table->size(1) * problem.page_size : tokens);
  // One more than the capacity, so that metadata of a length that was cut does not fit.
  params.seqlen_k =
      call.seqlen < 0
          ? params.capacity
          : static_cast<int>(std::min<int64_t>(call.seqlen, int64_t{params.capacity} + 1));
  params.seqlen_new = to_int(kName, "the number of new tokens", call.seqlen_new);
  return params;
}

}  // namespace

bool has_aligned_rows(const Tensor& tensor, int element_bytes) {
  const int64_t last = tensor.dim() - 1;
  bool aligned = reinterpret_cast<uintptr_t>(tensor.data_ptr()) % 16 == 0 &&
                 (tensor.size(last) <= 1 || tensor.stride(last) == 1);
  for (int64_t axis = 0; axis < last; ++axis) {
    aligned = aligned && (tensor.size(axis) <= 1 || tensor.stride(axis) * element_bytes % 16 == 0);
  }
  return aligned;
}

Tensor new_rows(const DecodeCall& call, int64_t columns) {
  const int64_t total = call.total_q(), heads = call.num_heads_q();
  const int32_t dtype = dtype_of(call.q);
  const int device = call.q.get_device_index();
  return call.varlen() ? new_tensor({3, {total, heads, columns}}, dtype, device)
                       : new_tensor({4, {call.batch(), total, heads, columns}}, dtype, device);
}

void check_decode(const CachedLaunch& launch, const DecodeCall& call,
                  const std::optional<Tensor>& out) {
  const CachedProblem& problem = launch.problem;
  const KernelInstance& kernel = decode_kernel(launch.config).info;
  check_call(problem, kernel, call);
  if (out) {
    check_rows("out", *out, kernel.dtype, rows_shape(problem, call, problem.head_dim_v));
    expect_written(kName, "out", *out);
  }
  const int device = device_of(call);
  if (out) expect_on_gpu(kName, "out.device", *out, device, "the GPU of q");
}

Tensor run_checked_decode(const CachedLaunch& prepared, const DecodeCall& call,
                          const std::optional<Tensor>& given) {
  const CachedProblem& problem = prepared.problem;
  const DecodeKernel& kernel = decode_kernel(prepared.config);
  const int device = call.q.get_device_index();
  const DeviceGuard guard(device);
  const cudaStream_t stream = current_stream(device);
  const Tensor out = given ? *given : new_rows(call, problem.head_dim_v);
  ByteDecodeParams params = make_params(problem, call, out);
  params.pdl = true;
  if (call.varlen() && problem.short_config >= 0) {
    launch_mixed(prepared, params, device, stream);
  } else {
    const LaunchMemory memory(problem, kernel, params, device);
    const LaunchCounters counters(params, device, stream);
    launch(problem, kernel, params, memory, stream);
  }
  if (kernel.clears_rows && !call.scheduler_metadata) return out;
  launch_fill_rows(params,
                   {.data = indices(call.scheduler_metadata),
                    .options_hash = static_cast<int>(call.options_hash)},
                   stream);
  return out;
}

Tensor run_decode(const CachedLaunch& launch, const DecodeCall& call,
                  const std::optional<Tensor>& out) {
  check_decode(launch, call, out);
  return run_checked_decode(launch, call, out);
}

namespace {

void decode_operator(StableIValue* stack, uint64_t, uint64_t) {
  Arguments arguments(stack);
  const Tensor launch = arguments.take<Tensor>();
  const DecodeCall call = DecodeCall::take(arguments);
  return_results(stack, std::tuple(run_decode(cached_launch(kName, launch), call, {})));
}

void decode_into(StableIValue* stack, uint64_t, uint64_t) {
  Arguments arguments(stack);
  const Tensor out = arguments.take<Tensor>(), launch = arguments.take<Tensor>();
  const DecodeCall call = DecodeCall::take(arguments);
  run_decode(cached_launch(kName, launch), call, out);
}

void decode_after_prefix(StableIValue* stack, uint64_t, uint64_t) {
  Arguments arguments(stack);
  const Tensor out = arguments.take<Tensor>(), pages = arguments.take<Tensor>();
  const auto seqlen = arguments.take<std::optional<Tensor>>();
  const int64_t length = arguments.take<int64_t>();
  const Tensor launch = arguments.take<Tensor>();
  DecodeCall call = DecodeCall::take(arguments);
  call.prefix_page_table = pages;
  call.prefix_seqlen = seqlen;
  call.prefix_len = length;
  run_decode(cached_launch(kName, launch), call, out);
}

// The grid and the workspace of calls of these sizes, and whether a warp kernel takes them.
// total_q: with cu_seqlens_q, else -1. prefix_pages: -1: no prefix.
std::tuple<int64_t, int64_t, bool> decode_size(Tensor launch, int64_t batch, int64_t seqlen_q,
                                               int64_t capacity, int64_t total_q,
                                               int64_t prefix_pages) {
  const CachedLaunch& found = cached_launch("decode_size", launch);
  const DecodeKernel& kernel = decode_kernel(found.config);
  DecodeParams params = decode_params_of(found.problem);
  params.batch = to_int(kName, "the batch", batch);
  params.seqlen_q = to_int(kName, "seqlen_q", seqlen_q);
  params.capacity = to_int(kName, "the capacity of a cache", capacity);
  const int32_t unread = 0;  // a size depends on whether there are cu_seqlens_q
  if (total_q >= 0) {
    params.total_q = to_int(kName, "the tokens of q", total_q);
    params.cu_seqlens_q = &unread;
  }
  if (prefix_pages >= 0) {
    params.prefix_pages = &unread;
    params.prefix_capacity =
        to_int(kName, "the tokens of a prefix", prefix_pages * params.page_size);
  }
  const LaunchSize size = kernel.size(kernel.info.name, params);
  const int64_t widened = is_widened(found.problem, kernel) ? widened_bytes(params) : 0;
  return {size.num_ctas, size.workspace_bytes + widened, size.on_warps};
}

}  // namespace

// Tensors that a call may lack come last: torch passes a default in less time than an argument.
#define FA3_CACHED_CALL                                                            \
  "Tensor launch, Tensor(b!)? lse, int seqlen, int seqlen_new, int max_seqlen_q, " \
  "int options_hash, " FLASHATTN3_DECODE_SCHEMA
STABLE_TORCH_LIBRARY_FRAGMENT(flashattn3_hopper, library) {
  library.def("decode(" FA3_CACHED_CALL ") -> Tensor");
  library.def("decode_into(Tensor(a!) out, " FA3_CACHED_CALL ") -> ()");
  library.def(
      "decode_after_prefix(Tensor(a!) out, Tensor prefix_page_table, Tensor? prefix_seqlen, "
      "int prefix_len, " FA3_CACHED_CALL ") -> ()");
  library.def(
      "decode_size(Tensor launch, int batch, int seqlen_q, int capacity, int total_q=-1, "
      "int prefix_pages=-1) -> (int num_ctas, int workspace_bytes, bool on_warps)");
}

STABLE_TORCH_LIBRARY_IMPL(flashattn3_hopper, CompositeExplicitAutograd, library) {
  library.impl("decode_size", boxed<decode_size>);
}

STABLE_TORCH_LIBRARY_IMPL(flashattn3_hopper, CUDA, library) {
  library.impl("decode", decode_operator);
  library.impl("decode_into", decode_into);
  library.impl("decode_after_prefix", decode_after_prefix);
}

// Tensors on the CPU get an error that names them.
STABLE_TORCH_LIBRARY_IMPL(flashattn3_hopper, CPU, library) {
  library.impl("decode", decode_operator);
  library.impl("decode_into", decode_into);
  library.impl("decode_after_prefix", decode_after_prefix);
}

}  // namespace flashattn3
