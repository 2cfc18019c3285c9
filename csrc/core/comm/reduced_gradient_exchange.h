// Gradient buckets over the all_reduce of any communicator: nothing moves before finish(), which averages one bucket
// after the other. For communicators that have no memory in common with their peers. Measures nothing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "core/comm/communicator.h"
#include "core/comm/gradient_exchange.h"
#include "core/comm/used_slots.h"

namespace accelerate_cpp::comm {

class ReducedGradientExchange final : public GradientExchange {
 public:
  // Reduces memory of the host over the ranks.
  using ReduceOnHost = std::function<void(MemoryView data, ReduceOp op, const Call& call)>;

  // `communicator` must outlive the exchange; its allocate() gives the buckets, which lie where its operands do.
  // Without `reduce_on_host` it must be able to reduce memory of the host. Ranks that pass different buckets, or give
  // weights where others do not, find out in finish(), as far as the communicator compares what they call.
  ReducedGradientExchange(Communicator& communicator, const std::vector<BucketSpec>& buckets,
                          ReduceOnHost reduce_on_host = {});

  MemoryView bucket(std::size_t index) override;
  std::uint8_t* used_slots(std::size_t index) override { return used_.own(index); }
  bool used_anywhere(std::size_t index, std::size_t slot) const override { return used_.anywhere(index, slot); }
  void begin(const RoundOptions& options, Deadline deadline) override;
  std::optional<amp::GradientStatistics> statistics(std::size_t, std::size_t) const override { return std::nullopt; }
  double divisor() const override { return divisor_; }
  void publish(std::size_t index) override;
  void progress() override {}
  void finish(Deadline deadline) override;

 private:
  struct Bucket {
    BucketSpec spec;
    std::shared_ptr<Buffer> memory;
    bool published = false;
  };

  const Bucket& at(std::size_t index) const;

  Communicator& communicator_;
  ReduceOnHost reduce_on_host_;
  std::vector<Bucket> buckets_;
  std::optional<double> weight_;  // of this round
  double divisor_ = 1.0;          // of the finished round
  UsedSlots used_;
};

}  // namespace accelerate_cpp::comm
