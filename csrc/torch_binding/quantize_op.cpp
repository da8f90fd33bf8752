// flashattn3_hopper::quantize, quantize_qkv, sample_mean and permute_v: fill QuantizeParams,
// SampleParams and PermuteParams from tensors and launch on torch's current stream.
// The notes in forward_op.cpp apply; the caller, flashattn3/quantization, has checked the options.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <tuple>

#include "launch/errors.h"
#include "launch/quantize.h"
#include "torch_binding/boxed.h"
#include "torch_binding/quantized_tensors.h"
#include "torch_binding/tensors.h"

namespace flashattn3 {
namespace {

std::tuple<Tensor, Tensor> quantize_one(Tensor x, std::optional<Tensor> mean,
                                        std::optional<Tensor> signs,
                                        std::optional<Tensor> cu_seqlens, int64_t block,
                                        int64_t max_seqlen, bool permuted, bool int8) {
  constexpr char kName[] = "quantize";
  const int device = x.get_device_index();
  const DeviceGuard guard(device);
  const Source source{token_tensor(kName, x, cu_seqlens, max_seqlen),
                      {.mean = mean, .signs = signs, .permuted = permuted, .int8 = int8}};
  const auto [one] = quantize_all(kName, {source}, sixteen_bit_type(kName, x), block, device);
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
  const ElementType dtype = sixteen_bit_type(kName, q);
  for (const Tensor& x : {k, v}) {
    expect(sixteen_bit_type(kName, x) == dtype, kName, "the dtypes of q, k and v", "equal",
           "two dtypes");
  }
  const Source sources[] = {
      {token_tensor(kName, q, cu_seqlens_q, max_seqlen_q),
       {.mean = std::nullopt, .signs = signs, .permuted = false, .int8 = int8}},
      {token_tensor(kName, k, cu_seqlens_k, max_seqlen_k),
       {.mean = k_mean, .signs = signs, .permuted = false, .int8 = int8}},
      {token_tensor(kName, v, cu_seqlens_k, max_seqlen_k), kFormOfV}};
  const auto [of_q, of_k, of_v] = quantize_all(kName, sources, dtype, block, device);
  return {of_q.data, of_q.descale, of_k.data, of_k.descale, of_v.data, of_v.descale};
}

// Estimates the mean of each sequence of x (fp16 or bf16). Result: fp32 (batch, heads, head_dim).
std::tuple<Tensor> sample_mean_of(Tensor x, std::optional<Tensor> cu_seqlens, int64_t max_seqlen) {
  constexpr char kName[] = "sample_mean";
  const TokenTensor rows = token_tensor(kName, x, cu_seqlens, max_seqlen);
  const ElementType dtype = sixteen_bit_type(kName, x);
  const int device = x.get_device_index();
  const DeviceGuard guard(device);
  const Tensor mean = new_tensor({3, {rows.batch, rows.num_heads, rows.head_dim}},
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
  library.def("sample_mean(Tensor x, Tensor? cu_seqlens, int max_seqlen) -> Tensor");
  library.def("permute_v(Tensor v, Tensor? cu_seqlens, int max_seqlen) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(flashattn3_hopper, CUDA, library) {
  library.impl("quantize", boxed<quantize_one>);
  library.impl("quantize_qkv", boxed<quantize_qkv>);
  library.impl("sample_mean", boxed<sample_mean_of>);
  library.impl("permute_v", boxed<to_permuted_v>);
}

}  // namespace flashattn3
