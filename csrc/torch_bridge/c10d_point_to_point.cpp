// Sends and receives of C10dBackend.
#include <string>
#include <utility>

#include "core/base/error.h"
#include "torch_bridge/c10d_arguments.h"
#include "torch_bridge/c10d_backend.h"
#include "torch_bridge/tensor_view.h"

namespace accelerate_cpp::comm {

using ::c10d::OpType;

WorkPointer C10dBackend::send(Tensors& tensors, int destination, int tag) {
  return issue(OpType::SEND, [&] {
    Contiguous data(single(tensors, "send"), Use::kMove);
    const std::string location = hooks_.call_site();
    const std::shared_ptr<Transfer> transfer = communicator_->send(
        data.load(), destination, static_cast<std::uint64_t>(tag), Call(deadline(::c10d::kUnsetTimeout), {}, location));
    count(CallKind::kSend, data.tensor());
    std::shared_ptr<Pending> pending = pump_.post(transfer, [data] {});
    return pending_work(OpType::SEND, 0, tensors, std::move(pending), nullptr, hooks_.rethrow);
  });
}

WorkPointer C10dBackend::recv(Tensors& tensors, int source, int tag) {
  return receive(OpType::RECV, tensors, source, tag);
}

WorkPointer C10dBackend::recvAnysource(Tensors& tensors, int tag) {
  return receive(OpType::RECVANYSOURCE, tensors, Communicator::kAnySource, tag);
}

WorkPointer C10dBackend::receive(OpType type, Tensors& tensors, int source, int tag) {
  return issue(type, [&] {
    if (type == OpType::RECV && source < 0) {
      throw InvalidArgument("recv: rank " + std::to_string(source) + " is not a rank of this group");
    }
    Contiguous data(single(tensors, "recv"), Use::kMove);
    const std::string location = hooks_.call_site();
    const std::shared_ptr<Transfer> transfer = communicator_->receive(
        data.reserve(), source, static_cast<std::uint64_t>(tag), Call(deadline(::c10d::kUnsetTimeout), {}, location));
    count(CallKind::kReceive, data.tensor());
    std::shared_ptr<Pending> pending = pump_.post(transfer, [data] { data.store(); });
    return pending_work(type, 0, tensors, std::move(pending), transfer, hooks_.rethrow);
  });
}

}  // namespace accelerate_cpp::comm
