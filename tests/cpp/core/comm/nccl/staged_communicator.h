// Lets an NcclCommunicator work on operands in the memory of the host, by copying them to its GPU and back: so the
// conformance suite, which looks into its operands, runs on GPUs too.
#pragma once

#include <algorithm>
#include <map>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "core/comm/heap_buffer.h"
#include "core/comm/nccl/cuda_objects.h"
#include "core/comm/nccl/nccl_communicator.h"

namespace accelerate_cpp::comm::testing {

// Copies between host and device that are complete when they return.
class Copier {
 public:
  explicit Copier(std::shared_ptr<const CudaDevice> device) : stream_(std::move(device)) {}

  void copy(void* destination, const void* source, std::size_t size_bytes) {
    stream_.copy(destination, source, size_bytes);
    while (!stream_.idle()) {
      std::this_thread::yield();
    }
  }

 private:
  DeviceStream stream_;
};

// Device memory for operands of the host. Operands that touch or overlap do so on the device as well.
class Mirror {
 public:
  Mirror(Communicator& communicator, Copier& copier, const std::vector<ConstMemoryView>& operands) : copier_(copier) {
    std::vector<std::pair<const std::byte*, const std::byte*>> ranges;
    for (const ConstMemoryView& operand : operands) {
      if (operand.count > 0) {
        ranges.emplace_back(operand.bytes(), operand.bytes() + operand.size_bytes());
      }
    }
    std::sort(ranges.begin(), ranges.end());
    for (const auto& [begin, end] : ranges) {
      if (!blocks_.empty() && begin <= blocks_.rbegin()->second.end) {
        blocks_.rbegin()->second.end = std::max(blocks_.rbegin()->second.end, end);
      } else {
        blocks_[begin] = {end, nullptr};
      }
    }
    for (auto& [begin, block] : blocks_) {
      const auto size_bytes = static_cast<std::size_t>(block.end - begin);
      block.memory = communicator.allocate(size_bytes);
      copier_.copy(block.memory->data(), begin, size_bytes);
    }
  }

  MemoryView at(const ConstMemoryView& operand) const {
    if (operand.count == 0) {
      return {nullptr, 0, operand.dtype};
    }
    const auto& [begin, block] = *std::prev(blocks_.upper_bound(operand.bytes()));
    return {static_cast<std::byte*>(block.memory->data()) + (operand.bytes() - begin), operand.count, operand.dtype};
  }
  template <class View>
  std::vector<View> at(const std::vector<View>& operands) const {
    std::vector<View> result;
    for (const View& operand : operands) {
      result.push_back(at(operand));
    }
    return result;
  }

  void bring_back(const MemoryView& operand) const {
    if (operand.count > 0) {
      copier_.copy(operand.data, at(operand).data, operand.size_bytes());
    }
  }
  void bring_back(const std::vector<MemoryView>& operands) const {
    for (const MemoryView& operand : operands) {
      bring_back(operand);
    }
  }

 private:
  struct Block {
    const std::byte* end;
    std::shared_ptr<Buffer> memory;
  };

  Copier& copier_;
  std::map<const std::byte*, Block> blocks_;  // by their beginning in the memory of the host
};

class StagedTransfer final : public Transfer {
 public:
  StagedTransfer(std::unique_ptr<Mirror> mirror, std::shared_ptr<Transfer> inner, MemoryView received)
      : mirror_(std::move(mirror)), inner_(std::move(inner)), received_(received) {}
  bool poll() noexcept override { return inner_->poll(); }
  void wait(Deadline deadline) override {
    inner_->wait(deadline);
    mirror_->bring_back(received_);
  }
  int source() const override { return inner_->source(); }

 private:
  std::unique_ptr<Mirror> mirror_;
  std::shared_ptr<Transfer> inner_;
  MemoryView received_;  // empty for a send
};

class StagedCommunicator final : public Communicator {
 public:
  StagedCommunicator(std::shared_ptr<Communicator> inner, std::shared_ptr<const CudaDevice> device)
      : inner_(std::move(inner)), device_(std::move(device)), copier_(device_) {}

  int rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }

  void all_reduce(MemoryView data, Reduction reduction, const Call& call) override {
    const Mirror mirror(*inner_, copier_, {data});
    inner_->all_reduce(mirror.at(data), reduction, call);
    mirror.bring_back(data);
  }
  void reduce(MemoryView data, int root, Reduction reduction, const Call& call) override {
    const Mirror mirror(*inner_, copier_, {data});
    inner_->reduce(mirror.at(data), root, reduction, call);
    mirror.bring_back(data);
  }
  void reduce_scatter(const std::vector<ConstMemoryView>& inputs, MemoryView output, Reduction reduction,
                      const Call& call) override {
    const Mirror mirror(*inner_, copier_, with(inputs, output));
    inner_->reduce_scatter(mirror.at(inputs), mirror.at(output), reduction, call);
    mirror.bring_back(output);
  }
  void broadcast(MemoryView data, int root, const Call& call) override {
    const Mirror mirror(*inner_, copier_, {data});
    inner_->broadcast(mirror.at(data), root, call);
    mirror.bring_back(data);
  }
  void all_gather(ConstMemoryView input, const std::vector<MemoryView>& outputs, const Call& call) override {
    const Mirror mirror(*inner_, copier_, with(outputs, input));
    inner_->all_gather(mirror.at(input), mirror.at(outputs), call);
    mirror.bring_back(outputs);
  }
  void gather(ConstMemoryView input, const std::vector<MemoryView>& outputs, int root, const Call& call) override {
    const Mirror mirror(*inner_, copier_, with(outputs, input));
    inner_->gather(mirror.at(input), mirror.at(outputs), root, call);
    mirror.bring_back(outputs);
  }
  void scatter(const std::vector<ConstMemoryView>& inputs, MemoryView output, int root, const Call& call) override {
    const Mirror mirror(*inner_, copier_, with(inputs, output));
    inner_->scatter(mirror.at(inputs), mirror.at(output), root, call);
    mirror.bring_back(output);
  }
  void all_to_all(const std::vector<ConstMemoryView>& inputs, const std::vector<MemoryView>& outputs,
                  const Call& call) override {
    std::vector<ConstMemoryView> all = inputs;
    all.insert(all.end(), outputs.begin(), outputs.end());
    const Mirror mirror(*inner_, copier_, all);
    inner_->all_to_all(mirror.at(inputs), mirror.at(outputs), call);
    mirror.bring_back(outputs);
  }
  void barrier(const Call& call) override { inner_->barrier(call); }

  std::shared_ptr<Transfer> send(ConstMemoryView data, int destination, std::uint64_t tag, const Call& call) override {
    auto mirror = std::make_unique<Mirror>(*inner_, copier_, std::vector<ConstMemoryView>{data});
    auto transfer = inner_->send(mirror->at(data), destination, tag, call);
    return std::make_shared<StagedTransfer>(std::move(mirror), std::move(transfer), MemoryView{});
  }
  std::shared_ptr<Transfer> receive(MemoryView data, int source, std::uint64_t tag, const Call& call) override {
    auto mirror = std::make_unique<Mirror>(*inner_, copier_, std::vector<ConstMemoryView>{data});
    auto transfer = inner_->receive(mirror->at(data), source, tag, call);
    return std::make_shared<StagedTransfer>(std::move(mirror), std::move(transfer), data);
  }
  std::shared_ptr<Communicator> split(int color, int key, const Call& call) override {
    std::shared_ptr<Communicator> part = inner_->split(color, key, call);
    return part == nullptr ? nullptr : std::make_shared<StagedCommunicator>(std::move(part), device_);
  }
  std::shared_ptr<Buffer> allocate(std::size_t size_bytes) override { return std::make_shared<HeapBuffer>(size_bytes); }
  void abort(const std::string& reason) noexcept override { inner_->abort(reason); }

 private:
  template <class View>
  static std::vector<ConstMemoryView> with(const std::vector<View>& some, ConstMemoryView one) {
    std::vector<ConstMemoryView> all(some.begin(), some.end());
    all.push_back(one);
    return all;
  }

  std::shared_ptr<Communicator> inner_;
  std::shared_ptr<const CudaDevice> device_;
  Copier copier_;
};

}  // namespace accelerate_cpp::comm::testing
