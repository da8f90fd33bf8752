// Where the parts of a work tile that several CTAs share are kept, and in which order the CTAs
// combine them.
#pragma once

#include <algorithm>

#include "decode/counters.h"
#include "decode/work_share.cuh"

namespace flashattn3::decode {

constexpr int kGroup = Counters::kGroup;
// Parts of a work tile up to which they are one group: a second level takes 1.5 us, 16 parts more
// 0.8 us (H100).
constexpr int kMostInOneGroup = 2 * kGroup;

// Index of the partial result of a CTA for the work tile that begins in first_cta. There are two
// for each CTA, since it begins in the middle of at most one work tile (2 c) and ends in the middle
// of at most one that began in it (2 c + 1).
__host__ __device__ __forceinline__ int partial_of(int cta, int first_cta) {
  return 2 * cta + (cta == first_cta ? 1 : 0);
}
constexpr int num_partials(int num_ctas) { return 2 * num_ctas; }

// The CTAs whose parts of a work tile are combined first with that of CTA `cta`: all of them, or
// kGroup neighbours, fewer in the last group.
struct ArrivalGroup {
  int leader;  // the first of them
  int num_ctas;

  // The groups of a work tile that has so many parts.
  static __host__ __device__ __forceinline__ int count(int num_parts) {
    return num_parts <= kMostInOneGroup ? 1 : (num_parts + kGroup - 1) / kGroup;
  }
  static __host__ __device__ __forceinline__ ArrivalGroup of(int cta, const Part& part) {
    if (count(part.num_ctas) == 1) return {part.first_cta, part.num_ctas};
    const int leader = cta - (cta - part.first_cta) % kGroup;
    return {leader, min(kGroup, part.first_cta + part.num_ctas - leader)};
  }

  // At which its CTAs arrive. Work tiles of several groups have more than 16 parts, so the leaders
  // of no two groups, the first of a work tile aside, are among the same 16 CTAs.
  __host__ __device__ __forceinline__ uint64_t* counter(Counters& counters,
                                                        const Part& part) const {
    return leader == part.first_cta ? &counters.tiles[leader] : &counters.groups[leader / kGroup];
  }
  // At which the last CTA of each group of a work tile arrives.
  static __host__ __device__ __forceinline__ uint64_t* counter_of_groups(Counters& counters,
                                                                         const Part& part) {
    return &counters.tile_groups[part.first_cta / kGroup];
  }
};

}  // namespace flashattn3::decode
