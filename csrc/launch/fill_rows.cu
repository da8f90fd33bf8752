#include "decode/fill_rows.cuh"
#include "launch/decode_arguments.h"
#include "launch/fill_rows.h"
#include "launch/launch.cuh"

namespace flashattn3 {

void launch_fill_rows(const DecodeParams& params, const SchedulerMetadata& metadata,
                      cudaStream_t stream) {
  const bool varlen = params.cu_seqlens_q != nullptr;
  if (!varlen && metadata.data == nullptr) return;
  const DecodeGrid grid{.num_shares = 1, .share_heads = 1, .num_ctas = 1};
  const decode::Arguments call = make_decode_arguments(params, grid, 1);
  const decode::FillArguments args{.out = call.out,
                                   .lse = call.lse,
                                   .out_batch = call.out_batch,
                                   .out_seq = call.out_seq,
                                   .out_head = call.out_head,
                                   .lse_batch = call.lse_batch,
                                   .lse_seq = call.lse_seq,
                                   .lse_head = call.lse_head,
                                   .num_heads_q = params.num_heads_q,
                                   .head_dim_v = params.head_dim_v,
                                   .seqlens_q = call.seqlens_q,
                                   .batch = params.batch,
                                   .cache_seqlens = params.cache_seqlens,
                                   .cu_seqlens_k_new = params.cu_seqlens_k_new,
                                   .cache_leftpad = params.cache_leftpad,
                                   .seqlen_k = params.seqlen_k,
                                   .seqlen_new = params.seqlen_new,
                                   .metadata = metadata.data,
                                   .options_hash = metadata.options_hash};
  const unsigned num_ctas = params.batch + (varlen ? 1 : 0);
  if (num_ctas == 0) return;
  launch_kernel("decode::fill_rows", "", &decode::fill_rows, {num_ctas, decode::kFillThreads},
                stream, params.pdl, args);
}

}  // namespace flashattn3
