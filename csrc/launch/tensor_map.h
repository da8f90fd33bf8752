// TMA descriptors of (batch, seq, head, head_dim) tensors, without linking libcuda.
#pragma once

#include <cuda.h>
#include <cudaTypedefs.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "forward/config.h"
#include "launch/errors.h"
#include "launch/params.h"
#include "tile/permuted_v.h"

namespace flashattn3 {

// The driver's encoder, looked up once.
inline PFN_cuTensorMapEncodeTiled_v12000 tensor_map_encoder() {
  static const PFN_cuTensorMapEncodeTiled_v12000 encoder = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found;
#if CUDART_VERSION >= 12050
    const cudaError_t status = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function,
                                                                12000, cudaEnableDefault, &found);
#else
    const cudaError_t status =
        cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &function, cudaEnableDefault, &found);
#endif
    check_cuda(status, "looking up cuTensorMapEncodeTiled");
    if (found != cudaDriverEntryPointSuccess || function == nullptr) {
      fail("looking up cuTensorMapEncodeTiled", "the driver does not have it");
    }
    return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(function);
  }();
  return encoder;
}

// Returns the status of encode(), which calls the encoder. The driver refuses a thread without a
// context. A call of the runtime binds one, but the threads of torch's autograd may make none
// before a gradient, if the memory that it needs is cached.
template <class Encode>
CUresult in_context_of_device(const Encode& encode) {
  const CUresult status = encode();
  if (status != CUDA_ERROR_INVALID_CONTEXT) return status;
  int device = 0;
  check_cuda(cudaGetDevice(&device), "looking up the current device");
  check_cuda(cudaSetDevice(device), "binding the context of the current device");
  return encode();
}

struct TensorMapShape {
  int64_t head_dim, seq, heads, batch;
};

// Everything that determines a descriptor. Dimensions are innermost first; the last ones may have
// extent 1. bytes: byte strides, without that of the innermost dimension, whose elements are
// contiguous.
struct TensorMapKey {
  const void* address;
  ElementType type;
  CUtensorMapSwizzle swizzle;
  cuuint32_t rank;
  cuuint32_t box[5];
  cuuint64_t extent[5];
  cuuint64_t bytes[4];
  bool operator==(const TensorMapKey&) const = default;
};

inline CUtensorMap encode_tensor_map(const char* name, const TensorMapKey& key) {
  const int element = element_bytes(key.type);
  const cuuint32_t element_strides[5] = {1, 1, 1, 1, 1};
  CUtensorMap map;
  const CUtensorMapDataType type =
      key.type == ElementType::kBFloat16  ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
      : key.type == ElementType::kFloat16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                          : CU_TENSOR_MAP_DATA_TYPE_UINT8;
  const CUresult status = in_context_of_device([&] {
    return tensor_map_encoder()(&map, type, key.rank, const_cast<void*>(key.address), key.extent,
                                key.bytes, key.box, element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE,
                                key.swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  });
  if (status != CUDA_SUCCESS) {
    std::string what = std::string("TMA descriptor of ") + name + " (";
    const int rank = static_cast<int>(key.rank);
    for (int i = 0; i < rank; ++i) what += (i ? " x " : "") + std::to_string(key.extent[i]);
    what += ", bytes between neighbours " + std::to_string(element);
    for (int i = 0; i + 1 < rank; ++i) what += ", " + std::to_string(key.bytes[i]);
    check_driver(status, (what + ")").c_str());
  }
  return map;
}

// Caches up to 64 descriptors per thread, because a caching allocator returns the same addresses
// again and again.
inline CUtensorMap known_tensor_map(const char* name, const TensorMapKey& key) {
  struct Known {
    TensorMapKey key{};
    CUtensorMap map;
  };
  constexpr int kKnown = 64;
  static thread_local Known known[kKnown];
  const uintptr_t mixed = reinterpret_cast<uintptr_t>(key.address) * 0x9e3779b97f4a7c15u;
  Known& cached = known[(mixed >> 48) % kKnown];
  if (cached.key != key) {
    cached.map = encode_tensor_map(name, key);
    cached.key = key;
  }
  return cached.map;
}

// Dimensions: (head_dim, seq, heads, batch), innermost first. Box: 128 bytes x box_rows tokens in
// the 128-byte swizzle. Elements out of bounds read as 0 and are not written. unused: any valid
// device address; stands in for an empty tensor's and is not read.
inline CUtensorMap make_tensor_map(const char* name, ElementType type, const void* address,
                                   const void* unused, const TensorMapShape& shape,
                                   const Strides& strides, int box_rows) {
  const bool empty = shape.seq == 0 || address == nullptr;
  TensorMapKey key{
      .address = empty ? unused : address,
      .type = type,
      .swizzle = CU_TENSOR_MAP_SWIZZLE_128B,
      .rank = 4,
      .box = {static_cast<cuuint32_t>(128 / element_bytes(type)), static_cast<cuuint32_t>(box_rows),
              1, 1},
      .extent = {static_cast<cuuint64_t>(shape.head_dim),
                 static_cast<cuuint64_t>(empty ? 1 : shape.seq),
                 static_cast<cuuint64_t>(shape.heads), static_cast<cuuint64_t>(shape.batch)},
      .bytes = {}};
  const int64_t elements[3] = {strides.seq, strides.head, strides.batch};
  for (int i = 0; i < 3; ++i) {
    // The stride of a dimension of size 1 is not used and may have any value.
    key.bytes[i] = key.extent[i + 1] == 1 || empty
                       ? 16
                       : static_cast<cuuint64_t>(elements[i]) * element_bytes(type);
  }
  return known_tensor_map(name, key);
}

// 16-bit rows of whole atoms (64 columns), in groups of 8. Dimensions: (columns of an atom, 8 rows,
// atoms, groups, heads), innermost first; strides in elements. Box: box_atoms atoms of box_groups
// groups, which follow each other.
struct GroupedRows {
  int64_t atoms, groups, heads, row_stride, head_stride;
};
inline CUtensorMap make_grouped_map(const char* name, ElementType type, const void* address,
                                    const GroupedRows& rows, int box_atoms, int box_groups) {
  const auto bytes = [](int64_t elements) { return static_cast<cuuint64_t>(elements * 2); };
  return known_tensor_map(
      name,
      {.address = address,
       .type = type,
       .swizzle = CU_TENSOR_MAP_SWIZZLE_128B,
       .rank = 5,
       .box = {64, 8, static_cast<cuuint32_t>(box_atoms), static_cast<cuuint32_t>(box_groups), 1},
       .extent = {64, 8, static_cast<cuuint64_t>(rows.atoms), static_cast<cuuint64_t>(rows.groups),
                  static_cast<cuuint64_t>(rows.heads)},
       .bytes = {bytes(rows.row_stride), bytes(64), bytes(8 * rows.row_stride),
                 rows.heads == 1 ? 16 : bytes(rows.head_stride)}});
}

// Permuted V: dense (heads, num_permuted_keys / 16, columns, 16) bytes. Dimensions: (8 columns x 16
// keys, num_permuted_keys / 16, columns / 8, heads), innermost first. Box: box_keys keys x all
// columns, in the tile layout of permuted_v.h. unused: as above.
inline CUtensorMap make_permuted_v_map(const void* address, const void* unused,
                                       int64_t num_permuted_keys, int64_t heads, int columns,
                                       int box_keys) {
  const bool empty = num_permuted_keys == 0 || address == nullptr;
  const cuuint64_t vecs = empty ? 1 : num_permuted_keys / kCoreRowKeys;
  const cuuint64_t bytes_of_vec = static_cast<cuuint64_t>(columns) * kCoreRowKeys;
  const cuuint32_t groups = columns / kCoreColumns;
  return known_tensor_map(
      "v", {.address = empty ? unused : address,
            .type = ElementType::kE4m3,
            .swizzle = CU_TENSOR_MAP_SWIZZLE_NONE,
            .rank = 4,
            .box = {kCoreBytes, static_cast<cuuint32_t>(box_keys / kCoreRowKeys), groups, 1},
            .extent = {kCoreBytes, vecs, groups, static_cast<cuuint64_t>(heads)},
            .bytes = {bytes_of_vec, kCoreBytes, vecs * bytes_of_vec}});
}

// A dense matrix of floats. Dimensions: (columns, rows), innermost first. Box: box_columns x 1, no
// swizzle. It is not cached, because the address is new in every call.
inline CUtensorMap make_float_map(const char* name, const float* address, int64_t columns,
                                  int64_t rows, int box_columns) {
  const cuuint64_t extent[2] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows)};
  const cuuint64_t bytes[1] = {static_cast<cuuint64_t>(columns) * sizeof(float)};
  const cuuint32_t box[2] = {static_cast<cuuint32_t>(box_columns), 1};
  const cuuint32_t element_strides[2] = {1, 1};
  CUtensorMap map;
  const CUresult status = in_context_of_device([&] {
    return tensor_map_encoder()(&map, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 2,
                                const_cast<float*>(address), extent, bytes, box, element_strides,
                                CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_NONE,
                                CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  });
  if (status != CUDA_SUCCESS) {
    const std::string size = std::to_string(columns) + " x " + std::to_string(rows) + " floats";
    check_driver(status, (std::string("TMA descriptor of ") + name + " (" + size + ")").c_str());
  }
  return map;
}

}  // namespace flashattn3
