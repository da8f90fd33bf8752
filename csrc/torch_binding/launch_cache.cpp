// flashattn3_hopper::keep_passes, and what it keeps.
#include "torch_binding/launch_cache.h"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <tuple>
#include <unordered_map>

#include "launch/errors.h"
#include "torch_binding/boxed.h"
#include "torch_binding/prepared.h"

namespace flashattn3 {
namespace {

constexpr int kAxes = 4;
// The options, the GPU, the dtype, the number of edges (-1: no varlen), the sizes of q, k and v.
using Key = std::array<int64_t, 4 + 3 * kAxes>;

// A sum of products, which the processor computes side by side.
struct Hash {
  size_t operator()(const Key& key) const {
    uint64_t hash = 0, factor = 1;
    for (const int64_t word : key) {
      factor *= 0x9e3779b97f4a7c15;  // 2^64 / golden ratio, odd
      hash += static_cast<uint64_t>(word) * factor;
    }
    return hash ^ hash >> 32;
  }
};

bool are_edges(const Tensor& edges, int64_t device) {
  return edges.dim() == 1 && edges.is_contiguous() && dtype_of(edges) == aoti_torch_dtype_int32() &&
         edges.get_device_index() == device;
}

// None for tensors that are in no plan together.
std::optional<Key> key_of(int64_t options, const GivenTensors& tensors) {
  const auto& [q, k, v, edges_q, edges_k] = tensors;
  const int64_t device = q.get_device_index();
  const int32_t dtype = dtype_of(q);
  Key key{options, device, dtype, -1};
  auto word = key.begin() + 4;
  for (const Tensor* tensor : {&q, &k, &v}) {
    const bool fits = tensor->dim() == kAxes && dtype_of(*tensor) == dtype &&
                      tensor->get_device_index() == device;
    if (!fits) return std::nullopt;
    int64_t* sizes;
    check_torch(aoti_torch_get_sizes(tensor->get(), &sizes), "asking for sizes");
    for (int axis = 0; axis < kAxes; ++axis) *word++ = sizes[axis];
  }
  if (edges_q.has_value() != edges_k.has_value()) return std::nullopt;
  if (edges_q) {
    const bool fit = are_edges(*edges_q, device) && are_edges(*edges_k, device) &&
                     edges_q->size(0) == edges_k->size(0);
    if (!fit) return std::nullopt;
    key[3] = edges_q->size(0);
  }
  return key;
}

// A model with dynamic shapes meets new keys in every step. A full cache is emptied: the calls that
// still come are kept again, from plans that Python has.
class LaunchCache {
 public:
  std::optional<PlannedPasses> find(const Key& key) {
    const std::lock_guard lock(mutex_);
    const auto found = passes_.find(key);
    if (found == passes_.end()) return std::nullopt;
    return found->second;
  }

  void keep(const Key& key, const PlannedPasses& passes) {
    const std::lock_guard lock(mutex_);
    if (passes_.size() >= kMost) passes_.clear();
    passes_.insert_or_assign(key, passes);
  }

 private:
  static constexpr size_t kMost = 4096;  // 2 MB
  std::mutex mutex_;
  std::unordered_map<Key, PlannedPasses, Hash> passes_;
};

LaunchCache& launch_cache() {
  static LaunchCache* cache = new LaunchCache;  // threads may outlive static objects
  return *cache;
}

}  // namespace

std::optional<PlannedPasses> find_passes(int64_t options, const GivenTensors& tensors) {
  const std::optional<Key> key = key_of(options, tensors);
  if (!key) return std::nullopt;
  return launch_cache().find(*key);
}

void keep_passes(int64_t options, const GivenTensors& tensors, const PlannedPasses& passes) {
  const std::optional<Key> key = key_of(options, tensors);
  expect(key.has_value(), "keep_passes", "q, k and v", "those of one call", "others");
  launch_cache().keep(*key, passes);
}

namespace {

void keep_passes_of_stack(StableIValue* stack, uint64_t, uint64_t) {
  constexpr char kName[] = "keep_passes";
  using Optional = std::optional<Tensor>;
  Arguments arguments(stack);
  const int64_t options = arguments.take<int64_t>();
  const bool bhsd = arguments.take<bool>();
  const Tensor forward = arguments.take<Tensor>(), backward = arguments.take<Tensor>();
  const Optional packed = arguments.take<Optional>();
  const GivenTensors given{.q = arguments.take<Tensor>(),
                           .k = arguments.take<Tensor>(),
                           .v = arguments.take<Tensor>(),
                           .cu_seqlens_q = arguments.take<Optional>(),
                           .cu_seqlens_k = arguments.take<Optional>()};
  PlannedPasses passes{.forward = prepared_launch(kName, Pass::kForward, forward),
                       .backward = prepared_launch(kName, Pass::kBackward, backward),
                       .bhsd = bhsd};
  if (packed) passes.packed = prepared_decode(kName, *packed);
  keep_passes(options, given, passes);
  return_results(stack, std::tuple<>());
}

}  // namespace

// forward, backward and packed: results of prepare_forward, prepare_backward and prepare_decode.
STABLE_TORCH_LIBRARY_FRAGMENT(flashattn3_hopper, library) {
  library.def(
      "keep_passes(int options, bool bhsd, Tensor forward, Tensor backward, Tensor? packed, "
      "Tensor q, Tensor k, Tensor v, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(flashattn3_hopper, CompositeExplicitAutograd, library) {
  library.impl("keep_passes", keep_passes_of_stack);
}

}  // namespace flashattn3
