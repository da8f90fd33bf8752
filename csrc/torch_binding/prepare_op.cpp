// flashattn3_hopper::prepare_forward and prepare_backward: check the numbers of a call once and
// keep them for the calls. They use no GPU.
#include <torch/csrc/stable/library.h>

#include <cstring>
#include <limits>
#include <string>
#include <type_traits>

#include "torch_binding/prepared.h"

namespace flashattn3 {
namespace {

static_assert(std::is_trivially_copyable_v<PreparedLaunch>);
constexpr int64_t kWords = (sizeof(PreparedLaunch) + 7) / 8;

template <class T>
constexpr const char* schema_type() {
  return std::is_same_v<T, bool> ? "bool" : std::is_same_v<T, float> ? "float" : "int";
}

// One argument of the schema for each field, in the order of the fields.
std::string schema(const char* name) {
  std::string text = std::string(name) + "(int config";
#define FLASHATTN3_ARGUMENT(type, field) \
  text += std::string(", ") + schema_type<type>() + " " #field;
  FLASHATTN3_PROBLEM_FIELDS(FLASHATTN3_ARGUMENT)
#undef FLASHATTN3_ARGUMENT
  return text +
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

PreparedLaunch take_launch(const char* function, Pass pass, StableIValue* stack) {
  Arguments arguments(stack);
  PreparedLaunch launch{.pass = pass, .config = arguments.take<int64_t>()};
#define FLASHATTN3_TAKE(type, field) \
  launch.problem.field = take_number<type>(function, #field, arguments);
  FLASHATTN3_PROBLEM_FIELDS(FLASHATTN3_TAKE)
#undef FLASHATTN3_TAKE
  const AttentionProblem& problem = launch.problem;
  expect(problem.batch >= 0, function, "batch", "at least 0", problem.batch);
  expect(problem.num_heads_kv >= 1, function, "num_heads_kv", "at least 1", problem.num_heads_kv);
  expect(problem.num_heads_q >= 1 && problem.num_heads_q % problem.num_heads_kv == 0, function,
         "num_heads_q", "a multiple of num_heads_kv", problem.num_heads_q);
  return launch;
}

template <class Params>
void prepare(const char* function, Pass pass, const Kernel<Params>& (*kernel_of)(int64_t),
             StableIValue* stack) {
  const PreparedLaunch launch = take_launch(function, pass, stack);
  const Kernel<Params>& kernel = kernel_of(launch.config);
  const LaunchSize size = kernel.size(kernel.info.name, launch.problem);
  const Tensor kept = new_tensor<1>({kWords}, aoti_torch_dtype_int64(), kCpu);
  std::memcpy(kept.data_ptr(), &launch, sizeof(launch));
  return_results(stack, std::tuple(kept, int64_t{size.num_ctas}, int64_t{kernel.info.num_threads},
                                   int64_t{kernel.info.shared_memory_bytes}, size.workspace_bytes));
}

void prepare_forward(StableIValue* stack, uint64_t, uint64_t) {
  prepare("prepare_forward", Pass::kForward, &forward_kernel, stack);
}

void prepare_backward(StableIValue* stack, uint64_t, uint64_t) {
  prepare("prepare_backward", Pass::kBackward, &backward_kernel, stack);
}

}  // namespace

const PreparedLaunch& prepared_launch(const char* function, Pass pass, const Tensor& tensor) {
  int32_t device;
  check_torch(aoti_torch_get_device_type(tensor.get(), &device), "asking for a device");
  const bool fits = device == aoti_torch_device_type_cpu() && tensor.numel() == kWords &&
                    dtype_of(tensor) == aoti_torch_dtype_int64() && tensor.is_contiguous();
  const char* wanted =
      pass == Pass::kForward ? "a result of prepare_forward" : "a result of prepare_backward";
  expect(fits, function, "launch", wanted, "another tensor");
  const auto* launch = static_cast<const PreparedLaunch*>(tensor.data_ptr());
  expect(launch->pass == pass, function, "launch", wanted, "another tensor");
  return *launch;
}

STABLE_TORCH_LIBRARY_FRAGMENT(flashattn3_hopper, library) {
  library.def(schema("prepare_forward").c_str());
  library.def(schema("prepare_backward").c_str());
}

STABLE_TORCH_LIBRARY_IMPL(flashattn3_hopper, CompositeExplicitAutograd, library) {
  library.impl("prepare_forward", prepare_forward);
  library.impl("prepare_backward", prepare_backward);
}

}  // namespace flashattn3
