#define ACCELERATE_KERNELS avx512
#include "core/comm/reduce_loops.h"
