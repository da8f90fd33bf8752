// Writes the schedule of csrc/varlen/prepare.cuh by sorting on the host.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <vector>

#include "attention/tile_scheduler.cuh"
#include "launch/params.h"

// Keys and blocks of a sequence.
struct VarlenExtent {
  int keys, blocks;
};

// Fills varlen_schedule_bytes(batch) at `workspace`.
inline void write_varlen_schedule(const std::vector<VarlenExtent>& batch, void* workspace) {
  const flashattn3::VarlenSchedule schedule{workspace, static_cast<int>(batch.size())};
  const auto steps = [&](int i) { return (batch[i].keys + 127) / 128; };
  std::vector<int> order;
  for (int i = 0; i < schedule.batch; ++i) {
    if (batch[i].blocks > 0) order.push_back(i);
  }
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) {
    return steps(a) != steps(b) ? steps(a) > steps(b) : batch[a].blocks > batch[b].blocks;
  });
  const int count = static_cast<int>(order.size());
  int blocks_before = 0;
  for (int first = 0, last; first < count; first = last) {
    const auto is_alike = [&](int i) {
      return steps(i) == steps(order[first]) && batch[i].blocks == batch[order[first]].blocks;
    };
    for (last = first; last < count && is_alike(order[last]);) ++last;
    for (int place = first; place < last; ++place) {
      const int blocks = batch[order[place]].blocks;
      schedule.batch_indices()[place] = order[place];
      schedule.places()[place] = {blocks_before, blocks, first, last - first};
      blocks_before += blocks;
    }
  }
  schedule.places()[-1] = {blocks_before, count, 0, 0};
}
