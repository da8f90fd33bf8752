// Attention whose autograd nodes run in C++: the CUDA kernels of two operators of torch, for which
// torch has none, and of their backwards. An autograd node written in Python takes longer than the
// launches of a small call, and LibTorch's stable ABI has no nodes of its own. These operators have
// some, which save tensors and pass them to the backward, and no code between reads a shape:
//   aten::_scaled_dot_product_flash_attention_for_cpu saves k, q, v, lse and out, in this order;
//   aten::_scaled_dot_product_fused_attention_overrideable saves attn_bias before them, which may
//   have a gradient too: a tensor that changes scores. Seven more results, which stay undefined,
//   take 2.5 us, so that plain calls have the other one.
//
// dropout_p: the number of the call's options and axes, under which launch_cache.h finds its
// launches; never 0, so that a call of torch's own is refused. attn_mask: none, or a tensor without
// elements, which the node saves and nothing reads: Python keeps launches while it lives. scale:
// with attn_bias, its index among FLASHATTN3_SCORE_TENSORS. The others have their defaults. Out has
// its tokens before its heads (BSHD), and so have q, k, v and their gradients; with passes that say
// bhsd, these have their heads first (BHSD), so that a caller with such tensors needs no
// transposes, which have nodes of their own.
//
// When an operator runs, hooks on saved tensors have seen its inputs. So it does not leave a call
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

// torch 2.10 and newer have them, and convert lists. Weak, because the library must load elsewhere.
struct StableListOpaque;
extern "C" __attribute__((weak)) AOTITorchError torch_list_get_item(StableListOpaque* list,
                                                                    size_t index,
                                                                    StableIValue* element);
extern "C" __attribute__((weak)) AOTITorchError torch_delete_list(StableListOpaque* list);

namespace flashattn3 {
namespace {

using Optional = std::optional<Tensor>;

struct CallOfNode {
  const char* function;  // for messages
  int64_t options;       // their number
  GivenTensors given;
};

CallOfNode call_of_node(const char* function, double dropout_p, bool has_defaults,
                        const GivenTensors& given) {
  expect(dropout_p >= 1 && dropout_p == std::floor(dropout_p), function, "dropout_p",
         "the number of a call's options", dropout_p);
  expect(has_defaults, function, "is_causal, attn_mask and scale",
         "unset: the options have a number", "set");
  return {function, static_cast<int64_t>(dropout_p), given};
}

// The same, with attn_bias as one of the tensors that change scores.
CallOfNode call_of_node(const char* function, double dropout_p, bool has_defaults,
                        GivenTensors given, const Tensor& attn_bias, std::optional<double> scale) {
  double index = 0;
  bool is_known = false;
#define FLASHATTN3_OPTIONAL(name) \
  if (scale == index++) given.name = attn_bias, is_known = true;
  FLASHATTN3_SCORE_TENSORS(FLASHATTN3_OPTIONAL)
#undef FLASHATTN3_OPTIONAL
  expect(is_known && attn_bias.defined(), function, "scale", "the index of attn_bias",
         scale.value_or(-1));
  return call_of_node(function, dropout_p, has_defaults, given);
}

// Takes a list of bools; returns the one at `index`.
bool take_bool_of_list(Arguments& arguments, size_t index) {
  auto* const list = arguments.take<StableListOpaque*>();
  StableIValue element;
  const AOTITorchError status = torch_list_get_item(list, index, &element);
  torch_delete_list(list);
  check_torch(status, "reading a list");
  return ::to<bool>(element);
}

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
// tensors, undefined for None; the last that it returns is a message, in bytes, if it has failed.
// Values on its stack belong to whoever reads them.
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
  std::array<Tensor, kNumResults> tensors;  // undefined
  for (size_t i = 0; i < kNumResults; ++i) {
    if (results[i]) tensors[i] = *results[i];
  }
  return tensors;
}

std::array<Tensor, 2> forward_of(const CallOfNode& call) {
  const GivenTensors& given = call.given;
  const Tensor &q = given.q, &k = given.k, &v = given.v;
  const std::optional<KeptPasses> kept = find_passes(call.options, given);
  if (!kept || !fits_tma(q) || !fits_tma(k) || !fits_tma(v)) {
    return run_in_python<2>("flashattn3_hopper::forward_in_python", call.options, q, k, v,
                            given.sinks, given.alibi_slopes, given.bias);
  }
  const CallTensors tensors = given.with_sides(q, k, v, kept->bhsd);
  const auto [out, lse] = run_kept_forward(call.function, *kept, {.tensors = tensors});
  return {out, *lse};
}

// dq, dk, dv and the gradient of the tensor that changes scores, which may be undefined. Saved
// tensors are those of the forward, but hooks on them may have returned others. with_dbias: as of
// BackwardCall.
std::array<Tensor, 4> backward_of(const CallOfNode& call, const Tensor& dout, const Tensor& out,
                                  const Tensor& lse, bool with_dbias) {
  const GivenTensors& given = call.given;
  const std::optional<KeptPasses> kept = find_passes(call.options, given);
  if (!kept || !are_of_call(dout, out, lse, given, kept->axes())) {
    return run_in_python<4>("flashattn3_hopper::backward_in_python", call.options, dout, out, lse,
                            given.q, given.k, given.v, given.sinks, given.alibi_slopes, given.bias,
                            with_dbias);
  }
  const BackwardCall passed{
      .dout = in_aligned_rows(dout),
      .out = in_aligned_rows(out),
      .lse = in_dense_memory(lse),
      .tensors = given.with_sides(in_aligned_rows(given.q), in_aligned_rows(given.k),
                                  in_aligned_rows(given.v), kept->bhsd),
      .with_dbias = with_dbias};
  const Gradients found = run_kept_backward(call.function, *kept, passed);
  const Optional& of_score = given.bias ? found.dbias : found.dsinks;
  return {found.dq, found.dk, found.dv, of_score.value_or(Tensor())};
}

GivenTensors take_sides(Arguments& arguments) {
  return {
      .q = arguments.take<Tensor>(), .k = arguments.take<Tensor>(), .v = arguments.take<Tensor>()};
}

// Takes the arguments behind the tensors in both schemas of plain calls.
CallOfNode take_plain_call(const char* function, const GivenTensors& sides, Arguments& arguments) {
  const auto dropout_p = arguments.take<double>();
  const auto is_causal = arguments.take<bool>();
  const auto attn_mask = arguments.take<Optional>();
  const auto scale = arguments.take<std::optional<double>>();
  // autograd passes an undefined one
  const bool has_mask = attn_mask && attn_mask->defined() && attn_mask->numel() > 0;
  return call_of_node(function, dropout_p, !is_causal && !has_mask && !scale, sides);
}

void forward(StableIValue* stack, uint64_t, uint64_t) {
  Arguments arguments(stack);
  const GivenTensors sides = take_sides(arguments);
  const auto [out, lse] = forward_of(take_plain_call("forward", sides, arguments));
  return_results(stack, std::tuple(out, lse));
}

void backward(StableIValue* stack, uint64_t, uint64_t) {
  Arguments arguments(stack);
  const auto dout = arguments.take<Tensor>();
  const GivenTensors sides = take_sides(arguments);
  const auto out = arguments.take<Tensor>(), lse = arguments.take<Tensor>();
  const CallOfNode call = take_plain_call("backward", sides, arguments);
  const auto [dq, dk, dv, of_score] = backward_of(call, dout, out, lse, false);
  return_results(stack, std::tuple(dq, dk, dv));
}

void forward_with_score(StableIValue* stack, uint64_t, uint64_t) {
  Arguments arguments(stack);
  const GivenTensors sides = take_sides(arguments);
  const auto attn_bias = arguments.take<Optional>();
  const auto dropout_p = arguments.take<double>();
  const auto is_causal = arguments.take<bool>(), return_debug_mask = arguments.take<bool>();
  const auto scale = arguments.take<std::optional<double>>();
  const Tensor none;  // undefined
  const int64_t no_length = 0;
  const CallOfNode call = call_of_node("forward", dropout_p, !is_causal && !return_debug_mask,
                                       sides, attn_bias.value_or(none), scale);
  const auto [out, lse] = forward_of(call);
  return_results(stack, std::tuple(out, lse, none, none, no_length, no_length, none, none, none));
}

void backward_with_score(StableIValue* stack, uint64_t, uint64_t) {
  Arguments arguments(stack);
  const auto dout = arguments.take<Tensor>();
  const GivenTensors sides = take_sides(arguments);
  const auto attn_bias = arguments.take<Tensor>();
  constexpr size_t kOfAttnBias = 3;
  const bool needs_dscore = take_bool_of_list(arguments, kOfAttnBias);  // of grad_input_mask
  const auto out = arguments.take<Tensor>(), lse = arguments.take<Tensor>();
  for (int i = 0; i < 2; ++i) arguments.take<Tensor>();   // cum_seq_q and cum_seq_k
  for (int i = 0; i < 2; ++i) arguments.take<int64_t>();  // max_q and max_k
  const auto dropout_p = arguments.take<double>();
  const auto is_causal = arguments.take<bool>();
  for (int i = 0; i < 2; ++i) arguments.take<Tensor>();  // philox_seed and philox_offset
  const auto scale = arguments.take<std::optional<double>>();
  const CallOfNode call = call_of_node("backward", dropout_p, !is_causal, sides, attn_bias, scale);
  const bool with_dbias = needs_dscore && call.given.bias;
  const auto [dq, dk, dv, of_score] = backward_of(call, dout, out, lse, with_dbias);
  return_results(stack, std::tuple(dq, dk, dv, of_score));
}

void implement(const char* dispatch_key, const char* name,
               void (*kernel)(StableIValue*, uint64_t, uint64_t)) {
  TorchLibraryHandle library;  // never deleted, which would take the kernels back
  check_torch(aoti_torch_library_init_impl("aten", dispatch_key, __FILE__, __LINE__, &library),
              name);
  check_torch(aoti_torch_library_impl(library, name, kernel), name);
}

}  // namespace

void register_autograd_node(const char* dispatch_key) {
  constexpr char kForward[] = "_scaled_dot_product_flash_attention_for_cpu";
  constexpr char kBackward[] = "_scaled_dot_product_flash_attention_for_cpu_backward";
  implement(dispatch_key, kForward, forward);
  implement(dispatch_key, kBackward, backward);
}

void register_score_node(const char* dispatch_key) {
  constexpr char kForward[] = "_scaled_dot_product_fused_attention_overrideable";
  constexpr char kBackward[] = "_scaled_dot_product_fused_attention_overrideable_backward";
  implement(dispatch_key, kForward, forward_with_score);
  implement(dispatch_key, kBackward, backward_with_score);
}

namespace {

std::tuple<> register_for_gpus() {
  register_autograd_node("CUDA");
  return {};
}

std::tuple<> register_score_node_for_gpus() {
  register_score_node("CUDA");
  return {};
}

}  // namespace

// Python implements the last two (flashattn3/run/launches.py). error: the message of an
// exception, in UTF-8; the others are then None.
STABLE_TORCH_LIBRARY_FRAGMENT(flashattn3_hopper, library) {
  library.def("register_autograd_node() -> ()");
  library.def("register_score_node() -> ()");
  library.def("forward_in_python(int options, Tensor q, Tensor k, Tensor v, " FLASHATTN3_SCORES
              ") -> (Tensor? out, Tensor? lse, Tensor? error)");
  library.def(
      "backward_in_python(int options, Tensor dout, Tensor out, Tensor lse, Tensor q, Tensor k, "
      "Tensor v, " FLASHATTN3_SCORES
      ", bool with_dbias=False) -> (Tensor? dq, Tensor? dk, Tensor? dv, Tensor? dscore, "
      "Tensor? error)");
}

STABLE_TORCH_LIBRARY_IMPL(flashattn3_hopper, CompositeExplicitAutograd, library) {
  library.impl("register_autograd_node", boxed<register_for_gpus>);
  library.impl("register_score_node", boxed<register_score_node_for_gpus>);
}

}  // namespace flashattn3
