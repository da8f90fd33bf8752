#include <algorithm>
#include <climits>
#include <cmath>
#include <iterator>
#include <string>
#include <type_traits>

#include "launch/errors.h"
#include "launch/launch.cuh"
#include "launch/quantize.h"
#include "quantize/kernel.cuh"
#include "quantize/sample_mean.cuh"
#include "quantize_limits.h"

namespace flashattn3 {
namespace {

// True if the address and all strides are multiples of a vector (kVec elements), so that the kernel
// can load whole vectors.
bool whole_vecs(const TokenTensor& tensor, int element_bytes) {
  const auto odd = [](int size, int64_t stride) {
    return size > 1 && stride % quantize::kVec != 0;
  };
  const bool varlen = tensor.cu_seqlens != nullptr;
  return tensor.head_dim % quantize::kVec == 0 &&
         reinterpret_cast<uintptr_t>(tensor.data) % (quantize::kVec * element_bytes) == 0 &&
         !odd(varlen ? 1 : tensor.batch, tensor.stride.batch) &&
         !odd(varlen ? tensor.total : tensor.seqlen, tensor.stride.seq) &&
         !odd(tensor.num_heads, tensor.stride.head);
}

quantize::Source source_of(const TokenTensor& tensor, int element_bytes, int block) {
  const bool varlen = tensor.cu_seqlens != nullptr;
  return {.data = tensor.data,
          .stride = {varlen ? 0 : tensor.stride.batch, tensor.stride.seq, tensor.stride.head},
          .tokens = {tensor.cu_seqlens, nullptr, tensor.seqlen, tensor.total},
          .head_dim = tensor.head_dim,
          .by_heads = cutlass::FastDivmod(std::max(1, tensor.num_heads)),
          .by_blocks = cutlass::FastDivmod(std::max(1, (tensor.seqlen + block - 1) / block)),
          .whole_vecs = whole_vecs(tensor, element_bytes)};
}

quantize::HeadStrides dense_strides(const TokenTensor& tensor) {
  const int64_t token = int64_t{tensor.num_heads} * tensor.head_dim;
  return {tensor.cu_seqlens != nullptr ? 0 : tensor.seqlen * token, token, tensor.head_dim};
}

quantize::HeadStrides permuted_strides(const TokenTensor& tensor) {
  const int64_t columns = padded_columns(tensor.head_dim),
                head = num_permuted_keys(tensor) * columns;
  return {tensor.cu_seqlens != nullptr ? 0 : tensor.num_heads * head, columns, head};
}

int64_t num_blocks(const TokenTensor& tensor, int tokens) {
  const int64_t blocks = (int64_t{tensor.seqlen} + tokens - 1) / tokens;
  return blocks * tensor.num_heads * tensor.batch;
}

// Launches `clusters` clusters of `ctas` CTAs of `threads` threads; returns if clusters is 0.
template <class Arguments>
void launch(const char* name, void (*kernel)(Arguments), const Arguments& args, int threads,
            int64_t clusters, int ctas, cudaStream_t stream) {
  const int64_t grid = clusters * ctas;
  expect(grid <= INT_MAX, name, "the number of CTAs", "below 2^31", grid);
  if (grid == 0) return;
  launch_kernel(name, "", kernel,
                {static_cast<unsigned>(grid), threads, 0, static_cast<unsigned>(ctas)}, stream,
                true, args);
}

// Returns choose(integral_constant) for padded_columns(head_dim).
template <class Choose>
auto for_columns(int head_dim, Choose choose) {
  switch (padded_columns(head_dim)) {
    case 64:
      return choose(std::integral_constant<int, 64>{});
    case 128:
      return choose(std::integral_constant<int, 128>{});
    default:
      return choose(std::integral_constant<int, 256>{});
  }
}

void check_head_dim(const char* name, int head_dim) {
  expect(head_dim >= 1 && head_dim <= quantize::kMaxHeadDim, name, "head_dim",
         "1 to " + std::to_string(quantize::kMaxHeadDim), head_dim);
}

void check_tensor(const char* name, const QuantizeParams& params) {
  const int head_dim = params.x.head_dim;
  check_head_dim(name, head_dim);
  const bool power_of_two = (head_dim & (head_dim - 1)) == 0;
  if (params.signs != nullptr) {
    expect(power_of_two, name, "head_dim", "a power of two with signs", head_dim);
  }
  if (!params.permuted) return;
  expect(params.signs == nullptr, name, "signs", "None for permuted data", "a tensor");
  expect(params.mean == nullptr, name, "mean", "None for permuted data", "a tensor");
  expect(params.to == ElementType::kE4m3, name, "dtype", "e4m3 for permuted data", "int8");
}

quantize::QuantizedTensor kernel_tensor(const QuantizeParams& params, int block) {
  const TokenTensor& x = params.x;
  return {.x = source_of(x, sizeof(uint16_t), block),
          .to = params.permuted                   ? quantize::Narrowed::kE4m3Permuted
                : params.to == ElementType::kInt8 ? quantize::Narrowed::kInt8
                                                  : quantize::Narrowed::kE4m3,
          .mean = params.mean,
          .signs = params.signs,
          .rotation_scale = static_cast<float>(std::pow(x.head_dim, -0.5)),
          .data = params.data,
          .data_stride = params.permuted ? permuted_strides(x) : dense_strides(x),
          .descale = params.descale};
}

}  // namespace

void launch_quantize(std::span<const QuantizeParams> tensors, ElementType dtype, int block,
                     cudaStream_t stream) {
  constexpr char kName[] = "quantize";
  const bool of_blocks = std::ranges::find(quantize::kBlocks, block) != std::end(quantize::kBlocks);
  expect(of_blocks, kName, "block", quantize::kBlocksText, block);
  expect(tensors.size() <= quantize::kMaxTensors, kName, "tensors", "at most three",
         tensors.size());
  for (const QuantizeParams& params : tensors) check_tensor(kName, params);
  for (const int columns : {64, 128, 256}) {
    quantize::Arguments args{};
    int num_tensors = 0;
    int64_t clusters = 0, rounds = INT_MAX;
    for (const QuantizeParams& params : tensors) {
      if (padded_columns(params.x.head_dim) != columns) continue;
      const int64_t blocks = num_blocks(params.x, block);
      args.num_blocks[num_tensors] = static_cast<uint32_t>(blocks);
      args.tensor[num_tensors++] = kernel_tensor(params, block);
      clusters += blocks;
      rounds = std::min(rounds, blocks);
    }
    args.by_tensors = cutlass::FastDivmod(std::max(1, num_tensors));
    args.rounds = static_cast<int>(rounds);
    const auto kernel = for_columns(columns, [&](auto width) {
      return dtype == ElementType::kBFloat16
                 ? quantize::quantize_blocks<ElementType::kBFloat16, width>
                 : quantize::quantize_blocks<ElementType::kFloat16, width>;
    });
    launch(kName, kernel, args, quantize::quantize_threads(columns), clusters,
           block / quantize::kTileTokens, stream);
  }
}

void launch_sample_mean(const SampleParams& params, ElementType dtype, cudaStream_t stream) {
  constexpr char kName[] = "sample_mean";
  const TokenTensor& x = params.x;
  check_head_dim(kName, x.head_dim);
  const quantize::SampleArguments args{source_of(x, sizeof(uint16_t), quantize::kTileTokens),
                                       params.mean};
  const auto kernel = for_columns(x.head_dim, [&](auto width) {
    return dtype == ElementType::kBFloat16 ? quantize::sample_mean<ElementType::kBFloat16, width>
                                           : quantize::sample_mean<ElementType::kFloat16, width>;
  });
  const int threads = quantize::sample_threads(padded_columns(x.head_dim));
  launch(kName, kernel, args, threads, int64_t{x.batch} * x.num_heads, 1, stream);
}

void launch_permute_v(const PermuteParams& params, cudaStream_t stream) {
  constexpr char kName[] = "permute_v";
  const int head_dim = params.v.head_dim;
  check_head_dim(kName, head_dim);
  quantize::PermuteArguments args;
  args.v = source_of(params.v, sizeof(uint8_t), quantize::kTileTokens);
  args.data = params.data;
  args.data_stride = permuted_strides(params.v);
  const auto kernel = for_columns(head_dim, [](auto width) { return quantize::permute_v<width>; });
  const int threads = quantize::quantize_threads(padded_columns(head_dim));
  launch(kName, kernel, args, threads, num_blocks(params.v, quantize::kTileTokens), 1, stream);
}

}  // namespace flashattn3
