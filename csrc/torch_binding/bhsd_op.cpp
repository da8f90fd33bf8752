// flashattn3_hopper::forward_bhsd and backward_bhsd: the passes of a call that is like an earlier
// one, as each layer of a compiled model is like the layer before. q, k, v and their gradients have
// their heads before their tokens (BHSD), out and dout do not. The operators find the launches that
// were planned for such a call: they read the tensors in less time than Python takes to make a key
// of them, and view them as rows in less time than torch's operators.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>
#include <span>
#include <tuple>

#include "launch/registry.h"
#include "torch_binding/attention_call.h"
#include "torch_binding/boxed.h"
#include "torch_binding/prepared.h"
#include "torch_binding/tensors.h"

namespace flashattn3 {
namespace {

using Optional = std::optional<Tensor>;

// Axes of a tensor: (batch, heads, tokens, columns) or (batch, tokens, heads, columns).
struct Axes {
  int heads, tokens;
};
constexpr Axes kHeadsFirst{1, 2}, kTokensFirst{2, 1};

// Whether TMA reads the tensor, and with varlen (rows, heads, columns) is a view of it.
bool is_readable(const Tensor& x, const Axes& axes, bool varlen) {
  if (x.dim() != 4 || !fits_tma(x)) return false;
  return !varlen || x.size(0) == 1 || x.stride(0) == x.size(axes.tokens) * x.stride(axes.tokens);
}

// (batch, tokens, heads, columns), or with varlen (rows, heads, columns).
Tensor rows_of(const Tensor& x, const Axes& axes, bool varlen) {
  const int64_t tokens = x.size(axes.tokens), heads = x.size(axes.heads);
  const int64_t sizes[] = {x.size(0), tokens, heads, x.size(3)};
  const int64_t strides[] = {x.stride(0), x.stride(axes.tokens), x.stride(axes.heads), 1};
  if (!varlen) return view_of(x, sizes, strides);
  const int64_t row_sizes[] = {x.size(0) * tokens, heads, x.size(3)};
  return view_of(x, row_sizes, std::span(strides).subspan(1));
}

// The inverse: dense rows as tensors of these axes.
Tensor batch_of(const Tensor& rows, int64_t batch, const Axes& axes) {
  const int last = static_cast<int>(rows.dim()) - 1;
  const int64_t heads = rows.size(last - 1), columns = rows.size(last);
  const int64_t tokens = rows.numel() / (batch * heads * columns);
  int64_t sizes[] = {batch, 0, 0, columns}, strides[] = {tokens * heads * columns, 0, 0, 1};
  sizes[axes.heads] = heads, strides[axes.heads] = columns;
  sizes[axes.tokens] = tokens, strides[axes.tokens] = heads * columns;
  return view_of(rows, sizes, strides);
}

// (batch, heads, tokens) of lse, with varlen (heads, rows).
Tensor lse_of_batch(const Tensor& lse, int64_t batch) {
  const int64_t heads = lse.size(0), rows = lse.size(1), tokens = rows / batch;
  const int64_t sizes[] = {batch, heads, tokens}, strides[] = {tokens, rows, 1};
  return view_of(lse, sizes, strides);
}

// The tensors that both passes begin with.
struct BhsdCall {
  Tensor q, k, v;
  Optional cu_seqlens_q, cu_seqlens_k;

  static BhsdCall take(Arguments& arguments) {
    return {.q = arguments.take<Tensor>(),
            .k = arguments.take<Tensor>(),
            .v = arguments.take<Tensor>(),
            .cu_seqlens_q = arguments.take<Optional>(),
            .cu_seqlens_k = arguments.take<Optional>()};
  }
  bool varlen() const { return cu_seqlens_q.has_value(); }
  bool is_readable() const {
    const auto fits = [&](const Tensor& x) {
      return flashattn3::is_readable(x, kHeadsFirst, varlen()) && x.numel() > 0;
    };
    return cu_seqlens_k.has_value() == varlen() && fits(q) && fits(k) && fits(v);
  }
  CallTensors rows() const {
    return {.q = rows_of(q, kHeadsFirst, varlen()),
            .k = rows_of(k, kHeadsFirst, varlen()),
            .v = rows_of(v, kHeadsFirst, varlen()),
            .cu_seqlens_q = cu_seqlens_q,
            .cu_seqlens_k = cu_seqlens_k};
  }
};

bool are_edges(const Tensor& edges, int device, int batch) {
  return edges.dim() == 1 && edges.size(0) == batch + 1 && edges.is_contiguous() &&
         dtype_of(edges) == aoti_torch_dtype_int32() && edges.get_device_index() == device;
}

// Returns whether the launches are planned for calls with these tensors, which are readable. It
// compares everything that a plan depends on.
bool are_planned_for(const PlannedPasses& planned, const BhsdCall& call) {
  const AttentionProblem& problem = planned.forward.problem;
  const bool fp16 = forward_kernel(planned.forward.config).info.dtype == ElementType::kFloat16;
  const int32_t dtype = fp16 ? aoti_torch_dtype_float16() : aoti_torch_dtype_bfloat16();
  const int64_t batch = call.q.size(0);
  const auto fits = [&](const Tensor& x, int64_t heads, int64_t tokens, int64_t columns) {
    return x.get_device_index() == planned.device && dtype_of(x) == dtype && x.size(0) == batch &&
           x.size(1) == heads && x.size(2) == tokens && x.size(3) == columns;
  };
  const int64_t seqlen_q = problem.seqlen_q, seqlen_k = problem.seqlen_k;
  if (!fits(call.q, problem.num_heads_q, seqlen_q, problem.head_dim) ||
      !fits(call.k, problem.num_heads_kv, seqlen_k, problem.head_dim) ||
      !fits(call.v, problem.num_heads_kv, seqlen_k, problem.head_dim_v)) {
    return false;
  }
  if (call.varlen() != problem.varlen) return false;
  if (!problem.varlen) return batch == problem.batch;
  const int device = static_cast<int>(planned.device);
  return batch * seqlen_q == problem.total_q && batch * seqlen_k == problem.total_k &&
         are_edges(*call.cu_seqlens_q, device, problem.batch) &&
         are_edges(*call.cu_seqlens_k, device, problem.batch);
}

// Null if no launches are for this call.
const PlannedPasses* find(const char* function, const Tensor& launches, const BhsdCall& call) {
  const auto all = planned_passes(function, launches);
  if (!call.is_readable()) return nullptr;
  for (const PlannedPasses& planned : all) {
    if (are_planned_for(planned, call)) return &planned;
  }
  return nullptr;
}

std::tuple<Optional, Optional> run(const Tensor& launches, const BhsdCall& call) {
  constexpr char kName[] = "forward_bhsd";
  const PlannedPasses* planned = find(kName, launches, call);
  if (planned == nullptr) return {};
  auto [out, lse] = run_forward(kName, planned->forward, {.tensors = call.rows()});
  if (!call.varlen()) return {out, lse};
  const int64_t batch = call.q.size(0);
  return {batch_of(out, batch, kTokensFirst), lse_of_batch(lse, batch)};
}

// dout, out and lse have the shapes that the forward returns.
std::tuple<Optional, Optional, Optional> run(const Tensor& launches, const Tensor& dout,
                                             const Tensor& out, const Tensor& lse,
                                             const BhsdCall& call) {
  constexpr char kName[] = "backward_bhsd";
  const PlannedPasses* planned = find(kName, launches, call);
  const bool varlen = call.varlen();
  const int64_t batch = call.q.size(0), seqlen = call.q.size(2), heads = call.q.size(1);
  const auto is_lse = [&] {
    if (lse.dim() != 3 || lse.size(0) != batch || lse.size(1) != heads) return false;
    if (!varlen) return lse.is_contiguous();
    return lse.size(2) == seqlen && lse.stride(2) == 1 && lse.stride(1) == batch * seqlen &&
           (batch == 1 || lse.stride(0) == seqlen);
  };
  if (planned == nullptr || !is_readable(dout, kTokensFirst, varlen) ||
      !is_readable(out, kTokensFirst, varlen) || !is_lse()) {
    return {};
  }
  const int64_t sizes[] = {heads, batch * seqlen}, strides[] = {batch * seqlen, 1};
  const BackwardCall backward{.dout = rows_of(dout, kTokensFirst, varlen),
                              .out = rows_of(out, kTokensFirst, varlen),
                              .lse = varlen ? view_of(lse, sizes, strides) : lse,
                              .tensors = call.rows()};
  const Gradients gradients = run_backward(kName, planned->backward, backward);
  return {batch_of(gradients.dq, batch, kHeadsFirst), batch_of(gradients.dk, batch, kHeadsFirst),
          batch_of(gradients.dv, batch, kHeadsFirst)};
}

void forward_bhsd(StableIValue* stack, uint64_t, uint64_t) {
  Arguments arguments(stack);
  const Tensor launches = arguments.take<Tensor>();
  return_results(stack, run(launches, BhsdCall::take(arguments)));
}

void backward_bhsd(StableIValue* stack, uint64_t, uint64_t) {
  Arguments arguments(stack);
  const Tensor launches = arguments.take<Tensor>(), dout = arguments.take<Tensor>(),
               out = arguments.take<Tensor>(), lse = arguments.take<Tensor>();
  return_results(stack, run(launches, dout, out, lse, BhsdCall::take(arguments)));
}

}  // namespace

// launches holds some PlannedPasses. An operator returns None if none of them is for such a call,
// or if a tensor would have to be copied.
STABLE_TORCH_LIBRARY_FRAGMENT(flashattn3_hopper, library) {
#define FA3_CALL "Tensor q, Tensor k, Tensor v, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k"
  library.def("forward_bhsd(Tensor launches, " FA3_CALL ") -> (Tensor? out, Tensor? lse)");
  library.def("backward_bhsd(Tensor launches, Tensor dout, Tensor out, Tensor lse, " FA3_CALL
              ") -> (Tensor? dq, Tensor? dk, Tensor? dv)");
#undef FA3_CALL
}

STABLE_TORCH_LIBRARY_IMPL(flashattn3_hopper, CUDA, library) {
  library.impl("forward_bhsd", forward_bhsd);
  library.impl("backward_bhsd", backward_bhsd);
}

// Tensors on the CPU, for which no launch is planned, get None.
STABLE_TORCH_LIBRARY_IMPL(flashattn3_hopper, CPU, library) {
  library.impl("forward_bhsd", forward_bhsd);
  library.impl("backward_bhsd", backward_bhsd);
}

}  // namespace flashattn3
