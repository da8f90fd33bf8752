// Where the parts of a work tile that several CTAs share are kept, and in which order the CTAs
// combine them.
#pragma once

#include <algorithm>

#include "decode/work_share.cuh"

namespace flashattn3::decode {

constexpr int kGroup = 16;

// Index of the partial result of a CTA for the work tile that begins in first_cta. There are two
// for each CTA, since it begins in the middle of at most one work tile (2 c) and ends in the middle
// of at most one that began in it (2 c + 1).
__host__ __device__ __forceinline__ int partial_of(int cta, int first_cta) {
  return 2 * cta + (cta == first_cta ? 1 : 0);
}
constexpr int num_partials(int num_ctas) { return 2 * num_ctas; }
// Arrival counters: one for each partial result, of the group whose first part it is, then one for
// each CTA, of the groups of the work tile that begins in it.
constexpr int num_counters(int num_ctas) { return 3 * num_ctas; }

// The CTAs whose parts of a work tile are combined first with that of CTA `cta`: kGroup neighbours,
// fewer in the last group.
struct ArrivalGroup {
  int leader;  // the first of them
  int num_ctas;

  static __host__ __device__ __forceinline__ ArrivalGroup of(int cta, const Part& part) {
    const int leader = cta - (cta - part.first_cta) % kGroup;
    return {leader, min(kGroup, part.first_cta + part.num_ctas - leader)};
  }
};

}  // namespace flashattn3::decode
