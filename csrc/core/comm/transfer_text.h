// How messages speak of sends and receives.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "core/base/dtype.h"
#include "core/base/error.h"

namespace accelerate_cpp::comm {

inline constexpr const char* kTransfersMustFit = ". Send and receive tensors must have equal shapes and dtypes";

// A send or a receive as its caller asked for it.
struct TransferText {
  bool is_send;
  std::size_t count;
  DType dtype;
  int peer;  // or Communicator::kAnySource
  std::uint64_t tag;
  int rank;  // that asked
  std::string location;

  // "receive of 3 float32 from any rank with tag 7 on rank 0 at train.py:88".
  std::string describe() const;

  // For a receive that takes a message of other elements.
  MismatchedCollective mismatch(int source, std::size_t sent_count, DType sent_dtype) const;
};

}  // namespace accelerate_cpp::comm
