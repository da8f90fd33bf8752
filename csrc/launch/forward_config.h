// forward::Config, for the files that name kernel configs: generated units, registry, checks.
#pragma once

#include "forward/config.h"
