// A warp's part of the CTA's tile in shared memory, where cp.async copies the next head while the
// warp quantizes one: loads in flight take no registers. A warp synchronizes with no other one.
#pragma once

#include <cstdint>
#include <cute/arch/util.hpp>

#include "ptx/cp_async_groups.cuh"
#include "quantize/tile.cuh"

namespace flashattn3::quantize {

constexpr int kWarpTileBytes = 32 * kVecsOfThread * kVec * static_cast<int>(sizeof(uint16_t));

// Partition for row output: a thread holds 64 columns of one token, so that 1, 2 or 4 lanes share a
// token and a rotation needs 0, 1 or 2 shuffles. Two lanes' columns are 16 apart, four lanes' 8:
// lanes that read angles at a time read different banks.
template <int kColumns>
struct RowPositions {
  static constexpr int kLanes = kColumns / (kVec * kVecsOfThread);
  static constexpr int kVecsOfToken = kVecsOfThread;
  static constexpr int kVecsBelow = kLanes == 2 ? 2 : 1;  // of columns below those of other lanes
  static constexpr int kVecsOfRow = kColumns / kVec;

  __device__ static int token(int) { return threadIdx.x / kLanes; }
  __device__ static int column(int vec) { return vec_of_row(vec) * kVec; }
  __device__ static constexpr int lanes_apart(int columns) {
    const int vecs = columns / kVec;
    return vecs < kVecsBelow || vecs >= kVecsBelow * kLanes ? 0 : vecs / kVecsBelow;
  }
  __device__ static constexpr int vecs_apart(int columns) {
    const int vecs = columns / kVec;
    return vecs < kVecsBelow ? vecs : vecs / kLanes;
  }

  static constexpr bool kWholeVecs = true;  // the launch checks it

  // The warp copies whole rows: copy j has tokens 4 / kLanes * j and more.
  static constexpr int kTokensOfCopy = 32 / kVecsOfRow;
  __device__ static int first_copied() {
    return threadIdx.x / 32 * (32 / kLanes) + threadIdx.x % 32 / kVecsOfRow;
  }
  __device__ static constexpr int copied_after(int copy) { return copy * kTokensOfCopy; }
  __device__ static int copied_column() { return threadIdx.x % kVecsOfRow * kVec; }
  // Places are swizzled: eight lanes that read a vector of their tokens read all banks.
  __device__ static int copied_place(int copy) {
    const int lane = threadIdx.x % 32;
    return copy * 32 + (lane ^ (lane / kVecsOfRow) ^ (copy % 2 * 4));
  }
  __device__ static int place(int vec) {
    const int token = threadIdx.x % 32 / kLanes;
    const int swizzle = token % kTokensOfCopy ^ token / kTokensOfCopy % 2 * 4;
    return token * kVecsOfRow + (vec_of_row(vec) ^ swizzle);
  }

 private:
  __device__ static int vec_of_row(int vec) {
    return vec % kVecsBelow + threadIdx.x % kLanes * kVecsBelow +
           vec / kVecsBelow * (kVecsBelow * kLanes);
  }
};

// Partition for permuted V: each thread copies its own vectors.
struct PermutedCopies : PermutedPositions {
  static constexpr bool kWholeVecs = false;
  __device__ static int first_copied() { return token(0); }
  __device__ static constexpr int copied_after(int copy) {
    return copy / kVecsOfRow * kCoreRowKeys + permuted_key(0, copy % kVecsOfRow);
  }
  __device__ static int copied_column() { return column(0); }
  __device__ static int copied_place(int copy) { return copy * 32 + threadIdx.x % 32; }
  __device__ static int place(int vec) { return copied_place(vec); }
};

// The warp's tile of one head after the other, of 16-bit elements. Its addresses are found once.
template <class Positions>
class StagedTile {
 public:
  // memory: of the CTA, kWarpTileBytes for each warp. tile: of the first head.
  __device__ StagedTile(void* memory, const Source& source, const WorkTile& tile)
      : vecs_(static_cast<uint4*>(memory) + threadIdx.x / 32 * (kWarpTileBytes / sizeof(uint4))) {
    const int first = Positions::first_copied(), column = Positions::copied_column();
    next_ = tile_rows<uint16_t>(source, tile) + first * source.stride.seq + column;
    num_tokens_ = column < source.head_dim ? tile.num_tokens() - first : 0;
  }

  // Starts to copy the next head; zeros past the tokens and the columns.
  __device__ __forceinline__ void fetch(const Source& source) {
    const uint16_t* columns = next_;
    next_ += source.stride.head;
    if (Positions::kWholeVecs || source.whole_vecs) {
#pragma unroll
      for (int i = 0, at = 0; i < kVecsOfThread; ++i) {
        const int after = Positions::copied_after(i);
        columns += (after - at) * source.stride.seq;  // 1, 2, 4 or 7 tokens
        at = after;
        copy_vec_async(cute::cast_smem_ptr_to_uint(vecs_ + Positions::copied_place(i)), columns,
                       after < num_tokens_);
      }
      commit_copies();
      return;
    }
#pragma unroll 1
    for (int i = 0; i < kVecsOfThread; ++i) {
      const int after = Positions::copied_after(i);
      VecWords<uint16_t> word{};
      if (after < num_tokens_) {
        load_vec<uint16_t>(word, columns + after * source.stride.seq,
                           source.head_dim - Positions::copied_column());
      }
      vecs_[Positions::copied_place(i)] = make_uint4(word[0], word[1], word[2], word[3]);
    }
  }

  // Waits for what the warp's lanes have fetched. All lanes call it.
  __device__ __forceinline__ static void wait() {
    wait_for_groups<0>();
    __syncwarp();
  }

  // The thread's vector.
  __device__ __forceinline__ void load(VecWords<uint16_t>& word, int vec) const {
    load_vec<uint16_t>(word, reinterpret_cast<const uint16_t*>(vecs_ + Positions::place(vec)));
  }

 private:
  uint4* vecs_;
  const uint16_t* next_;  // the thread's first vector of the next head
  int num_tokens_;        // from it on
};

}  // namespace flashattn3::quantize
