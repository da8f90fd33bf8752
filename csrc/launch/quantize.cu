#include <algorithm>
#include <climits>
#include <cmath>
#include <iterator>
#include <ranges>
#include <span>
#include <string>
#include <type_traits>

#include "launch/errors.h"
#include "launch/launch.cuh"
#include "launch/quantize.h"
#include "quantize/embedding_kernel.cuh"
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
            int64_t clusters, int ctas, cudaStream_t stream, int shared_bytes = 0) {
  const int64_t grid = clusters * ctas;
  expect(grid <= INT_MAX, name, "the number of CTAs", "below 2^31", grid);
  if (grid == 0) return;
  launch_kernel(name, "", kernel,
                {static_cast<unsigned>(grid), threads, shared_bytes, static_cast<unsigned>(ctas)},
                stream, true, args);
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

// Runs body(type, columns), constants both.
template <class Body>
void for_type_and_columns(ElementType dtype, int head_dim, Body body) {
  using Bf16 = std::integral_constant<ElementType, ElementType::kBFloat16>;
  using Fp16 = std::integral_constant<ElementType, ElementType::kFloat16>;
  for_columns(head_dim, [&](auto width) {
    if (dtype == ElementType::kBFloat16) {
      body(Bf16{}, width);
    } else {
      body(Fp16{}, width);
    }
  });
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

// Half of the rotated columns; 0 without a rotation.
int half_of(const quantize::Embedding (&embeddings)[quantize::kMaxTensors]) {
  int half = 0;
  for (const quantize::Embedding& of : embeddings) half = std::max(half, of.half);
  return half;
}

// Runs body(kApart), a constant, of the rotation in these tensors; kInterleaved also without one.
template <int kColumns, class Body>
void for_pairs(const quantize::Embedding (&embeddings)[quantize::kMaxTensors], Body body) {
  const bool interleaved =
      std::ranges::any_of(embeddings, [](auto& of) { return of.tables.interleaved; });
  const int half = interleaved ? 0 : half_of(embeddings);
  if (half == 0) {
    body(std::integral_constant<int, quantize::kInterleaved>{});
  } else if (half == 32) {
    body(std::integral_constant<int, 32 * quantize::kVecsOfThread / kColumns>{});
  } else if constexpr (kColumns == 128) {
    body(std::integral_constant<int, 4>{});
  } else if constexpr (kColumns == 256) {
    if (half == 64) {
      body(std::integral_constant<int, 2>{});
    } else {
      body(std::integral_constant<int, 4>{});
    }
  }
}

bool is_embedded(const QuantizeParams& params) {
  return params.embedding.weight != nullptr || params.embedding.cos != nullptr;
}

// Checks a tensor of a launch with embeddings.
void check_embedding(const char* name, const QuantizeParams& params) {
  const EmbeddingParams& how = params.embedding;
  if (params.permuted) {
    expect(!is_embedded(params), name, "an embedding", "None for permuted data", "a table or norm");
    return;
  }
  expect(whole_vecs(params.x, sizeof(uint16_t)), name, "x", "of whole vectors", "another layout");
  if (how.cos == nullptr) return;
  const bool in_vecs = how.interleaved ? how.half % (quantize::kVec / 2) == 0
                                       : how.half == 32 || how.half == 64 || how.half == 128;
  expect(in_vecs && 2 * how.half <= params.x.head_dim, name, "half", "a number of whole vectors",
         how.half);
}

quantize::Embedding kernel_embedding(const QuantizeParams& params) {
  const EmbeddingParams& how = params.embedding;
  return {.weight = how.weight,
          .eps = how.eps,
          .half = how.cos != nullptr ? how.half : 0,
          .tables = {how.cos, how.sin, how.half, how.num_positions, how.tables_are_fp32,
                     how.interleaved},
          .positions = how.positions,
          .wide_positions = how.positions_are_i64,
          .positions_batch = params.x.cu_seqlens != nullptr ? 0 : params.x.seqlen};
}

// Heads that a cluster takes one after the other, of a launch of so many CTAs if each takes one: as
// many as leave two waves of CTAs on an H100, where each CTA has its share of the registers.
int heads_together(const TokenTensor& x, int64_t ctas, int columns) {
  constexpr int kSms = 132;
  const int64_t resident = kSms * quantize::quantize_ctas(columns, quantize::kEmbeddingRegisters);
  int heads = quantize::kHeadsTogether;
  while (heads > 1 && (x.num_heads % heads != 0 || ctas / heads < 2 * resident)) --heads;
  return heads;
}

// Launches the tensors with so many padded columns.
void launch_columns(const char* name, std::span<const QuantizeParams> tensors, ElementType dtype,
                    int block, int columns, cudaStream_t stream) {
  const int threads = quantize::quantize_threads(columns), ctas = block / quantize::kTileTokens;
  const bool embeds = std::ranges::any_of(tensors, is_embedded);
  const auto has_columns = [&](const QuantizeParams& params) {
    return padded_columns(params.x.head_dim) == columns;
  };
  int64_t most_ctas = 0;
  for (const QuantizeParams& params : tensors | std::views::filter(has_columns)) {
    most_ctas += num_blocks(params.x, block) * ctas;
  }
  quantize::EmbeddedArguments args{};
  int num_tensors = 0;
  int64_t clusters = 0, rounds = INT_MAX;
  for (const QuantizeParams& params : tensors | std::views::filter(has_columns)) {
    const int heads = embeds ? heads_together(params.x, most_ctas, columns) : 1;
    const int64_t blocks = num_blocks(params.x, block) / heads;
    args.num_blocks[num_tensors] = static_cast<uint32_t>(blocks);
    args.heads_together[num_tensors] = heads;
    args.embedding[num_tensors] = kernel_embedding(params);
    args.tensor[num_tensors++] = kernel_tensor(params, block);
    clusters += blocks;
    rounds = std::min(rounds, blocks);
  }
  args.by_tensors = cutlass::FastDivmod(std::max(1, num_tensors));
  args.rounds = static_cast<int>(rounds);
  for_type_and_columns(dtype, columns, [&](auto type, auto width) {
    if (!embeds) {
      const quantize::Arguments& plain = args;
      launch(name, quantize::quantize_blocks<type, width>, plain, threads, clusters, ctas, stream);
      return;
    }
    for_pairs<width>(args.embedding, [&](auto apart) {
      constexpr auto kKernel = quantize::embed_blocks<type, width, apart>;
      allow_shared_memory<kKernel>(quantize::embed_shared_bytes(width, width / 2));
      launch(name, kKernel, args, threads, clusters, ctas, stream,
             quantize::embed_shared_bytes(width, half_of(args.embedding)));
    });
  });
}

}  // namespace

void launch_quantize(std::span<const QuantizeParams> tensors, ElementType dtype, int block,
                     cudaStream_t stream) {
  constexpr char kName[] = "quantize";
  const bool of_blocks = std::ranges::find(quantize::kBlocks, block) != std::end(quantize::kBlocks);
  expect(of_blocks, kName, "block", quantize::kBlocksText, block);
  expect(tensors.size() <= quantize::kMaxTensors, kName, "tensors", "at most three",
         tensors.size());
  const bool embeds = std::ranges::any_of(tensors, is_embedded);
  for (const QuantizeParams& params : tensors) {
    check_tensor(kName, params);
    if (embeds) check_embedding(kName, params);
  }
  for (const int columns : {64, 128, 256}) {
    launch_columns(kName, tensors, dtype, block, columns, stream);
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
