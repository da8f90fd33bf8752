// flashattn3_hopper::forward_kept and backward_kept: the passes of a call that is like an
// earlier one, without an autograd node. q, k, v and their gradients have the axes that the kept
// passes name. With cu_seqlens the operators view tensors as rows in less time than torch's
// operators take.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>
#include <tuple>

#include "torch_binding/attention_call.h"
#include "torch_binding/boxed.h"
#include "torch_binding/launch_cache.h"
#include "torch_binding/packed_forward.h"
#include "torch_binding/tensors.h"

namespace flashattn3 {
namespace {

using Optional = std::optional<Tensor>;

// Whether TMA reads the tensor, and with varlen (rows, heads, columns) is a view of it.
bool is_readable(const Tensor& x, const Axes& axes, bool varlen) {
  if (x.dim() != 4 || !fits_tma(x)) return false;
  return !varlen || x.size(0) == 1 || x.stride(0) == x.size(axes.rows) * x.stride(axes.rows);
}

// (rows, heads, columns) of readable tensors, without varlen the tensor.
Tensor rows_of(const Tensor& x, const Axes& axes, bool varlen) {
  if (!varlen) return x;
  const int64_t sizes[] = {x.size(0) * x.size(axes.rows), x.size(axes.heads), x.size(3)};
  const int64_t strides[] = {x.stride(axes.rows), x.stride(axes.heads), 1};
  return view_of(x, sizes, strides);
}

// The inverse: dense rows as tensors of these axes.
Tensor batch_of(const Tensor& rows, int64_t batch, const Axes& axes, bool varlen) {
  if (!varlen) return rows;
  const int64_t tokens = rows.size(0) / batch, heads = rows.size(1), columns = rows.size(2);
  int64_t sizes[] = {batch, 0, 0, columns}, strides[] = {tokens * heads * columns, 0, 0, 1};
  sizes[axes.heads] = heads, strides[axes.heads] = columns;
  sizes[axes.rows] = tokens, strides[axes.rows] = heads * columns;
  return view_of(rows, sizes, strides);
}

// (batch, heads, tokens) of lse, with varlen (heads, rows).
Tensor lse_of_batch(const Tensor& lse, int64_t batch) {
  const int64_t heads = lse.size(0), rows = lse.size(1), tokens = rows / batch;
  const int64_t sizes[] = {batch, heads, tokens}, strides[] = {tokens, rows, 1};
  return view_of(lse, sizes, strides);
}

bool are_readable(const GivenTensors& given, const Axes& axes) {
  const auto fits = [&](const Tensor& x) {
    return is_readable(x, axes, given.varlen()) && x.numel() > 0;
  };
  return fits(given.q) && fits(given.k) && fits(given.v);
}

CallTensors in_rows(const GivenTensors& given, const KeptPasses& kept) {
  const bool varlen = given.varlen();
  const Axes& axes = kept.axes();
  return given.with_sides(rows_of(given.q, axes, varlen), rows_of(given.k, axes, varlen),
                          rows_of(given.v, axes, varlen), kept.bhsd && !varlen);
}

std::tuple<Optional, Optional> run(int64_t options, bool returns_lse, const GivenTensors& given,
                                   const Optional& max_logit) {
  const std::optional<KeptPasses> kept = find_passes(options, given);
  if (!kept || !are_readable(given, kept->axes())) return {};
  const ForwardCall call{
      .tensors = in_rows(given, *kept), .max_logit = max_logit, .returns_lse = returns_lse};
  auto [out, lse] = run_kept_forward("forward_kept", *kept, call);
  if (!given.varlen()) return {out, lse};
  const int64_t batch = given.q.size(0);
  if (!lse) return {batch_of(out, batch, kBshd, true), std::nullopt};
  return {batch_of(out, batch, kBshd, true), lse_of_batch(*lse, batch)};
}

// dq, dk, dv, dsinks and dbias.
std::tuple<Optional, Optional, Optional, Optional, Optional> run(
    int64_t options, const Tensor& dout, const Tensor& out, const Tensor& lse,
    const GivenTensors& given, bool with_dbias) {
  const std::optional<KeptPasses> kept = find_passes(options, given);
  const bool varlen = given.varlen();
  if (!kept || !are_of_call(dout, out, lse, given, kept->axes()) ||
      !are_readable(given, kept->axes()) || !is_readable(dout, kBshd, varlen) ||
      !is_readable(out, kBshd, varlen)) {
    return {};
  }
  const Axes& axes = kept->axes();
  const int64_t batch = given.q.size(0);
  const int64_t seqlen = given.q.size(axes.rows), heads = given.q.size(axes.heads);
  const auto is_readable_lse = [&] {
    if (!varlen) return lse.is_contiguous();
    return lse.stride(2) == 1 && lse.stride(1) == batch * seqlen &&
           (batch == 1 || lse.stride(0) == seqlen);
  };
  if (!is_readable_lse()) return {};
  const int64_t sizes[] = {heads, batch * seqlen}, strides[] = {batch * seqlen, 1};
  const BackwardCall call{.dout = rows_of(dout, kBshd, varlen),
                          .out = rows_of(out, kBshd, varlen),
                          .lse = varlen ? view_of(lse, sizes, strides) : lse,
                          .tensors = in_rows(given, *kept),
                          .with_dbias = with_dbias};
  const auto [dq, dk, dv, dsinks, dbias] = run_kept_backward("backward_kept", *kept, call);
  return {batch_of(dq, batch, axes, varlen), batch_of(dk, batch, axes, varlen),
          batch_of(dv, batch, axes, varlen), dsinks, dbias};
}

void forward_kept(StableIValue* stack, uint64_t num_arguments, uint64_t) {
  Arguments arguments(stack, num_arguments);
  const int64_t options = arguments.take<int64_t>();
  const bool returns_lse = arguments.take<bool>();
  const GivenTensors given = GivenTensors::take(arguments);
  Optional max_logit;
  if (arguments.has_more()) max_logit = arguments.take<Optional>();
  return_results(stack, run(options, returns_lse, given, max_logit));
}

void backward_kept(StableIValue* stack, uint64_t num_arguments, uint64_t) {
  Arguments arguments(stack, num_arguments);
  const int64_t options = arguments.take<int64_t>();
  const Tensor dout = arguments.take<Tensor>(), out = arguments.take<Tensor>(),
               lse = arguments.take<Tensor>();
  const GivenTensors given = GivenTensors::take(arguments);
  const bool has_scores = arguments.has_more();
  const bool with_dbias = has_scores && arguments.take<bool>();
  const auto [dq, dk, dv, dsinks, dbias] = run(options, dout, out, lse, given, with_dbias);
  if (!has_scores) return return_results(stack, std::tuple(dq, dk, dv));
  return_results(stack, std::tuple(dq, dk, dv, dsinks, dbias));
}

}  // namespace

// options: as find_passes. returns_lse: else lse is None, and no kernel writes it. An operator
// returns None if no passes are kept for such a call, or if a tensor would have to be copied, or if
// out and lse are not those of the call. max_logit, with_dbias, dsinks and dbias: as those of
// forward and backward.
STABLE_TORCH_LIBRARY_FRAGMENT(flashattn3_hopper, library) {
#define FA3_FORWARD "(int options, bool returns_lse, " FLASHATTN3_FOUND_SCHEMA
#define FA3_BACKWARD "(int options, Tensor dout, Tensor out, Tensor lse, " FLASHATTN3_FOUND_SCHEMA
  library.def("forward_kept" FA3_FORWARD ") -> (Tensor? out, Tensor? lse)");
  library.def("forward_kept.scores" FA3_FORWARD ", " FLASHATTN3_SCORES
              ", Tensor(a!)? max_logit=None) -> (Tensor? out, Tensor? lse)");
  library.def("backward_kept" FA3_BACKWARD ") -> (Tensor? dq, Tensor? dk, Tensor? dv)");
  library.def("backward_kept.scores" FA3_BACKWARD ", " FLASHATTN3_SCORES
              ", bool with_dbias=False) -> (Tensor? dq, Tensor? dk, Tensor? dv, Tensor? dsinks, "
              "Tensor? dbias)");
}

STABLE_TORCH_LIBRARY_IMPL(flashattn3_hopper, CUDA, library) {
  library.impl("forward_kept", forward_kept);
  library.impl("forward_kept.scores", forward_kept);
  library.impl("backward_kept", backward_kept);
  library.impl("backward_kept.scores", backward_kept);
}

// Tensors on the CPU, for which no launch is kept, get None.
STABLE_TORCH_LIBRARY_IMPL(flashattn3_hopper, CPU, library) {
  library.impl("forward_kept", forward_kept);
  library.impl("forward_kept.scores", forward_kept);
  library.impl("backward_kept", backward_kept);
  library.impl("backward_kept.scores", backward_kept);
}

}  // namespace flashattn3
