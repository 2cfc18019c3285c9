// All-reduces of many operands in one go, such as the gradients of a model: small ones of one dtype travel together.
//
// How they travel depends on their dtypes, counts and order alone, which all ranks must have alike. Large operands are
// reduced where they lie.
#pragma once

#include <cstddef>
#include <memory>
#include <string_view>
#include <vector>

#include "core/base/deadline.h"
#include "core/base/memory_view.h"
#include "core/comm/communicator.h"

namespace accelerate_cpp::comm {

// One operand. `input` may be `output`, but not overlap it otherwise.
struct Reduced {
  ConstMemoryView input;
  MemoryView output;  // as `input`
  Shape shape;        // for messages about ranks whose operands differ
};

class AllReduceTogether {
 public:
  // Operands up to kSmallOperandBytes travel together, in pieces of up to kRoomBytes.
  static constexpr std::size_t kSmallOperandBytes = std::size_t{64} << 10;
  static constexpr std::size_t kRoomBytes = std::size_t{1} << 20;

  explicit AllReduceTogether(std::shared_ptr<Communicator> communicator) : communicator_(std::move(communicator)) {}

  // Returns when every output holds the reduction of the inputs of all ranks. Errors as in Communicator. One thread at
  // a time.
  void run(const std::vector<Reduced>& operands, Reduction reduction, const Deadline& deadline,
           std::string_view location = {});

 private:
  void reduce_packed(const std::vector<Reduced>& pack, Reduction reduction, const Call& call);

  std::shared_ptr<Communicator> communicator_;
  std::shared_ptr<Buffer> room_;  // from the first small operand on
};

}  // namespace accelerate_cpp::comm
