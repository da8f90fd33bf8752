// The WGMMA instructions of attention, one struct for each element type and width: 64 rows x kN
// columns, a depth of 32 bytes, fp32 accumulators. CuTe's atoms take every accumulator as a
// separate argument and lack widths such as 80; with the header that has such widths, an otherwise
// empty translation unit compiles in 30 s instead of 6 s (nvcc 13.0).
#pragma once

#include <cstdint>

#include "ptx/element.h"

namespace flashattn3 {

// ss computes d = a * b^T (+ d if accumulate); both operands are in shared memory and K-major (the
// depth is contiguous).
// rs computes d += a * b; a is in registers, b in shared memory: MN-major (the columns are
// contiguous) for 16 bits, K-major for 8 bits, which allow no other order.
// The last two exist for 16 bits alone. ss_mn_b is like rs, but a is in shared memory and K-major.
// ss_mn_ab computes d = a * b (+ d if accumulate); both are in shared memory and MN-major.
// tile/fragment.h has the rows and columns of d[i].
template <ElementType kElement, int kN>
struct Wgmma;

// clang-format off
#define FA3_REGISTERS_0 "%0, %1, %2, %3, %4, %5, %6, %7"
#define FA3_REGISTERS_1 "%8, %9, %10, %11, %12, %13, %14, %15"
#define FA3_REGISTERS_2 "%16, %17, %18, %19, %20, %21, %22, %23"
#define FA3_REGISTERS_3 "%24, %25, %26, %27, %28, %29, %30, %31"
#define FA3_REGISTERS_4 "%32, %33, %34, %35, %36, %37, %38, %39"
#define FA3_REGISTERS_5 "%40, %41, %42, %43, %44, %45, %46, %47"
#define FA3_REGISTERS_6 "%48, %49, %50, %51, %52, %53, %54, %55"
#define FA3_REGISTERS_7 "%56, %57, %58, %59, %60, %61, %62, %63"
#define FA3_REGISTERS_8 "%64, %65, %66, %67, %68, %69, %70, %71"
#define FA3_REGISTERS_9 "%72, %73, %74, %75, %76, %77, %78, %79"
#define FA3_REGISTERS_10 "%80, %81, %82, %83, %84, %85, %86, %87"
#define FA3_REGISTERS_11 "%88, %89, %90, %91, %92, %93, %94, %95"
#define FA3_REGISTERS_12 "%96, %97, %98, %99, %100, %101, %102, %103"
#define FA3_REGISTERS_13 "%104, %105, %106, %107, %108, %109, %110, %111"
#define FA3_REGISTERS_14 "%112, %113, %114, %115, %116, %117, %118, %119"
#define FA3_REGISTERS_15 "%120, %121, %122, %123, %124, %125, %126, %127"
#define FA3_INT_ACC8(i)                                                                            \
  "+r"(d[i]), "+r"(d[i + 1]), "+r"(d[i + 2]), "+r"(d[i + 3]),                                      \
  "+r"(d[i + 4]), "+r"(d[i + 5]), "+r"(d[i + 6]), "+r"(d[i + 7])
#define FA3_ACC4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define FA3_ACC8(i)                                                                                \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]),                                      \
  "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])

// o0 to o4: the numbers of the operands that follow the accumulators. DEPTH: k16 or k32. SCORES,
// VALUES, SHARED and ACROSS: the instruction's arguments for the majorness of a and b in ss, rs,
// ss_mn_b and ss_mn_ab; 8-bit types have none.
#define FA3_WGMMA(ELEMENT, NAME, DEPTH, SCORES, VALUES, SHARED, ACROSS, N, REGISTERS, o0, o1, o2, o3, \
                  o4, ...)                                                                         \
  template <>                                                                                      \
  struct Wgmma<ELEMENT, N> {                                                                       \
    static __device__ __forceinline__ void ss(float (&d)[N / 2], uint64_t a, uint64_t b,       \
                                                  bool accumulate) {                               \
      asm volatile(                                                                                \
          "{\n.reg .pred p;\nsetp.ne.b32 p, %" #o2 ", 0;\n"                                        \
          "wgmma.mma_async.sync.aligned.m64n" #N DEPTH ".f32." NAME "." NAME " {" REGISTERS "}, %"    \
          #o0 ", %" #o1 ", p, 1, 1" SCORES ";\n}"                                                  \
          : __VA_ARGS__                                                                            \
          : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)));                                    \
    }                                                                                              \
    static __device__ __forceinline__ void ss_mn_b(float (&d)[N / 2], uint64_t a,            \
                                                         uint64_t b) {                             \
      asm volatile(                                                                                \
          "wgmma.mma_async.sync.aligned.m64n" #N DEPTH ".f32." NAME "." NAME " {" REGISTERS "}, %"    \
          #o0 ", %" #o1 ", 1, 1, 1" SHARED ";"                                                     \
          : __VA_ARGS__                                                                            \
          : "l"(a), "l"(b));                                                                       \
    }                                                                                              \
    static __device__ __forceinline__ void ss_mn_ab(float (&d)[N / 2], uint64_t a, uint64_t b,       \
                                                  bool accumulate) {                               \
      asm volatile(                                                                                \
          "{\n.reg .pred p;\nsetp.ne.b32 p, %" #o2 ", 0;\n"                                        \
          "wgmma.mma_async.sync.aligned.m64n" #N DEPTH ".f32." NAME "." NAME " {" REGISTERS "}, %"    \
          #o0 ", %" #o1 ", p, 1, 1" ACROSS ";\n}"                                                  \
          : __VA_ARGS__                                                                            \
          : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)));                                    \
    }                                                                                              \
    static __device__ __forceinline__ void rs(float (&d)[N / 2], const uint32_t (&a)[4],       \
                                                  uint64_t b) {                                    \
      asm volatile(                                                                                \
          "wgmma.mma_async.sync.aligned.m64n" #N DEPTH ".f32." NAME "." NAME " {" REGISTERS "}, {%"   \
          #o0 ", %" #o1 ", %" #o2 ", %" #o3 "}, %" #o4 ", 1, 1, 1" VALUES ";"                      \
          : __VA_ARGS__                                                                            \
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                   \
    }                                                                                              \
  };
// int8 has only ss, for signed and for unsigned elements; d holds 32-bit integers.
#define FA3_INT_SS(NAME, TYPES, N, REGISTERS, o0, o1, o2, ...)                                    \
  static __device__ __forceinline__ void NAME(uint32_t (&d)[N / 2], uint64_t a, uint64_t b,        \
                                              bool accumulate) {                                   \
    asm volatile(                                                                                  \
        "{\n.reg .pred p;\nsetp.ne.b32 p, %" #o2 ", 0;\n"                                          \
        "wgmma.mma_async.sync.aligned.m64n" #N "k32.s32." TYPES " {" REGISTERS "}, %" #o0 ", %" #o1   \
        ", p;\n}"                                                                                  \
        : __VA_ARGS__                                                                              \
        : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)));                                      \
  }
#define FA3_WGMMA_INT8(N, ...)                                                                     \
  template <>                                                                                      \
  struct Wgmma<ElementType::kInt8, N> {                                                            \
    FA3_INT_SS(ss, "s8.s8", N, __VA_ARGS__)                                                \
    FA3_INT_SS(ss_unsigned, "u8.u8", N, __VA_ARGS__)                                       \
  };
#define FA3_WGMMA_BOTH(...)                                                                        \
  FA3_WGMMA(ElementType::kBFloat16, "bf16", "k16", ", 0, 0", ", 1", ", 0, 1", ", 1, 1",            \
            __VA_ARGS__)                                                                           \
  FA3_WGMMA(ElementType::kFloat16, "f16", "k16", ", 0, 0", ", 1", ", 0, 1", ", 1, 1",              \
            __VA_ARGS__)
#define FA3_WGMMA_E4M3(...)                                                                        \
  FA3_WGMMA(ElementType::kE4m3, "e4m3", "k32", "", "", ", none", ", none", __VA_ARGS__)
#define FA3_WGMMA_ALL(...)                                                                         \
  FA3_WGMMA_BOTH(__VA_ARGS__)                                                                      \
  FA3_WGMMA_E4M3(__VA_ARGS__)

// The widths of O for 8-bit inputs, whose last 8 columns are row sums (tile/row_sum_columns.cuh).
FA3_WGMMA_E4M3(72, FA3_REGISTERS_0 ", " FA3_REGISTERS_1 ", " FA3_REGISTERS_2 ", " FA3_REGISTERS_3
    ", %32, %33, %34, %35", 36, 37, 38, 39, 40, FA3_ACC8(0), FA3_ACC8(8), FA3_ACC8(16),
    FA3_ACC8(24), FA3_ACC4(32))
FA3_WGMMA_E4M3(136, FA3_REGISTERS_0 ", " FA3_REGISTERS_1 ", " FA3_REGISTERS_2 ", " FA3_REGISTERS_3 ", "
    FA3_REGISTERS_4 ", " FA3_REGISTERS_5 ", " FA3_REGISTERS_6 ", " FA3_REGISTERS_7 ", %64, %65, %66, %67", 68,
    69, 70, 71, 72, FA3_ACC8(0), FA3_ACC8(8), FA3_ACC8(16), FA3_ACC8(24), FA3_ACC8(32),
    FA3_ACC8(40), FA3_ACC8(48), FA3_ACC8(56), FA3_ACC4(64))
FA3_WGMMA_INT8(96, FA3_REGISTERS_0 ", " FA3_REGISTERS_1 ", " FA3_REGISTERS_2 ", " FA3_REGISTERS_3 ", "
    FA3_REGISTERS_4 ", " FA3_REGISTERS_5, 48, 49, 50, FA3_INT_ACC8(0), FA3_INT_ACC8(8), FA3_INT_ACC8(16),
    FA3_INT_ACC8(24), FA3_INT_ACC8(32), FA3_INT_ACC8(40))
FA3_WGMMA_INT8(128, FA3_REGISTERS_0 ", " FA3_REGISTERS_1 ", " FA3_REGISTERS_2 ", " FA3_REGISTERS_3 ", "
    FA3_REGISTERS_4 ", " FA3_REGISTERS_5 ", " FA3_REGISTERS_6 ", " FA3_REGISTERS_7, 64, 65, 66, FA3_INT_ACC8(0),
    FA3_INT_ACC8(8), FA3_INT_ACC8(16), FA3_INT_ACC8(24), FA3_INT_ACC8(32), FA3_INT_ACC8(40),
    FA3_INT_ACC8(48), FA3_INT_ACC8(56))
FA3_WGMMA_BOTH(32, FA3_REGISTERS_0 ", " FA3_REGISTERS_1, 16, 17, 18, 19, 20, FA3_ACC8(0), FA3_ACC8(8))
FA3_WGMMA_BOTH(48, FA3_REGISTERS_0 ", " FA3_REGISTERS_1 ", " FA3_REGISTERS_2, 24, 25, 26, 27, 28,
    FA3_ACC8(0), FA3_ACC8(8), FA3_ACC8(16))
FA3_WGMMA_BOTH(64, FA3_REGISTERS_0 ", " FA3_REGISTERS_1 ", " FA3_REGISTERS_2 ", " FA3_REGISTERS_3, 32, 33, 34,
    35, 36, FA3_ACC8(0), FA3_ACC8(8), FA3_ACC8(16), FA3_ACC8(24))
FA3_WGMMA_BOTH(80, FA3_REGISTERS_0 ", " FA3_REGISTERS_1 ", " FA3_REGISTERS_2 ", " FA3_REGISTERS_3 ", "
    FA3_REGISTERS_4, 40, 41, 42, 43, 44, FA3_ACC8(0), FA3_ACC8(8), FA3_ACC8(16), FA3_ACC8(24),
    FA3_ACC8(32))
FA3_WGMMA_ALL(96, FA3_REGISTERS_0 ", " FA3_REGISTERS_1 ", " FA3_REGISTERS_2 ", " FA3_REGISTERS_3 ", "
    FA3_REGISTERS_4 ", " FA3_REGISTERS_5, 48, 49, 50, 51, 52, FA3_ACC8(0), FA3_ACC8(8), FA3_ACC8(16),
    FA3_ACC8(24), FA3_ACC8(32), FA3_ACC8(40))
FA3_WGMMA_BOTH(112, FA3_REGISTERS_0 ", " FA3_REGISTERS_1 ", " FA3_REGISTERS_2 ", " FA3_REGISTERS_3 ", "
    FA3_REGISTERS_4 ", " FA3_REGISTERS_5 ", " FA3_REGISTERS_6, 56, 57, 58, 59, 60, FA3_ACC8(0),
    FA3_ACC8(8), FA3_ACC8(16), FA3_ACC8(24), FA3_ACC8(32), FA3_ACC8(40), FA3_ACC8(48))
FA3_WGMMA_ALL(128, FA3_REGISTERS_0 ", " FA3_REGISTERS_1 ", " FA3_REGISTERS_2 ", " FA3_REGISTERS_3 ", "
    FA3_REGISTERS_4 ", " FA3_REGISTERS_5 ", " FA3_REGISTERS_6 ", " FA3_REGISTERS_7, 64, 65, 66, 67, 68,
    FA3_ACC8(0), FA3_ACC8(8), FA3_ACC8(16), FA3_ACC8(24), FA3_ACC8(32), FA3_ACC8(40),
    FA3_ACC8(48), FA3_ACC8(56))
FA3_WGMMA_BOTH(160, FA3_REGISTERS_0 ", " FA3_REGISTERS_1 ", " FA3_REGISTERS_2 ", " FA3_REGISTERS_3 ", "
    FA3_REGISTERS_4 ", " FA3_REGISTERS_5 ", " FA3_REGISTERS_6 ", " FA3_REGISTERS_7 ", " FA3_REGISTERS_8 ", "
    FA3_REGISTERS_9, 80, 81, 82, 83, 84, FA3_ACC8(0), FA3_ACC8(8), FA3_ACC8(16), FA3_ACC8(24),
    FA3_ACC8(32), FA3_ACC8(40), FA3_ACC8(48), FA3_ACC8(56), FA3_ACC8(64), FA3_ACC8(72))
FA3_WGMMA_BOTH(176, FA3_REGISTERS_0 ", " FA3_REGISTERS_1 ", " FA3_REGISTERS_2 ", " FA3_REGISTERS_3 ", "
    FA3_REGISTERS_4 ", " FA3_REGISTERS_5 ", " FA3_REGISTERS_6 ", " FA3_REGISTERS_7 ", " FA3_REGISTERS_8 ", "
    FA3_REGISTERS_9 ", " FA3_REGISTERS_10, 88, 89, 90, 91, 92, FA3_ACC8(0), FA3_ACC8(8), FA3_ACC8(16),
    FA3_ACC8(24), FA3_ACC8(32), FA3_ACC8(40), FA3_ACC8(48), FA3_ACC8(56), FA3_ACC8(64),
    FA3_ACC8(72), FA3_ACC8(80))
FA3_WGMMA_ALL(192, FA3_REGISTERS_0 ", " FA3_REGISTERS_1 ", " FA3_REGISTERS_2 ", " FA3_REGISTERS_3 ", "
    FA3_REGISTERS_4 ", " FA3_REGISTERS_5 ", " FA3_REGISTERS_6 ", " FA3_REGISTERS_7 ", " FA3_REGISTERS_8 ", "
    FA3_REGISTERS_9 ", " FA3_REGISTERS_10 ", " FA3_REGISTERS_11, 96, 97, 98, 99, 100, FA3_ACC8(0),
    FA3_ACC8(8), FA3_ACC8(16), FA3_ACC8(24), FA3_ACC8(32), FA3_ACC8(40), FA3_ACC8(48),
    FA3_ACC8(56), FA3_ACC8(64), FA3_ACC8(72), FA3_ACC8(80), FA3_ACC8(88))
FA3_WGMMA_BOTH(256, FA3_REGISTERS_0 ", " FA3_REGISTERS_1 ", " FA3_REGISTERS_2 ", " FA3_REGISTERS_3 ", "
    FA3_REGISTERS_4 ", " FA3_REGISTERS_5 ", " FA3_REGISTERS_6 ", " FA3_REGISTERS_7 ", " FA3_REGISTERS_8 ", "
    FA3_REGISTERS_9 ", " FA3_REGISTERS_10 ", " FA3_REGISTERS_11 ", " FA3_REGISTERS_12 ", " FA3_REGISTERS_13 ", "
    FA3_REGISTERS_14 ", " FA3_REGISTERS_15, 128, 129, 130, 131, 132, FA3_ACC8(0), FA3_ACC8(8),
    FA3_ACC8(16), FA3_ACC8(24), FA3_ACC8(32), FA3_ACC8(40), FA3_ACC8(48), FA3_ACC8(56),
    FA3_ACC8(64), FA3_ACC8(72), FA3_ACC8(80), FA3_ACC8(88), FA3_ACC8(96), FA3_ACC8(104),
    FA3_ACC8(112), FA3_ACC8(120))

#undef FA3_WGMMA_ALL
#undef FA3_WGMMA_E4M3
#undef FA3_WGMMA_BOTH
#undef FA3_WGMMA_INT8
#undef FA3_INT_SS
#undef FA3_WGMMA
#undef FA3_ACC4
#undef FA3_ACC8
#undef FA3_INT_ACC8
#undef FA3_REGISTERS_0
#undef FA3_REGISTERS_1
#undef FA3_REGISTERS_2
#undef FA3_REGISTERS_3
#undef FA3_REGISTERS_4
#undef FA3_REGISTERS_5
#undef FA3_REGISTERS_6
#undef FA3_REGISTERS_7
#undef FA3_REGISTERS_8
#undef FA3_REGISTERS_9
#undef FA3_REGISTERS_10
#undef FA3_REGISTERS_11
#undef FA3_REGISTERS_12
#undef FA3_REGISTERS_13
#undef FA3_REGISTERS_14
#undef FA3_REGISTERS_15
// clang-format on

}  // namespace flashattn3
