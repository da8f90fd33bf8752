// Softmax whose probabilities become e4m3 without an exponential.
//
// The bits of an e4m3 number 2^e (1 + m / 8), its code, are 8 (e + 7) + m. So the code of 2^x is
// nearly 8 (x + 7): exactly so at powers of two, and between them up to 0.7 less, as the codes
// follow a number and not its logarithm. A score becomes a code by one multiply-add, and four of
// them become bytes by two conversions that saturate and pack. P is then right to 3.2 % in the root
// mean square, where rounding the exact exponential is to 2.65 %; a quarter of the instructions
// and all use of the slow exponential unit are gone. (H100, full, 16384 tokens, TFLOP/s: d64 658 to
// 915, d128 935 to 1238, d256 1351 to 1462.)
//
// The price is range: what is to be below 2^-7 becomes 0, and below 2^-6 too little. So a reference
// follows its row in both directions. It rises where a probability would pass 448: growth is seen
// in the maxima, before anything is lost. It falls where a whole tile of the row stays below 2^-1:
// a row with one heavy key has many light ones, which together may weigh as much, and which would
// all become 0. When a reference is set, the row's maximum in this tile becomes 2^kLowest to 2^8
// (code_of_maximum).
//
// The sums are columns of out (row_sum_columns.cuh): of what P was rounded to, as out is.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "attention/score_scale.cuh"
#include "attention/softmax_state.cuh"
#include "ptx/convert_fp8.cuh"
#include "ptx/element.h"
#include "tile/gemm.cuh"
#include "tile/row_sum_columns.cuh"

namespace flashattn3 {

// kN: keys of a tile. kRowsMayBeEmpty: a row may see no key of the first tile. kLowest: log2 of a
// row's largest probability when its reference is set, at least. kInteger: codes are the bits of
// denormals (score_accumulator.cuh); so they and the references are whole.
template <int kN, bool kRowsMayBeEmpty, int kLowest, bool kInteger>
struct SoftmaxE4m3 : SoftmaxState<kN, kRowsMayBeEmpty> {
  using Base = SoftmaxState<kN, kRowsMayBeEmpty>;
  using Base::kCount, Base::row_max, Base::sum, Base::unseen;
  // Codes are so much less than 8 (x + 7) that they mean 2^x in the mean over an octave.
  static constexpr float kBelow = 0.46f;
  static constexpr float kUnit = kInteger ? kDenormalUnit : 1.f;
  // A maximum whose reference is set lies this far below a whole octave, where its code has no
  // error. Whole codes are right in the mean at 1.75 times a power of two, two codes below the
  // next.
  static constexpr float kTopBelow = kInteger ? 2.f : kBelow;
  static constexpr float kLowestCode = kCodesPerOctave * (kLowest + 7) * kUnit;
  static constexpr float kHighestCode = kCodesPerOctave * (8 + 7) * kUnit;
  static constexpr float kOfScore0 = 2 * kCodesPerOctave * kUnit;  // 2^-5
  // Sums with it are whole octaves.
  static constexpr float kWholeOctaves = 1.5f * 0x1p23f * kCodesPerOctave * kUnit;
  // A row of a tile whose maximum is below 2^-1 is light: its reference falls, if it matters.
  static constexpr float kLight = kCodesPerOctave * (-1 + 7) * kUnit;
  // 126 is 448, 127 NaN.
  static constexpr float kRescaleThreshold = (kInteger ? 127.f : 126.4f) * kUnit;

  // Of whole codes: by how many octaves the probabilities of the last tile are too large in each of
  // this thread's rows, as those of the one key that outweighs all others in them are; two fp16.
  // Out and the sums are made as much too large, and put right when the next tile has scores.
  uint32_t excess;

  __device__ __forceinline__ void reset() {
    Base::reset();
    excess = 0;
  }

  // Returns whether a row of this thread has only light keys in this tile. highest:
  // subtract_row_max's, which is the row's maximum where this is false.
  __device__ __forceinline__ bool is_light(const int (&highest)[2]) const {
    return min(highest[0], highest[1]) < __float_as_int(kLight);
  }

  // Returns whether a reference of a row of this thread may have to move: a maximum reaches the
  // limit or is NaN, or is light, or the row may see its first key. Less kLight, as unsigned
  // numbers, light maxima compare above all others.
  __device__ __forceinline__ bool may_rescale(const int (&highest)[2]) const {
    const unsigned light = __float_as_uint(kLight);
    const bool moves =
        max(highest[0] - light, highest[1] - light) >= __float_as_uint(kRescaleThreshold) - light;
    return moves || (kRowsMayBeEmpty && unseen != 0) || (kInteger && excess != 0);
  }

  // log2 of the probability from which on a light maximum lowers its row's reference: num_keys keys
  // below it hold less than 1/64 of the row's sum, so that nothing is lost with them. All lanes of
  // the warp must call it.
  __device__ __forceinline__ void find_least(float (&least)[2], int num_keys) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      // The sum may lack the tile before, whose product is under way.
      const float total = fmaxf(row_sum(r), static_cast<float>(1 << kLowest));
      least[r] = __log2f(__fdividef(total, static_cast<float>(num_keys))) - 6.f;
    }
  }

  // The largest code of each row of this thread, whatever the codes are.
  template <class S>
  static __device__ __forceinline__ void find_highest(float (&highest)[2], const S (&s)[kCount]) {
    highest[0] = highest[1] = -INFINITY;
#pragma unroll
    for (int i = 0; i < kCount; ++i) highest[row_of(i)] = max_or_nan(highest[row_of(i)], get(s[i]));
  }

  // What moving the references of a warp did.
  struct Moved {
    bool fell;           // a reference of the warp
    uint32_t dominated;  // of whole codes: rows of this thread in which one key of this tile
                         // outweighs all others so far, a bit for each
  };

  // Moves the references of rows that grew too far or see their first key, and of those whose
  // maximum is light but at least `least`. s: codes over the old references, on return over the new
  // ones. highest: of each row of this thread; on return the code of the whole row's maximum.
  // factor: what out has to be multiplied with; the sums here are. All lanes of the warp must call
  // it.
  template <class S>
  __device__ __forceinline__ Moved rescale(S (&s)[kCount], float (&highest)[2],
                                           const float (&least)[2], float (&factor)[2]) {
    Moved moved{};
    float rises_by[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float top = max_or_nan(highest[r], __shfl_xor_sync(~0u, highest[r], 1));
      top = max_or_nan(top, __shfl_xor_sync(~0u, top, 2));
      const bool first = unseen >> r & 1;
      const bool rises = first ? top != -INFINITY : !(top < kRescaleThreshold);
      const bool falls = !first && top < kLight && octaves(top) - 7.f >= least[r];
      const float rise = rises || falls ? top - code_of_maximum(top + row_max[r]) : 0.f;
      factor[r] = first ? 1.f : exp2_approx(-octaves(rise) - excess_of(r));
      sum[r] = top < INFINITY ? sum[r] * factor[r] : NAN;
      if (rises) unseen &= ~(1u << r);
      row_max[r] += rise;
      if constexpr (kInteger) {
        const bool alone = outweighs(highest[r], top, top - rise, r);
        if (alone && (rises || falls) && top < INFINITY) moved.dominated |= 1u << r;
      }
      highest[r] = top - rise;
      rises_by[r] = rise;
      moved.fell = moved.fell || falls;
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) set(s[i], get(s[i]) - rises_by[row_of(i)]);
    if constexpr (kInteger) excess = 0;
    moved.fell = __any_sync(~0u, moved.fell);
    return moved;
  }

  // The column of a key of row r with this code, -1 if none of this thread's has it.
  template <class S>
  static __device__ __forceinline__ int column_of(const S (&s)[kCount], int r, float code) {
    int column = -1;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (row_of(i) == r && get(s[i]) == code) column = i / 4 * 8 + i % 2;
    }
    return column < 0 ? -1 : column + threadIdx.x % 4 * 2;
  }

  // By how many octaves the whole code of a score of row r is above the score's exponent. number:
  // the score, an integer; key: of the tile.
  template <class Scale>
  __device__ __forceinline__ float octaves_above(float code, float number, const Scale& scale,
                                                 int key, int r) const {
    const float shift = scale.shift_of(key) - from_denormal(row_max[r]);
    return octaves(code) - fmaf(number, scale.factor_of(key), shift) / kCodesPerOctave;
  }

  // Sets `excess`; the sums here and factor, which out is multiplied with, follow it.
  __device__ __forceinline__ void set_excess(float first, float second, float (&factor)[2]) {
    const __half2 both = __floats2half2_rn(first, second);
    excess = reinterpret_cast<const uint32_t&>(both);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float larger = exp2_approx(excess_of(r));
      factor[r] *= larger;
      sum[r] *= larger;
    }
  }

  // Codes as operands, for V's slots (permuted_v.h).
  template <class S>
  static __device__ __forceinline__ void pack(Probabilities<ElementType::kE4m3, kN>& p,
                                              const S (&s)[kCount]) {
#pragma unroll
    for (int i = 0; i < kN / 8; ++i) {
      const int at = i / 2 * 8 + i % 2 * 2;  // register i % 4 / 2: keys 16 on; i % 2: rows 8 below
      p[i / 4][i % 4] = to_uint8(s[at], s[at + 1], s[at + 4], s[at + 5]);
    }
  }

  // Does what some of a tile's groups, if any, need besides: adds those whose sum cannot be had of
  // their codes, and gives the sign to the codes of those whose V descale has the other sign.
  template <class S, class Scale>
  __device__ __forceinline__ void complete_groups(S (&s)[kCount], const Scale& scale) {
    if (!scale.is_special()) return;
#pragma unroll
    for (int g = 0; g < Scale::kNumGroups; ++g) {
      if (scale.is_negative(g)) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
          if (Scale::group(i) == g) set(s[i], negative(get(s[i])));
        }
      }
      if (!scale.sums_apart(g)) continue;
      const float below =
          (kBelow - scale.codes_of_shift(g)) / kCodesPerOctave - 7.f + log2_of_one();
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        if (Scale::group(i) == g) sum[row_of(i)] += exp2_approx(octaves(get(s[i])) + below);
      }
    }
  }

  // As the base's, of sums that take_row_sums added up.
  __device__ __forceinline__ float row_sum(int r) const {
    return quad_sum(sum[r] * exp2_approx(-log2_of_one())) * kRowSumCorrection;
  }

  // In log2 units: out and the sums are of 2^(score - this).
  __device__ __forceinline__ float row_max_log2(int r) const {
    return octaves(row_max[r]) + (7.f - kBelow / kCodesPerOctave) - excess_of(r);
  }

 private:
  // Whether row r's maximum is six octaves above what the other lanes have of this tile, or above a
  // score of 0 where they have nothing, and at least 1/16 of the row's sum so far. highest: of this
  // lane; top: of the row; both on the old reference, as which code is on the new one, like the
  // sums. All lanes of the warp must call it.
  __device__ __forceinline__ bool outweighs(float highest, float top, float code, int r) const {
    constexpr float kFar = 6 * kCodesPerOctave * kUnit;
    const int quad = threadIdx.x % 32 & ~3;
    const float of_score0 = top - code - row_max[r];
    const float own = highest == -INFINITY ? of_score0 : highest;
    // The first lane of a quad has almost all of the row's sum (row_sum_columns.cuh).
    const float weight = exp2_approx(octaves(code) - 7.f + kLog2KeyWeight);
    const uint32_t near = __ballot_sync(~0u, own >= top - kFar) >> quad & 15u;
    const uint32_t light = __ballot_sync(~0u, sum[r] <= 16.f * weight) >> quad & 1u;
    return light != 0 && (near & (near - 1)) == 0;
  }

  __device__ __forceinline__ float excess_of(int r) const {
    if constexpr (!kInteger) return 0.f;
    return __half2float(__ushort_as_half(static_cast<unsigned short>(excess >> 16 * r)));
  }

  // Returns the code that a row's maximum gets: a whole octave, so that the code is right. A
  // maximum far above a score of 0, near which most keys of a row lie, gets a high code, so that
  // those keys do not vanish; any other gets a low one, so that it may grow.
  static __device__ __forceinline__ float code_of_maximum(float code_over_score0) {
    const float wanted =
        __fsub_rn(__fadd_rn(code_over_score0 + kOfScore0, kWholeOctaves), kWholeOctaves);
    return fminf(fmaxf(wanted, kLowestCode), kHighestCode) - kTopBelow * kUnit;
  }

  // The code of the probability with the other sign, which is a bit more for the conversion to
  // bytes.
  static __device__ __forceinline__ float negative(float code) {
    return fminf(fmaxf(code, 0.f), 126.f * kUnit) + 128.f * kUnit;
  }

  // Of a difference of codes.
  static __device__ __forceinline__ float octaves(float codes) {
    return (kInteger ? from_denormal(codes) : codes) / kCodesPerOctave;
  }
};

}  // namespace flashattn3
