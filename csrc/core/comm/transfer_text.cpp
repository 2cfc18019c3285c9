#include "core/comm/transfer_text.h"

#include "core/comm/call.h"
#include "core/comm/communicator.h"

namespace accelerate_cpp::comm {

std::string TransferText::describe() const {
  const std::string other = peer == Communicator::kAnySource ? "any rank" : "rank " + std::to_string(peer);
  return std::string(is_send ? "send" : "receive") + " of " + std::to_string(count) + " " + name(dtype) +
         (is_send ? " to " : " from ") + other + " with tag " + std::to_string(tag) + " on rank " +
         std::to_string(rank) + CallSite(location).suffix();
}

MismatchedCollective TransferText::mismatch(int source, std::size_t sent_count, DType sent_dtype) const {
  return MismatchedCollective("rank " + std::to_string(source) + " sent " + std::to_string(sent_count) + " " +
                              name(sent_dtype) + " with tag " + std::to_string(tag) + ", but the matching call was " +
                              describe() + kTransfersMustFit);
}

}  // namespace accelerate_cpp::comm
