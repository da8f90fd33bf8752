// Emulation of setmaxnreg.
#pragma once

#include "../../emulation.h"

namespace cutlass::arch {

template <int kRegisters>
void warpgroup_reg_alloc() {
  emulation::change_registers(kRegisters);
}
template <int kRegisters>
void warpgroup_reg_dealloc() {
  emulation::change_registers(kRegisters);
}

}  // namespace cutlass::arch
