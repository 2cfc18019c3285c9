#include "core/comm/communicator.h"

#include <numeric>

#include "core/base/error.h"

namespace accelerate_cpp::comm {

std::shared_ptr<Buffer> Communicator::window(std::size_t, const Call&) {
  throw InvalidArgument("window: only ranks that share a host and communicate through shared memory share a window");
}

std::vector<int> Communicator::meet(const std::string&, const Call& call) {
  barrier(call);
  std::vector<int> all(static_cast<std::size_t>(size()));
  std::iota(all.begin(), all.end(), 0);
  return all;
}

}  // namespace accelerate_cpp::comm
