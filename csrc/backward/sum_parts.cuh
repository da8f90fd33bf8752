// Adds the parts of dK and dV where the query heads of a KV head are divided (launch/backward.cuh).
#pragma once

#include <cutlass/fast_math.h>

#include <cstdint>

#include "attention/seqlen.cuh"
#include "ptx/convert_16bit.cuh"
#include "ptx/element.h"
#include "ptx/pdl.cuh"
#include "tile/tma_store.cuh"

namespace flashattn3::backward {

constexpr int kSumThreads = 256;

// dK or dV. A thread adds eight columns.
struct SummedGradient {
  const uint16_t* parts;        // (batch, seqlen, heads, num_parts, vectors, 8)
  uint16_t* sum;                // (batch, seqlen, heads, num_columns)
  int64_t batch, seq, head;     // strides of sum, in elements
  cutlass::FastDivmod vectors;  // of a row
  int num_columns;
  int64_t count;  // vectors of sum
};

struct SumArguments {
  SummedGradient dk, dv;
  SequenceTable seqlens_k;
  int batch;
  cutlass::FastDivmod heads;
  cutlass::FastDivmod seqlen;  // varlen: total_k, so that the tensor is one batch entry
  int num_parts;
};

// Returns whether a sequence owns the token, so that the main kernel stored its parts. With
// cu_seqlens batch_idx is 0, and the function searches for the last sequence that begins at or
// before the token.
__device__ __forceinline__ bool is_owned(const SequenceTable& table, int batch, int batch_idx,
                                         int token) {
  if (table.cu_seqlens != nullptr) {
    for (int end = batch; end - batch_idx > 1;) {
      const int middle = (batch_idx + end) / 2;
      (table.cu_seqlens[middle] <= token ? batch_idx : end) = middle;
    }
  }
  const Sequence keys = find_sequence(table, batch_idx);
  return token >= keys.offset && token < keys.offset + keys.length;
}

template <ElementType kElement>
__device__ __forceinline__ void sum_vector(const SumArguments& args, const SummedGradient& of,
                                           int index) {
  int row, vec, batch_token, head, batch_idx, token;
  of.vectors(row, vec, index);
  args.heads(batch_token, head, row);
  args.seqlen(batch_idx, token, batch_token);
  if (!is_owned(args.seqlens_k, args.batch, batch_idx, token)) return;
  const int vectors = of.vectors;
  const uint4* part =
      reinterpret_cast<const uint4*>(of.parts) + int64_t{row} * args.num_parts * vectors + vec;
  float sum[8] = {};
#pragma unroll 4
  for (int i = 0; i < args.num_parts; ++i, part += vectors) {
    const uint4 word = __ldcs(part);
    const uint32_t words[4] = {word.x, word.y, word.z, word.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float2 two = unpack<kElement>(words[j]);
      sum[2 * j] += two.x;
      sum[2 * j + 1] += two.y;
    }
  }
  uint16_t* to = of.sum + batch_idx * of.batch + token * of.seq + head * of.head;
  store_columns(to, vec * 8, of.num_columns,
                make_uint4(pack<kElement>(sum[0], sum[1]), pack<kElement>(sum[2], sum[3]),
                           pack<kElement>(sum[4], sum[5]), pack<kElement>(sum[6], sum[7])));
}

template <ElementType kElement>
__global__ void __launch_bounds__(kSumThreads)
    sum_parts_kernel(const __grid_constant__ SumArguments args) {
  launch_dependents();
  griddepcontrol_wait();
  const int64_t index = int64_t{blockIdx.x} * kSumThreads + threadIdx.x;
  if (index < args.dk.count) {
    sum_vector<kElement>(args, args.dk, static_cast<int>(index));
  } else if (index < args.dk.count + args.dv.count) {
    sum_vector<kElement>(args, args.dv, static_cast<int>(index - args.dk.count));
  }
}

}  // namespace flashattn3::backward
