#include "core/comm/arguments.h"

#include "core/base/error.h"

namespace accelerate_cpp::comm {
namespace {

template <class View>
void check_views(const char* operation, ConstMemoryView one, const std::vector<View>& per_rank, int size) {
  if (per_rank.size() != static_cast<std::size_t>(size)) {
    throw InvalidArgument(std::string(operation) + ": expected " + std::to_string(size) +
                          " tensors, one per rank, found " + std::to_string(per_rank.size()));
  }
  for (std::size_t r = 0; r < per_rank.size(); ++r) {
    if (per_rank[r].dtype != one.dtype || per_rank[r].count != one.count) {
      throw InvalidArgument(std::string(operation) + ": the tensor for rank " + std::to_string(r) + " has " +
                            std::to_string(per_rank[r].count) + " elements of " + name(per_rank[r].dtype) +
                            ", expected " + std::to_string(one.count) + " of " + name(one.dtype));
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

void check_per_rank(const char* operation, ConstMemoryView one, const std::vector<ConstMemoryView>& per_rank,
                    int size) {
  check_views(operation, one, per_rank, size);
}

void check_per_rank(const char* operation, ConstMemoryView one, const std::vector<MemoryView>& per_rank, int size) {
  check_views(operation, one, per_rank, size);
}

}  // namespace accelerate_cpp::comm
