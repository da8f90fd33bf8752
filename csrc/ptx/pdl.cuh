// Programmatic dependent launch (PDL): CTAs of a kernel may start while the kernel before it in
// the stream still runs its last CTAs.
#pragma once

namespace flashattn3 {

// Lets the dependent kernel start as soon as SMs have room. It still waits, in
// griddepcontrol_wait(), until this kernel is complete.
__device__ __forceinline__ void launch_dependents() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// Waits until the preceding kernels are complete and their writes are visible. Returns at once if
// the launch did not request an early start.
__device__ __forceinline__ void griddepcontrol_wait() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

}  // namespace flashattn3
