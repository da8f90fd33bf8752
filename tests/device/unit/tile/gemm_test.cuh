// tile/gemm.cuh: each GEMM on one tile against the product on the host. Elements are small
// integers, so that every sum is exact.
#pragma once

#include "../unit.cuh"
#include "tile/fragment.h"
#include "tile/gemm.cuh"

namespace unit::gemm {

using namespace flashattn3;

__device__ inline uint32_t desc_low(const uint8_t* tile, int atom_stride) {
  return smem_desc_low(cute::cast_smem_ptr_to_uint(tile), atom_stride);
}

// S = Q K^T of two warpgroups, 128 rows, or S = 1000 + Q K^T with kAdd.
template <ElementType kElement, int kN, int kHeadDim, bool kAdd>
__global__ void store_ss(const uint8_t* q, const uint8_t* k, float* found) {
  constexpr int kBlockM = 128, kPitchBytes = kHeadDim * element_bytes(kElement);
  uint8_t* q_tile = shared_memory();
  uint8_t* k_tile = q_tile + tile_bytes(kBlockM, kPitchBytes);
  fill_tile(q_tile, q, kBlockM, kPitchBytes);
  fill_tile(k_tile, k, kN, kPitchBytes);
  __syncthreads();
  float s[kN / 2];
  for (int i = 0; i < kN / 2; ++i) s[i] = 1000.f;
  const int warpgroup = uniform(threadIdx.x / 128);
  gemm_ss<kElement, kBlockM, kN, kHeadDim, kAdd>(
      s, desc_low(q_tile + warpgroup * 64 * 128, kBlockM * 128), desc_low(k_tile, kN * 128));
  warpgroup_wait<0>();
  warpgroup_fence_operand(s);
  store_fragment<kN>(s, found);
}

template <ElementType kElement, int kN, int kHeadDim, bool kAdd>
void check_ss(Result& result) {
  constexpr int kPitchBytes = kHeadDim * element_bytes(kElement);
  const Matrix q(128, kHeadDim, 4, 1), k(kN, kHeadDim, 4, 2);
  Array<uint8_t> q_bytes(q.bytes(kElement)), k_bytes(k.bytes(kElement));
  const auto s =
      results_of<float>(128 * kN, store_ss<kElement, kN, kHeadDim, kAdd>, 1, 256,
                        tile_bytes(128 + kN, kPitchBytes), q_bytes.device(), k_bytes.device());
  for (int row = 0; row < 128; ++row) {
    for (int column = 0; column < kN; ++column) {
      int wanted = kAdd ? 1000 : 0;
      for (int i = 0; i < kHeadDim; ++i) wanted += q.at(row, i) * k.at(column, i);
      result.equal(wanted, s[row * kN + column], "S", row, column);
    }
  }
}

// O = 7 + P V with P from registers, packed from accumulators.
template <ElementType kElement, int kN, int kHeadDim>
__global__ void store_rs(const float* p, const uint8_t* v, float* found) {
  uint8_t* v_tile = shared_memory();
  fill_tile(v_tile, v, kN, kHeadDim * 2);
  __syncthreads();
  float s[kN / 2], o[kHeadDim / 2];
  load_fragment<kN>(s, p);
  Probabilities<kElement, kN> operand;
  pack_probabilities<kElement, kN>(operand, s);
  for (int i = 0; i < kHeadDim / 2; ++i) o[i] = 7.f;
  gemm_rs<kElement, kN, kHeadDim>(o, operand, desc_low(v_tile, kN * 128));
  warpgroup_wait<0>();
  warpgroup_fence_operand(o);
  store_fragment<kHeadDim>(o, found);
}

// 7 + a * b, or 7 + a^T * b.
inline void compare_product(Result& result, const Matrix& a, bool transposed, const Matrix& b,
                            int start, const std::vector<float>& found) {
  const int rows = transposed ? a.columns : a.rows;
  for (int row = 0; row < rows; ++row) {
    for (int column = 0; column < b.columns; ++column) {
      int wanted = start;
      for (int i = 0; i < b.rows; ++i) {
        wanted += (transposed ? a.at(i, row) : a.at(row, i)) * b.at(i, column);
      }
      result.equal(wanted, found[row * b.columns + column], "O", row, column);
    }
  }
}

template <ElementType kElement, int kN, int kHeadDim>
void check_rs(Result& result) {
  const Matrix p(64, kN, 4, 3), v(kN, kHeadDim, 4, 4);
  Array<float> p_values(std::vector<float>(p.values.begin(), p.values.end()));
  Array<uint8_t> v_bytes(v.bytes(kElement));
  const auto found =
      results_of<float>(64 * kHeadDim, store_rs<kElement, kN, kHeadDim>, 1, 128,
                        tile_bytes(kN, kHeadDim * 2), p_values.device(), v_bytes.device());
  compare_product(result, p, false, v, 7, found);
}

// pack rounds to nearest, the low half first; unpack returns both halves.
template <ElementType kElement>
__global__ void store_packed(const float* values, uint32_t* packed, float2* unpacked) {
  const uint32_t pair = pack<kElement>(values[2 * threadIdx.x], values[2 * threadIdx.x + 1]);
  packed[threadIdx.x] = pair;
  unpacked[threadIdx.x] = unpack<kElement>(pair);
}

template <ElementType kElement>
void check_pack(Result& result) {
  constexpr int kPairs = 64;
  std::vector<float> values(2 * kPairs);
  std::mt19937 random(9);
  std::normal_distribution<float> normal;
  for (float& x : values) x = normal(random);
  values[0] = INFINITY, values[1] = -0.f, values[2] = 1.00390625f, values[3] = 1.01171875f;
  Array<float> given(values);
  Array<uint32_t> packed(kPairs);
  Array<float2> unpacked(kPairs);
  launch(store_packed<kElement>, 1, kPairs, 0, given.device(), packed.device(), unpacked.device());
  for (int i = 0; i < 2 * kPairs; ++i) {
    const bool fp16 = kElement == ElementType::kFloat16;
    const uint16_t bits = fp16 ? __half_as_ushort(__float2half_rn(values[i]))
                               : __bfloat16_as_ushort(__float2bfloat16_rn(values[i]));
    const float back =
        fp16 ? __half2float(__ushort_as_half(bits)) : __bfloat162float(__ushort_as_bfloat16(bits));
    const uint32_t pair = packed.download()[i / 2];
    result.equal(bits, i % 2 == 0 ? pair & 0xffff : pair >> 16, "pack", i / 2, i % 2);
    const float2 both = unpacked.download()[i / 2];
    result.equal(back, i % 2 == 0 ? both.x : both.y, "unpack", i / 2, i % 2);
  }
}

// S of one warp's rows from the tiles in shared memory, exact for small integers. All eight warps
// of two warpgroups, one after the other: no other warp takes part.
template <ElementType kElement, int kN, int kHeadDim>
__global__ void store_recomputed(const uint8_t* q, const uint8_t* k, float* found) {
  constexpr int kBlockM = 128;
  uint8_t* q_tile = shared_memory();
  uint8_t* k_tile = q_tile + tile_bytes(kBlockM, kHeadDim * 2);
  fill_tile(q_tile, q, kBlockM, kHeadDim * 2);
  fill_tile(k_tile, k, kN, kHeadDim * 2);
  __syncthreads();
  const int warp = threadIdx.x / 32;
  for (int turn = 0; turn < 8; ++turn) {
    if (warp == turn) {
      float s[kN / 2];
      recompute_scores<kElement, kBlockM, kN, kHeadDim>(s, cute::cast_smem_ptr_to_uint(q_tile),
                                                        cute::cast_smem_ptr_to_uint(k_tile),
                                                        warp * kRowsOfWarp);
      for (int i = 0; i < kN / 2; ++i) {
        const int row = thread_row(threadIdx.x) + register_row(i);
        found[row * kN + thread_column(threadIdx.x) + register_column(i)] = s[i];
      }
    }
    __syncthreads();
  }
}

template <ElementType kElement, int kN, int kHeadDim>
void check_recomputed(Result& result) {
  const Matrix q(128, kHeadDim, 4, 31), k(kN, kHeadDim, 4, 32);
  Array<uint8_t> q_bytes(q.bytes(kElement)), k_bytes(k.bytes(kElement));
  Array<float> found(128 * kN);
  launch(store_recomputed<kElement, kN, kHeadDim>, 1, 256, tile_bytes(128 + kN, kHeadDim * 2),
         q_bytes.device(), k_bytes.device(), found.device());
  const std::vector<float>& s = found.download();
  for (int row = 0; row < 128; ++row) {
    for (int key = 0; key < kN; ++key) {
      int wanted = 0;
      for (int i = 0; i < kHeadDim; ++i) wanted += q.at(row, i) * k.at(key, i);
      result.equal(wanted, s[row * kN + key], "S", row, key);
    }
  }
}

constexpr ElementType kBf16 = ElementType::kBFloat16, kFp16 = ElementType::kFloat16;
constexpr ElementType kE4m3 = ElementType::kE4m3;

static const Tests kTests = {
    {"tile/gemm: ss bf16, 64 keys, d64", Where::kGpu, check_ss<kBf16, 64, 64, false>},
    {"tile/gemm: ss bf16, 80 keys, d192", Where::kGpu, check_ss<kBf16, 80, 192, false>},
    {"tile/gemm: ss bf16, 112 keys, d192", Where::kGpu, check_ss<kBf16, 112, 192, false>},
    {"tile/gemm: ss fp16, 128 keys, d192", Where::kGpu, check_ss<kFp16, 128, 192, false>},
    {"tile/gemm: ss fp16, 128 keys, d128, add", Where::kGpu, check_ss<kFp16, 128, 128, true>},
    {"tile/gemm: ss bf16, 96 keys, d96", Where::kGpu, check_ss<kBf16, 96, 96, false>},
    {"tile/gemm: ss e4m3, 128 keys, d128", Where::kGpu, check_ss<kE4m3, 128, 128, false>},
    {"tile/gemm: ss e4m3, 96 keys, d256", Where::kGpu, check_ss<kE4m3, 96, 256, false>},
    {"tile/gemm: rs bf16, 64 keys, d64", Where::kGpu, check_rs<kBf16, 64, 64>},
    {"tile/gemm: rs fp16, 80 keys, d192", Where::kGpu, check_rs<kFp16, 80, 192>},
    {"tile/gemm: rs bf16, 112 keys, d128", Where::kGpu, check_rs<kBf16, 112, 128>},
    {"tile/gemm: rs bf16, 96 keys, d96", Where::kGpu, check_rs<kBf16, 96, 96>},
    {"tile/gemm: recompute bf16, 64 keys, d64", Where::kGpu, check_recomputed<kBf16, 64, 64>},
    {"tile/gemm: recompute fp16, 80 keys, d192", Where::kGpu, check_recomputed<kFp16, 80, 192>},
    {"tile/gemm: pack bf16", Where::kGpu, check_pack<kBf16>},
    {"tile/gemm: pack fp16", Where::kGpu, check_pack<kFp16>}};

}  // namespace unit::gemm
