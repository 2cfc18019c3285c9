#define ACCELERATE_KERNELS avx2
#include "core/amp/epilogue_loops.h"
