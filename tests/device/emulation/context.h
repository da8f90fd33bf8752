// Exchange of the stack that the CPU runs on, without a system call.
#pragma once

#include <cstddef>
#include <cstdint>

#ifdef __x86_64__

namespace emulation {

struct Context {
  void* stack_pointer;
};

// Keeps the registers that a function must keep on the running stack, and takes those of the other.
asm(R"(
  .pushsection .text
  .type emulation_exchange, @function
emulation_exchange:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq (%rsi), %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
  .popsection
)");
void exchange(Context& from, const Context& to) asm("emulation_exchange");

// Lets the context begin with a function that does not return.
inline void start_with(Context& context, void (*begin)(), char* stack, size_t bytes) {
  auto** top = reinterpret_cast<void**>(reinterpret_cast<uintptr_t>(stack + bytes) & -16);
  *(top -= 2) = reinterpret_cast<void*>(begin);  // where the first exchange returns to
  context.stack_pointer = top - 6;               // with six registers of any values
}

}  // namespace emulation

#else
#include <ucontext.h>

namespace emulation {

using Context = ucontext_t;

inline void exchange(Context& from, const Context& to) { swapcontext(&from, &to); }
inline void start_with(Context& context, void (*begin)(), char* stack, size_t bytes) {
  getcontext(&context);
  context.uc_stack.ss_sp = stack, context.uc_stack.ss_size = bytes;
  makecontext(&context, begin, 0);
}

}  // namespace emulation

#endif
