// Point-to-point engines whose ranks are threads, and messages of integers.
#pragma once

#include <cstdint>
#include <memory>
#include <numeric>
#include <vector>

#include "core/comm/shm/groups.h"
#include "core/comm/shm/point_to_point.h"

namespace accelerate_cpp::comm::testing {

// One rank.
struct Engine {
  std::shared_ptr<Group> group;
  std::shared_ptr<PointToPoint> messages;

  int rank() const { return group->rank(); }
};

// Runs `body(engine)` on each of `size` thread ranks; `hooks(rank)` are their hooks.
template <class Hooks, class Body>
void run_engines_with(const Hooks& hooks, int size, std::size_t pool_bytes, const Body& body) {
  run_threads(size, [&](Store& store, int rank) {
    const auto group = std::make_shared<Group>(store, rank, size, 0, soon(), hooks(rank));
    Engine engine{group, std::make_shared<PointToPoint>(group, pool_bytes)};
    body(engine);
  });
}

template <class Body>
void run_engines(int size, const Body& body, std::size_t pool_bytes = PointToPoint::kPoolBytes) {
  run_engines_with([](int) { return WaitHooks(); }, size, pool_bytes, body);
}

// `count` integers from `first` on, or as many that are to be received.
class Integers {
 public:
  explicit Integers(std::size_t count, std::int32_t first = 0) : values_(count) {
    std::iota(values_.begin(), values_.end(), first);
  }
  MemoryView view() { return {values_.data(), values_.size(), DType::kInt32}; }
  void expect(std::int32_t first) const {
    EXPECT_TRUE(values_ == Integers(values_.size(), first).values_) << "expected integers from " << first << " on";
  }

 private:
  std::vector<std::int32_t> values_;
};

inline void send(Engine& engine, int destination, std::uint64_t tag, Integers data) {
  engine.messages->send(data.view(), destination, tag, soon())->wait(soon());
}

// Receives `count` integers that should begin with `first`.
inline void expect_message(Engine& engine, int source, std::uint64_t tag, std::size_t count, std::int32_t first) {
  Integers data(count, -1000000);
  engine.messages->receive(data.view(), source, tag, soon())->wait(soon());
  data.expect(first);
}

}  // namespace accelerate_cpp::comm::testing
