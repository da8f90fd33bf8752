#include "launch/errors.h"
#include "launch/launch.cuh"
#include "launch/varlen.h"
#include "varlen/prepare.cuh"

namespace flashattn3 {

void launch_varlen_forward(const ForwardParams& params, const TileShape& shape, cudaStream_t stream,
                           int min_queries, int32_t* semaphore) {
  varlen::Arguments args{};
  args.seqlens_q = seqlens_q_of(params);
  args.seqlens_k = seqlens_k_of(params);
  args.batch = params.batch;
  args.shape = shape;
  args.schedule = {params.varlen_schedule, params.batch};
  args.out = static_cast<uint16_t*>(params.out);
  args.lse = params.lse;
  args.out_seq = params.out_stride.seq;
  args.out_head = params.out_stride.head;
  args.lse_seq = params.lse_stride.seq;
  args.lse_head = params.lse_stride.head;
  args.num_heads = params.num_heads_q;
  args.head_dim_v = params.head_dim_v;
  args.min_queries = min_queries;
  args.semaphore = semaphore;
  varlen::prepare<<<params.batch + 2, varlen::kThreads, 0, stream>>>(args);
  check_cuda(cudaGetLastError(), "launch of varlen::prepare");
}

void launch_varlen_backward(const ForwardParams& params, int block_n, cudaStream_t stream) {
  // The backward's work tiles are n_blocks, so keys take the place of the kernel's queries.
  varlen::Arguments args{};
  args.seqlens_q = seqlens_k_of(params);
  args.seqlens_k = seqlens_q_of(params);
  args.batch = params.batch;
  args.shape = {.rows = block_n};
  args.schedule = {params.varlen_schedule, params.batch};
  varlen::prepare<<<1, varlen::kThreads, 0, stream>>>(args);  // CTA 0 sorts the sequences
  check_cuda(cudaGetLastError(), "launch of varlen::prepare");
}

}  // namespace flashattn3
