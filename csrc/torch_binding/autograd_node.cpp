// Attention whose autograd node runs in C++: the CUDA kernels of
// aten::_scaled_dot_product_flash_attention_for_cpu and of its backward, for which torch has none.
// An autograd node written in Python takes longer than the launches of a small call, and LibTorch's
// stable ABI has no nodes of its own. This operator has one: it saves k, q, v, lse and out, in
// this order, and passes them to the backward, and no code between the two reads a shape.
//
// dropout_p: the number of the call's options and axes, under which launch_cache.h finds its
// launches; never 0, so that torch's own kernel refuses it. The others have their defaults. Out has
// its tokens before its heads (BSHD), and so have q, k, v and their gradients; with passes that say
// bhsd, these have their heads first (BHSD), so that a caller with such tensors needs no
// transposes, which have nodes of their own.
//
// When the operator runs, hooks on saved tensors have seen k, q and v. So it does not leave a call
// to its caller, which would save them again: a call without launches, or with tensors that the
// kernels cannot read, is computed in Python, which keeps its launches for further ones.
#include "torch_binding/autograd_node.h"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>

#include "torch_binding/attention_call.h"
#include "torch_binding/boxed.h"
#include "torch_binding/launch_cache.h"
#include "torch_binding/launch_record.h"
#include "torch_binding/packed_forward.h"
#include "torch_binding/tensors.h"

namespace flashattn3 {
namespace {

using Optional = std::optional<Tensor>;

// Arguments behind the tensors in both schemas.
struct Rest {
  double dropout_p;
  bool is_causal;
  Optional attn_mask;
  std::optional<double> scale;

  static Rest take(Arguments& arguments) {
    return {.dropout_p = arguments.take<double>(),
            .is_causal = arguments.take<bool>(),
            .attn_mask = arguments.take<Optional>(),
            .scale = arguments.take<std::optional<double>>()};
  }

  // The number of the options.
  int64_t options(const char* function) const {
    expect(dropout_p >= 1 && dropout_p == std::floor(dropout_p), function, "dropout_p",
           "the number of a call's options", dropout_p);
    const bool has_mask = attn_mask && attn_mask->defined();  // autograd passes an undefined one
    expect(!is_causal && !has_mask && !scale, function, "is_causal, attn_mask and scale",
           "unset: the options have a number", "set");
    return static_cast<int64_t>(dropout_p);
  }
};

// A dense copy of a tensor of three or four axes.
Tensor copied(const Tensor& tensor) {
  const int device = tensor.get_device_index();
  const int32_t dtype = dtype_of(tensor);
  const auto size = [&](int axis) { return tensor.size(axis); };
  const Tensor copy = tensor.dim() == 3
                          ? new_tensor({3, {size(0), size(1), size(2)}}, dtype, device)
                          : new_tensor({4, {size(0), size(1), size(2), size(3)}}, dtype, device);
  check_torch(aoti_torch_copy_(copy.get(), tensor.get(), 0), "copying a tensor");
  return copy;
}

// The tensor, or a copy, with rows that TMA reads. The last axis is a multiple of 16 bytes.
Tensor in_aligned_rows(const Tensor& tensor) { return fits_tma(tensor) ? tensor : copied(tensor); }

Tensor in_dense_memory(const Tensor& tensor) {
  return tensor.is_contiguous() ? tensor : copied(tensor);
}

// Calls an operator of this library that Python implements and returns its results, kNumResults
// tensors; the last that it returns is a message, in bytes, if it has failed. Values on its stack
// belong to whoever reads them.
template <size_t kNumResults, class... Values>
std::array<Tensor, kNumResults> run_in_python(const char* name, const Values&... values) {
  StableIValue stack[] = {::from(values)...};
  static_assert(sizeof...(values) > kNumResults);
  check_torch(aoti_torch_call_dispatcher(name, "", stack), name);
  std::array<Optional, kNumResults + 1> results;
  for (size_t i = 0; i <= kNumResults; ++i) results[i] = ::to<Optional>(stack[i]);
  if (const Optional& message = results[kNumResults]) {
    const auto* text = static_cast<const char*>(message->data_ptr());
    throw std::runtime_error(std::string(text, static_cast<size_t>(message->numel())));
  }
  std::array<Tensor, kNumResults> tensors;
  for (size_t i = 0; i < kNumResults; ++i) tensors[i] = *results[i];
  return tensors;
}

void forward(StableIValue* stack, uint64_t, uint64_t) {
  Arguments arguments(stack);
  const GivenTensors given{
      .q = arguments.take<Tensor>(), .k = arguments.take<Tensor>(), .v = arguments.take<Tensor>()};
  const int64_t options = Rest::take(arguments).options("forward");
  const Tensor &q = given.q, &k = given.k, &v = given.v;
  const std::optional<KeptPasses> kept = find_passes(options, given);
  if (kept && fits_tma(q) && fits_tma(k) && fits_tma(v)) {
    const CallTensors tensors{.q = q, .k = k, .v = v, .bhsd = kept->bhsd};
    const auto [out, lse] = run_kept_forward("forward", *kept, {.tensors = tensors});
    return return_results(stack, std::tuple(out, *lse));
  }
  const auto [out, lse] =
      run_in_python<2>("flashattn3_hopper::forward_in_python", options, q, k, v);
  return_results(stack, std::tuple(out, lse));
}

// Saved tensors are those of the forward, but hooks on them may have returned others.
void backward(StableIValue* stack, uint64_t, uint64_t) {
  Arguments arguments(stack);
  const Tensor dout = arguments.take<Tensor>();
  const GivenTensors given{
      .q = arguments.take<Tensor>(), .k = arguments.take<Tensor>(), .v = arguments.take<Tensor>()};
  const Tensor out = arguments.take<Tensor>(), lse = arguments.take<Tensor>();
  const int64_t options = Rest::take(arguments).options("backward");
  const std::optional<KeptPasses> kept = find_passes(options, given);
  if (kept && are_of_call(dout, out, lse, given, kept->axes())) {
    const BackwardCall call{.dout = in_aligned_rows(dout),
                            .out = in_aligned_rows(out),
                            .lse = in_dense_memory(lse),
                            .tensors = {.q = in_aligned_rows(given.q),
                                        .k = in_aligned_rows(given.k),
                                        .v = in_aligned_rows(given.v),
                                        .bhsd = kept->bhsd}};
    const Gradients found = run_kept_backward("backward", *kept, call);
    return return_results(stack, std::tuple(found.dq, found.dk, found.dv));
  }
  const auto [dq, dk, dv] = run_in_python<3>("flashattn3_hopper::backward_in_python", options, dout,
                                             out, lse, given.q, given.k, given.v);
  return_results(stack, std::tuple(dq, dk, dv));
}

}  // namespace

void register_autograd_node(const char* dispatch_key) {
  TorchLibraryHandle library;  // never deleted, which would take the kernels back
  check_torch(aoti_torch_library_init_impl("aten", dispatch_key, __FILE__, __LINE__, &library),
              "registering the autograd node");
  constexpr char kForward[] = "_scaled_dot_product_flash_attention_for_cpu";
  constexpr char kBackward[] = "_scaled_dot_product_flash_attention_for_cpu_backward";
  check_torch(aoti_torch_library_impl(library, kForward, forward), kForward);
  check_torch(aoti_torch_library_impl(library, kBackward, backward), kBackward);
}

namespace {

std::tuple<> register_for_gpus() {
  register_autograd_node("CUDA");
  return {};
}

}  // namespace

// Python implements the last two (flashattn3/run/launches.py). error: the message of an
// exception, in UTF-8; the others are then None.
STABLE_TORCH_LIBRARY_FRAGMENT(flashattn3_hopper, library) {
  library.def("register_autograd_node() -> ()");
  library.def(
      "forward_in_python(int options, Tensor q, Tensor k, Tensor v) -> (Tensor? out, Tensor? lse, "
      "Tensor? error)");
  library.def(
      "backward_in_python(int options, Tensor dout, Tensor out, Tensor lse, Tensor q, Tensor k, "
      "Tensor v) -> (Tensor? dq, Tensor? dk, Tensor? dv, Tensor? error)");
}

STABLE_TORCH_LIBRARY_IMPL(flashattn3_hopper, CompositeExplicitAutograd, library) {
  library.impl("register_autograd_node", boxed<register_for_gpus>);
}

}  // namespace flashattn3
