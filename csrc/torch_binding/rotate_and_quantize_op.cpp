// flashattn3_hopper::rotate_and_quantize: q, k and v of 8 bits from a projection's output, in one
// launch on torch's current stream. The notes in forward_op.cpp apply.
//
// The operator itself decides whether the kernel reads the tensors of a call where they lie, so
// that Python checks and converts those of other calls alone.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <optional>
#include <tuple>

#include "launch/quantize.h"
#include "quantize_limits.h"
#include "torch_binding/boxed.h"
#include "torch_binding/quantized_tensors.h"
#include "torch_binding/tensors.h"

namespace flashattn3 {
namespace {

using Optional = std::optional<Tensor>;

constexpr char kName[] = "rotate_and_quantize";
constexpr int64_t kVec = 8;  // elements of 16 bytes

// Arguments of a call, in the order of the schema. Its overload "further" has the tensors behind
// `together`, which most calls lack: torch takes time for each argument. Without k and v q is alone
// or, where num_heads_q is not -1, has their heads behind its own. mean: of k, as QuantizeParams
// has it. signs: of the rotation of the head dim; none: no rotation. Norms: fp32 (head_dim,).
// max_seqlen: -1 without cu_seqlens. together: all results in one allocation, which torch forbids
// the results of custom operators.
struct Call {
  Tensor q;
  Optional k, v, cos, sin, signs;
  int64_t num_heads_q;
  bool interleaved;
  double eps;
  int64_t block, max_seqlen;
  bool int8, together;
  Optional positions, q_norm, k_norm, cu_seqlens, mean;

  static Call take(Arguments& arguments) {
    const auto optional = [&] { return arguments.take<Optional>(); };
    Call call{.q = arguments.take<Tensor>(),
              .k = optional(),
              .v = optional(),
              .cos = optional(),
              .sin = optional(),
              .signs = optional(),
              .num_heads_q = arguments.take<int64_t>(),
              .interleaved = arguments.take<bool>(),
              .eps = arguments.take<double>(),
              .block = arguments.take<int64_t>(),
              .max_seqlen = arguments.take<int64_t>(),
              .int8 = arguments.take<bool>(),
              .together = arguments.take<bool>()};
    if (!arguments.has_more()) return call;
    call.positions = optional();
    call.q_norm = optional();
    call.k_norm = optional();
    call.cu_seqlens = optional();
    call.mean = optional();
    return call;
  }

  int64_t axes() const { return cu_seqlens ? 3 : 4; }
  bool packed() const { return num_heads_q > 0; }
  // The length of the longest sequence.
  int64_t seqlen() const { return cu_seqlens ? std::min(max_seqlen, q.size(0)) : q.size(1); }
};

// Whether the kernel reads the tensors of a call where they lie.
class Fit {
 public:
  explicit Fit(const Call& call)
      : call_(call),
        device_(call.q.get_device_index()),
        dtype_(dtype_of(call.q)),
        fp32_(aoti_torch_dtype_float32()) {}

  bool of_call() const {
    const Tensor& q = call_.q;
    const int64_t last = call_.axes() - 1;
    const bool is_16_bit =
        dtype_ == aoti_torch_dtype_bfloat16() || dtype_ == aoti_torch_dtype_float16();
    if (!is_16_bit || !q.is_cuda() || q.dim() != last + 1) return false;
    const int64_t head_dim = q.size(last), heads = q.size(last - 1);
    if (head_dim < kVec || head_dim > quantize::kMaxHeadDim || !in_vecs(q)) return false;
    if (call_.signs && !std::has_single_bit(static_cast<uint64_t>(head_dim))) return false;
    const bool has_k = call_.packed() || call_.k;
    return (call_.packed() ? of_packed(heads) : of_sides(heads)) && of_edges() &&
           of_norm(call_.q_norm, head_dim) && of_norm(call_.k_norm, head_dim) &&
           (has_k || !call_.k_norm) && of_rotation(head_dim);
  }

 private:
  bool is_beside_q(const Tensor& x) const { return x.is_cuda() && x.get_device_index() == device_; }

  // Every 8 elements of a token's head are at a multiple of 16 bytes.
  static bool in_vecs(const Tensor& x) {
    const int64_t last = x.dim() - 1;
    bool fits = x.stride(last) == 1 && x.size(last) % kVec == 0 && is_aligned(x);
    for (int64_t axis = 0; fits && axis < last; ++axis) fits = x.stride(axis) % kVec == 0;
    return fits;
  }

  // Whether q's heads can share those of k and v.
  static bool divides(int64_t heads_q, int64_t heads_kv) {
    return heads_q > 0 && heads_kv > 0 && heads_q % heads_kv == 0;
  }

  bool of_packed(int64_t heads) const {
    const int64_t rest = heads - call_.num_heads_q;
    return !call_.k && !call_.v && rest % 2 == 0 && divides(call_.num_heads_q, rest / 2);
  }

  bool of_sides(int64_t heads) const {
    if (call_.k.has_value() != call_.v.has_value()) return false;
    if (!call_.k) return true;
    const Tensor &k = *call_.k, &v = *call_.v;
    const int64_t last = call_.axes() - 1;
    if (!is_like_q(k) || !is_like_q(v) || !divides(heads, k.size(last - 1))) return false;
    const int64_t columns = v.size(last);
    return k.size(last) == call_.q.size(last) && in_vecs(k) &&
           v.size(last - 1) == k.size(last - 1) && columns >= 1 &&
           columns <= quantize::kMaxHeadDim && (columns == 1 || v.stride(last) == 1);
  }

  // Whether x has q's axes, dtype, number of tokens and device.
  bool is_like_q(const Tensor& x) const {
    bool fits = x.dim() == call_.axes() && dtype_of(x) == dtype_ && is_beside_q(x);
    for (int64_t axis = 0; fits && axis < x.dim() - 2; ++axis) {
      fits = x.size(axis) == call_.q.size(axis);
    }
    return fits;
  }

  bool of_edges() const {
    const Optional& edges = call_.cu_seqlens;
    if (edges.has_value() != (call_.max_seqlen >= 0)) return false;
    return !edges || (edges->dim() == 1 && edges->size(0) >= 1 && edges->is_contiguous() &&
                      dtype_of(*edges) == aoti_torch_dtype_int32() && is_beside_q(*edges));
  }

  bool of_norm(const Optional& weight, int64_t head_dim) const {
    return !weight || (weight->dim() == 1 && weight->size(0) == head_dim &&
                       dtype_of(*weight) == fp32_ && is_table(*weight));
  }

  bool is_table(const Tensor& x) const {
    return x.is_contiguous() && is_aligned(x) && is_beside_q(x);
  }

  bool of_rotation(int64_t head_dim) const {
    const Optional &cos = call_.cos, &sin = call_.sin, &positions = call_.positions;
    if (cos.has_value() != sin.has_value() || (!cos && positions)) return false;
    if (!cos) return true;
    const int32_t dtype = dtype_of(*cos);
    if (cos->dim() != 2 || sin->dim() != 2 || (dtype != fp32_ && dtype != dtype_)) return false;
    const int64_t rows = cos->size(0), half = cos->size(1);
    const bool in_pairs = call_.interleaved ? half >= 1 && half % (kVec / 2) == 0
                                            : half == 32 || half == 64 || half == 128;
    const bool fits = in_pairs && 2 * half <= head_dim && rows >= 1 && is_table(*cos) &&
                      sin->size(0) == rows && sin->size(1) == half && dtype_of(*sin) == dtype &&
                      is_table(*sin);
    if (!fits) return false;
    return positions ? are_positions(*positions) : rows >= call_.seqlen();
  }

  bool are_positions(const Tensor& x) const {
    const int32_t dtype = dtype_of(x);
    bool fits = x.dim() == call_.axes() - 2 && x.is_contiguous() && is_beside_q(x) &&
                (dtype == aoti_torch_dtype_int32() || dtype == aoti_torch_dtype_int64());
    for (int64_t axis = 0; fits && axis < x.dim(); ++axis) {
      fits = x.size(axis) == call_.q.size(axis);
    }
    return fits;
  }

  const Call& call_;
  int64_t device_;
  int32_t dtype_, fp32_;
};

// The rotary embedding of q and k, without a norm.
EmbeddingParams embedding_of(const Call& call) {
  EmbeddingParams params{.eps = static_cast<float>(call.eps)};
  if (!call.cos) return params;
  params.tables_are_fp32 = dtype_of(*call.cos) == aoti_torch_dtype_float32();
  params.cos = call.cos->data_ptr();
  params.sin = call.sin->data_ptr();
  params.interleaved = call.interleaved;
  params.num_positions = to_int(kName, "the number of positions", call.cos->size(0));
  params.half = static_cast<int>(call.cos->size(1));
  if (call.positions) {
    params.positions = call.positions->data_ptr();
    params.positions_are_i64 = dtype_of(*call.positions) == aoti_torch_dtype_int64();
  }
  return params;
}

const float* weight_of(const Optional& norm) {
  return norm ? static_cast<const float*>(norm->data_ptr()) : nullptr;
}

// `count` heads of a tensor, from `first` on.
TokenTensor heads_of(TokenTensor rows, int first, int count) {
  rows.data = static_cast<const uint16_t*>(rows.data) + first * rows.stride.head;
  rows.num_heads = count;
  return rows;
}

// Data and descale of q, k and v: none of k and v where q is alone, none at all for tensors that
// the kernel does not read.
using Results = std::tuple<Optional, Optional, Optional, Optional, Optional, Optional>;

Results run(const Call& call) {
  if (!Fit(call).of_call()) return {};
  const int device = call.q.get_device_index();
  const DeviceGuard guard(device);
  const auto rows_of = [&](const Tensor& x) {
    return token_tensor(kName, x, call.cu_seqlens, call.seqlen());
  };
  Form of_q{.mean = std::nullopt, .signs = call.signs, .permuted = false, .int8 = call.int8};
  of_q.embedding = embedding_of(call);
  Form of_k = of_q;
  of_k.mean = call.mean;
  of_q.embedding.weight = weight_of(call.q_norm);
  of_k.embedding.weight = weight_of(call.k_norm);
  const Memory memory = call.together ? Memory::kOfAll : Memory::kOfEach;
  TokenTensor q = rows_of(call.q), k, v;
  const ElementType dtype = sixteen_bit_type(kName, call.q);
  if (call.packed()) {
    const int heads = static_cast<int>(call.num_heads_q), of_keys = (q.num_heads - heads) / 2;
    k = heads_of(q, heads, of_keys);
    v = heads_of(q, heads + of_keys, of_keys);
    q = heads_of(q, 0, heads);
  } else if (call.k) {
    k = rows_of(*call.k);
    v = rows_of(*call.v);
  } else {
    const auto [one] = quantize_all(kName, {Source{q, of_q}}, dtype, call.block, device, memory);
    return {one.data, one.descale, {}, {}, {}, {}};
  }
  const Source sources[] = {{q, of_q}, {k, of_k}, {v, kFormOfV}};
  const auto [x, y, z] = quantize_all(kName, sources, dtype, call.block, device, memory);
  return {x.data, x.descale, y.data, y.descale, z.data, z.descale};
}

void rotate_and_quantize(StableIValue* stack, uint64_t num_arguments, uint64_t) {
  Arguments arguments(stack, num_arguments);
  const Call call = Call::take(arguments);
  return_results(stack, run(call));
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(flashattn3_hopper, library) {
#define FA3_CALL                                                                                \
  "(Tensor q, Tensor? k, Tensor? v, Tensor? cos, Tensor? sin, Tensor? signs, int num_heads_q, " \
  "bool interleaved, float eps, int block, int max_seqlen, bool int8, bool together"
#define FA3_RESULTS                                                                       \
  ") -> (Tensor? q, Tensor? q_descale, Tensor? k, Tensor? k_descale, Tensor? v, Tensor? " \
  "v_descale)"
  library.def("rotate_and_quantize" FA3_CALL FA3_RESULTS);
  library.def("rotate_and_quantize.further" FA3_CALL
              ", Tensor? positions, Tensor? q_norm, Tensor? k_norm, Tensor? cu_seqlens, "
              "Tensor? k_mean" FA3_RESULTS);
}

STABLE_TORCH_LIBRARY_IMPL(flashattn3_hopper, CUDA, library) {
  library.impl("rotate_and_quantize", rotate_and_quantize);
  library.impl("rotate_and_quantize.further", rotate_and_quantize);
}

// Tensors on the CPU, which the kernel does not read, get None.
STABLE_TORCH_LIBRARY_IMPL(flashattn3_hopper, CPU, library) {
  library.impl("rotate_and_quantize", rotate_and_quantize);
  library.impl("rotate_and_quantize.further", rotate_and_quantize);
}

}  // namespace flashattn3
