// Programmatic dependent launch: a kernel's CTAs may take their places while the kernel before it
// in the stream still runs its last ones.
#pragma once

namespace flashattn3 {

// Lets a dependent kernel begin as soon as there is room; it still waits below for this one's end.
__device__ __forceinline__ void launch_dependents() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// Until the kernels before are complete and what they wrote can be seen. At once where the launch
// did not ask for an early start.
__device__ __forceinline__ void griddepcontrol_wait() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

}  // namespace flashattn3
