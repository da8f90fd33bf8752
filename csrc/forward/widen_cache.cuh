// Writes the keys of a cache of 8 bits that a cached forward kernel reads to a dense cache of 16
// bits: codes times descales in fp32, rounded once. The sequences lie in their order, so the
// kernel that follows needs no table and no descale.
//
// A unit of work is some neighbouring keys of a sequence, all heads of them. CTAs take units in
// turn. The number of units is found on the device, so a captured launch is right at any lengths.
#pragma once

#include <cutlass/fast_math.h>

#include <cstdint>

#include "attention/block_list.cuh"
#include "attention/cached_keys.cuh"
#include "attention/seqlen.cuh"
#include "ptx/convert_16bit.cuh"
#include "ptx/element.h"
#include "ptx/pdl.cuh"
#include "ptx/stream_load.cuh"
#include "ptx/vector_access.cuh"
#include "ptx/widen.cuh"

namespace flashattn3::forward {

constexpr int kWidenThreads = 256;
constexpr int kWidenCtasPerSm = 4;
constexpr int kWidenInFlight = 8;  // vectors of a thread that are loaded at a time
constexpr int kWidenVec = 8;       // columns of a vector

// K or V. Strides in bytes and, of descales, in elements; a stride that does not apply is 0.
struct WidenTensor {
  const uint8_t* from;  // the cache
  int64_t page, slot, head;
  uint16_t* to;          // (batch, capacity, num_heads, head_dim), dense
  const float* descale;  // null: all are 1
  int64_t descale_batch, descale_page, descale_slot, descale_head;
  cutlass::FastDivmod vecs_of_head, vecs_of_token;
  uint32_t lost;  // two elements of a key whose page does not exist
};

struct WidenArguments {
  WidenTensor k, v;
  CachedKeys keys;
  SequenceTable seqlens_q;
  Window window;
  int batch;
  int min_queries;  // sequences with fewer are skipped
  int unit_keys;    // keys of a unit, at most kWidenThreads
  bool is_int8;     // else e4m3
};

// Keys of a sequence that some query sees: first, and one past the last.
struct SeenKeys {
  int begin, end;

  static __device__ __forceinline__ SeenKeys of(const WidenArguments& args, int batch_idx) {
    const int rows = find_sequence(args.seqlens_q, batch_idx).length;
    if (rows == 0 || rows < args.min_queries) return {0, 0};
    const int num_keys = args.keys.num_keys(batch_idx);
    const int padding = args.keys.first_key(batch_idx, num_keys);
    const Mask mask = Mask::of(rows, num_keys, args.window, padding);
    return {min(mask.begin(0), num_keys), num_keys};
  }
};

// Where a key is. page: -1: its page does not exist.
struct KeyPlace {
  int page, slot;
};

// Widens a vector and multiplies it by a descale.
template <ElementType kElement, bool kIsInt8>
__device__ __forceinline__ uint4 dequantize_vector(uint2 bytes, float descale) {
  const auto scaled = [&](uint32_t halves) {
    const float2 x = unpack<ElementType::kFloat16>(halves);
    return pack<kElement>(x.x * descale, x.y * descale);
  };
  const uint2 low = kIsInt8 ? widen_int8(bytes.x) : widen_e4m3(bytes.x);
  const uint2 high = kIsInt8 ? widen_int8(bytes.y) : widen_e4m3(bytes.y);
  return make_uint4(scaled(low.x), scaled(low.y), scaled(high.x), scaled(high.y));
}

// Widens num_keys keys of a sequence. to: of the first of them.
template <ElementType kElement, bool kIsInt8>
__device__ __forceinline__ void widen_keys(const WidenTensor& tensor, const KeyPlace* places,
                                           int num_keys, int batch_idx, uint16_t* to) {
  const StreamPolicy policy;
  const int count = num_keys * tensor.vecs_of_token.divisor;
  for (int first = threadIdx.x; first < count; first += kWidenThreads * kWidenInFlight) {
    uint2 bytes[kWidenInFlight];
    float descale[kWidenInFlight];
    uint32_t lost = 0;  // a bit for each vector
#pragma unroll
    for (int i = 0; i < kWidenInFlight; ++i) {
      const int index = first + i * kWidenThreads;
      if (index >= count) break;
      int key, head, vec, rest;
      tensor.vecs_of_token(key, rest, index);
      tensor.vecs_of_head(head, vec, rest);
      const KeyPlace place = places[key];
      descale[i] = 1.f;
      if (place.page < 0) {
        lost |= 1u << i;
        continue;
      }
      bytes[i] = policy.load_half(tensor.from + place.page * tensor.page +
                                  place.slot * tensor.slot + head * tensor.head + vec * kWidenVec);
      if (tensor.descale != nullptr) {
        descale[i] =
            tensor.descale[batch_idx * tensor.descale_batch + place.page * tensor.descale_page +
                           place.slot * tensor.descale_slot + head * tensor.descale_head];
      }
    }
#pragma unroll
    for (int i = 0; i < kWidenInFlight; ++i) {
      const int64_t index = first + i * kWidenThreads;
      if (index >= count) break;
      const uint4 wide = dequantize_vector<kElement, kIsInt8>(bytes[i], descale[i]);
      const uint4 none = make_uint4(tensor.lost, tensor.lost, tensor.lost, tensor.lost);
      store_vector(to + index * kWidenVec, lost >> i & 1 ? none : wide);
    }
  }
}

// Sets ends[i] to the sum of the counts of the threads 0 to i.
__device__ __forceinline__ void sum_up(int* ends, int count, int num_counts) {
  const int thread = threadIdx.x;
  ends[thread] = count;
  __syncthreads();
  for (int distance = 1; distance < num_counts; distance *= 2) {
    const int before = thread >= distance ? ends[thread - distance] : 0;
    __syncthreads();
    ends[thread] += before;
    __syncthreads();
  }
}

// Returns the first index with ends[index] > unit; below `count` there is one.
__device__ __forceinline__ int find_end(const int* ends, int count, int unit) {
  int low = 0, high = count - 1;
  while (low < high) {
    const int middle = (low + high) / 2;
    if (ends[middle] > unit) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low;
}

// kElement: of the 16-bit cache.
template <ElementType kElement>
__global__ void __launch_bounds__(kWidenThreads, kWidenCtasPerSm)
    widen_cache(const __grid_constant__ WidenArguments args) {
  __shared__ SeenKeys seen[kWidenThreads];
  __shared__ int ends[kWidenThreads];
  __shared__ KeyPlace places[kWidenThreads];
  launch_dependents();
  // A kernel before may still write the cache, or read the memory of the 16-bit one.
  griddepcontrol_wait();
  const int thread = threadIdx.x;
  int unit = blockIdx.x;
  for (int first = 0; first < args.batch; first += kWidenThreads) {
    const int num_sequences = min(args.batch - first, kWidenThreads);
    __syncthreads();  // the last unit has been found
    SeenKeys own{0, 0};
    if (thread < num_sequences) own = SeenKeys::of(args, first + thread);
    seen[thread] = own;
    sum_up(ends, (own.end - own.begin + args.unit_keys - 1) / args.unit_keys, num_sequences);
    const int num_units = ends[num_sequences - 1];
    for (; unit < num_units; unit += gridDim.x) {
      const int index = find_end(ends, num_sequences, unit), batch_idx = first + index;
      const int units_before = index == 0 ? 0 : ends[index - 1];
      const int begin = seen[index].begin + (unit - units_before) * args.unit_keys;
      const int num_keys = min(seen[index].end - begin, args.unit_keys);
      __syncthreads();  // the places of the unit before have been read
      if (thread < num_keys) {
        KeyPlace& place = places[thread];
        args.keys.find(args.keys.cache_idx(batch_idx), begin + thread, place.page, place.slot);
      }
      __syncthreads();
      const int64_t token = int64_t{batch_idx} * args.keys.capacity + begin;
#pragma unroll 1
      for (int i = 0; i < 2; ++i) {
        const WidenTensor& tensor = i == 0 ? args.k : args.v;
        uint16_t* const to = tensor.to + token * tensor.vecs_of_token.divisor * kWidenVec;
        if (args.is_int8) {
          widen_keys<kElement, true>(tensor, places, num_keys, batch_idx, to);
        } else {
          widen_keys<kElement, false>(tensor, places, num_keys, batch_idx, to);
        }
      }
    }
    unit -= num_units;
  }
}

}  // namespace flashattn3::forward
