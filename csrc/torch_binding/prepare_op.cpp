// flashattn3_hopper::prepare_forward, prepare_backward and prepare_decode: check the numbers of a
// call once and keep them for the calls. They use no GPU.
#include <torch/csrc/stable/library.h>

#include <cstring>
#include <limits>
#include <string>
#include <type_traits>

#include "launch/byte_decode_params.h"
#include "launch/errors.h"
#include "torch_binding/launch_record.h"

namespace flashattn3 {
namespace {

template <class T>
constexpr const char* schema_type() {
  return std::is_same_v<T, bool> ? "bool" : std::is_same_v<T, float> ? "float" : "int";
}

// One argument of the schemas for each field, in the order of the fields.
#define FLASHATTN3_ARGUMENT(type, field) \
  text += std::string(", ") + schema_type<type>() + " " #field;
std::string fields_of_attention() {
  std::string text;
  FLASHATTN3_PROBLEM_FIELDS(FLASHATTN3_ARGUMENT)
  return text;
}
std::string fields_of_cached_call() {
  std::string text;
  FLASHATTN3_CACHED_FIELDS(FLASHATTN3_ARGUMENT)
  return text;
}
#undef FLASHATTN3_ARGUMENT

std::string schema(const char* name) {
  return std::string(name) + "(int config" + fields_of_attention() +
         ") -> (Tensor launch, int num_ctas, int num_threads, int shared_memory_bytes, "
         "int workspace_bytes)";
}

template <class T>
T take_number(const char* function, const char* name, Arguments& arguments) {
  if constexpr (std::is_same_v<T, bool>) {
    return arguments.take<bool>();
  } else if constexpr (std::is_same_v<T, float>) {
    return static_cast<float>(arguments.take<double>());
  } else {
    const int64_t number = arguments.take<int64_t>();
    using Limits = std::numeric_limits<T>;
    expect(number >= Limits::min() && number <= Limits::max(), function, name,
           "a number of 32 bits", number);
    return static_cast<T>(number);
  }
}

void check_heads(const char* function, int num_heads_q, int num_heads_kv) {
  expect(num_heads_kv >= 1, function, "num_heads_kv", "at least 1", num_heads_kv);
  expect(num_heads_q >= 1 && num_heads_q % num_heads_kv == 0, function, "num_heads_q",
         "a multiple of num_heads_kv", num_heads_q);
}

AttentionLaunch take_launch(const char* function, Pass pass, StableIValue* stack) {
  Arguments arguments(stack);
  AttentionLaunch launch{.pass = pass, .config = arguments.take<int64_t>()};
#define FLASHATTN3_TAKE(type, field) \
  launch.problem.field = take_number<type>(function, #field, arguments);
  FLASHATTN3_PROBLEM_FIELDS(FLASHATTN3_TAKE)
#undef FLASHATTN3_TAKE
  const AttentionProblem& problem = launch.problem;
  expect(problem.batch >= 0, function, "batch", "at least 0", problem.batch);
  check_heads(function, problem.num_heads_q, problem.num_heads_kv);
  return launch;
}

CachedLaunch take_decode(const char* function, StableIValue* stack) {
  Arguments arguments(stack);
  CachedLaunch launch{.pass = Pass::kDecode, .config = arguments.take<int64_t>()};
#define FLASHATTN3_TAKE(type, field) \
  launch.problem.field = take_number<type>(function, #field, arguments);
  FLASHATTN3_CACHED_FIELDS(FLASHATTN3_TAKE)
#undef FLASHATTN3_TAKE
  const CachedProblem& problem = launch.problem;
  check_heads(function, problem.num_heads_q, problem.num_heads_kv);
  expect(problem.page_size >= 0, function, "page_size", "at least 0", problem.page_size);
  expect(problem.num_sms >= 1, function, "num_sms", "at least 1", problem.num_sms);
  return launch;
}

template <class Launch>
constexpr int64_t kWords = (sizeof(Launch) + 7) / 8;

template <class Launch>
Tensor kept(const Launch& launch) {
  static_assert(std::is_trivially_copyable_v<Launch>);
  const Tensor tensor = new_tensor({1, {kWords<Launch>}}, aoti_torch_dtype_int64(), kCpu);
  std::memcpy(tensor.data_ptr(), &launch, sizeof(launch));
  return tensor;
}

// The launch in a tensor; null if the tensor cannot hold one.
template <class Launch>
const Launch* launch_in(const Tensor& tensor) {
  int32_t device;
  check_torch(aoti_torch_get_device_type(tensor.get(), &device), "asking for a device");
  const bool fits = device == aoti_torch_device_type_cpu() && tensor.numel() == kWords<Launch> &&
                    dtype_of(tensor) == aoti_torch_dtype_int64() && tensor.is_contiguous();
  return fits ? static_cast<const Launch*>(tensor.data_ptr()) : nullptr;
}

// wanted: the operator whose result the tensor must be.
template <class Launch>
const Launch& found(const char* function, Pass pass, const char* wanted, const Tensor& tensor) {
  const Launch* launch = launch_in<Launch>(tensor);
  expect(launch != nullptr && launch->pass == pass, function, "launch", wanted, "another tensor");
  return *launch;
}

template <class Params>
void prepare(const char* function, Pass pass, const Kernel<Params>& (*kernel_of)(int64_t),
             StableIValue* stack) {
  const AttentionLaunch launch = take_launch(function, pass, stack);
  const Kernel<Params>& kernel = kernel_of(launch.config);
  const LaunchSize size = kernel.size(kernel.info.name, launch.problem);
  return_results(stack,
                 std::tuple(kept(launch), int64_t{size.num_ctas}, int64_t{kernel.info.num_threads},
                            int64_t{kernel.info.shared_memory_bytes}, size.workspace_bytes));
}

void prepare_forward(StableIValue* stack, uint64_t, uint64_t) {
  prepare("prepare_forward", Pass::kForward, &forward_kernel, stack);
}

void prepare_backward(StableIValue* stack, uint64_t, uint64_t) {
  prepare("prepare_backward", Pass::kBackward, &backward_kernel, stack);
}

// The grid and the workspace depend on the sizes of a call: decode_size.
void prepare_decode(StableIValue* stack, uint64_t, uint64_t) {
  const CachedLaunch launch = take_decode("prepare_decode", stack);
  const DecodeKernel& kernel = decode_kernel(launch.config);
  const auto check_cache = [&](const DecodeKernel& of) {
    const bool byte_cache = launch.problem.byte_cache;
    expect(byte_cache || !reads_bytes(of.info.name), "prepare_decode", "byte_cache",
           std::string("true for ") + of.info.name, "false");
  };
  check_cache(kernel);
  if (launch.problem.short_config >= 0) check_cache(decode_kernel(launch.problem.short_config));
  kernel.size(kernel.info.name, decode_params_of(launch.problem));  // throws for what it refuses
  return_results(stack, std::tuple(kept(launch), int64_t{kernel.info.num_threads},
                                   int64_t{kernel.info.shared_memory_bytes}));
}

}  // namespace

const AttentionLaunch& attention_launch(const char* function, Pass pass, const Tensor& tensor) {
  const char* wanted =
      pass == Pass::kForward ? "a result of prepare_forward" : "a result of prepare_backward";
  return found<AttentionLaunch>(function, pass, wanted, tensor);
}

const CachedLaunch& cached_launch(const char* function, const Tensor& tensor) {
  return found<CachedLaunch>(function, Pass::kDecode, "a result of prepare_decode", tensor);
}

STABLE_TORCH_LIBRARY_FRAGMENT(flashattn3_hopper, library) {
  library.def(schema("prepare_forward").c_str());
  library.def(schema("prepare_backward").c_str());
  library.def(("prepare_decode(int config" + fields_of_cached_call() +
               ") -> (Tensor launch, int num_threads, int shared_memory_bytes)")
                  .c_str());
}

STABLE_TORCH_LIBRARY_IMPL(flashattn3_hopper, CompositeExplicitAutograd, library) {
  library.impl("prepare_forward", prepare_forward);
  library.impl("prepare_backward", prepare_backward);
  library.impl("prepare_decode", prepare_decode);
}

}  // namespace flashattn3
