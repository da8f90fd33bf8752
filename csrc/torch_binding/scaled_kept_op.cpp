// flashattn3_hopper::keep_scaled and scaled_kept: the forward of a dense call of 8 bits that is
// like an earlier one. Calls of 16 bits, which have gradients, are in kept_op.cpp.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <tuple>

#include "torch_binding/attention_call.h"
#include "torch_binding/boxed.h"
#include "torch_binding/launch_cache.h"
#include "torch_binding/launch_record.h"
#include "torch_binding/tensors.h"

namespace flashattn3 {
namespace {

using Optional = std::optional<Tensor>;

// (batch, tokens, heads, head_dim) of q and k, permuted v, and the descales of each. Their blocks
// are among the options.
struct ScaledTensors {
  Tensor q, k, v, q_descale, k_descale, v_descale;

  static ScaledTensors take(Arguments& arguments) {
    const auto tensor = [&] { return arguments.take<Tensor>(); };
    return {tensor(), tensor(), tensor(), tensor(), tensor(), tensor()};
  }
};

constexpr int kRowAxes = 4, kPermutedAxes = 5, kDescaleAxes = 3;
// The options, the GPU, the dtype of q and k, and the sizes of all tensors.
using Key = std::array<int64_t, 3 + 2 * kRowAxes + kPermutedAxes + 3 * kDescaleAxes>;

// None for tensors that are in no plan together, or that kernels do not read where they lie.
std::optional<Key> key_of(int64_t options, const ScaledTensors& x) {
  const int64_t device = x.q.get_device_index();
  const int32_t dtype = dtype_of(x.q);
  Key key{options, device, dtype};
  auto word = key.begin() + 3;
  const auto write = [&](const Tensor& tensor, int axes, int32_t wanted) {
    if (tensor.dim() != axes || dtype_of(tensor) != wanted || tensor.numel() == 0 ||
        tensor.get_device_index() != device) {
      return false;
    }
    int64_t* sizes;
    check_torch(aoti_torch_get_sizes(tensor.get(), &sizes), "asking for sizes");
    word = std::copy_n(sizes, axes, word);
    return true;
  };
  const int32_t fp32 = aoti_torch_dtype_float32();
  constexpr int kInVec = 16;  // elements of 8 bits in 16 bytes
  const bool fits = write(x.q, kRowAxes, dtype) && write(x.k, kRowAxes, dtype) &&
                    write(x.v, kPermutedAxes, aoti_torch_dtype_float8_e4m3fn()) &&
                    write(x.q_descale, kDescaleAxes, fp32) &&
                    write(x.k_descale, kDescaleAxes, fp32) &&
                    write(x.v_descale, kDescaleAxes, fp32) && fits_tma(x.q, kInVec) &&
                    fits_tma(x.k, kInVec) && x.v.is_contiguous() && is_aligned(x.v);
  if (!fits) return std::nullopt;
  return key;
}

struct KeptForward {
  AttentionLaunch launch;
  bool returns_lse;
};

LaunchCache<Key, KeptForward>& launch_cache() {
  static auto* cache = new LaunchCache<Key, KeptForward>;  // threads may outlive static objects
  return *cache;
}

void keep_scaled(StableIValue* stack, uint64_t, uint64_t) {
  constexpr char kName[] = "keep_scaled";
  Arguments arguments(stack);
  const int64_t options = arguments.take<int64_t>();
  const bool returns_lse = arguments.take<bool>();
  const Tensor launch = arguments.take<Tensor>();
  const ScaledTensors tensors = ScaledTensors::take(arguments);
  if (const std::optional<Key> key = key_of(options, tensors)) {
    launch_cache().keep(*key, {attention_launch(kName, Pass::kForward, launch), returns_lse});
  }
  return_results(stack, std::tuple<>());
}

std::tuple<Optional, Optional> run(int64_t options, const ScaledTensors& x) {
  const std::optional<Key> key = key_of(options, x);
  if (!key) return {};
  const std::optional<KeptForward> kept = launch_cache().find(*key);
  if (!kept) return {};
  const ForwardCall call{.tensors = {.q = x.q, .k = x.k, .v = x.v},
                         .q_descale = x.q_descale,
                         .k_descale = x.k_descale,
                         .v_descale = x.v_descale,
                         .returns_lse = kept->returns_lse};
  const auto [out, lse] = run_forward("scaled_kept", kept->launch, call);
  return {out, lse};
}

void scaled_kept(StableIValue* stack, uint64_t, uint64_t) {
  Arguments arguments(stack);
  const int64_t options = arguments.take<int64_t>();
  const ScaledTensors tensors = ScaledTensors::take(arguments);
  return_results(stack, run(options, tensors));
}

}  // namespace

// options: Python's number of the options of a call (flashattn3/run/launches.py). returns_lse:
// whether these calls return lse. launch: a result of prepare_forward. scaled_kept returns None in
// place of out if no launch is kept for such a call.
STABLE_TORCH_LIBRARY_FRAGMENT(flashattn3_hopper, library) {
#define FA3_SCALED \
  "Tensor q, Tensor k, Tensor v, Tensor q_descale, Tensor k_descale, Tensor v_descale"
  library.def("keep_scaled(int options, bool returns_lse, Tensor launch, " FA3_SCALED ") -> ()");
  library.def("scaled_kept(int options, " FA3_SCALED ") -> (Tensor? out, Tensor? lse)");
}

STABLE_TORCH_LIBRARY_IMPL(flashattn3_hopper, CompositeExplicitAutograd, library) {
  library.impl("keep_scaled", keep_scaled);
}

STABLE_TORCH_LIBRARY_IMPL(flashattn3_hopper, CUDA, library) {
  library.impl("scaled_kept", scaled_kept);
}

// Tensors on the CPU, for which no launch is kept, get None.
STABLE_TORCH_LIBRARY_IMPL(flashattn3_hopper, CPU, library) {
  library.impl("scaled_kept", scaled_kept);
}

}  // namespace flashattn3
