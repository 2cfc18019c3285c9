// Rank 0 of two ranks, for exchanges that need all_reduce and allocate only.
#pragma once

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "core/comm/communicator.h"
#include "core/comm/solo.h"

namespace accelerate_cpp::comm::testing {

class OneOfTwo : public Communicator {
 public:
  int rank() const override { return 0; }
  int size() const override { return 2; }
  std::shared_ptr<Buffer> allocate(std::size_t size_bytes) override { return solo_.allocate(size_bytes); }

  void all_reduce(MemoryView, Reduction, const Call&) override { unused(); }
  void reduce(MemoryView, int, Reduction, const Call&) override { unused(); }
  void reduce_scatter(const std::vector<ConstMemoryView>&, MemoryView, Reduction, const Call&) override { unused(); }
  void broadcast(MemoryView, int, const Call&) override { unused(); }
  void all_gather(ConstMemoryView, const std::vector<MemoryView>&, const Call&) override { unused(); }
  void gather(ConstMemoryView, const std::vector<MemoryView>&, int, const Call&) override { unused(); }
  void scatter(const std::vector<ConstMemoryView>&, MemoryView, int, const Call&) override { unused(); }
  void all_to_all(const std::vector<ConstMemoryView>&, const std::vector<MemoryView>&, const Call&) override {
    unused();
  }
  void barrier(const Call&) override { unused(); }
  std::shared_ptr<Transfer> send(ConstMemoryView, int, std::uint64_t, const Call&) override {
    return unused(), nullptr;
  }
  std::shared_ptr<Transfer> receive(MemoryView, int, std::uint64_t, const Call&) override { return unused(), nullptr; }
  std::shared_ptr<Communicator> split(int, int, const Call&) override { return unused(), nullptr; }
  void abort(const std::string&) noexcept override {}

 private:
  [[noreturn]] static void unused() { throw std::logic_error("an exchange needs all_reduce and allocate only"); }

  SoloCommunicator solo_;
};

}  // namespace accelerate_cpp::comm::testing
