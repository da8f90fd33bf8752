// flashattn3_hopper::keep_passes, and what it keeps.
#include "torch_binding/launch_cache.h"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <tuple>
#include <utility>

#include "launch/errors.h"
#include "torch_binding/attention_call.h"
#include "torch_binding/boxed.h"
#include "torch_binding/launch_record.h"

namespace flashattn3 {
namespace {

using Optional = std::optional<Tensor>;

constexpr int kAxes = 4;
#define FLASHATTN3_TENSOR(name) +kAxes
#define FLASHATTN3_WORD(name) +1
#define FLASHATTN3_WORDS(name) +2
// The options, the GPU, the dtype, and of each tensor what a plan depends on.
using Key = std::array<int64_t,
                       3 FLASHATTN3_FOUND_PLAN(FLASHATTN3_TENSOR, FLASHATTN3_WORD, FLASHATTN3_WORDS,
                                               FLASHATTN3_WORDS, FLASHATTN3_TENSOR)>;
#undef FLASHATTN3_TENSOR
#undef FLASHATTN3_WORD
#undef FLASHATTN3_WORDS

constexpr int64_t kAbsent = -1;

// Writes the words of a key, one function for each kind of tensor. fits: whether all tensors were
// such as plans have and kernels read.
class KeyWriter {
 public:
  KeyWriter(Key& key, int64_t options, const Tensor& q)
      : word_(key.begin()), device_(q.get_device_index()), dtype_(dtype_of(q)) {
    for (const int64_t word : {options, device_, int64_t{dtype_}}) *word_++ = word;
  }

  // Sizes: the GPU and the dtype are q's.
  void rows(const Tensor& tensor) {
    fits_ = fits_ && tensor.dim() == kAxes && dtype_of(tensor) == dtype_ && is_beside_q(tensor);
    if (!fits_) return;
    int64_t* sizes;
    check_torch(aoti_torch_get_sizes(tensor.get(), &sizes), "asking for sizes");
    for (int axis = 0; axis < kAxes; ++axis) *word_++ = sizes[axis];
  }

  // Their number.
  void edges(const Optional& tensor) {
    if (is_absent(tensor, 1)) return;
    fits_ = tensor->dim() == 1 && tensor->is_contiguous() &&
            dtype_of(*tensor) == aoti_torch_dtype_int32() && is_beside_q(*tensor);
    if (fits_) *word_++ = tensor->size(0);
  }

  // Their number, which finds nothing if it is wrong, and dtype.
  void sinks(const Optional& tensor) {
    if (is_absent(tensor, 2)) return;
    fits_ = tensor->dim() == 1 && tensor->is_contiguous() && is_beside_q(*tensor);
    if (!fits_) return;
    *word_++ = tensor->size(0);
    *word_++ = dtype_of(*tensor);
  }

  // Sizes, of one axis behind one that is absent.
  void slopes(const Optional& tensor) {
    if (is_absent(tensor, 2)) return;
    const int64_t axes = tensor->dim();
    fits_ = (axes == 1 || axes == 2) &&
            (tensor->size(axes - 1) <= 1 || tensor->stride(axes - 1) == 1) &&
            dtype_of(*tensor) == aoti_torch_dtype_float32() && is_beside_q(*tensor);
    if (!fits_) return;
    *word_++ = axes == 2 ? tensor->size(0) : kAbsent;
    *word_++ = tensor->size(axes - 1);
  }

  // Sizes. The gradient of rows of other lengths is a copy.
  void bias(const Optional& tensor) {
    if (is_absent(tensor, kAxes)) return;
    rows(*tensor);
    fits_ = fits_ && tensor->size(kAxes - 1) % 8 == 0 && fits_tma(*tensor);
  }

  bool fits() const { return fits_; }

 private:
  bool is_beside_q(const Tensor& tensor) const { return tensor.get_device_index() == device_; }

  // Returns true, and writes as many words, for a tensor that the call lacks.
  bool is_absent(const Optional& tensor, int words) {
    if (tensor && fits_) return false;
    for (; fits_ && words > 0; --words) *word_++ = kAbsent;
    return true;
  }

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
#define FLASHATTN3_SINKS(name) writer.sinks(tensors.name);
#define FLASHATTN3_SLOPES(name) writer.slopes(tensors.name);
#define FLASHATTN3_BIAS(name) writer.bias(tensors.name);
  FLASHATTN3_FOUND_PLAN(FLASHATTN3_ROWS, FLASHATTN3_EDGES, FLASHATTN3_SINKS, FLASHATTN3_SLOPES,
                        FLASHATTN3_BIAS)
#undef FLASHATTN3_ROWS
#undef FLASHATTN3_EDGES
#undef FLASHATTN3_SINKS
#undef FLASHATTN3_SLOPES
#undef FLASHATTN3_BIAS
  if (!writer.fits()) return std::nullopt;
  return key;
}

LaunchCache<Key, KeptPasses>& launch_cache() {
  static auto* cache = new LaunchCache<Key, KeptPasses>;  // threads may outlive static objects
  return *cache;
}

}  // namespace

GivenTensors GivenTensors::take(Arguments& arguments) {
#define FLASHATTN3_REQUIRED(name) .name = arguments.take<Tensor>(),
#define FLASHATTN3_OPTIONAL(name) .name = arguments.take<Optional>(),
  GivenTensors given{FLASHATTN3_FOUND_TENSORS(FLASHATTN3_REQUIRED, FLASHATTN3_OPTIONAL)};
#undef FLASHATTN3_REQUIRED
#undef FLASHATTN3_OPTIONAL
  if (arguments.has_more()) take_scores(arguments, given);
  return given;
}

CallTensors GivenTensors::with_sides(const Tensor& q, const Tensor& k, const Tensor& v,
                                     bool bhsd) const {
  CallTensors tensors{.q = q,
                      .k = k,
                      .v = v,
                      .cu_seqlens_q = cu_seqlens_q,
                      .cu_seqlens_k = cu_seqlens_k,
                      .bhsd = bhsd};
#define FLASHATTN3_OPTIONAL(name) tensors.name = name;
  FLASHATTN3_SCORE_TENSORS(FLASHATTN3_OPTIONAL)
#undef FLASHATTN3_OPTIONAL
  return tensors;
}

std::optional<KeptPasses> find_passes(int64_t options, const GivenTensors& tensors) {
  const std::optional<Key> key = key_of(options, tensors);
  if (!key) return std::nullopt;
  return launch_cache().find(*key);
}

void keep_passes(int64_t options, const GivenTensors& tensors, const KeptPasses& passes) {
  if (const std::optional<Key> key = key_of(options, tensors)) launch_cache().keep(*key, passes);
}

bool are_of_call(const Tensor& dout, const Tensor& out, const Tensor& lse,
                 const GivenTensors& given, const Axes& axes) {
  const Tensor &q = given.q, &v = given.v;
  const auto fits = [&](const Tensor& x) {
    return x.dim() == 4 && x.size(0) == q.size(0) && x.size(1) == q.size(axes.rows) &&
           x.size(2) == q.size(axes.heads) && x.size(3) == v.size(3) &&
           dtype_of(x) == dtype_of(q) && x.get_device_index() == q.get_device_index();
  };
  return fits(dout) && fits(out) && lse.dim() == 3 && lse.size(0) == q.size(0) &&
         lse.size(1) == q.size(axes.heads) && lse.size(2) == q.size(axes.rows) &&
         dtype_of(lse) == aoti_torch_dtype_float32() &&
         lse.get_device_index() == q.get_device_index();
}

namespace {

void keep_passes_of_stack(StableIValue* stack, uint64_t num_arguments, uint64_t) {
  constexpr char kName[] = "keep_passes";
  Arguments arguments(stack, num_arguments);
  const int64_t options = arguments.take<int64_t>();
  const bool bhsd = arguments.take<bool>();
  const Tensor forward = arguments.take<Tensor>(), backward = arguments.take<Tensor>();
  const Optional packed = arguments.take<Optional>();
  const GivenTensors given = GivenTensors::take(arguments);
  KeptPasses passes{.forward = attention_launch(kName, Pass::kForward, forward),
                    .backward = attention_launch(kName, Pass::kBackward, backward),
                    .bhsd = bhsd};
  if (packed) passes.packed = cached_launch(kName, *packed);
  KeptMask mask{.of_queries = MaskTensors::take(arguments),
                .of_keys = MaskTensors::take(arguments)};
  if (mask.of_queries.entries) passes.mask = std::make_shared<KeptMask>(std::move(mask));
  keep_passes(options, given, passes);
  return_results(stack, std::tuple<>());
}

void forget_passes(StableIValue* stack, uint64_t, uint64_t) {
  Arguments arguments(stack);
  launch_cache().forget(arguments.take<int64_t>());
  return_results(stack, std::tuple<>());
}

}  // namespace

// forward, backward and packed: results of prepare_forward, prepare_backward and prepare_decode.
// The mask is kept until forget_passes gets the number of its options.
STABLE_TORCH_LIBRARY_FRAGMENT(flashattn3_hopper, library) {
  library.def(
      "keep_passes(int options, bool bhsd, Tensor forward, Tensor backward, Tensor? "
      "packed, " FLASHATTN3_FOUND_SCHEMA ", " FLASHATTN3_SCORES
      ", " FLASHATTN3_MASK(_q) ", " FLASHATTN3_MASK(_k) ") -> ()");
  library.def("forget_passes(int options) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(flashattn3_hopper, CompositeExplicitAutograd, library) {
  library.impl("keep_passes", keep_passes_of_stack);
  library.impl("forget_passes", forget_passes);
}

}  // namespace flashattn3
