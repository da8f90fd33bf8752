// flashattn3_hopper::keep_passes, and what it keeps.
#include "torch_binding/launch_cache.h"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>

#include <array>
#include <cstdint>
#include <optional>
#include <tuple>

#include "launch/errors.h"
#include "torch_binding/boxed.h"
#include "torch_binding/launch_record.h"

namespace flashattn3 {
namespace {

constexpr int kAxes = 4;
#define FLASHATTN3_ROWS(name) +kAxes
#define FLASHATTN3_EDGES(name) +1
// The options, the GPU, the dtype, and of each tensor what a plan depends on.
using Key = std::array<int64_t, 3 FLASHATTN3_FOUND_TENSORS(FLASHATTN3_ROWS, FLASHATTN3_EDGES)>;
#undef FLASHATTN3_ROWS
#undef FLASHATTN3_EDGES

// Writes the words of a key. fits: whether all tensors were such as plans have.
class KeyWriter {
 public:
  KeyWriter(Key& key, int64_t options, const Tensor& q)
      : word_(key.begin()), device_(q.get_device_index()), dtype_(dtype_of(q)) {
    for (const int64_t word : {options, device_, int64_t{dtype_}}) *word_++ = word;
  }

  // Sizes: the GPU and the dtype are q's.
  void rows(const Tensor& tensor) {
    fits_ = fits_ && tensor.dim() == kAxes && dtype_of(tensor) == dtype_ &&
            tensor.get_device_index() == device_;
    if (!fits_) return;
    int64_t* sizes;
    check_torch(aoti_torch_get_sizes(tensor.get(), &sizes), "asking for sizes");
    for (int axis = 0; axis < kAxes; ++axis) *word_++ = sizes[axis];
  }

  // Their number; -1: there are none.
  void edges(const std::optional<Tensor>& tensor) {
    if (fits_ && tensor) {
      fits_ = tensor->dim() == 1 && tensor->is_contiguous() &&
              dtype_of(*tensor) == aoti_torch_dtype_int32() &&
              tensor->get_device_index() == device_;
    }
    if (fits_) *word_++ = tensor ? tensor->size(0) : -1;
  }

  bool fits() const { return fits_; }

 private:
  Key::iterator word_;
  int64_t device_;
  int32_t dtype_;
  bool fits_ = true;
};

// None for tensors that are in no plan together.
std::optional<Key> key_of(int64_t options, const GivenTensors& tensors) {
  Key key;
  KeyWriter writer(key, options, tensors.q);
#define FLASHATTN3_ROWS(name) writer.rows(tensors.name);
#define FLASHATTN3_EDGES(name) writer.edges(tensors.name);
  FLASHATTN3_FOUND_TENSORS(FLASHATTN3_ROWS, FLASHATTN3_EDGES)
#undef FLASHATTN3_ROWS
#undef FLASHATTN3_EDGES
  if (!writer.fits()) return std::nullopt;
  return key;
}

LaunchCache<Key, KeptPasses>& launch_cache() {
  static auto* cache = new LaunchCache<Key, KeptPasses>;  // threads may outlive static objects
  return *cache;
}

}  // namespace

GivenTensors GivenTensors::take(Arguments& arguments) {
#define FLASHATTN3_ROWS(name) .name = arguments.take<Tensor>(),
#define FLASHATTN3_EDGES(name) .name = arguments.take<std::optional<Tensor>>(),
  return {FLASHATTN3_FOUND_TENSORS(FLASHATTN3_ROWS, FLASHATTN3_EDGES)};
#undef FLASHATTN3_ROWS
#undef FLASHATTN3_EDGES
}

std::optional<KeptPasses> find_passes(int64_t options, const GivenTensors& tensors) {
  const std::optional<Key> key = key_of(options, tensors);
  if (!key) return std::nullopt;
  return launch_cache().find(*key);
}

void keep_passes(int64_t options, const GivenTensors& tensors, const KeptPasses& passes) {
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
  const GivenTensors given = GivenTensors::take(arguments);
  KeptPasses passes{.forward = attention_launch(kName, Pass::kForward, forward),
                    .backward = attention_launch(kName, Pass::kBackward, backward),
                    .bhsd = bhsd};
  if (packed) passes.packed = cached_launch(kName, *packed);
  keep_passes(options, given, passes);
  return_results(stack, std::tuple<>());
}

}  // namespace

// forward, backward and packed: results of prepare_forward, prepare_backward and prepare_decode.
STABLE_TORCH_LIBRARY_FRAGMENT(flashattn3_hopper, library) {
  library.def(
      "keep_passes(int options, bool bhsd, Tensor forward, Tensor backward, Tensor? "
      "packed, " FLASHATTN3_FOUND_SCHEMA ") -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(flashattn3_hopper, CompositeExplicitAutograd, library) {
  library.impl("keep_passes", keep_passes_of_stack);
}

}  // namespace flashattn3
