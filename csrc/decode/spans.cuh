// Fixed spans of keys, counted from key 0 (split_tokens): each gives a row a result of its own, and
// these are joined one after the other. A row's bits then depend on its query, its keys and the
// length of a span, not on what else is in the launch or on which CTA has which spans.
//
// So each row rescales by its own scores alone (attention/span_softmax.cuh), rows that do not exist
// or keys that a row does not see change nothing (their factors are 1 or 0), and every join is the
// same two instructions. The forward kernel with spans does the same. A CTA joins the
// spans of a work tile from the first on in one slot of the workspace; those of a work tile that
// began in another CTA have a slot each, because a sum of them would be another order.
#pragma once

#include <cstdint>

#include "attention/row_stats.cuh"
#include "attention/span_softmax.cuh"
#include "decode/arguments.h"
#include "decode/packed_tile.cuh"
#include "decode/work_share.cuh"
#include "tile/fragment.h"

namespace flashattn3::decode {

// The partial results of the CTAs: slot 0 of a CTA is for the work tiles that begin in it, the
// others for the spans of the work tile that began in a CTA before.
class SpanSlots {
 public:
  __device__ __forceinline__ SpanSlots(const Arguments& args, int cta)
      : args_(args), first_row_(int64_t{cta} * args.span_slots * args.partial_rows) {}

  // Index of a row among those of all slots.
  __device__ __forceinline__ int64_t row_at(int slot, int row) const {
    // No other CTA's slot, even if the lengths have changed.
    return first_row_ + int64_t{min(slot, args_.span_slots - 1)} * args_.partial_rows + row;
  }
  __device__ __forceinline__ float* out_at(int64_t row) const {
    return args_.partial_out + row * args_.head_dim_v;
  }
  __device__ __forceinline__ float2* stats_at(int64_t row) const {
    return args_.partial_stats + row;
  }

  // Stores the accumulators of one warpgroup and their statistics.
  template <class Traits>
  __device__ __forceinline__ void store(int slot, int num_rows,
                                        const float (&o)[Traits::kOutRegisters],
                                        const RowStats (&stats)[2]) const {
    const int column = thread_column(thread());
    for_each_pair<Traits>(slot, num_rows, [&](float* out, int i) {
      *reinterpret_cast<float2*>(out) = make_float2(o[i], o[i + 1]);
    });
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = thread_row(thread()) + kRowStride * r;
      if (column == 0 && row < num_rows) {
        *stats_at(row_at(slot, row)) = make_float2(stats[r].max, stats[r].sum);
      }
    }
  }

  // Joins a span's accumulators to what this thread stored in a slot: o and all become those of
  // both. all: statistics of what the slot has.
  template <class Traits>
  __device__ __forceinline__ void join(int slot, int num_rows, float (&o)[Traits::kOutRegisters],
                                       RowStats (&all)[2], const RowStats (&span)[2]) const {
    const SpanJoin join[2] = {SpanJoin::of(all[0], span[0]), SpanJoin::of(all[1], span[1])};
    for_each_pair<Traits>(slot, num_rows, [&](const float* out, int i) {
      const float2 before = *reinterpret_cast<const float2*>(out);
      o[i] = join[row_of(i)](before.x, o[i]);
      o[i + 1] = join[row_of(i)](before.y, o[i + 1]);
    });
  }

 private:
  static __device__ __forceinline__ int thread() { return threadIdx.x % 128; }

  // Calls call(address, register) for each two neighbouring columns of this thread's rows.
  template <class Traits, class Call>
  __device__ __forceinline__ void for_each_pair(int slot, int num_rows, Call&& call) const {
    const int column = thread_column(thread());
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = thread_row(thread()) + kRowStride * r;
      if (row >= num_rows) continue;
      float* out = out_at(row_at(slot, row));
#pragma unroll
      for (int i = 2 * r; i < Traits::kOutRegisters; i += 4) {
        const int at = column + register_column(i);
        if (at < args_.head_dim_v) call(out + at, i);
      }
    }
  }

  const Arguments& args_;
  int64_t first_row_;
};

// The slots of a work tile that several CTAs share, in the order of the keys: slot 0 of the CTA in
// which it begins, then those of the spans of the CTAs behind it.
class TileSlots {
 public:
  struct Place {
    int cta, slot;
  };

  // part: any of the work tile, of CTA share.cta. blocks: that a query of the work tile may see.
  __host__ __device__ __forceinline__ TileSlots(const Arguments& args, const WorkShare& share,
                                                const Part& part, const CachedSequence& sequence,
                                                const BlockRange& blocks)
      : share_(share), first_cta_(part.first_cta), last_cta_(part.first_cta + part.num_ctas - 1) {
    const int head_cta = share.cta - share.first_cta;
    const BlockRange own = spans_of(args, part.n_blocks), all = spans_of(args, sequence.n_blocks);
    // The number of the work tile's first unit: its part is the end of the first share, and the
    // beginning of the others.
    const int first_unit = share.cta == part.first_cta
                               ? share.begin_of(head_cta + 1) - own.count()
                               : share.begin_of(head_cta) - (own.begin - all.begin);
    more_ = share.begin_of(part.first_cta - share.first_cta + 1);
    count_ = 1 + max(0, spans_of(args, blocks).count() - (more_ - first_unit));
  }

  __host__ __device__ __forceinline__ int count() const { return count_; }
  __host__ __device__ __forceinline__ Place operator[](int i) const {
    if (i == 0) return {first_cta_, 0};
    const int unit = more_ + i - 1;
    const int cta = min(share_.cta_of(unit), last_cta_);
    return {cta, unit - share_.begin_of(cta - share_.first_cta) + 1};
  }

 private:
  const WorkShare& share_;
  int first_cta_, last_cta_;
  int more_;  // the first unit behind those of the first CTA
  int count_;
};

}  // namespace flashattn3::decode
