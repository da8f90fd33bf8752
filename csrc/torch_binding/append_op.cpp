// flashattn3_hopper::append: fills AppendParams from the tensors of an append and launches on
// torch's current stream. The notes in forward_op.cpp apply.
//
// Nothing is allocated, and nothing depends on a length on the host, so a captured call is right
// for other lengths.
#include <cuda_runtime.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <optional>
#include <string>

#include "launch/append.h"
#include "launch/errors.h"
#include "torch_binding/append_call.h"
#include "torch_binding/attention_call.h"
#include "torch_binding/boxed.h"
#include "torch_binding/decode_call.h"
#include "torch_binding/tensors.h"

namespace flashattn3 {
namespace {

constexpr char kName[] = "append";

// Checks the tensors of a call and reads their sizes. Error messages are composed only where a
// check fails.
class Checks {
 public:
  explicit Checks(const AppendCall& call)
      : int32_(aoti_torch_dtype_int32()),
        fp32_(aoti_torch_dtype_float32()),
        dtype_(dtype_of(call.k)) {
    const bool legal =
        dtype_ == aoti_torch_dtype_float16() || dtype_ == aoti_torch_dtype_bfloat16();
    expect(legal, kName, "k.dtype", "fp16 or bf16", "another dtype");
  }

  bool is_fp16() const { return dtype_ == aoti_torch_dtype_float16(); }

  // Keys, values or queries: of k's dtype, the last stride 1.
  void tokens(const char* name, const Tensor& tensor, const Shape& shape) const {
    expect_shape(kName, name, tensor, shape);
    expect_dtype(name, tensor, dtype_, "k's");
    expect_dense_columns(name, tensor);
  }

  // A cache, which is written.
  void cache(const char* name, const Tensor& tensor, const Shape& shape) const {
    tokens(name, tensor, shape);
    expect_written(kName, name, tensor);
  }

  void indices(const char* name, const std::optional<Tensor>& tensor, int64_t size) const {
    if (!tensor) return;
    expect_shape(kName, name, *tensor, {1, {size}});
    expect_dtype(name, *tensor, int32_, "int32");
    expect_dense_columns(name, *tensor);
  }

  void page_table(const Tensor& table) const {
    expect(table.dim() == 2, kName, "the number of axes of page_table", 2, table.dim());
    expect_dtype("page_table", table, int32_, "int32");
    expect_dense_columns("page_table", table);
  }

  void descale(const char* name, const std::optional<Tensor>& tensor, int64_t batch,
               int64_t heads) const {
    if (!tensor) return;
    expect_dtype(name, *tensor, fp32_, "float32");
    if (!is_one_number(*tensor)) expect_shape(kName, name, *tensor, {2, {batch, heads}});
  }

  void rotary_tables(const AppendCall& call) const {
    expect(call.rotary_sin.has_value() == call.rotary_cos.has_value(), kName, "rotary_sin",
           call.rotary_cos ? "a tensor beside rotary_cos" : "None without rotary_cos",
           call.rotary_cos ? "None" : "a tensor");
    if (!call.rotary_cos) return;
    const Tensor &cos = *call.rotary_cos, &sin = *call.rotary_sin;
    expect(cos.dim() == 2, kName, "the number of axes of rotary_cos", 2, cos.dim());
    const int64_t half = cos.size(1), widest = call.k.size(call.k.dim() - 1) / 2;
    expect(half >= 1 && half <= widest, kName, "rotary_cos.shape[1]",
           "between 1 and half of k's head_dim", half);
    expect_shape(kName, "rotary_sin", sin, {2, {cos.size(0), half}});
    const int32_t dtype = dtype_of(cos);
    expect(dtype == fp32_ || dtype == dtype_, kName, "rotary_cos.dtype", "float32 or k's",
           "another dtype");
    expect_dtype("rotary_sin", sin, dtype, "rotary_cos's");
    expect_dense_columns("rotary_cos", cos);
    expect_dense_columns("rotary_sin", sin);
    expect(cos.size(0) <= 1 || cos.stride(0) == sin.stride(0), kName, "rotary_sin.stride(0)",
           cos.stride(0), sin.stride(0));
  }

 private:
  static void check(bool condition, const char* name, const char* property, const char* wanted,
                    const char* found) {
    if (condition) return;
    expect(false, kName, (std::string(name) + property).c_str(), wanted, found);
  }
  static void expect_dtype(const char* name, const Tensor& tensor, int32_t wanted,
                           const char* text) {
    check(dtype_of(tensor) == wanted, name, ".dtype", text, "another dtype");
  }
  static void expect_dense_columns(const char* name, const Tensor& tensor) {
    const int64_t last = tensor.dim() - 1;
    check(tensor.size(last) <= 1 || tensor.stride(last) == 1, name, ".stride(-1)", "1", "another");
  }

  int32_t int32_, fp32_, dtype_;
};

// Returns the GPU of k. Throws for a tensor that is on another one, or on none.
int device_of(const AppendCall& call) {
  const int device = call.k.get_device_index();
  const auto check = [&](const char* name, const Tensor& tensor) {
    expect_on_gpu(kName, name, tensor, device, "the GPU of k");
  };
  check("k.device", call.k);
  check("v.device", call.v);
  check("k_cache.device", call.k_cache);
  check("v_cache.device", call.v_cache);
  const auto check_given = [&](const char* name, const std::optional<Tensor>& tensor) {
    if (tensor) check(name, *tensor);
  };
  check_given("q.device", call.q);
  check_given("q_out.device", call.q_out);
  check_given("cache_seqlens.device", call.cache_seqlens);
  check_given("page_table.device", call.page_table);
  check_given("cache_batch_idx.device", call.cache_batch_idx);
  check_given("cu_seqlens_q.device", call.cu_seqlens_q);
  check_given("cu_seqlens_k_new.device", call.cu_seqlens_k_new);
  check_given("rotary_cos.device", call.rotary_cos);
  check_given("rotary_sin.device", call.rotary_sin);
  check_given("rotary_seqlens.device", call.rotary_seqlens);
  check_given("k_descale.device", call.k_descale);
  check_given("v_descale.device", call.v_descale);
  return device;
}

// Strides (batch, tokens, heads) of (batch, tokens, heads, ·), or with varlen (tokens, heads, ·);
// 0 for an axis of one entry, whose stride may be anything.
Strides strides_of(const Tensor& tensor, bool varlen) {
  const auto stride = [&](int64_t axis) { return tensor.size(axis) > 1 ? tensor.stride(axis) : 0; };
  return varlen ? Strides{0, stride(0), stride(1)} : Strides{stride(0), stride(1), stride(2)};
}

AppendTensor append_tensor(const Tensor& from, const Tensor& to,
                           const std::optional<Tensor>& cu_seqlens, bool of_cache,
                           const std::optional<Tensor>& descale) {
  const bool varlen = cu_seqlens.has_value();
  const bool of_heads = descale && !is_one_number(*descale);
  const int64_t tokens = varlen ? 0 : 1;
  return {.from = from.data_ptr(),
          .to = to.data_ptr(),
          .from_stride = strides_of(from, varlen),
          .to_stride = strides_of(to, varlen && !of_cache),
          .seqlen = to_int(kName, "the number of new tokens or queries", from.size(tokens)),
          .num_heads = to_int(kName, "the number of heads", from.size(tokens + 1)),
          .head_dim = to_int(kName, "head_dim", from.size(tokens + 2)),
          .cu_seqlens = indices(cu_seqlens),
          .descale = descale ? static_cast<const float*>(descale->data_ptr()) : nullptr,
          .descale_batch = of_heads ? descale->stride(0) : 0,
          .descale_head = of_heads ? descale->stride(1) : 0};
}

// Shape of a tensor of tokens like `like`, with other heads and columns.
Shape shape_like(const Tensor& like, bool varlen, int64_t heads, int64_t columns) {
  if (varlen) return {3, {like.size(0), heads, columns}};
  return {4, {like.size(0), like.size(1), heads, columns}};
}

void expect_axes(const char* what, const Tensor& tensor, int64_t axes) {
  expect(tensor.dim() == axes, kName, what, axes, tensor.dim());
}

// Checks q and q_out and fills params.q.
void fill_q(const Checks& checks, const AppendCall& call, AppendParams& params) {
  expect(call.q.has_value() == call.q_out.has_value(), kName, "q_out",
         call.q ? "a tensor beside q" : "None without q", call.q ? "None" : "a tensor");
  if (!call.q) return;
  const Tensor& q = *call.q;
  const bool varlen = call.cu_seqlens_q.has_value();
  expect_axes("the number of axes of q", q, varlen ? 3 : 4);
  checks.indices("cu_seqlens_q", call.cu_seqlens_q, int64_t{params.batch} + 1);
  if (!varlen) expect(q.size(0) == params.batch, kName, "q.shape[0]", params.batch, q.size(0));
  const Shape shape = shape_like(q, varlen, q.size(varlen ? 1 : 2), params.k.head_dim);
  checks.tokens("q", q, shape);
  checks.tokens("q_out", *call.q_out, shape);
  params.q = append_tensor(q, *call.q_out, call.cu_seqlens_q, false, std::nullopt);
}

// Checks k, v and the caches and fills what params says of them.
void fill_cache(const Checks& checks, const AppendCall& call, AppendParams& params) {
  const bool varlen = call.cu_seqlens_k_new.has_value(), paged = call.page_table.has_value();
  expect_axes("the number of axes of k", call.k, varlen ? 3 : 4);
  expect_axes("the number of axes of k_cache", call.k_cache, 4);
  expect_axes("the number of axes of v_cache", call.v_cache, 4);
  const int64_t edges = varlen ? call.cu_seqlens_k_new->numel() : 0;
  if (varlen) expect(edges >= 1, kName, "cu_seqlens_k_new.shape[0]", "at least 1", edges);
  const int64_t batch = varlen ? edges - 1 : call.k.size(0);
  const int64_t caches = call.k_cache.size(0), slots = call.k_cache.size(1);
  const int64_t heads = call.k_cache.size(2), head_dim = call.k_cache.size(3);
  const int64_t head_dim_v = call.v_cache.size(3);
  checks.tokens("k", call.k, shape_like(call.k, varlen, heads, head_dim));
  checks.tokens("v", call.v, shape_like(call.k, varlen, heads, head_dim_v));
  checks.cache("k_cache", call.k_cache, {4, {caches, slots, heads, head_dim}});
  checks.cache("v_cache", call.v_cache, {4, {caches, slots, heads, head_dim_v}});
  checks.indices("cu_seqlens_k_new", call.cu_seqlens_k_new, edges);
  checks.indices("cache_seqlens", call.cache_seqlens, batch);
  checks.indices("cache_batch_idx", call.cache_batch_idx, batch);
  checks.descale("k_descale", call.k_descale, batch, heads);
  checks.descale("v_descale", call.v_descale, batch, heads);
  if (paged) checks.page_table(*call.page_table);
  const int64_t entries = paged ? call.page_table->size(0) : caches;
  if (!call.cache_batch_idx) {
    expect(entries == batch, kName, "the number of caches", batch, entries);
  }
  params.k = append_tensor(call.k, call.k_cache, call.cu_seqlens_k_new, true, call.k_descale);
  params.v = append_tensor(call.v, call.v_cache, call.cu_seqlens_k_new, true, call.v_descale);
  params.batch = to_int(kName, "the batch", batch);
  params.page_table = indices(call.page_table);
  params.cache_seqlens = indices(call.cache_seqlens);
  params.cache_batch_idx = indices(call.cache_batch_idx);
  params.num_caches = to_int(kName, "the number of caches", entries);
  if (paged) {
    params.page_table_stride = call.page_table->stride(0);
    params.page_size = to_int(kName, "the page size", slots);
    params.num_pages = to_int(kName, "the number of pages", caches);
  }
  params.capacity =
      to_int(kName, "the capacity of a cache", paged ? call.page_table->size(1) * slots : slots);
  params.seqlen_k = call.seqlen < 0
                        ? params.capacity
                        : static_cast<int>(std::min<int64_t>(call.seqlen, params.capacity));
}

void fill_rotary(const Checks& checks, const AppendCall& call, AppendParams& params) {
  checks.rotary_tables(call);
  checks.indices("rotary_seqlens", call.rotary_seqlens, params.batch);
  params.one_q_position = call.one_q_position;
  params.rotary_seqlens = indices(call.rotary_seqlens);
  if (!call.rotary_cos) return;
  const Tensor& cos = *call.rotary_cos;
  params.rotary_cos = cos.data_ptr();
  params.rotary_sin = call.rotary_sin->data_ptr();
  params.rotary_stride = cos.size(0) > 1 ? cos.stride(0) : 0;
  params.num_positions = to_int(kName, "rotary_cos.shape[0]", cos.size(0));
  params.rotary_dim = static_cast<int>(2 * cos.size(1));
  params.rotary_is_fp32 = dtype_of(cos) == aoti_torch_dtype_float32();
  params.rotary_interleaved = call.rotary_interleaved;
}

}  // namespace

CheckedAppend CheckedAppend::of(const AppendCall& call) {
  const Checks checks(call);
  CheckedAppend checked{};
  checked.params.dtype = checks.is_fp16() ? ElementType::kFloat16 : ElementType::kBFloat16;
  fill_cache(checks, call, checked.params);
  fill_q(checks, call, checked.params);
  fill_rotary(checks, call, checked.params);
  checked.device = device_of(call);
  return checked;
}

void CheckedAppend::launch() const {
  const DeviceGuard guard(device);
  launch_append(params, current_stream(device));
}

namespace {

void append(StableIValue* stack, uint64_t, uint64_t) {
  Arguments arguments(stack);
  const AppendCall call = AppendCall::take(arguments);
  CheckedAppend::of(call).launch();
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(flashattn3_hopper, library) {
  library.def("append(" FLASHATTN3_APPEND_SCHEMA
              ", int seqlen, bool rotary_interleaved, bool one_q_position) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(flashattn3_hopper, CUDA, library) { library.impl("append", append); }

// Tensors on the CPU get an error that names them.
STABLE_TORCH_LIBRARY_IMPL(flashattn3_hopper, CPU, library) { library.impl("append", append); }

}  // namespace flashattn3
