// The reducers that there are in this process. Thread-safe.
#pragma once

#include <cstdint>

#include "torch_bridge/gradient_reducer.h"

namespace accelerate_cpp::grad {

// The others leave to it the parameters that it has in common with them.
void add_reducer(GradientReducer& reducer);
void remove_reducer(GradientReducer& reducer);

// To be called when some module of the program gets a parameter or a submodule; how often it was.
void note_registration() noexcept;
std::uint64_t registrations() noexcept;

}  // namespace accelerate_cpp::grad
