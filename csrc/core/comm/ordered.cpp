#include "core/comm/ordered.h"

#include <utility>

namespace accelerate_cpp::comm {
Communicator& OrderedCommunicator::in_turn() {
  queue_->drain();
  return *inner_;
}

void OrderedCommunicator::all_reduce(MemoryView data, Reduction reduction, const Call& call) {
  in_turn().all_reduce(data, reduction, call);
}

void OrderedCommunicator::reduce(MemoryView data, int root, Reduction reduction, const Call& call) {
  in_turn().reduce(data, root, reduction, call);
}

void OrderedCommunicator::reduce_scatter(const std::vector<ConstMemoryView>& inputs, MemoryView output,
                                         Reduction reduction, const Call& call) {
  in_turn().reduce_scatter(inputs, output, reduction, call);
}

void OrderedCommunicator::broadcast(MemoryView data, int root, const Call& call) {
  in_turn().broadcast(data, root, call);
}

void OrderedCommunicator::all_gather(ConstMemoryView input, const std::vector<MemoryView>& outputs, const Call& call) {
  in_turn().all_gather(input, outputs, call);
}

void OrderedCommunicator::gather(ConstMemoryView input, const std::vector<MemoryView>& outputs, int root,
                                 const Call& call) {
  in_turn().gather(input, outputs, root, call);
}

void OrderedCommunicator::scatter(const std::vector<ConstMemoryView>& inputs, MemoryView output, int root,
                                  const Call& call) {
  in_turn().scatter(inputs, output, root, call);
}

void OrderedCommunicator::all_to_all(const std::vector<ConstMemoryView>& inputs, const std::vector<MemoryView>& outputs,
                                     const Call& call) {
  in_turn().all_to_all(inputs, outputs, call);
}

void OrderedCommunicator::barrier(const Call& call) {
  in_turn().barrier(call);
}

std::shared_ptr<Transfer> OrderedCommunicator::send(ConstMemoryView data, int destination, std::uint64_t tag,
                                                    const Call& call) {
  return inner_->send(data, destination, tag, call);  // independent of collectives
}

std::shared_ptr<Transfer> OrderedCommunicator::receive(MemoryView data, int source, std::uint64_t tag,
                                                       const Call& call) {
  return inner_->receive(data, source, tag, call);
}

std::shared_ptr<Communicator> OrderedCommunicator::split(int color, int key, const Call& call) {
  return in_turn().split(color, key, call);
}

std::vector<int> OrderedCommunicator::meet(const std::string& topic, const Call& call) {
  return in_turn().meet(topic, call);
}

void OrderedCommunicator::withdraw(const std::string& reason, const Call& call) {
  in_turn().withdraw(reason, call);
}

std::shared_ptr<Buffer> OrderedCommunicator::window(std::size_t size_bytes, const Call& call) {
  return in_turn().window(size_bytes, call);
}

std::shared_ptr<Buffer> OrderedCommunicator::allocate(std::size_t size_bytes) {
  return inner_->allocate(size_bytes);
}

}  // namespace accelerate_cpp::comm
