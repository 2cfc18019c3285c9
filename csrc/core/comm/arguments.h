// Checks of the arguments of operations, shared by every Communicator. All throw InvalidArgument.
#pragma once

#include <string>
#include <vector>

#include "core/base/memory_view.h"

namespace accelerate_cpp::comm {

// `root` names a rank of the group.
void check_root(const char* operation, int root, int size);

// `peer` names another rank of the group than `rank`.
void check_peer(const char* operation, int peer, int rank, int size);

// There is one view per rank, each of `dtype`. `role` says what they are: "input" or "output".
void check_parts(const char* operation, const char* role, const std::vector<ConstMemoryView>& parts, DType dtype,
                 int size);
void check_parts(const char* operation, const char* role, const std::vector<MemoryView>& parts, DType dtype, int size);

// A rank that is not the root passes none.
void check_no_parts(const char* operation, const char* role, std::size_t found, int root);

// An output has as many elements as the input of the same rank that it receives.
void check_counts_equal(const char* operation, ConstMemoryView input, ConstMemoryView output);

}  // namespace accelerate_cpp::comm
