// Scattered gradients through a torch backend, for ranks that do not all share memory, or that have replicas: ranks of
// another group whose shares are the same, and over which averages are taken as well.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <deque>
#include <vector>

#include "core/grad/scattered_exchange.h"

namespace accelerate_cpp::grad {

using BackendPointer = c10::intrusive_ptr<::c10d::Backend>;

class C10dScatteredExchange final : public ScatteredExchange {
 public:
  // `replicas` is null where there are none. Buckets are reduced while the next ones are filled if `overlaps`: that
  // pays where they travel between hosts, while ranks of one host only take time from each other.
  C10dScatteredExchange(BackendPointer ranks, BackendPointer replicas, std::vector<ScatteredBucket> buckets,
                        bool overlaps);
  ~C10dScatteredExchange() override;

 private:
  struct UnderWay {
    std::size_t index;
    at::Tensor averages;
    c10::intrusive_ptr<::c10d::Work> work;
  };

  void start_round(Deadline deadline) override;
  void* free_memory(std::size_t index, Deadline deadline) override;
  void hand_over(std::size_t index) override;
  void complete(MemoryView used, Deadline deadline) override;
  // The elements of the bucket in the memory that it has.
  at::Tensor bucket(std::size_t index);
  void take_oldest();
  void forget_started() noexcept;

  const BackendPointer ranks_;
  const BackendPointer replicas_;
  const bool averages_;  // else the backend only sums
  const std::size_t num_at_once_;
  std::vector<at::Tensor> memory_;  // bytes, used in turn
  std::deque<UnderWay> under_way_;
};

}  // namespace accelerate_cpp::grad
