// Softmax that computes e4m3 probabilities with a bit-pattern exp2 (Schraudolph 1999).
//
// The code (bits as an integer) of an e4m3 number 2^e (1 + m / 8) is 8 (e + 7) + m, so the code of
// 2^x is nearly 8 (x + 7): exactly at powers of two, up to 0.7 less between them. One FMA turns a
// score into a code, two saturating conversions pack four codes. P has an RMS error of 3.2 %,
// against 2.65 % for rounding the exact exponential, with a quarter fewer instructions and without
// MUFU. (H100, full, 16384 tokens, TFLOP/s: d64 658 to 915, d128 935 to 1238, d256 1351 to 1462.)
//
// The cost is range: probabilities below 2^-7 become 0, those below 2^-6 are too small. So row_max
// moves in both directions. It rises if a probability would pass 448; the tile's maxima show this
// before P is computed. It falls if a whole tile of the row stays below 2^-1: a row with one heavy
// key has many light ones, which would all become 0 but may together weigh as much. When row_max
// is set, the row's largest probability in this tile becomes 2^kLowest to 2^8 (code_of_maximum);
// 2^8 where it is far above the tile's others, which would become 0 otherwise.
//
// The row sums are columns of O (row_sum_columns.cuh) and sum the rounded P, as O does.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "attention/block_scale.cuh"
#include "attention/softmax.cuh"
#include "ptx/approximations.cuh"
#include "ptx/convert_fp8.cuh"
#include "ptx/element.h"
#include "tile/gemm.cuh"
#include "tile/row_sum_columns.cuh"

namespace flashattn3 {

// kN: keys of a tile. kRowsMayBeEmpty: a row may see no key of the first tile. kLowest: lower bound
// of log2 of a row's largest probability when row_max is set. kInteger: codes are the bits of
// denormals (gemm_int8.cuh), so codes and row_max are integers.
template <int kN, bool kRowsMayBeEmpty, int kLowest, bool kInteger>
struct SoftmaxE4m3 : SoftmaxState<kN, kRowsMayBeEmpty> {
  using Base = SoftmaxState<kN, kRowsMayBeEmpty>;
  using Base::kCount, Base::row_max, Base::sum, Base::unseen;
  // Offset of codes below 8 (x + 7) at which they equal 2^x in the mean over an octave.
  static constexpr float kBelow = 0.46f;
  static constexpr float kUnit = kInteger ? kDenormalUnit : 1.f;
  // When row_max is set, the maximum's code lies this far below a whole octave, where it is exact.
  // Integer codes are so at 1.75 times a power of two, two codes below the next power.
  static constexpr float kTopBelow = kInteger ? 2.f : kBelow;
  static constexpr float kLowestCode = (kCodesPerOctave * (kLowest + 7) - kTopBelow) * kUnit;
  static constexpr float kHighestCode = (kCodesPerOctave * (8 + 7) - kTopBelow) * kUnit;
  static constexpr float kOfScore0 = 2 * kCodesPerOctave * kUnit;  // 2^-5
  // Adding it to codes rounds them to whole octaves.
  static constexpr float kWholeOctaves = 1.5f * 0x1p23f * kCodesPerOctave * kUnit;
  // A row whose maximum in the tile is below 2^-1 is light: row_max falls if the tile matters.
  static constexpr float kLight = kCodesPerOctave * (-1 + 7) * kUnit;
  static constexpr float kRescaleThreshold = (kInteger ? 127.f : 126.4f) * kUnit;  // 127: NaN

  // kInteger: octaves by which the last tile's probabilities are too large, for each of this
  // thread's two rows (two fp16): the rounding of the code of a dominant key. O and the sums are
  // scaled to match and corrected in the next step.
  uint32_t excess;

  __device__ __forceinline__ void reset() {
    Base::reset();
    excess = 0;
  }

  // Returns whether a row of this thread has only light keys in this tile. highest: from
  // subtract_row_max; it is the row's maximum if this returns false.
  __device__ __forceinline__ bool is_light(const int (&highest)[2]) const {
    return min(highest[0], highest[1]) < __float_as_int(kLight);
  }

  // Returns whether row_max of a row of this thread may have to move: a maximum reaches the
  // threshold, is NaN or is light, or the row may see its first key. After subtracting kLight as
  // unsigned, light maxima compare above all others.
  __device__ __forceinline__ bool may_rescale(const int (&highest)[2]) const {
    const unsigned light = __float_as_uint(kLight);
    const bool moves =
        max(highest[0] - light, highest[1] - light) >= __float_as_uint(kRescaleThreshold) - light;
    return moves || (kRowsMayBeEmpty && unseen != 0) || (kInteger && excess != 0);
  }

  // least: log2 of the smallest probability at which a light maximum lowers row_max. num_keys keys
  // below it hold less than 1/128 of the row's sum and can be dropped. All lanes of the warp must
  // call it.
  __device__ __forceinline__ void find_least(float (&least)[2], int num_keys) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      // The sum may lack the previous tile, whose PV GEMM is in flight.
      const float total = fmaxf(row_sum(r), static_cast<float>(1 << kLowest));
      least[r] = __log2f(__fdividef(total, static_cast<float>(num_keys))) - 7.f;
    }
  }

  // Result of rescale().
  struct Rescaled {
    bool fell;           // row_max of a row of the warp fell
    uint32_t dominated;  // kInteger: bit r: in row r of this thread one key of this tile outweighs
                         // all others so far
  };

  // Moves row_max of rows that pass the threshold or see their first key, and of rows whose maximum
  // is light but at least `least`. s: codes relative to the old row_max, on return to the new one.
  // highest: of each row of this thread; on return the code of the whole row's maximum. factor: the
  // caller multiplies O with it; the sums are rescaled here. full: every row sees every key of the
  // tile. All lanes of the warp must call it.
  template <class S>
  __device__ __forceinline__ Rescaled rescale(S (&s)[kCount], float (&highest)[2],
                                              const float (&least)[2], float (&factor)[2],
                                              bool full) {
    Rescaled rescaled{};
    float rises_by[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float top = max_or_nan(highest[r], __shfl_xor_sync(~0u, highest[r], 1));
      top = max_or_nan(top, __shfl_xor_sync(~0u, top, 2));
      const bool first = unseen >> r & 1;
      const bool rises = first ? top != -INFINITY : !(top < kRescaleThreshold);
      const bool falls = !first && top < kLight && octaves(top) - 7.f >= least[r];
      // Where keys are masked, a row often sees one far key only because it sees few.
      const bool alone = is_alone(highest[r], top, r, full ? 4 : 6);
      const float code = alone && full ? kHighestCode : code_of_maximum(top + row_max[r]);
      const float rise = rises || falls ? top - code : 0.f;
      factor[r] = first ? 1.f : exp2_approx(-octaves(rise) - excess_of(r));
      sum[r] = top < INFINITY ? sum[r] * factor[r] : NAN;
      if (rises) unseen &= ~(1u << r);
      row_max[r] += rise;
      if constexpr (kInteger) {
        const bool moved = (rises || falls) && top < INFINITY;
        if (outweighs(alone && moved, top - rise, r)) rescaled.dominated |= 1u << r;
      }
      highest[r] = top - rise;
      rises_by[r] = rise;
      rescaled.fell = rescaled.fell || falls;
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) set(s[i], get(s[i]) - rises_by[row_of(i)]);
    if constexpr (kInteger) excess = 0;
    rescaled.fell = __any_sync(~0u, rescaled.fell);
    return rescaled;
  }

  // Returns how many octaves the integer code of a score of row r is above the score's exponent.
  // number: the score, an integer; key: index in the tile.
  template <class Scale>
  __device__ __forceinline__ float octaves_above(float code, float number, const Scale& scale,
                                                 int key, int r) const {
    const float shift = scale.shift_of(key) - from_denormal(row_max[r]);
    return octaves(code) - fmaf(number, scale.factor_of(key), shift) / kCodesPerOctave;
  }

  // Sets `excess` and applies it to the sums and to factor, which O is multiplied with.
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

  // Packs codes as the A operand of the PV GEMM with permuted V (permuted_v.h).
  template <class S>
  static __device__ __forceinline__ void pack(Probabilities<ElementType::kE4m3, kN>& p,
                                              const S (&s)[kCount]) {
#pragma unroll
    for (int i = 0; i < kN / 8; ++i) {
      const int at = register_at(i % 2, i / 2 * kCoreRowKeys), far = register_at(0, 8);
      p[i / 4][i % 4] = to_uint8(s[at], s[at + 1], s[at + far], s[at + far + 1]);
    }
  }

  // Handles the tile's special groups, if any: sums the groups that the extra columns of V cannot
  // sum, and negates the codes of groups whose V descale has the other sign.
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

  // Like Base::row_sum, for sums that take_row_sums accumulated.
  __device__ __forceinline__ float row_sum(int r) const {
    return quad_sum(sum[r] * exp2_approx(-log2_of_one())) * kRowSumCorrection;
  }

  // log2 units: O and the sums hold 2^(score - row_max_log2).
  __device__ __forceinline__ float row_max_log2(int r) const {
    return octaves(row_max[r]) + (7.f - kBelow / kCodesPerOctave) - excess_of(r);
  }

 private:
  // Returns whether row r's maximum is this many octaves above the other lanes' maxima of this
  // tile, or above a score of 0 for lanes without a key. highest: this lane's maximum, top: the
  // row's, both relative to the old row_max, as row_max[r] is. All lanes of the warp must call it.
  __device__ __forceinline__ bool is_alone(float highest, float top, int r, int octaves) const {
    const float own = highest == -INFINITY ? -row_max[r] : highest;
    const uint32_t near = quad_bits(own >= top - octaves * kCodesPerOctave * kUnit);
    return (near & (near - 1)) == 0;
  }

  // Returns whether a maximum that is `alone` is at least 1/16 of row r's sum so far. code: its
  // code, relative to the new row_max, as the sums are. All lanes of the warp must call it.
  __device__ __forceinline__ bool outweighs(bool alone, float code, int r) const {
    // The first lane of a quad holds almost all of the row's sum (row_sum_columns.cuh).
    const float weight = exp2_approx(octaves(code) - 7.f + kLog2KeyWeight);
    return quad_bits(alone && sum[r] <= 16.f * weight) & 1u;
  }

  __device__ __forceinline__ float excess_of(int r) const {
    if constexpr (!kInteger) return 0.f;
    return __half2float(__ushort_as_half(static_cast<unsigned short>(excess >> 16 * r)));
  }

  // Returns the new code of a row's maximum: a whole octave less kTopBelow, where codes are right.
  // A maximum far above a score of 0, near which most keys of a row lie, gets a high code, so that
  // those keys do not become 0; any other gets a low code, which leaves room to grow.
  static __device__ __forceinline__ float code_of_maximum(float code_over_score0) {
    const float wanted =
        __fsub_rn(__fadd_rn(code_over_score0 + kOfScore0, kWholeOctaves), kWholeOctaves);
    return fminf(fmaxf(wanted - kTopBelow * kUnit, kLowestCode), kHighestCode);
  }

  // Returns the code of the negated probability: adds the sign bit, 128, before the conversion.
  static __device__ __forceinline__ float negative(float code) {
    return fminf(fmaxf(code, 0.f), 126.f * kUnit) + 128.f * kUnit;
  }

  // Converts a difference of codes to octaves.
  static __device__ __forceinline__ float octaves(float codes) {
    return (kInteger ? from_denormal(codes) : codes) / kCodesPerOctave;
  }
};

}  // namespace flashattn3
