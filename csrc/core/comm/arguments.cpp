#include "core/comm/arguments.h"

#include "core/base/error.h"

namespace accelerate_cpp::comm {
namespace {

template <class View>
void check_views(const char* operation, const char* role, const std::vector<View>& parts, DType dtype, int size) {
  if (parts.size() != static_cast<std::size_t>(size)) {
    throw InvalidArgument(std::string(operation) + ": expected " + std::to_string(size) + " " + role +
                          " tensors, one per rank, found " + std::to_string(parts.size()));
  }
  for (std::size_t r = 0; r < parts.size(); ++r) {
    if (parts[r].dtype != dtype) {
      throw InvalidArgument(std::string(operation) + ": the " + role + " tensor for rank " + std::to_string(r) +
                            " is " + name(parts[r].dtype) + ", expected " + name(dtype));
    }
  }
}

}  // namespace

void check_root(const char* operation, int root, int size) {
  if (root < 0 || root >= size) {
    throw InvalidArgument(std::string(operation) + ": root " + std::to_string(root) +
                          " is not a rank of this group of " + std::to_string(size));
  }
}

void check_peer(const char* operation, int peer, int rank, int size) {
  if (peer < 0 || peer >= size || peer == rank) {
    throw InvalidArgument(std::string(operation) + ": rank " + std::to_string(peer) +
                          " is not another rank of this group of " + std::to_string(size));
  }
}

void check_parts(const char* operation, const char* role, const std::vector<ConstMemoryView>& parts, DType dtype,
                 int size) {
  check_views(operation, role, parts, dtype, size);
}

void check_parts(const char* operation, const char* role, const std::vector<MemoryView>& parts, DType dtype, int size) {
  check_views(operation, role, parts, dtype, size);
}

void check_no_parts(const char* operation, const char* role, std::size_t found, int root) {
  if (found != 0) {
    throw InvalidArgument(std::string(operation) + ": only rank " + std::to_string(root) + ", the root, passes " +
                          role + " tensors; found " + std::to_string(found) + " elsewhere");
  }
}

void check_counts_equal(const char* operation, ConstMemoryView input, ConstMemoryView output) {
  if (input.count != output.count) {
    throw InvalidArgument(std::string(operation) + ": the output of " + std::to_string(output.count) +
                          " elements does not fit its input of " + std::to_string(input.count));
  }
}

}  // namespace accelerate_cpp::comm
