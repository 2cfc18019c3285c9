// A group of one rank: the null object. Collectives only copy; nothing ever waits.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "core/comm/communicator.h"

namespace accelerate_cpp::comm {

class SoloCommunicator final : public Communicator {
 public:
  int rank() const override { return 0; }
  int size() const override { return 1; }
  void all_reduce(MemoryView data, ReduceOp op, Deadline deadline) override;
  void reduce_scatter(const std::vector<ConstMemoryView>& inputs, MemoryView output, ReduceOp op,
                      Deadline deadline) override;
  void broadcast(MemoryView data, int root, Deadline deadline) override;
  void all_gather(ConstMemoryView input, const std::vector<MemoryView>& outputs, Deadline deadline) override;
  void gather(ConstMemoryView input, const std::vector<MemoryView>& outputs, int root, Deadline deadline) override;
  void scatter(const std::vector<ConstMemoryView>& inputs, MemoryView output, int root, Deadline deadline) override;
  void barrier(Deadline deadline) override;
  std::shared_ptr<Buffer> allocate(std::size_t size_bytes) override;
  std::unique_ptr<GradientExchange> gradient_exchange(const std::vector<BucketSpec>& buckets,
                                                      Deadline deadline) override;
  void abort(const std::string& reason) noexcept override;

 private:
  void check_usable() const;

  bool aborted_ = false;
  std::string reason_;
};

}  // namespace accelerate_cpp::comm
