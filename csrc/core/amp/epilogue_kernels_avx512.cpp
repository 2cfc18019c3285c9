#define ACCELERATE_KERNELS avx512
#include "core/amp/epilogue_loops.h"
