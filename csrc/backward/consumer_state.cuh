// The base class of a consumer warpgroup's steps (step.cuh, wide_step.cuh): it holds the state,
// waits for Q and dO, stores dS to shared memory, and computes dQ in turn with the other
// warpgroups.
#pragma once

#include "attention/bias.cuh"
#include "attention/block_list.cuh"
#include "attention/mask_lists.cuh"
#include "backward/arguments.h"
#include "backward/probabilities.cuh"
#include "backward/traits.cuh"
#include "ptx/opaque.cuh"
#include "ptx/smem_operand.cuh"
#include "ptx/store_shared.cuh"
#include "tile/fragment.h"
#include "tile/gemm.cuh"
#include "tile/gemm_mn.cuh"
#include "tile/tma_load.cuh"
#include "tile/tma_store.cuh"

namespace flashattn3::backward {

template <Config kConfig>
class ConsumerState {
 protected:
  using Traits = KernelTraits<kConfig>;
  static constexpr ElementType kElement = Traits::kElement;
  static constexpr int kHeadDim = Traits::kHeadDim, kHeadDimV = Traits::kHeadDimV;
  static constexpr int kThreads = 128 * Traits::kConsumers;
  static constexpr int kLastPart = Traits::kDqParts - 1;
  using Scores = float[kBlockM / 2];
  using KeyGradient = float[kHeadDim / 2];
  using ValueGradient = float[kHeadDimV / 2];
  using QueryGradient = float[Traits::kDqColumns / 2];  // a part of dQ
  using Operand = Probabilities<kElement, kBlockM>;

 public:
  // warpgroup: 0 to kConsumers - 1, the same in all lanes of a warp.
  __device__ __forceinline__ ConsumerState(const Arguments& args, uint8_t* shared, int warpgroup)
      : args_(args),
        storage_(*reinterpret_cast<SharedStorageOf<kConfig>*>(shared)),
        shared_(shared),
        warpgroup_(warpgroup) {
    const uint32_t base = cute::cast_smem_ptr_to_uint(shared);
    const int lane = threadIdx.x % 32;
    low_ = opaque_uniform(base / 16);
    const uint32_t first_row = base + Traits::kDsOffset + threadIdx.x / 32 * kRowsOfWarp * 128;
    // The shuffle hides the address from ptxas, which would compute it anew in every step.
    ds_row_ = __shfl_sync(~0u, first_row + staged_row_of_lane(lane), lane);
    turn_ = warpgroup + 1;
    if constexpr (Traits::kBias) {
      bias_columns_ = base + Traits::kBiasOffset + warpgroup * (kBlockM * 128) +
                      transposed_columns_of_lane(threadIdx.x % 128);
    }
  }

 protected:
  // Waits for Q, dO, lse and delta of a step. All warpgroups call it, also those that skip the step
  // and only release the stage.
  __device__ __forceinline__ void wait_for_q_dout(int position) {
    const uint32_t stage = q_dout().index();
    storage_.q_dout_full[stage].wait(q_dout().phase());  // Sync: all four are loaded.
    zero_fill_q_dout(stage, tile().m_blocks.block(position));
  }

  // Sets the probabilities of keys that a query of the m_block does not see, or that are past the
  // end, to 0: 2^(0 - lse) may be infinite there. full_blocks: positions of m_blocks that see all
  // 64 keys of this warpgroup.
  __device__ __forceinline__ void mask_unless_full(Scores& p, int position,
                                                   BlockRange full_blocks) {
    if (contains(full_blocks, position)) return;
    if constexpr (Traits::kListed) {
      // From global memory, late: the other warpgroup computes meanwhile, and there is no space for
      // the bits in shared memory, nor registers to load them early without slowing full blocks.
      const MaskLists& lists = static_cast<const ListedArguments&>(args_).lists;
      const int partial = position - tile().blocks.num_full;
      ThreadBits<1> bits;
      if (partial >= 0) {
        bits.load(0, lists.tile(tile().blocks.first_tile + partial));
      } else {
        const int key = warp_first_key() + thread_row(threadIdx.x % 32);
        bits.fill_rows(0, tile().num_keys - key);
      }
      return bits.hide(p, 0.f);
    }
    mask_probabilities<kBlockM>(p, tile_mask(), warp_first_key() + thread_row(threadIdx.x % 32),
                                tile().m_blocks.block(position) * kBlockM);
  }

  // The term of the scores of a step. stage: of Q and dO.
  __device__ __forceinline__ auto term_of(int position, uint32_t stage) const {
    if constexpr (Traits::kConfig.term == ScoreTerm::kSlopes) {
      const int row = tile().m_blocks.block(position) * kBlockM;
      const int of_row = row + uniform(tile().num_keys) - uniform(tile().num_rows);
      return TransposedAlibi<kBlockM>(storage_.slopes[stage], of_row, uniform(warp_first_key()),
                                      column(), args_.window.right > 0);
    } else {
      return NoTerm();
    }
  }

  // Starts dV += P dO or dK += dS Q. offset: of the stage's dO or Q, as Traits::kDoutLow.
  template <int kColumns>
  __device__ __forceinline__ void start_gradient(float (&gradient)[kColumns / 2],
                                                 const Operand& operand, uint32_t offset) {
    gemm_rs<kElement, kBlockM, kColumns>(
        gradient, operand, SmemOperand{low() + offset, opaque_desc_high<1>(opaque_ones())});
  }
  static __device__ __forceinline__ uint32_t q_low(uint32_t stage) {
    return Traits::kQLow + stage * (Traits::kQBytes / 16);
  }
  static __device__ __forceinline__ uint32_t dout_low(uint32_t stage) {
    return Traits::kDoutLow + stage * (Traits::kDoutBytes / 16);
  }
  // The address of shared memory / 16. Where registers are few, ptxas must not know that it is the
  // same in every step, or it keeps what follows from it in registers.
  __device__ __forceinline__ uint32_t low() const {
    return Traits::kDqParts > 1 ? low_ + (opaque_ones() + 1) : low_;
  }

  // Returns thread_column, the column of this thread's register 0, from ds_row_, which is in a
  // register anyway: row lane % 16 has 128 bytes, so bits 7 and 8 of its address are lane % 4.
  __device__ __forceinline__ uint32_t column() const { return ds_row_ / 128 % 4 * 2; }
  // Lane 0 arrives for the warp. ds_row_ tells lanes apart without threadIdx: only lane 0 stores at
  // the beginning of the warp's rows, a multiple of their 2048 bytes.
  __device__ __forceinline__ void arrive_warp(Barrier& barrier) const {
    barrier.arrive_warp((ds_row_ & (kRowsOfWarp * 128 - 1)) == 0);
  }

  // The stage of Q and dO of this step, and the dS buffers of this step and of the previous one.
  __device__ __forceinline__ PipelineState<Traits::kStages> q_dout() const {
    return PipelineState<Traits::kStages>::after_steps(step_);
  }
  __device__ __forceinline__ PipelineState<2> ds_buffer() const {
    return PipelineState<2>::after_steps(step_);
  }
  __device__ __forceinline__ PipelineState<2> previous_ds_buffer() const {
    return PipelineState<2>::after_steps(step_ - 1);
  }

  // Returns whether this warpgroup computes the last part of dQ of the previous step; if so its
  // next turn is kConsumers steps later. The turn for a tile's last dQ is taken after the tile's
  // last step, so no warpgroup has a turn in the next tile's first step.
  __device__ __forceinline__ bool takes_turn() {
    if (turn_ != 0) return false;
    turn_ = Traits::kConsumers;
    return true;
  }

  // Stores dS of this warp's 16 keys to shared memory.
  __device__ __forceinline__ void store_ds(const Operand& ds) {
    stage_in_ds(ds);
    fence_async_proxy();
    __syncwarp();
    arrive_warp(storage_.ds_full[ds_buffer().index()]);  // Sync: this warp has written and fenced.
  }
  // Writes this warp's 16 keys of the dS buffer.
  __device__ __forceinline__ void stage_in_ds(const Operand& values) {
    // Sync: the warpgroups that computed dQ of the step before last have read the buffer.
    storage_.ds_empty[ds_buffer().index()].wait(ds_buffer().phase() ^ 1);
    uint32_t word[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) word[i] = values[i / 4][i % 4];
    stage_rows_at(ds_row_ + ds_buffer().index() * Traits::kDsBytes, word);
  }
  // Sync: this warp has read the previous step's dS.
  __device__ __forceinline__ void release_previous_ds() {
    arrive_warp(storage_.ds_empty[previous_ds_buffer().index()]);
  }

  // Starts the GEMM of a part of dQ of the previous step.
  __device__ __forceinline__ void start_dq(QueryGradient& dq, int part) {
    const PipelineState<2> at = previous_ds_buffer();
    storage_.ds_full[at.index()].wait(at.phase());  // Sync: all consumer warps have written dS.
    gemm_ss_mn_ab_in_halves<kElement, Traits::kBlockN, Traits::kDqColumns>(
        dq, low() + Traits::kDsLow + at.index() * (Traits::kDsBytes / 16),
        low() + Traits::kKLow + part * (Traits::kBlockN * 128 / 16));
  }

  // Passes a part of dQ to its dQ writer through shared memory.
  __device__ __forceinline__ void hand_over(const QueryGradient& dq, int part) {
    if constexpr (Traits::kOneDqBuffer) {
      // Sync: what the other warpgroup handed over, dQ of the step before, has been read.
      const PipelineState<2> before = PipelineState<2>::after_steps(step_ - 2);
      storage_.dq_empty[before.index()].wait(before.phase());
    } else {
      // Sync: what this warpgroup handed over last has been read.
      storage_.dq_empty[warpgroup_].wait(dq_.phase() ^ 1);
    }
    float4* dq_accum =
        reinterpret_cast<float4*>(shared_ + Traits::dq_offset(warpgroup_)) + threadIdx.x % 128;
#pragma unroll
    for (int i = 0; i < Traits::kDqColumns / 8; ++i) {
      dq_accum[i * 128] = make_float4(dq[4 * i], dq[4 * i + 1], dq[4 * i + 2], dq[4 * i + 3]);
    }
    fence_async_proxy();
    __syncwarp();
    // Sync: this warp has written and fenced.
    arrive_warp(storage_.dq_full[warpgroup_ + (part == kLastPart ? 0 : Traits::kConsumers)]);
    dq_.advance();
  }

  // Computes a part of dQ of the previous step. kReleases: this warpgroup does not read its dS
  // again.
  template <bool kReleases>
  __device__ __forceinline__ void gemm_dq(int part) {
    QueryGradient dq;
    start_dq(dq, part);
    warpgroup_wait<0>();
    warpgroup_fence_operand(dq);
    if (kReleases) release_previous_ds();
    hand_over(dq, part);
  }

  // Where this lane reads the bias, and writes its gradient, at a stage.
  __device__ __forceinline__ uint32_t bias_columns(uint32_t stage) const {
    return bias_columns_ + stage * Traits::kBiasBytes;
  }
  // dS replaces this warpgroup's part of the bias at a stage, and is stored as its gradient.
  __device__ __forceinline__ void stage_bias_gradient(const Operand& ds, uint32_t stage) const {
    if (bias_arguments().writes_ds) stage_transposed(bias_columns(stage), ds);
  }
  // After store_ds, which has fenced.
  __device__ __forceinline__ void store_bias_gradient(uint32_t stage) {
    named_barrier_sync(2 + Traits::kConsumers + warpgroup_, 128);  // Sync: all four have staged.
    const BiasArguments& args = bias_arguments();
    if (threadIdx.x % 128 != 0 || !args.writes_ds) return;
    const uint8_t* staged =
        shared_ + Traits::kBiasOffset + stage * Traits::kBiasBytes + warpgroup_ * (kBlockM * 128);
    const int key = tile().first_key + 64 * warpgroup_, row = storage_.place[stage].row;
    const int head = storage_.place[stage].head * args.ds_heads_differ;
    const int sequence = tile().batch_idx * args.ds_sequences_differ;
    if (args.adds_ds) {
      start_add<kElement>(&args.ds, staged, key, row, head, sequence);
    } else {
      start_store(&args.ds, staged, key, row, head, sequence);
    }
    commit_stores();
  }
  // Releases the bias of the step before, whose gradient has been copied by now, or nearly.
  __device__ __forceinline__ void release_previous_bias() {
    if (threadIdx.x % 128 != 0 || step_ == 0) return;
    wait_for_stores();
    // Sync: this warpgroup no longer uses it.
    storage_.bias_empty[PipelineState<Traits::kStages>::after_steps(step_ - 1).index()].arrive();
  }
  __device__ __forceinline__ const BiasArguments& bias_arguments() const {
    return static_cast<const BiasArguments&>(args_);
  }

  // Zero fill past the end of the sequence of keys: those tokens may belong to another sequence or
  // to none and hold NaN, and 0 * NaN is NaN.
  __device__ __forceinline__ void zero_fill_kv() {
    if (args_.seqlens_k.cu_seqlens == nullptr && args_.seqlens_k.seqused == nullptr) return;
    const int used = uniform(tile().num_keys) - uniform(tile().first_key);
    if (used >= Traits::kBlockN) return;
    zero_fill_rows<Traits::kBlockN, Traits::kAtoms>(shared_ + Traits::kKOffset, used, threadIdx.x,
                                                    kThreads);
    zero_fill_rows<Traits::kBlockN, Traits::kAtomsV>(shared_ + Traits::kVOffset, used, threadIdx.x,
                                                     kThreads);
    fence_async_proxy();
    named_barrier_sync(1 + Traits::kConsumers, kThreads);  // Sync: all warpgroups have filled.
  }

  // The same for queries; rows past the end have lse +inf and delta 0.
  __device__ __forceinline__ void zero_fill_q_dout(uint32_t stage, int block) {
    if (block != partial_block_) return;
    const int used = uniform(tile().num_rows) - block * kBlockM;
    if (used >= kBlockM) return;
    zero_fill_rows<kBlockM, Traits::kAtoms>(shared_ + Traits::kQOffset + stage * Traits::kQBytes,
                                            used, threadIdx.x, kThreads);
    zero_fill_rows<kBlockM, Traits::kAtomsV>(
        shared_ + Traits::kDoutOffset + stage * Traits::kDoutBytes, used, threadIdx.x, kThreads);
    fence_async_proxy();
    named_barrier_sync(1 + Traits::kConsumers, kThreads);  // Sync: as above.
  }

  __device__ __forceinline__ const typename SharedStorageOf<kConfig>::Tile& tile() const {
    return storage_.tile[tile_.index()];
  }
  __device__ __forceinline__ int warp_first_key() const {
    return tile().first_key + threadIdx.x / 32 * kRowsOfWarp;
  }
  __device__ __forceinline__ Mask tile_mask() const {
    return Mask::of(uniform(tile().num_rows), uniform(tile().num_keys), args_.window);
  }

  const Arguments& args_;
  SharedStorageOf<kConfig>& storage_;
  uint8_t* shared_;
  int warpgroup_;
  PipelineState<2> tile_{0};
  PipelineState<1> dq_{0};  // this warpgroup's dQ buffer
  uint32_t kv_phase_ = 0;
  uint32_t low_;           // address of shared memory / 16
  uint32_t bias_columns_;  // where this lane reads the bias at stage 0, if there is one
  uint32_t ds_row_;        // where this lane stores dS in buffer 0 (staged_row_of_lane)
  uint32_t step_ = 0;      // steps since the start of the kernel
  int turn_;               // steps until this warpgroup computes dQ of the previous step
  int partial_block_;      // the m_block that needs zero fill; -1: none
};

}  // namespace flashattn3::backward
