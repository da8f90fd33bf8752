// tile/row_sum_columns.cuh: weights in e4m3 columns, and the PV GEMM that sums the rows by them.
// P and V are small integers and the weights exact, so that every sum is exact.
#pragma once

#include "../unit.cuh"
#include "attention/softmax_e4m3.cuh"
#include "tile/fragment.h"
#include "tile/row_sum_columns.cuh"

namespace unit::row_sum_columns {

using namespace flashattn3;

inline float e4m3_value(uint8_t code) {
  __nv_fp8_e4m3 value;
  value.__x = code;
  return static_cast<float>(value);
}

__global__ void store_column_bytes(const float* weights, uint32_t* found) {
  found[threadIdx.x] = row_sum_column_bytes(weights[threadIdx.x]);
}

// Column c counts 16^-c; together they are the weight to 12 bits, over the promised range.
inline void check_weights(Result& result) {
  std::vector<float> weights;
  for (float log2 = -kGreatestFactor; log2 <= -kLeastFactor; log2 += 0.0321f) {
    weights.push_back(std::exp2(log2));
  }
  const int count = static_cast<int>(weights.size());
  Array<float> given(weights);
  const auto found = results_of<uint32_t>(count, store_column_bytes, 1, count, 0, given.device());
  for (int i = 0; i < count; ++i) {
    double weight = 0;
    for (int c = 0; c < kUsedRowSumColumns; ++c) {
      const uint8_t code = static_cast<uint8_t>(found[i] >> (8 * c));
      weight += e4m3_value(code) * std::pow(16., -c);
    }
    weight /= 1 << kLog2KeyWeight;
    result.compare(weights[i], weight, weights[i] * 0x1p-12, "weight", i);
  }
}

// O and the row sums of 64 x kN probabilities. v: boxes of kBoxKeys keys. weights: one for each 16
// keys. sums: of the row over its four lanes, with a probability of 1 as 1. rest: the accumulators
// of the extra columns, after.
template <int kN, int kHeadDim, int kBoxKeys>
__global__ void multiply(const float* codes, const uint8_t* v, const float* weights, float* out,
                         float* sums, float* rest) {
  uint8_t* tile = shared_memory();
  constexpr int kBytes = kBoxKeys * kHeadDim, kBoxBytes = kBytes + kBoxKeys * kRowSumColumns;
  uint8_t* columns = tile + kBytes;
  for (int i = threadIdx.x; i < kN * (kHeadDim + kRowSumColumns); i += blockDim.x) {
    const int box = i / kBoxBytes, in_box = i % kBoxBytes;
    tile[i] = in_box < kBytes ? v[box * kBytes + in_box] : 0xff;
  }
  __syncthreads();
  for (int box = 0; box < kN / kBoxKeys; ++box) {
    zero_row_sum_columns<kBoxKeys>(columns + box * kBoxBytes);
  }
  __syncthreads();
  if (threadIdx.x < 32) {
    const int lane = threadIdx.x;
    const int key = row_sum_key(lane);
    const float weight = key < kN ? weights[key / 16] : NAN;  // lanes past the tile write nothing
    write_row_sum_columns<kN, kBoxKeys, kBoxBytes>(columns, row_sum_column_bytes(weight), lane);
  }
  fence_async_proxy();
  __syncthreads();
  float s[kN / 2];
  load_fragment<kN>(s, codes);
  Probabilities<ElementType::kE4m3, kN> p;
  SoftmaxE4m3<kN, false, 1, false>::pack(p, s);
  float o[(kHeadDim + kRowSumColumns) / 2];
  for (float& x : o) x = 0.f;
  gemm_rs_with_row_sum<kN, kHeadDim, kBoxKeys>(
      o, p, smem_desc_low(cute::cast_smem_ptr_to_uint(tile), kCoreBytes));
  warpgroup_wait<0>();
  warpgroup_fence_operand(o);
  for (int i = 0; i < kHeadDim / 2; ++i) out[fragment_index<kHeadDim>(i)] = o[i];
  float sum[2] = {0.f, 0.f};
  take_row_sums(sum, o);
  for (int r = 0; r < 2; ++r) {
    const float total = quad_sum(sum[r] * exp2_approx(-log2_of_one()));
    sums[thread_row(threadIdx.x) + 8 * r] = total;
  }
  for (int i = 0; i < 4; ++i) rest[threadIdx.x * 4 + i] = o[kHeadDim / 2 + i];
}

template <int kN, int kHeadDim, int kBoxKeys = kN>
void check_multiply(Result& result) {
  constexpr float kCodes[5] = {0, 56, 64, 68, 72};  // of 0, 1, 2, 3 and 4 in e4m3
  for (int i = 0; i < 5; ++i) {
    result.equal(i, e4m3_value(static_cast<uint8_t>(kCodes[i])), "e4m3 code", i);
  }
  Matrix p(64, kN, 2, 21);
  const Matrix v(kN, kHeadDim, 2, 22);
  std::vector<float> codes;
  for (int& x : p.values) {
    x += 2;  // 0 to 4; row 0 sees nothing
    if (&x - p.values.data() < kN) x = 0;
    codes.push_back(kCodes[x]);
  }
  std::vector<uint8_t> permuted(kN * kHeadDim);
  const std::vector<uint8_t> v_bytes = v.bytes(ElementType::kE4m3);
  constexpr int kGroups = kBoxKeys / 16;  // of a box
  for (int group = 0; group < kN / 16; ++group) {
    const int first = group / kGroups * kBoxKeys * kHeadDim;
    for (int at = 0; at < 16; ++at) {
      const int key = group * 16 + permuted_key(at / 4, at % 4);
      for (int column = 0; column < kHeadDim; ++column) {
        permuted[first + ((column / 8 * kGroups + group % kGroups) * 8 + column % 8) * 16 + at] =
            v_bytes[key * kHeadDim + column];
      }
    }
  }
  constexpr float kWeights[4] = {1.f, 0.5f, 3.f, 66.f / 64.f};  // 66 = 64 + 32 / 16
  std::vector<float> weights;
  for (int group = 0; group < kN / 16; ++group) weights.push_back(kWeights[group % 4]);
  Array<float> p_codes(codes), key_weights(weights), out(64 * kHeadDim), sums(64), rest(128 * 4);
  Array<uint8_t> v_tile(permuted);
  launch(multiply<kN, kHeadDim, kBoxKeys>, 1, 128, kN * (kHeadDim + kRowSumColumns),
         p_codes.device(), v_tile.device(), key_weights.device(), out.device(), sums.device(),
         rest.device());
  const std::vector<float>& o = out.download();
  const std::vector<float>& found = sums.download();
  for (int row = 0; row < 64; ++row) {
    double sum = 0;
    for (int key = 0; key < kN; ++key) sum += p.at(row, key) * weights[key / 16];
    result.compare(sum, found[row], sum * 1e-6, "row sum", row);  // a product by 2^-6
    for (int column = 0; column < kHeadDim; ++column) {
      int wanted = 0;
      for (int key = 0; key < kN; ++key) wanted += p.at(row, key) * v.at(key, column);
      result.equal(wanted, o[row * kHeadDim + column], "O", row, column);
    }
  }
  for (int i = 0; i < 128 * 4; ++i) result.equal(0, rest.download()[i], "extra columns", i);
}

static const Tests kTests = {
    {"tile/row_sum_columns: weights", Where::kGpu, check_weights},
    {"tile/row_sum_columns: GEMM, 128 keys, d64", Where::kGpu, check_multiply<128, 64>},
    {"tile/row_sum_columns: GEMM, 2 x 64 keys, d128", Where::kGpu, check_multiply<128, 128, 64>},
    {"tile/row_sum_columns: GEMM, 96 keys, d128", Where::kGpu, check_multiply<96, 128>},
    {"tile/row_sum_columns: GEMM, 128 keys, d256", Where::kGpu, check_multiply<128, 256>}};

}  // namespace unit::row_sum_columns
