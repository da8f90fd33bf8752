// Emulation of the election of a lane.
#pragma once

#include "emulation.h"

namespace cute {

inline bool elect_one_sync() { return threadIdx.x % 32 == 0; }

}  // namespace cute
