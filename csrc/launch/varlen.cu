#include "launch/launch.cuh"
#include "launch/varlen.h"
#include "varlen/prepare.cuh"

namespace flashattn3 {

namespace {

static_assert(varlen_schedule_bytes(7) == 8 * sizeof(VarlenPlace) + 7 * sizeof(int32_t));

varlen::Result result_of(void* data, const Strides& strides, int num_heads, int columns) {
  return {static_cast<uint16_t*>(data), strides.seq, strides.head, num_heads, columns};
}

// Enqueues the kernel with a CTA for each sequence and one more.
void launch_prepare(const ForwardParams& params, varlen::Arguments& args, cudaStream_t stream) {
  args.batch = params.batch;
  args.schedule = {params.varlen_schedule, params.batch};
  const KernelGrid grid{static_cast<unsigned>(params.batch) + 1, varlen::kThreads};
  launch_kernel("varlen::prepare", "", varlen::prepare, grid, stream, params.pdl, args);
}

}  // namespace

void launch_varlen_forward(const ForwardParams& params, const TileShape& shape, cudaStream_t stream,
                           int min_queries, int32_t* semaphore) {
  varlen::Arguments args{};
  args.seqlens = seqlens_q_of(params);
  args.other_seqlens = seqlens_k_of(params);
  args.shape = shape;
  args.of_tiles[0] =
      result_of(params.out, params.out_stride, params.num_heads_q, params.head_dim_v);
  args.lse = params.lse;
  args.lse_seq = params.lse_stride.seq;
  args.lse_head = params.lse_stride.head;
  args.min_tokens = min_queries;
  args.semaphore = semaphore;
  launch_prepare(params, args, stream);
}

void launch_varlen_backward(const BackwardParams& params, int block_n, cudaStream_t stream) {
  const ForwardParams& forward = params.forward;
  varlen::Arguments args{};
  args.seqlens = seqlens_k_of(forward);
  args.other_seqlens = seqlens_q_of(forward);
  args.shape = {.rows = block_n};
  args.of_tiles[0] = result_of(params.dk, params.dk_stride, forward.num_heads_kv, forward.head_dim);
  args.of_tiles[1] =
      result_of(params.dv, params.dv_stride, forward.num_heads_kv, forward.head_dim_v);
  args.of_others = result_of(params.dq, params.dq_stride, forward.num_heads_q, forward.head_dim);
  launch_prepare(forward, args, stream);
}

}  // namespace flashattn3
