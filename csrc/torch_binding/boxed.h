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

template <typename... Arguments, size_t... kIndex>
void call_with_stack(void (*function)(Arguments...), StableIValue* stack,
                     std::index_sequence<kIndex...>) {
  function(::to<Arguments>(stack[kIndex])...);
}

template <typename... Results, typename... Arguments, size_t... kIndex>
void call_with_stack(std::tuple<Results...> (*function)(Arguments...), StableIValue* stack,
                     std::index_sequence<kIndex...>) {
  const std::tuple<Results...> results = function(::to<Arguments>(stack[kIndex])...);
  std::apply([stack](const Results&... result) mutable { ((*stack++ = ::from(result)), ...); },
             results);
}

template <typename Results, typename... Arguments>
void call_with_stack(Results (*function)(Arguments...), StableIValue* stack) {
  call_with_stack(function, stack, std::index_sequence_for<Arguments...>{});
}

// For STABLE_TORCH_LIBRARY_IMPL. kFunction takes its parameters by value and returns a tuple or
// void.
template <auto kFunction>
void boxed(StableIValue* stack, uint64_t, uint64_t) {
  call_with_stack(kFunction, stack);
}

}  // namespace flashattn3
