#define ACCELERATE_KERNELS portable
#include "core/comm/reduce_loops.h"
