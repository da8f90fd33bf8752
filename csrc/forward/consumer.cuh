// A consumer warpgroup: takes work tiles until none is left, runs the main loop on its 64 query
// rows of each, and stores them. The tensor cores compute S of the next tile's first block, in the
// registers of S, while this tile is stored.
#pragma once

#include <type_traits>

#include "forward/epilogue.cuh"
#include "forward/mainloop.cuh"
#include "forward/mainloop_fp8.cuh"

namespace flashattn3::forward {

template <Config kConfig>
using MainloopOf =
    std::conditional_t<is_quantized(kConfig.dtype), MainloopFp8<kConfig>, Mainloop<kConfig>>;

template <Config kConfig>
class Consumer : MainloopOf<kConfig> {
  using Base = MainloopOf<kConfig>;
  using Base::args_, Base::kStages, Base::kv_, Base::q_, Base::shared_, Base::staged_,
      Base::storage_, Base::tile_, Base::warpgroup_;
  using typename Base::Out, typename Base::Probabilities, typename Base::Scores;
  using typename Base::Softmax, typename Base::Traits, typename Base::Work;

 public:
  __device__ __forceinline__ Consumer(const Arguments& args, uint8_t* shared, int warpgroup)
      : Base(args, shared, warpgroup) {}

  __device__ __forceinline__ void run() {
    Scores s;
    Out o;
    Probabilities p;
    Softmax softmax;
    Work work;
    bool ahead = false;  // s already holds S of the tile's first block
    while (true) {
      if (!ahead) {
        work = this->get_next_work();
        if (!work.any()) return;
        this->begin_tile(this->tile());
        this->start_first_qk(s, work, kv_);
        warpgroup_wait<0>();
        warpgroup_fence_operand(s);
      }
      this->skip_v(work.above);
      this->attend(s, o, p, softmax, work.blocks);

      storage_.v_full[kv_.index()].wait(kv_.phase());  // Sync: the last V is loaded.
      this->gemm_pv(o, p, kv_);
      if constexpr (!Traits::kOutOverQ) this->release_q();
      q_.advance();
      Work next{};
      if (work.below == 0) {  // else the producer needs those released before it publishes a tile
        // Sync: the producer has written the next WorkTile.
        storage_.tile_full[tile_.next().index()].wait(tile_.next().phase());
        next = this->work_of(storage_.tile[tile_.next().index()]);
      }
      // K tiles skipped here are loaded while V is still held: at most one per stage.
      ahead = next.any() && next.above <= kStages;
      if (ahead) {
        this->begin_tile(storage_.tile[tile_.next().index()]);
        this->start_first_qk(s, next, kv_.next());
        warpgroup_wait<1>();
        store_tile(o, softmax);
        warpgroup_wait<0>();
        warpgroup_fence_operand(s);
      } else {
        warpgroup_wait<0>();
        store_tile(o, softmax);
      }
      this->skip_n_blocks(work.below);
      work = next;
    }
  }

 private:
  // Stores the tile. O is complete; q_ is at the next tile's Q.
  __device__ __forceinline__ void store_tile(Out& o, Softmax& softmax) {
    warpgroup_fence_operand(o);
    if constexpr (Traits::kQuantized) this->finish(o, softmax);
    storage_.v_empty[kv_.index()].arrive_warp();  // Sync: this warp has finished reading V.
    kv_.advance();
    if constexpr (Traits::kOutOverQ) {
      const int warp = threadIdx.x / 32;
      // Sync: all four warps have finished reading their 64 rows of Q.
      named_barrier_sync(1 + warpgroup_, 128);
      uint8_t* rows = shared_ + Traits::kQOffset + q_.next().index() * Traits::kQBytes +
                      warp * kRowsOfWarp * 128;
      store_rows<Traits>(args_, this->tile(), this->warp_first_row(), o, softmax, 1.f, rows,
                         Traits::kBlockM * 128);
      staged_ = true;
    } else {
      if (threadIdx.x % 32 == 0) wait_for_stores();
      __syncwarp();
      constexpr int kAtomStride = kRowsOfWarp * 128;
      const float scale = Traits::kQuantized ? storage_.out_scale[tile_.index()] : 1.f;
      store_rows<Traits>(args_, this->tile(), this->warp_first_row(), o, softmax, scale,
                         this->staged_out(), kAtomStride);
    }
    this->release_tile();
  }
};

}  // namespace flashattn3::forward
