// Boxed operators of torch's stable ABI: arguments are on a stack of 64-bit values. torch converts
// each value; its macro that boxes a whole function is newer than 2.9.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <cstddef>
#include <cstdint>
#include <tuple>
#include <utility>

namespace flashattn3 {

// Takes the arguments off the stack in the order of the schema. An operator takes all of them
// before it can throw, so that no tensor is leaked. count: of an operator with several schemas, one
// of which ends before the others.
class Arguments {
 public:
  explicit Arguments(StableIValue* stack, uint64_t count = 0) : next_(stack), end_(stack + count) {}

  template <class T>
  T take() {
    return ::to<T>(*next_++);
  }

  bool has_more() const { return next_ < end_; }

 private:
  StableIValue *next_, *end_;
};

template <typename... Results>
void return_results(StableIValue* stack, const std::tuple<Results...>& results) {
  std::apply([stack](const Results&... result) mutable { ((*stack++ = ::from(result)), ...); },
             results);
}

template <typename... Results, typename... Parameters, size_t... kIndex>
void call_with_stack(std::tuple<Results...> (*function)(Parameters...), StableIValue* stack,
                     std::index_sequence<kIndex...>) {
  return_results(stack, function(::to<Parameters>(stack[kIndex])...));
}

// For STABLE_TORCH_LIBRARY_IMPL. kFunction takes its parameters by value and returns a tuple.
template <auto kFunction>
void boxed(StableIValue* stack, uint64_t, uint64_t) {
  const auto call = []<typename Result, typename... Parameters>(Result (*function)(Parameters...),
                                                                StableIValue* values) {
    call_with_stack(function, values, std::index_sequence_for<Parameters...>{});
  };
  call(kFunction, stack);
}

}  // namespace flashattn3
