#include "core/comm/communicator.h"

#include <numeric>

namespace accelerate_cpp::comm {

std::vector<int> Communicator::meet(const std::string&, const Call& call) {
  barrier(call);
  std::vector<int> all(static_cast<std::size_t>(size()));
  std::iota(all.begin(), all.end(), 0);
  return all;
}

}  // namespace accelerate_cpp::comm
