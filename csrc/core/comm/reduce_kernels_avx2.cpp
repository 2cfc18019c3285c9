#define ACCELERATE_KERNELS avx2
#include "core/comm/reduce_loops.h"
