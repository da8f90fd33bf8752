#include <algorithm>
#include <climits>
#include <cmath>

#include "host/errors.h"
#include "host/quantize.h"
#include "kernels/quantize/kernel.cuh"

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

// Clusters of `ctas`, one for each `tokens` tokens of each head; none where there is nothing to do.
template <class Arguments>
void launch(const char* name, void (*kernel)(Arguments), const Arguments& args,
            const TokenRows& rows, int tokens, int ctas, cudaStream_t stream) {
  if (rows.head_dim < 1 || rows.head_dim > 256) fail(name, "the head dim must be 1 to 256");
  const int64_t blocks = (int64_t{rows.seqlen} + tokens - 1) / tokens;
  const int64_t grid = blocks * rows.num_heads * rows.batch * ctas;
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
  config.blockDim = dim3(quantize_threads(slot_columns(rows.head_dim)));
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = capture == cudaStreamCaptureStatusNone ? 2 : 1;
  check_cuda(cudaLaunchKernelEx(&config, kernel, args), name);
}

using QuantizeKernel = void (*)(QuantizeArguments);

template <ElementType kType, ElementType kTo, int kColumns>
QuantizeKernel rows_kernel(const QuantizeParams& params) {
  return params.signs != nullptr ? quantize_blocks<kType, kTo, kColumns, true, false>
                                 : quantize_blocks<kType, kTo, kColumns, false, false>;
}

template <ElementType kType, int kColumns>
QuantizeKernel kernel_of(const QuantizeParams& params) {
  if (params.slots) return quantize_blocks<kType, ElementType::kE4m3, kColumns, false, true>;
  return params.to == ElementType::kInt8 ? rows_kernel<kType, ElementType::kInt8, kColumns>(params)
                                         : rows_kernel<kType, ElementType::kE4m3, kColumns>(params);
}

template <ElementType kType>
QuantizeKernel kernel_of(const QuantizeParams& params) {
  switch (slot_columns(params.x.head_dim)) {
    case 64:
      return kernel_of<kType, 64>(params);
    case 128:
      return kernel_of<kType, 128>(params);
    default:
      return kernel_of<kType, 256>(params);
  }
}

using ToSlotsKernel = void (*)(ToSlotsArguments);

ToSlotsKernel to_slots_kernel(int head_dim) {
  switch (slot_columns(head_dim)) {
    case 64:
      return rows_to_slots<64>;
    case 128:
      return rows_to_slots<128>;
    default:
      return rows_to_slots<256>;
  }
}

}  // namespace

void quantize(const QuantizeParams& params, cudaStream_t stream) {
  constexpr char kName[] = "launch of quantize";
  const TokenRows& x = params.x;
  if (params.block != 64 && params.block != 128 && params.block != 256) {
    fail(kName, "a block must be 64, 128 or 256 tokens");
  }
  if (params.signs != nullptr && (params.slots || (x.head_dim & (x.head_dim - 1)) != 0)) {
    fail(kName, "a rotation wants rows of a power of two columns");
  }
  if (params.slots && params.to != ElementType::kE4m3) fail(kName, "slots are of e4m3");
  QuantizeArguments args;
  args.x = source_of(x, sizeof(uint16_t), params.block);
  args.signs = params.signs;
  args.rotation_scale = static_cast<float>(std::pow(x.head_dim, -0.5));
  args.data = params.data;
  args.data_stride = params.slots ? dense_slots(x) : dense_rows(x);
  args.descale = params.descale;
  const QuantizeKernel kernel = params.dtype == ElementType::kBFloat16
                                    ? kernel_of<ElementType::kBFloat16>(params)
                                    : kernel_of<ElementType::kFloat16>(params);
  launch(kName, kernel, args, x, params.block, params.block / kTileTokens, stream);
}

void to_slots(const ToSlotsParams& params, cudaStream_t stream) {
  ToSlotsArguments args;
  args.v = source_of(params.v, sizeof(uint8_t), kTileTokens);
  args.data = params.data;
  args.data_stride = dense_slots(params.v);
  launch("launch of to_slots", to_slots_kernel(params.v.head_dim), args, params.v, kTileTokens, 1,
         stream);
}

}  // namespace flashattn3
