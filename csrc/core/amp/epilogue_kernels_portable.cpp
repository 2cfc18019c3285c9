#define ACCELERATE_KERNELS portable
#include "core/amp/epilogue_loops.h"
