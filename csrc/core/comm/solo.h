// A group of one rank (a null object). Collectives only copy and never wait.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/comm/communicator.h"
#include "core/comm/first_failure.h"

namespace accelerate_cpp::comm {

class SoloCommunicator final : public Communicator {
 public:
  int rank() const override { return 0; }
  int size() const override { return 1; }
  void all_reduce(MemoryView data, Reduction reduction, const Call& call) override;
  void reduce(MemoryView data, int root, Reduction reduction, const Call& call) override;
  void reduce_scatter(const std::vector<ConstMemoryView>& inputs, MemoryView output, Reduction reduction,
                      const Call& call) override;
  void broadcast(MemoryView data, int root, const Call& call) override;
  void all_gather(ConstMemoryView input, const std::vector<MemoryView>& outputs, const Call& call) override;
  void gather(ConstMemoryView input, const std::vector<MemoryView>& outputs, int root, const Call& call) override;
  void scatter(const std::vector<ConstMemoryView>& inputs, MemoryView output, int root, const Call& call) override;
  void all_to_all(const std::vector<ConstMemoryView>& inputs, const std::vector<MemoryView>& outputs,
                  const Call& call) override;
  void barrier(const Call& call) override;
  // There is no other rank to send to or receive from: both throw InvalidArgument.
  std::shared_ptr<Transfer> send(ConstMemoryView data, int destination, std::uint64_t tag, const Call& call) override;
  std::shared_ptr<Transfer> receive(MemoryView data, int source, std::uint64_t tag, const Call& call) override;
  std::shared_ptr<Communicator> split(int color, int key, const Call& call) override;
  std::shared_ptr<Buffer> allocate(std::size_t size_bytes) override;
  std::shared_ptr<Buffer> window(std::size_t size_bytes, const Call& call) override;
  void withdraw(const std::string&, const Call&) override { ++interruptions_; }  // there is nobody to tell
  std::uint64_t interruptions() const noexcept override { return interruptions_; }
  bool can_withdraw() const override { return true; }
  void abort(const std::string& reason) noexcept override;
  // Throws PeerLost after abort().
  void check_usable(const char* operation) const;

 private:
  FirstFailure failure_;
  std::atomic<std::uint64_t> interruptions_{0};
};

}  // namespace accelerate_cpp::comm
