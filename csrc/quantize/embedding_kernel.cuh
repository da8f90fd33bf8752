// From a projection's output to 8 bits in one pass: the kernel of quantize/kernel.cuh for q and k
// that are normalized and rotated on the way.
#pragma once

#include <algorithm>

#include "quantize/embedding.cuh"
#include "quantize/kernel.cuh"

namespace flashattn3::quantize {

constexpr int kEmbeddingRegisters = 128;

// Dynamic shared memory: the warps' tiles, and behind them the angles or the stages of permuted V.
constexpr int embed_shared_bytes(int columns, int half) {
  const int warps = quantize_threads(columns) / 32;
  const int stages = warps * static_cast<int>(sizeof(PermutedStage));
  return warps * kWarpTileBytes + std::max(stages, TileAngles::bytes(half));
}

// Quantizes the tile of `heads` heads from tile.head on, one after the other. The first one is on
// its way; while one is being quantized the next one is copied. make(tile, i): the values of what
// has been copied. quantize(values, tile, largest[i]).
template <class Staged, class Maximum, class Make, class Quantize>
__device__ __forceinline__ void quantize_heads(const QuantizedTensor& tensor, Staged& staged,
                                               WorkTile tile, int heads, Maximum* largest,
                                               Make make, Quantize quantize) {
  cluster_wait();  // every CTA does
#pragma unroll 1
  for (int i = 0; i < heads; ++i, ++tile.head) {
    Staged::wait();
    auto values = make(tile, i);
    __syncwarp();  // every lane has read its vectors
    if (i + 1 < heads) staged.fetch(tensor.x);
    quantize(values, tile, largest[i]);
  }
}

// Grid: for each tensor heads / heads_together * blocks * batch clusters of block / 64 CTAs.
template <ElementType kType, int kColumns, int kApart>
__global__ void __launch_bounds__(quantize_threads(kColumns),
                                  quantize_ctas(kColumns, kEmbeddingRegisters))
    embed_blocks(const __grid_constant__ EmbeddedArguments args) {
  using Values = EmbeddedValues<kType, kColumns, kApart>;
  extern __shared__ __align__(128) uint8_t memory[];
  __shared__ LargestOfCluster<kColumns> largest[kHeadsTogether];
  launch_dependents();
  griddepcontrol_wait();
  const BlockOfTensor of = find_tensor(args, cluster_index());
  const QuantizedTensor& tensor = args.tensor[of.tensor];
  const int heads = args.heads_together[of.tensor];
  // Heads are innermost, so the cluster's heads are neighbours of this one.
  WorkTile tile = find_block(tensor.x, of.block * heads, cluster_size() * kTileTokens);
  if (tile.num_tokens() <= 0) {  // the sequence has no such block
    for (int i = 0; i < heads; ++i, ++tile.head) store_scale(tensor, tile, kSmallestScale);
    return;
  }
  tile.first += cluster_rank() * kTileTokens;
  for (LargestOfCluster<kColumns>& of_head : largest) init_maxima(of_head);
  cluster_arrive();  // by every thread: this CTA's barriers are ready for the others' values

  uint8_t* const beside_tiles = memory + quantize_threads(kColumns) / 32 * kWarpTileBytes;
  if (tensor.to == Narrowed::kE4m3Permuted) {
    StagedTile<PermutedCopies> staged(memory, tensor.x, tile);
    staged.fetch(tensor.x);
    PermutedStage& stage = reinterpret_cast<PermutedStage*>(beside_tiles)[threadIdx.x / 32];
    quantize_heads(
        tensor, staged, tile, heads, largest,
        [&](const WorkTile& of_head, int) {
          LoadedVecs loaded;
#pragma unroll
          for (int u = 0; u < kVecsOfThread; ++u) staged.load(loaded[u], u);
          return LoadedValues<kType>(loaded, tensor, of_head);
        },
        [&](auto& values, const WorkTile& of_head, LargestOfCluster<kColumns>& found) {
          quantize_permuted<kType, kColumns>(tensor, of_head, values, found, stage);
        });
    return;
  }
  typename Values::Staged staged(memory, tensor.x, tile);
  staged.fetch(tensor.x);
  const Embedding& embedding = args.embedding[of.tensor];
  const TileAngles angles(beside_tiles, embedding.half);
  __shared__ typename Values::Columns columns;
  Values::stage(tensor, tile, columns);
  const auto ready = [] { __syncthreads(); };
  if (embedding.half > 0) {
    angles.stage<kType, kColumns, kApart == kInterleaved>(
        embedding, tile, reinterpret_cast<const uint16_t*>(columns.flips), ready);
  }
  ready();
  quantize_heads(
      tensor, staged, tile, heads, largest,
      [&](const WorkTile& of_head, int i) {
        if (tensor.mean != nullptr && i > 0) {  // each head has a mean of its own
          __syncthreads();
          Values::stage(tensor, of_head, columns);
          __syncthreads();
        }
        return Values(staged, tensor, of_head, embedding, angles, columns);
      },
      [&](auto& values, const WorkTile& of_head, LargestOfCluster<kColumns>& found) {
        values.transform(tensor);
        quantize_tokens<kColumns>(tensor, of_head, values, found, [&](const auto& bytes) {
          store_token<kColumns>(bytes, tensor, of_head);
        });
      });
}

}  // namespace flashattn3::quantize
