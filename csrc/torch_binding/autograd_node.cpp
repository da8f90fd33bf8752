// Attention whose autograd node runs in C++: the CUDA kernels of
// aten::_scaled_dot_product_flash_attention_for_cpu and of its backward, for which torch has none.
// An autograd node written in Python takes longer than the launches of a small call, and LibTorch's
// stable ABI has no nodes of its own. This operator has one: it saves q, k, v, out, lse and
// attn_mask and passes them to the backward, and no code between the two reads a shape.
//
// attn_mask: PlannedPasses, among which the operator finds the launches of the call; RuntimeError
// if there are none. Out has its tokens before its heads (BSHD), and so have q, k, v and their
// gradients; with passes that say bhsd, these have their heads first (BHSD), so that a caller with
// such tensors needs no transposes, which have nodes of their own. dropout_p, is_causal and scale
// have their defaults: the launches have the options of the call.
#include "torch_binding/autograd_node.h"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>

#include <cstdint>
#include <optional>
#include <tuple>

#include "torch_binding/attention_call.h"
#include "torch_binding/boxed.h"
#include "torch_binding/packed_forward.h"
#include "torch_binding/planned_passes.h"
#include "torch_binding/prepared.h"
#include "torch_binding/tensors.h"

namespace flashattn3 {
namespace {

// What follows the tensors in both schemas.
struct Options {
  double dropout_p;
  bool is_causal;
  std::optional<Tensor> launches;
  std::optional<double> scale;

  static Options take(Arguments& arguments) {
    return {.dropout_p = arguments.take<double>(),
            .is_causal = arguments.take<bool>(),
            .launches = arguments.take<std::optional<Tensor>>(),
            .scale = arguments.take<std::optional<double>>()};
  }
};

const PlannedPasses& passes_of(const char* function, const Options& options,
                               const GivenTensors& tensors) {
  const bool unset = options.dropout_p == 0 && !options.is_causal && !options.scale;
  expect(unset, function, "dropout_p, is_causal, scale", "unset: launches hold the options", "set");
  expect(options.launches.has_value(), function, "attn_mask", "planned launches", "None");
  const PlannedPasses* planned = find_planned(function, *options.launches, tensors);
  expect(planned != nullptr, function, "q, k and v", "those of a planned call", "others");
  return *planned;
}

// A dense copy of a tensor of three or four axes.
Tensor copied(const Tensor& tensor) {
  const int device = tensor.get_device_index();
  const int32_t dtype = dtype_of(tensor);
  const auto size = [&](int axis) { return tensor.size(axis); };
  const Tensor copy = tensor.dim() == 3
                          ? new_tensor<3>({size(0), size(1), size(2)}, dtype, device)
                          : new_tensor<4>({size(0), size(1), size(2), size(3)}, dtype, device);
  check_torch(aoti_torch_copy_(copy.get(), tensor.get(), 0), "copying a tensor");
  return copy;
}

// The tensor, or a copy, with rows that TMA reads. The last axis is a multiple of 16 bytes.
Tensor in_aligned_rows(const Tensor& tensor) { return fits_tma(tensor) ? tensor : copied(tensor); }

Tensor in_dense_memory(const Tensor& tensor) {
  return tensor.is_contiguous() ? tensor : copied(tensor);
}

void forward(StableIValue* stack, uint64_t, uint64_t) {
  constexpr char kName[] = "forward";
  Arguments arguments(stack);
  const GivenTensors given{
      .q = arguments.take<Tensor>(), .k = arguments.take<Tensor>(), .v = arguments.take<Tensor>()};
  const Options options = Options::take(arguments);
  const PlannedPasses& planned = passes_of(kName, options, given);
  const auto& [q, k, v, cu_seqlens_q, cu_seqlens_k] = given;
  expect(fits_tma(q) && fits_tma(k) && fits_tma(v), kName, "q, k and v",
         "of addresses and strides of a planned call", "others");
  const CallTensors tensors{.q = q, .k = k, .v = v, .bhsd = planned.bhsd != 0};
  const auto [out, lse] = run_planned_forward(kName, planned, tensors);
  return_results(stack, std::tuple(out, lse));
}

// Saved tensors are those of the forward, but hooks on them may have returned others.
void backward(StableIValue* stack, uint64_t, uint64_t) {
  constexpr char kName[] = "backward";
  Arguments arguments(stack);
  const Tensor dout = arguments.take<Tensor>();
  const GivenTensors given{
      .q = arguments.take<Tensor>(), .k = arguments.take<Tensor>(), .v = arguments.take<Tensor>()};
  const Tensor out = arguments.take<Tensor>(), lse = arguments.take<Tensor>();
  const Options options = Options::take(arguments);
  const PlannedPasses& planned = passes_of(kName, options, given);
  const BackwardCall call{.dout = in_aligned_rows(dout),
                          .out = in_aligned_rows(out),
                          .lse = in_dense_memory(lse),
                          .tensors = {.q = in_aligned_rows(given.q),
                                      .k = in_aligned_rows(given.k),
                                      .v = in_aligned_rows(given.v),
                                      .bhsd = planned.bhsd != 0}};
  const auto [dq, dk, dv] = run_backward(kName, planned.backward, call);
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

STABLE_TORCH_LIBRARY_FRAGMENT(flashattn3_hopper, library) {
  library.def("register_autograd_node() -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(flashattn3_hopper, CompositeExplicitAutograd, library) {
  library.impl("register_autograd_node", boxed<register_for_gpus>);
}

}  // namespace flashattn3
