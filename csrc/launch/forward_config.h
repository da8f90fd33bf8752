// The row struct for those who name kernels: the generated units, the registry, the checks.
#pragma once

#include "forward/config.h"
