// P and dS from S, on accumulator fragments of keys x queries; each column (query) has one lse and
// one delta.
#pragma once

#include "attention/variant.cuh"
#include "backward/transposed_alibi.cuh"
#include "ptx/approximations.cuh"
#include "ptx/opaque.cuh"
#include "tile/fragment.h"

namespace flashattn3::backward {

// Loads lse or delta of the column of each accumulator kBegin to kEnd - 1. lse_or_delta: points to
// that of the fragment's first column, in shared memory. column: of the thread's register 0.
template <int kBegin, int kEnd, int kCount>
__device__ __forceinline__ void load_per_column(float (&s)[kCount], const float* lse_or_delta,
                                                uint32_t column = thread_column(threadIdx.x)) {
  const float* mine = lse_or_delta + column;
#pragma unroll
  for (int i = kBegin; i < kEnd; i += 4) {
    const float2 pair = *reinterpret_cast<const float2*>(mine + register_column(i));
    s[i] = s[i + 2] = pair.x, s[i + 1] = s[i + 3] = pair.y;
  }
}
template <int kCount>
__device__ __forceinline__ void load_per_column(float (&s)[kCount], const float* lse_or_delta,
                                                uint32_t column = thread_column(threadIdx.x)) {
  load_per_column<0, kCount>(s, lse_or_delta, column);
}

// Scores become 2^(score - lse), capped, with their term and in log2 units. lse: of each
// accumulator's column. Term: TransposedAlibi or NoTerm.
template <int kCount, class Term>
__device__ __forceinline__ void exponentiate(float (&s)[kCount], const float (&lse)[kCount],
                                             ScoreScale scale, const Term& term) {
  if (scale.caps()) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      // This branch never exits; see differentiate_cap.
      make_opaque(scale.tanh_scale);
      if (scale.tanh_scale == 0.f) break;
      s[i] = tanh_of_scaled(s[i] * scale.tanh_scale);
    }
  }
  if constexpr (Term::kAny) {
    if (term.is_crossed()) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        s[i] = exp2_approx(fmaf(s[i], scale.factor, -lse[i]) + term.of(i));
      }
    } else {  // the two rows of a column share a sum
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        s[i] = fmaf(s[i], scale.factor, term.of_column(i) - lse[i]);
        s[i] = exp2_approx(s[i] + term.of_row(row_of(i)));
      }
    }
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) s[i] = exp2_approx(fmaf(s[i], scale.factor, -lse[i]));
  }
}

// Sets the probabilities of a tile of keys x kM queries to 0 where the query does not see the key.
// key: of the thread's register 0. first_row: of the tile.
template <int kM>
__device__ __forceinline__ void mask_probabilities(float (&p)[kM / 2], const Mask& mask, int key,
                                                   int first_row) {
  const int row = first_row + thread_column(threadIdx.x);  // the query of register 0
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int begin =
        key + kRowStride * r < mask.num_keys ? key + kRowStride * r - mask.last - row : kM;
    const int last = key + kRowStride * r - mask.first - row;
#pragma unroll
    for (int i = 0; i < kM / 2; ++i) {
      const int column = register_column(i);
      if (row_of(i) == r && (column < begin || column > last)) p[i] = 0.f;
    }
  }
}

// Multiplies P by the cap's derivative 1 - tanh^2; tanh is recovered from P. scale: with a cap.
// Where P is 0, tanh is lost and the result is 0. kClamps: there a maximum sets tanh to -1, which
// takes fewer registers than a select (up to 128 columns the select spills registers).
template <bool kClamps = false, int kCount, class Term>
__device__ __forceinline__ void differentiate_cap(float (&p)[kCount], const float* lse,
                                                  ScoreScale scale, const Term& term,
                                                  uint32_t column = thread_column(threadIdx.x)) {
  const float inverse = 1.f / scale.factor;
#pragma unroll
  for (int i = 0; i < kCount; i += 8) {
    // This branch never exits; it keeps ptxas from starting the next eight early: registers do not
    // suffice for all at once.
    make_opaque(scale.tanh_scale);
    if (scale.tanh_scale == 0.f) break;
    float of_column[8];
    load_per_column(of_column, lse + register_column(i), column);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      if constexpr (Term::kAny) of_column[j] -= term.of(i + j);
      const float tanh = (__log2f(p[i + j]) + of_column[j]) * inverse;
      if constexpr (kClamps) {
        const float clamped = fmaxf(tanh, -1.f);
        p[i + j] *= 1.f - clamped * clamped;
      } else {
        p[i + j] = p[i + j] == 0.f ? 0.f : p[i + j] * (1.f - tanh * tanh);
      }
    }
  }
}

}  // namespace flashattn3::backward
