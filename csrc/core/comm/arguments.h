// Checks of the operands of collectives, shared by every Communicator. All throw InvalidArgument.
#pragma once

#include <string>
#include <vector>

#include "core/base/memory_view.h"

namespace accelerate_cpp::comm {

// `root` names a rank of the group.
void check_root(const char* operation, int root, int size);

// There is one view per rank, each with the dtype and count of `one`.
void check_per_rank(const char* operation, ConstMemoryView one, const std::vector<ConstMemoryView>& per_rank, int size);
void check_per_rank(const char* operation, ConstMemoryView one, const std::vector<MemoryView>& per_rank, int size);

}  // namespace accelerate_cpp::comm
