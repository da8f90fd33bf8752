// tile/gemm_mn.cuh: each GEMM on one tile against the product on the host, as in gemm_test.cuh.
#pragma once

#include "../unit.cuh"
#include "gemm_test.cuh"
#include "tile/gemm_mn.cuh"

namespace unit::gemm_mn {

using namespace flashattn3;
using gemm::compare_product, gemm::desc_low, gemm::kBf16, gemm::kFp16;

// O = 7 + P V with both in shared memory.
template <ElementType kElement, int kColumns>
__global__ void store_ss_mn_b(const uint8_t* p, const uint8_t* v, float* found) {
  uint8_t* p_tile = shared_memory();
  uint8_t* v_tile = p_tile + tile_bytes(64, 128);
  fill_tile(p_tile, p, 64, 128);
  fill_tile(v_tile, v, 64, kColumns * 2);
  __syncthreads();
  float o[kColumns / 2];
  for (int i = 0; i < kColumns / 2; ++i) o[i] = 7.f;
  gemm_ss_mn_b<kElement, kColumns>(o, desc_low(p_tile, 64 * 128), desc_low(v_tile, 64 * 128));
  warpgroup_wait<0>();
  warpgroup_fence_operand(o);
  store_fragment<kColumns>(o, found);
}

template <ElementType kElement, int kColumns>
void check_ss_mn_b(Result& result) {
  const Matrix p(64, 64, 4, 5), v(64, kColumns, 4, 6);
  Array<uint8_t> p_bytes(p.bytes(kElement)), v_bytes(v.bytes(kElement));
  const auto found =
      results_of<float>(64 * kColumns, store_ss_mn_b<kElement, kColumns>, 1, 128,
                        tile_bytes(64, 128 + kColumns * 2), p_bytes.device(), v_bytes.device());
  compare_product(result, p, false, v, 7, found);
}

// O = S^T K, or with kTwice O = S^T K + S^T K.
template <ElementType kElement, int kDepth, int kColumns, bool kTwice>
__global__ void store_ss_mn_ab(const uint8_t* s, const uint8_t* k, float* found) {
  uint8_t* s_tile = shared_memory();
  uint8_t* k_tile = s_tile + tile_bytes(kDepth, 128);
  fill_tile(s_tile, s, kDepth, 128);
  fill_tile(k_tile, k, kDepth, kColumns * 2);
  __syncthreads();
  float o[kColumns / 2];
  for (int i = 0; i < kColumns / 2; ++i) o[i] = NAN;  // not read
  const uint32_t s_low = desc_low(s_tile, 16), k_low = desc_low(k_tile, kDepth * 128);
  if constexpr (kTwice) {
    gemm_ss_mn_ab<kElement, kDepth, kColumns>(o, s_low, k_low, s_low, k_low);
  } else {
    gemm_ss_mn_ab<kElement, kDepth, kColumns>(o, s_low, k_low);
  }
  warpgroup_wait<0>();
  warpgroup_fence_operand(o);
  store_fragment<kColumns>(o, found);
}

template <ElementType kElement, int kDepth, int kColumns, bool kTwice>
void check_ss_mn_ab(Result& result) {
  const Matrix s(kDepth, 64, 4, 7), k(kDepth, kColumns, 4, 8);
  Array<uint8_t> s_bytes(s.bytes(kElement)), k_bytes(k.bytes(kElement));
  auto product =
      results_of<float>(64 * kColumns, store_ss_mn_ab<kElement, kDepth, kColumns, kTwice>, 1, 128,
                        tile_bytes(kDepth, 128 + kColumns * 2), s_bytes.device(), k_bytes.device());
  if (kTwice) {
    for (float& x : product) x /= 2.f;
  }
  compare_product(result, s, true, k, 0, product);
}

static const Tests kTests = {
    {"tile/gemm_mn: ss_mn_b bf16, d128", Where::kGpu, check_ss_mn_b<kBf16, 128>},
    {"tile/gemm_mn: ss_mn_b fp16, d96", Where::kGpu, check_ss_mn_b<kFp16, 96>},
    {"tile/gemm_mn: ss_mn_b bf16, d192", Where::kGpu, check_ss_mn_b<kBf16, 192>},
    {"tile/gemm_mn: ss_mn_ab bf16, 128 x d128", Where::kGpu,
     check_ss_mn_ab<kBf16, 128, 128, false>},
    {"tile/gemm_mn: ss_mn_ab fp16, 64 x d256", Where::kGpu, check_ss_mn_ab<kFp16, 64, 256, false>},
    {"tile/gemm_mn: ss_mn_ab of two tiles", Where::kGpu, check_ss_mn_ab<kBf16, 64, 128, true>},
    {"tile/gemm_mn: ss_mn_ab of two tiles, 48 columns", Where::kGpu,
     check_ss_mn_ab<kFp16, 64, 48, true>}};

}  // namespace unit::gemm_mn
