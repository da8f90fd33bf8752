#include "host/errors.h"
#include "host/prepare_ragged.h"
#include "kernels/ragged/prepare.cuh"

namespace flashattn3 {

void prepare_ragged_forward(const ForwardParams& params, int block_m, cudaStream_t stream) {
  RaggedArguments args{};
  args.rows = {params.cu_seqlens_q, params.seqused_q, params.seqlen_q, params.total_q};
  args.keys = {params.cu_seqlens_k, params.seqused_k, params.seqlen_k, params.total_k};
  args.batch = params.batch;
  args.block_m = block_m;
  args.order = {params.ragged_order, params.batch};
  args.out = static_cast<uint16_t*>(params.out);
  args.lse = params.lse;
  args.out_seq = params.out_stride.seq;
  args.out_head = params.out_stride.head;
  args.lse_seq = params.lse_stride.seq;
  args.lse_head = params.lse_stride.head;
  args.num_heads = params.num_heads_q;
  args.head_dim_v = params.head_dim_v;
  prepare_ragged<<<params.batch + 2, kRaggedThreads, 0, stream>>>(args);
  check_cuda(cudaGetLastError(), "launch of prepare_ragged");
}

void order_ragged_keys(const ForwardParams& params, int block_n, cudaStream_t stream) {
  // What the kernel calls rows are those that are worked on in blocks, here the keys.
  RaggedArguments args{};
  args.rows = {params.cu_seqlens_k, params.seqused_k, params.seqlen_k, params.total_k};
  args.keys = {params.cu_seqlens_q, params.seqused_q, params.seqlen_q, params.total_q};
  args.batch = params.batch;
  args.block_m = block_n;
  args.order = {params.ragged_order, params.batch};
  prepare_ragged<<<1, kRaggedThreads, 0, stream>>>(args);  // the CTA that orders
  check_cuda(cudaGetLastError(), "launch of prepare_ragged");
}

}  // namespace flashattn3
