// 8-bit inputs of one case of forward_check: the problem's values are rounded to e4m3 or int8 times
// power-of-two descales, so that the fp64 reference has the same inputs as the kernel.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "cache_bytes.h"
#include "forward_problem.h"
#include "launch/params.h"

constexpr int kBlockTokens = 128;  // tokens that share a descale

// An 8-bit type: its largest number, and the conversions from and to float.
struct Narrow {
  float largest;
  uint8_t (*from_float)(float);
  float (*to_float)(uint8_t);
};
constexpr Narrow kToE4m3{448.f, e4m3_of, of_e4m3};
constexpr Narrow kToInt8{
    127.f, int8_of, [](uint8_t bits) { return static_cast<float>(static_cast<int8_t>(bits)); }};

// One of q, k and v: the tokens of `source` with head dims padded to a multiple of 16 bytes, NaN
// outside the sequences; and descales (batch, heads, blocks).
struct Quantized {
  flashattn3::Strides stride;
  int64_t blocks;
  std::vector<uint8_t> host;
  std::vector<float> descale;
  uint8_t* device = nullptr;
  float* device_descale = nullptr;

  // rows_of(b): position of sequence b. spread: powers of two between the blocks' values.
  template <class RowsOf>
  Quantized(const Narrow& type, Tensor& source, int batch, int longest, RowsOf rows_of,
            int spread) {
    const int64_t pitch = (source.dim + 15) / 16 * 16;
    stride = {pitch * source.heads * source.seq, pitch * source.heads, pitch};
    blocks = std::max(1, (longest + kBlockTokens - 1) / kBlockTokens);
    host.assign(stride.batch * source.batch, 0x7f);
    descale.assign(blocks * source.heads * batch, NAN);
    for (int b = 0; b < batch; ++b) {
      const Rows rows = rows_of(b);
      for (int h = 0; h < source.heads; ++h) {
        for (int block = 0; block * kBlockTokens < rows.length; ++block) {
          const int first = block * kBlockTokens;
          const int last = std::min(first + kBlockTokens, rows.length);
          const float extra = std::ldexp(1.f, spread == 0 ? 0 : block * 3 % 5 * spread - spread);
          float amax = 0;
          for (int s = first; s < last; ++s) {
            const uint16_t* at = source.row(rows.batch_coord, rows.offset + s, h);
            for (int i = 0; i < source.dim; ++i) {
              amax = std::max(amax, std::fabs(to_float(at[i], false)) * extra);
            }
          }
          const float scale =
              amax == 0 ? 1.f : std::exp2(std::ceil(std::log2(amax / type.largest)));
          descale[(static_cast<int64_t>(b) * source.heads + h) * blocks + block] = scale;
          for (int s = first; s < last; ++s) {
            uint16_t* at = source.row(rows.batch_coord, rows.offset + s, h);
            uint8_t* to = host.data() + rows.batch_coord * stride.batch +
                          (rows.offset + s) * stride.seq + h * stride.head;
            for (int i = 0; i < source.dim; ++i) {
              to[i] = type.from_float(to_float(at[i], false) * extra / scale);
              at[i] = to_bits(type.to_float(to[i]) * scale, false);
            }
          }
        }
      }
    }
    cudaMalloc(&device_descale, descale.size() * 4);
    cudaMemcpy(device_descale, descale.data(), descale.size() * 4, cudaMemcpyHostToDevice);
  }
  ~Quantized() { cudaFree(device), cudaFree(device_descale); }
  Quantized(const Quantized&) = delete;

  void upload(const std::vector<uint8_t>& bytes) {
    cudaMalloc(&device, bytes.size() + 16);
    cudaMemcpy(device, bytes.data(), bytes.size(), cudaMemcpyHostToDevice);
  }
  flashattn3::BlockDescales descales(int heads) const {
    return {.data = device_descale,
            .batch = blocks * heads,
            .head = blocks,
            .block = 1,
            .num_blocks = static_cast<int>(blocks),
            .block_tokens = kBlockTokens};
  }
};

// Replaces the problem's host values with the quantized ones.
struct QuantizedInputs {
  Quantized q, k, v;
  int64_t num_permuted_keys;

  // scored: type of q and k; v is e4m3.
  QuantizedInputs(const Narrow& scored, Problem& p, int head_dim)
      : q(
            scored, p.q, p.c.batch, p.c.seqlen_q, [&](int b) { return p.queries(b); }, 0),
        k(
            scored, p.k, p.c.batch, p.c.seqlen_k, [&](int b) { return p.keys(b); }, 0),
        v(
            kToE4m3, p.v, p.c.batch, p.c.seqlen_k, [&](int b) { return p.keys(b); },
            p.c.data == Data::kNormal ? 2 : 0) {
    q.upload(q.host), k.upload(k.host);
    const Case& c = p.c;
    const bool varlen = !c.cu_k.empty();
    num_permuted_keys = 32 * (varlen ? c.total_k / 32 + c.batch : (c.seqlen_k + 31) / 32);
    // NaN in every padding key, including those past a sequence's end in its last group of 32.
    std::vector<uint8_t> slots(p.v.batch * c.heads_kv * num_permuted_keys * head_dim, 0x7f);
    for (int b = 0; b < c.batch; ++b) {
      const Rows rows = p.keys(b);
      const int64_t first = varlen ? 32 * (rows.offset / 32 + b) : 0;
      for (int h = 0; h < c.heads_kv; ++h) {
        for (int key = 0; key < rows.length; ++key) {
          const int in16 = key % 16;
          const int64_t slot = first + key / 16 * 16 + in16 % 8 / 2 * 4 + in16 / 8 * 2 + in16 % 2;
          const uint8_t* from = v.host.data() + rows.batch_coord * v.stride.batch +
                                (rows.offset + key) * v.stride.seq + h * v.stride.head;
          uint8_t* to = slots.data() +
                        (rows.batch_coord * c.heads_kv + h) * num_permuted_keys * head_dim +
                        slot / 16 * 16 * head_dim + slot % 16;
          for (int i = 0; i < head_dim; ++i) to[i * 16] = i < c.head_dim_v ? from[i] : 0;
        }
      }
    }
    v.upload(slots);
  }

  void fill(flashattn3::ForwardParams& params, void* promoted) const {
    params.q = q.device, params.k = k.device, params.v = v.device;
    params.q_stride = q.stride, params.k_stride = k.stride;
    params.quantized = {.num_permuted_keys = num_permuted_keys,
                        .q = q.descales(params.num_heads_q),
                        .k = k.descales(params.num_heads_kv),
                        .v = v.descales(params.num_heads_kv),
                        .promoted = promoted};
  }
};
