// flashattn3_hopper::quantize, quantize_qkv, rotate_and_quantize, sample_mean and permute_v: fill
// QuantizeParams, SampleParams and PermuteParams from tensors and launch on torch's current stream.
// The notes in forward_op.cpp apply; the caller, flashattn3/quantization, has checked the options.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <string>
#include <tuple>

#include "launch/errors.h"
#include "launch/quantize.h"
#include "torch_binding/boxed.h"
#include "torch_binding/tensors.h"

namespace flashattn3 {
namespace {

using torch::stable::Tensor;

// tensor: (batch, seqlen, heads, head_dim), or with cu_seqlens (total, heads, head_dim).
TokenTensor token_tensor(const char* function, const Tensor& tensor,
                         const std::optional<Tensor>& cu_seqlens, int64_t max_seqlen) {
  const bool varlen = cu_seqlens.has_value();
  const int64_t seq = varlen ? 0 : 1;
  expect(tensor.dim() == seq + 3, function, "the number of axes", seq + 3, tensor.dim());
  const int64_t head_dim = tensor.size(seq + 2), step = tensor.stride(seq + 2);
  expect(head_dim <= 1 || step == 1, function, "the last stride", 1, step);
  expect(!varlen || cu_seqlens->numel() >= 1, function, "cu_seqlens.shape[0]", "at least 1", 0);
  const int64_t tokens = tensor.size(seq);
  return {.data = tensor.data_ptr(),
          .stride = row_strides(tensor, varlen),
          .batch = to_int(function, "the batch", varlen ? cu_seqlens->numel() - 1 : tensor.size(0)),
          .seqlen = to_int(function, "the longest sequence", varlen ? max_seqlen : tokens),
          .total = to_int(function, "the number of tokens", tokens),
          .num_heads = to_int(function, "the number of heads", tensor.size(seq + 1)),
          .head_dim = to_int(function, "the head dim", head_dim),
          .cu_seqlens = indices(cu_seqlens)};
}

Tensor new_rows(const TokenTensor& rows, int32_t dtype, int device) {
  if (rows.cu_seqlens != nullptr) {
    return new_tensor<3>({rows.total, rows.num_heads, rows.head_dim}, dtype, device);
  }
  return new_tensor<4>({rows.batch, rows.seqlen, rows.num_heads, rows.head_dim}, dtype, device);
}

Tensor new_permuted_v(const TokenTensor& rows, int device) {
  const int32_t e4m3 = aoti_torch_dtype_float8_e4m3fn();
  const int64_t groups = num_permuted_keys(rows) / kCoreRowKeys,
                columns = padded_columns(rows.head_dim);
  if (rows.cu_seqlens != nullptr) {
    return new_tensor<4>({rows.num_heads, groups, columns, kCoreRowKeys}, e4m3, device);
  }
  return new_tensor<5>({rows.batch, rows.num_heads, groups, columns, kCoreRowKeys}, e4m3, device);
}

ElementType sixteen_bit_type(const char* function, const Tensor& x) {
  const int32_t dtype = dtype_of(x);
  if (dtype == aoti_torch_dtype_bfloat16()) return ElementType::kBFloat16;
  expect(dtype == aoti_torch_dtype_float16(), function, "dtype", "fp16 or bf16", "another");
  return ElementType::kFloat16;
}

// Null if there is no tensor. wanted: what an fp32 tensor of `size` elements is.
const float* floats(const char* function, const char* name, const std::optional<Tensor>& tensor,
                    int64_t size, const char* wanted) {
  if (!tensor) return nullptr;
  expect(dtype_of(*tensor) == aoti_torch_dtype_float32(), function, name, wanted, "another dtype");
  expect(tensor->numel() == size, function, name, wanted,
         std::to_string(tensor->numel()) + " elements");
  return static_cast<const float*>(tensor->data_ptr());
}

// Options of one tensor. data is dense: shape of x in e4m3 or int8, or permuted e4m3
// (tile/permuted_v.h).
struct Form {
  std::optional<Tensor> mean;   // fp32 (batch, heads, head_dim), dense: subtract
  std::optional<Tensor> signs;  // fp32 (head_dim): rotate
  bool permuted;
  bool int8;
  EmbeddingParams embedding{};
};

// Parameters and results of one tensor: data, and descale, fp32 (batch, heads, blocks).
struct Quantized {
  QuantizeParams params;
  ElementType dtype;  // of x
  Tensor data, descale;
};

// x: fp16 or bf16. max_seqlen: read only with cu_seqlens.
Quantized quantized(const char* function, const Tensor& x, const std::optional<Tensor>& cu_seqlens,
                    int64_t max_seqlen, int64_t block, const Form& form) {
  const TokenTensor rows = token_tensor(function, x, cu_seqlens, max_seqlen);
  const ElementType dtype = sixteen_bit_type(function, x);
  const int64_t mean_size = int64_t{rows.batch} * rows.num_heads * rows.head_dim;
  expect(block >= 1, function, "block", "64, 128 or 256", block);
  const int device = x.get_device_index();
  const Tensor data =
      form.permuted
          ? new_permuted_v(rows, device)
          : new_rows(rows, form.int8 ? aoti_torch_dtype_int8() : aoti_torch_dtype_float8_e4m3fn(),
                     device);
  const Tensor descale =
      new_tensor<3>({rows.batch, rows.num_heads, (rows.seqlen + block - 1) / block},
                    aoti_torch_dtype_float32(), device);
  return {
      .params = {.x = rows,
                 .to = form.int8 ? ElementType::kInt8 : ElementType::kE4m3,
                 .permuted = form.permuted,
                 .mean = floats(function, "mean", form.mean, mean_size,
                                "fp32 (batch, heads, head dim)"),
                 .signs = floats(function, "signs", form.signs, rows.head_dim, "fp32 (head dim,)"),
                 .data = static_cast<uint8_t*>(data.data_ptr()),
                 .descale = static_cast<float*>(descale.data_ptr()),
                 .embedding = form.embedding},
      .dtype = dtype,
      .data = data,
      .descale = descale};
}

std::tuple<Tensor, Tensor> quantize_one(Tensor x, std::optional<Tensor> mean,
                                        std::optional<Tensor> signs,
                                        std::optional<Tensor> cu_seqlens, int64_t block,
                                        int64_t max_seqlen, bool permuted, bool int8) {
  const int device = x.get_device_index();
  const DeviceGuard guard(device);
  const Quantized one =
      quantized("quantize", x, cu_seqlens, max_seqlen, block,
                {.mean = mean, .signs = signs, .permuted = permuted, .int8 = int8});
  launch_quantize({&one.params, 1}, one.dtype, static_cast<int>(block), current_stream(device));
  return {one.data, one.descale};
}

// Quantizes q, k (minus k_mean if given; both rotated if signs are given) and v (to permuted e4m3),
// in one launch if their head dims have the same padded_columns.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> quantize_qkv(
    Tensor q, Tensor k, Tensor v, std::optional<Tensor> k_mean, std::optional<Tensor> signs,
    std::optional<Tensor> cu_seqlens_q, std::optional<Tensor> cu_seqlens_k, int64_t block,
    int64_t max_seqlen_q, int64_t max_seqlen_k, bool int8) {
  constexpr char kName[] = "quantize_qkv";
  const int device = q.get_device_index();
  const DeviceGuard guard(device);
  const Form of_q{.mean = std::nullopt, .signs = signs, .permuted = false, .int8 = int8};
  const Form of_k{.mean = k_mean, .signs = signs, .permuted = false, .int8 = int8};
  const Form of_v{.mean = std::nullopt, .signs = std::nullopt, .permuted = true, .int8 = false};
  const Quantized all[] = {quantized(kName, q, cu_seqlens_q, max_seqlen_q, block, of_q),
                           quantized(kName, k, cu_seqlens_k, max_seqlen_k, block, of_k),
                           quantized(kName, v, cu_seqlens_k, max_seqlen_k, block, of_v)};
  for (const Quantized& one : all) {
    expect(one.dtype == all[0].dtype, kName, "the dtypes of q, k and v", "equal", "two dtypes");
  }
  const QuantizeParams params[] = {all[0].params, all[1].params, all[2].params};
  launch_quantize(params, all[0].dtype, static_cast<int>(block), current_stream(device));
  return {all[0].data, all[0].descale, all[1].data, all[1].descale, all[2].data, all[2].descale};
}

// The rotation of q and k: cos and sin (positions, half), dense, fp32 or the dtype of x; positions
// (batch, seqlen) or (total,), dense, int32 or int64.
EmbeddingParams rotation(const char* function, const Tensor& x, const std::optional<Tensor>& cos,
                         const std::optional<Tensor>& sin, const std::optional<Tensor>& positions,
                         bool interleaved, double eps) {
  EmbeddingParams params{.eps = static_cast<float>(eps)};
  if (!cos) return params;
  params.tables_are_fp32 = dtype_of(*cos) == aoti_torch_dtype_float32();
  expect(params.tables_are_fp32 || dtype_of(*cos) == dtype_of(x), function, "rotary_cos.dtype",
         "fp32 or that of q", "another");
  expect(sin.has_value() && sin->numel() == cos->numel() && dtype_of(*sin) == dtype_of(*cos),
         function, "rotary_sin", "like rotary_cos", "another");
  params.cos = cos->data_ptr();
  params.sin = sin->data_ptr();
  params.interleaved = interleaved;
  params.num_positions = to_int(function, "the number of positions", cos->size(0));
  params.half = to_int(function, "half", cos->size(1));
  if (positions) {
    params.positions = positions->data_ptr();
    params.positions_are_i64 = dtype_of(*positions) == aoti_torch_dtype_int64();
    expect(params.positions_are_i64 || dtype_of(*positions) == aoti_torch_dtype_int32(), function,
           "positions.dtype", "int32 or int64", "another");
    expect(positions->numel() * x.size(x.dim() - 1) * x.size(x.dim() - 2) == x.numel(), function,
           "positions", "one for each token", "another number");
  }
  return params;
}

// quantize_qkv of q and k that are normalized, with fp32 weights (head_dim,), and rotated before; q
// alone without k, where what is of k and v has no elements.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> rotate_and_quantize(
    Tensor q, std::optional<Tensor> k, std::optional<Tensor> v, std::optional<Tensor> k_mean,
    std::optional<Tensor> signs, std::optional<Tensor> q_norm, std::optional<Tensor> k_norm,
    std::optional<Tensor> cos, std::optional<Tensor> sin, std::optional<Tensor> positions,
    std::optional<Tensor> cu_seqlens, bool interleaved, double eps, int64_t block,
    int64_t max_seqlen, bool int8) {
  constexpr char kName[] = "rotate_and_quantize";
  constexpr char kWeights[] = "fp32 (head dim,)";
  const int device = q.get_device_index();
  const DeviceGuard guard(device);
  Form of_q{.mean = std::nullopt, .signs = signs, .permuted = false, .int8 = int8};
  of_q.embedding = rotation(kName, q, cos, sin, positions, interleaved, eps);
  Form of_k = of_q;
  of_k.mean = k_mean;
  const int64_t head_dim = q.size(q.dim() - 1);
  of_q.embedding.weight = floats(kName, "q_norm", q_norm, head_dim, kWeights);
  of_k.embedding.weight = floats(kName, "k_norm", k_norm, head_dim, kWeights);
  const Form of_v{.mean = std::nullopt, .signs = std::nullopt, .permuted = true, .int8 = false};
  const Quantized first = quantized(kName, q, cu_seqlens, max_seqlen, block, of_q);
  const int number = static_cast<int>(block);
  if (!k) {
    launch_quantize({&first.params, 1}, first.dtype, number, current_stream(device));
    const Tensor none = new_tensor<1>({0}, aoti_torch_dtype_float32(), device);
    return {first.data, first.descale, none, none, none, none};
  }
  expect(v.has_value(), kName, "v", "given with k", "None");
  const Quantized second = quantized(kName, *k, cu_seqlens, max_seqlen, block, of_k);
  const Quantized third = quantized(kName, *v, cu_seqlens, max_seqlen, block, of_v);
  expect(second.dtype == first.dtype && third.dtype == first.dtype, kName,
         "the dtypes of q, k and v", "equal", "two dtypes");
  const QuantizeParams params[] = {first.params, second.params, third.params};
  launch_quantize(params, first.dtype, number, current_stream(device));
  return {first.data, first.descale, second.data, second.descale, third.data, third.descale};
}

// Estimates the mean of each sequence of x (fp16 or bf16). Result: fp32 (batch, heads, head_dim).
std::tuple<Tensor> sample_mean_of(Tensor x, std::optional<Tensor> cu_seqlens, int64_t max_seqlen) {
  constexpr char kName[] = "sample_mean";
  const TokenTensor rows = token_tensor(kName, x, cu_seqlens, max_seqlen);
  const ElementType dtype = sixteen_bit_type(kName, x);
  const int device = x.get_device_index();
  const DeviceGuard guard(device);
  const Tensor mean = new_tensor<3>({rows.batch, rows.num_heads, rows.head_dim},
                                    aoti_torch_dtype_float32(), device);
  const SampleParams params{.x = rows, .mean = static_cast<float*>(mean.data_ptr())};
  launch_sample_mean(params, dtype, current_stream(device));
  return {mean};
}

// v: e4m3. Returns its bytes in the permuted layout that quantize writes.
std::tuple<Tensor> to_permuted_v(Tensor v, std::optional<Tensor> cu_seqlens, int64_t max_seqlen) {
  constexpr char kName[] = "permute_v";
  expect(dtype_of(v) == aoti_torch_dtype_float8_e4m3fn(), kName, "v.dtype", "e4m3", "another");
  const TokenTensor rows = token_tensor(kName, v, cu_seqlens, max_seqlen);
  const int device = v.get_device_index();
  const DeviceGuard guard(device);
  const Tensor data = new_permuted_v(rows, device);
  launch_permute_v({.v = rows, .data = static_cast<uint8_t*>(data.data_ptr())},
                   current_stream(device));
  return {data};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(flashattn3_hopper, library) {
  library.def(
      "quantize(Tensor x, Tensor? mean, Tensor? signs, Tensor? cu_seqlens, int block, "
      "int max_seqlen, bool permuted, bool int8) -> (Tensor data, Tensor descale)");
  library.def(
      "quantize_qkv(Tensor q, Tensor k, Tensor v, Tensor? k_mean, Tensor? signs, "
      "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, int block, int max_seqlen_q, "
      "int max_seqlen_k, bool int8) -> "
      "(Tensor q, Tensor q_descale, Tensor k, Tensor k_descale, Tensor v, Tensor v_descale)");
  library.def(
      "rotate_and_quantize(Tensor q, Tensor? k, Tensor? v, Tensor? k_mean, Tensor? signs, "
      "Tensor? q_norm, Tensor? k_norm, Tensor? cos, Tensor? sin, Tensor? positions, "
      "Tensor? cu_seqlens, bool interleaved, float eps, int block, int max_seqlen, bool int8) -> "
      "(Tensor q, Tensor q_descale, Tensor k, Tensor k_descale, Tensor v, Tensor v_descale)");
  library.def("sample_mean(Tensor x, Tensor? cu_seqlens, int max_seqlen) -> Tensor");
  library.def("permute_v(Tensor v, Tensor? cu_seqlens, int max_seqlen) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(flashattn3_hopper, CUDA, library) {
  library.impl("quantize", boxed<quantize_one>);
  library.impl("quantize_qkv", boxed<quantize_qkv>);
  library.impl("rotate_and_quantize", boxed<rotate_and_quantize>);
  library.impl("sample_mean", boxed<sample_mean_of>);
  library.impl("permute_v", boxed<to_permuted_v>);
}

}  // namespace flashattn3
