// Waves of a deterministic backward with lists: work tiles of a head that run at a time, and add dQ
// in the order of their steps (masks/block_lists.py, turns_of).
#pragma once

#include "attention/tile_scheduler.cuh"

namespace flashattn3::backward {

// Tiles of a wave, WAVE in Python. They wait for each other, so as many CTAs must run at a time and
// none may hold two of them.
constexpr int kWave = 8;
// Heads whose waves take turns. A wave waits for those of its head before it: with so many heads
// they have ended, and all SMs of the largest GPU are busy.
constexpr int kWaveHeads = 16;

// The work tile of a scheduler index: a wave of each head of a group, then the next wave of each.
__host__ __device__ __forceinline__ TileCoord wave_tile(const HeadGroups& heads, int index) {
  const int first_head = index / (kWaveHeads * heads.num_blocks) * kWaveHeads;
  const int group = min(kWaveHeads, heads.num_heads - first_head);
  const int within = index - first_head * heads.num_blocks;
  const int first_block = within / (group * kWave) * kWave;
  const int within_wave = within - first_block * group;
  const int blocks = min(kWave, heads.num_blocks - first_block);
  const int head = within_wave / blocks;
  const int block = first_block + within_wave - head * blocks;
  return {heads.num_blocks - 1 - block, first_head + head};  // the shortest lists first
}

}  // namespace flashattn3::backward
