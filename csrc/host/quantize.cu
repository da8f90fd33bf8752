#include <algorithm>
#include <climits>
#include <cmath>
#include <type_traits>

#include "host/errors.h"
#include "host/quantize.h"
#include "kernels/quantize/kernel.cuh"
#include "kernels/quantize/sample.cuh"

namespace flashattn3 {
namespace {

// Byte strides and the address are multiples of a unit's size where it is loaded whole.
bool whole_units(const TokenRows& rows, int element_bytes) {
  const auto odd = [](int size, int64_t stride) { return size > 1 && stride % kUnit != 0; };
  const bool varlen = rows.cu_seqlens != nullptr;
  return rows.head_dim % kUnit == 0 &&
         reinterpret_cast<uintptr_t>(rows.data) % (kUnit * element_bytes) == 0 &&
         !odd(varlen ? 1 : rows.batch, rows.stride.batch) &&
         !odd(varlen ? rows.total : rows.seqlen, rows.stride.seq) &&
         !odd(rows.num_heads, rows.stride.head);
}

QuantizeSource source_of(const TokenRows& rows, int element_bytes, int block) {
  const bool varlen = rows.cu_seqlens != nullptr;
  return {.data = rows.data,
          .stride = {varlen ? 0 : rows.stride.batch, rows.stride.seq, rows.stride.head},
          .tokens = {rows.cu_seqlens, nullptr, rows.seqlen, rows.total},
          .head_dim = rows.head_dim,
          .by_heads = cutlass::FastDivmod(std::max(1, rows.num_heads)),
          .by_blocks = cutlass::FastDivmod(std::max(1, (rows.seqlen + block - 1) / block)),
          .whole_units = whole_units(rows, element_bytes)};
}

HeadRows dense_rows(const TokenRows& rows) {
  const int64_t token = int64_t{rows.num_heads} * rows.head_dim;
  return {rows.cu_seqlens != nullptr ? 0 : rows.seqlen * token, token, rows.head_dim};
}

HeadRows dense_slots(const TokenRows& rows) {
  const int64_t columns = slot_columns(rows.head_dim), head = num_slots(rows) * columns;
  return {rows.cu_seqlens != nullptr ? 0 : rows.num_heads * head, columns, head};
}

int64_t num_blocks(const TokenRows& rows, int tokens) {
  const int64_t blocks = (int64_t{rows.seqlen} + tokens - 1) / tokens;
  return blocks * rows.num_heads * rows.batch;
}

// Clusters of `ctas`, of CTAs of `threads`; none where there is nothing to do.
template <class Arguments>
void launch(const char* name, void (*kernel)(Arguments), const Arguments& args, int threads,
            int64_t clusters, int ctas, cudaStream_t stream) {
  const int64_t grid = clusters * ctas;
  if (grid > INT_MAX) fail(name, "more than 2^31 CTAs");
  if (grid == 0) return;
  cudaStreamCaptureStatus capture;
  check_cuda(cudaStreamIsCapturing(stream, &capture), name);
  cudaLaunchAttribute attributes[2];
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim = {static_cast<unsigned>(ctas), 1, 1};
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(grid));
  config.blockDim = dim3(threads);
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = capture == cudaStreamCaptureStatusNone ? 2 : 1;
  check_cuda(cudaLaunchKernelEx(&config, kernel, args), name);
}

// What `choose` gives for the columns that rows of this head dim have in slots.
template <class Choose>
auto for_columns(int head_dim, Choose choose) {
  switch (slot_columns(head_dim)) {
    case 64:
      return choose(std::integral_constant<int, 64>{});
    case 128:
      return choose(std::integral_constant<int, 128>{});
    default:
      return choose(std::integral_constant<int, 256>{});
  }
}

void check_head_dim(const char* name, int head_dim) {
  if (head_dim < 1 || head_dim > 256) fail(name, "the head dim must be 1 to 256");
}

void check_tensor(const char* name, const QuantizeParams& params) {
  const int head_dim = params.x.head_dim;
  check_head_dim(name, head_dim);
  if (params.signs != nullptr && (params.slots || (head_dim & (head_dim - 1)) != 0)) {
    fail(name, "a rotation wants rows of a power of two columns");
  }
  if (params.slots && params.mean != nullptr) fail(name, "nothing is subtracted in slots");
  if (params.slots && params.to != ElementType::kE4m3) fail(name, "slots are of e4m3");
}

QuantizeTensor kernel_tensor(const QuantizeParams& params, int block) {
  const TokenRows& x = params.x;
  return {.x = source_of(x, sizeof(uint16_t), block),
          .to = params.slots                      ? Narrowed::kE4m3Slots
                : params.to == ElementType::kInt8 ? Narrowed::kInt8Rows
                                                  : Narrowed::kE4m3Rows,
          .mean = params.mean,
          .signs = params.signs,
          .rotation_scale = static_cast<float>(std::pow(x.head_dim, -0.5)),
          .data = params.data,
          .data_stride = params.slots ? dense_slots(x) : dense_rows(x),
          .descale = params.descale};
}

}  // namespace

void quantize(std::span<const QuantizeParams> tensors, ElementType dtype, int block,
              cudaStream_t stream) {
  constexpr char kName[] = "launch of quantize";
  if (block != 64 && block != 128 && block != 256) {
    fail(kName, "a block must be 64, 128 or 256 tokens");
  }
  if (tensors.size() > kMaxTensors) fail(kName, "more than three tensors");
  for (const QuantizeParams& params : tensors) check_tensor(kName, params);
  for (const int columns : {64, 128, 256}) {
    QuantizeArguments args{};
    int num_tensors = 0;
    int64_t clusters = 0, rounds = INT_MAX;
    for (const QuantizeParams& params : tensors) {
      if (slot_columns(params.x.head_dim) != columns) continue;
      const int64_t blocks = num_blocks(params.x, block);
      args.num_blocks[num_tensors] = static_cast<uint32_t>(blocks);
      args.tensor[num_tensors++] = kernel_tensor(params, block);
      clusters += blocks;
      rounds = std::min(rounds, blocks);
    }
    args.by_tensors = cutlass::FastDivmod(std::max(1, num_tensors));
    args.rounds = static_cast<int>(rounds);
    const auto kernel = for_columns(columns, [&](auto width) {
      return dtype == ElementType::kBFloat16 ? quantize_blocks<ElementType::kBFloat16, width>
                                             : quantize_blocks<ElementType::kFloat16, width>;
    });
    launch(kName, kernel, args, quantize_threads(columns), clusters, block / kTileTokens, stream);
  }
}

void sample_mean(const SampleParams& params, ElementType dtype, cudaStream_t stream) {
  constexpr char kName[] = "launch of sample_mean";
  const TokenRows& x = params.x;
  check_head_dim(kName, x.head_dim);
  const SampleArguments args{source_of(x, sizeof(uint16_t), kTileTokens), params.mean};
  const auto kernel = for_columns(x.head_dim, [&](auto width) {
    return dtype == ElementType::kBFloat16 ? sample_mean<ElementType::kBFloat16, width>
                                           : sample_mean<ElementType::kFloat16, width>;
  });
  const int threads = sample_threads(slot_columns(x.head_dim));
  launch(kName, kernel, args, threads, int64_t{x.batch} * x.num_heads, 1, stream);
}

void to_slots(const ToSlotsParams& params, cudaStream_t stream) {
  constexpr char kName[] = "launch of to_slots";
  const int head_dim = params.v.head_dim;
  check_head_dim(kName, head_dim);
  ToSlotsArguments args;
  args.v = source_of(params.v, sizeof(uint8_t), kTileTokens);
  args.data = params.data;
  args.data_stride = dense_slots(params.v);
  const auto kernel = for_columns(head_dim, [](auto width) { return rows_to_slots<width>; });
  const int threads = quantize_threads(slot_columns(head_dim));
  launch(kName, kernel, args, threads, num_blocks(params.v, kTileTokens), 1, stream);
}

}  // namespace flashattn3
