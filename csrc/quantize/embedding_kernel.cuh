// From a projection's output to 8 bits in one pass: the kernel of quantize/kernel.cuh for q and k
// that are normalized and rotated on the way.
#pragma once

#include "quantize/embedding.cuh"
#include "quantize/kernel.cuh"

namespace flashattn3::quantize {

constexpr int kEmbeddingRegisters = 128;

// Quantizes the tile of `heads` heads from tile.head on, one after the other. While one is being
// quantized the next one is being loaded. make: the values of what has been loaded.
template <class Positions, class Maximum, class Make, class Quantize>
__device__ __forceinline__ void quantize_heads(const QuantizedTensor& tensor, WorkTile tile,
                                               int heads, Maximum* largest, Make make,
                                               Quantize quantize) {
  LoadedVecs loaded;
  load_tile<uint16_t, Positions>(loaded, tensor.x, tile);
  cluster_wait();  // every CTA does
#pragma unroll 1
  for (int i = 0; i < heads; ++i, ++tile.head) {
    auto values = make(loaded, tile, i);
    if (i + 1 < heads) {
      WorkTile next = tile;
      ++next.head;
      load_tile<uint16_t, Positions>(loaded, tensor.x, next);
    }
    quantize(values, tile, largest[i]);
  }
}

// Grid: for each tensor heads / heads_together * blocks * batch clusters of block / 64 CTAs.
// Dynamic shared memory: TileAngles::bytes of the rotated columns.
template <ElementType kType, int kColumns, int kApart>
__global__ void __launch_bounds__(quantize_threads(kColumns),
                                  quantize_ctas(kColumns, kEmbeddingRegisters))
    embed_blocks(const __grid_constant__ EmbeddedArguments args) {
  using Values = EmbeddedValues<kType, kColumns, kApart>;
  extern __shared__ float4 angles_of_tile[];
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

  if (tensor.to == Narrowed::kE4m3Permuted) {
    quantize_heads<PermutedPositions>(
        tensor, tile, heads, largest,
        [&](const LoadedVecs& loaded, const WorkTile& of_head, int) {
          __syncwarp();  // what the head before has staged has been read
          return LoadedValues<kType>(loaded, tensor, of_head);
        },
        [&](auto& values, const WorkTile& of_head, LargestOfCluster<kColumns>& found) {
          quantize_permuted<kType, kColumns>(tensor, of_head, values, found);
        });
    return;
  }
  const Embedding& embedding = args.embedding[of.tensor];
  const TileAngles angles(angles_of_tile, embedding.half);
  __shared__ typename Values::Columns columns;
  if (embedding.half > 0) angles.stage<kType>(embedding, tensor, tile);
  Values::stage(tensor, tile, columns);
  __syncthreads();
  quantize_heads<TokenPositions<kColumns>>(
      tensor, tile, heads, largest,
      [&](const LoadedVecs& loaded, const WorkTile& of_head, int i) {
        if (tensor.mean != nullptr && i > 0) {  // each head has a mean of its own
          __syncthreads();
          Values::stage(tensor, of_head, columns);
          __syncthreads();
        }
        return Values(loaded, tensor, embedding, angles, columns);
      },
      [&](auto& values, const WorkTile& of_head, LargestOfCluster<kColumns>& found) {
        quantize_tokens<kColumns>(tensor, of_head, values, found);
      });
}

}  // namespace flashattn3::quantize
