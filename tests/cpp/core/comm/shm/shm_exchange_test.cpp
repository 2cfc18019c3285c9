// The three ways in which operands travel, at every size at which one gives way to another, compared with plain loops.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "core/comm/ranks.h"
#include "core/comm/shm/shm_communicator.h"

namespace accelerate_cpp::comm {
namespace {

using testing::soon;

constexpr OperationKind kKinds[] = {OperationKind::kAllReduce, OperationKind::kReduceScatter, OperationKind::kBroadcast,
                                    OperationKind::kAllGather, OperationKind::kGather,        OperationKind::kScatter};

// One collective, the same on all ranks but for where their operands lie.
struct Step {
  OperationKind kind;
  std::size_t count;  // elements per rank
  int root;
  ReduceOp op;
  unsigned seed;
  std::uint32_t ranks_in_arena;  // bit r: the operands of rank r lie in its arena
};

template <class T>
constexpr DType kDType = DType::kInt32;
template <>
constexpr DType kDType<std::int8_t> = DType::kInt8;
template <>
constexpr DType kDType<std::int64_t> = DType::kInt64;

// Element `index` of what `rank` has for `receiver`: any bits, so that no two places are mixed up unnoticed.
template <class T>
T element(const Step& step, int rank, int receiver, std::size_t index) {
  std::uint64_t bits = step.seed * 0x9e3779b97f4a7c15u + static_cast<std::uint64_t>(rank) * 0xbf58476d1ce4e5b9u +
                       static_cast<std::uint64_t>(receiver) * 0x94d049bb133111ebu + index;
  bits = (bits ^ (bits >> 30)) * 0xbf58476d1ce4e5b9u;
  bits = (bits ^ (bits >> 27)) * 0x94d049bb133111ebu;
  return static_cast<T>(bits ^ (bits >> 31));
}

template <class T>
T reduced(const Step& step, int size, int receiver, std::size_t index) {
  T result = element<T>(step, 0, receiver, index);
  for (int rank = 1; rank < size; ++rank) {
    const T next = element<T>(step, rank, receiver, index);
    switch (step.op) {
      case ReduceOp::kMin:
        result = std::min(result, next);
        break;
      case ReduceOp::kMax:
        result = std::max(result, next);
        break;
      default:
        result = static_cast<T>(static_cast<std::uint64_t>(result) + static_cast<std::uint64_t>(next));
    }
  }
  return result;
}

// One rank's part in a step.
template <class T>
class Part {
 public:
  Part(Communicator& communicator, const Step& step)
      : communicator_(communicator),
        step_(step),
        rank_(communicator.rank()),
        size_(communicator.size()),
        is_root_(rank_ == step.root),
        in_arena_(((step.ranks_in_arena >> rank_) & 1) != 0) {}

  // The number of elements that are not as they should be.
  std::size_t run() {
    switch (step_.kind) {
      case OperationKind::kAllReduce:
        return all_reduce();
      case OperationKind::kReduceScatter:
        return reduce_scatter();
      case OperationKind::kBroadcast:
        return broadcast();
      case OperationKind::kAllGather:
      case OperationKind::kGather:
        return gather();
      case OperationKind::kScatter:
        return scatter();
      default:
        communicator_.barrier(soon());
        return 0;
    }
  }

 private:
  // An operand, filled with what this rank has for `receiver`.
  MemoryView operand(int receiver) {
    const MemoryView view = memory();
    for (std::size_t i = 0; i < step_.count; ++i) {
      static_cast<T*>(view.data)[i] = element<T>(step_, rank_, receiver, i);
    }
    return view;
  }

  // Memory for one operand, behind as many elements as leave it unaligned to anything but an element.
  MemoryView memory() {
    const std::size_t offset = step_.seed % 5;
    T* data = nullptr;
    if (in_arena_) {
      buffers_.push_back(communicator_.allocate((step_.count + offset + 1) * sizeof(T)));
      data = static_cast<T*>(buffers_.back()->data());
    } else {
      heap_.emplace_back(step_.count + offset + 1);
      data = heap_.back().data();
    }
    return {data + offset, step_.count, kDType<T>};
  }

  template <class Expected>
  std::size_t differences(const MemoryView& view, const Expected& expected) const {
    std::size_t count = 0;
    for (std::size_t i = 0; i < step_.count; ++i) {
      count += static_cast<const T*>(view.data)[i] == expected(i) ? 0 : 1;
    }
    return count;
  }

  std::size_t all_reduce() {
    const MemoryView data = operand(0);
    communicator_.all_reduce(data, step_.op, soon());
    return differences(data, [&](std::size_t i) { return reduced<T>(step_, size_, 0, i); });
  }

  std::size_t reduce_scatter() {
    std::vector<ConstMemoryView> inputs;
    for (int r = 0; r < size_; ++r) {
      inputs.emplace_back(operand(r));
    }
    const MemoryView output = memory();
    communicator_.reduce_scatter(inputs, output, step_.op, soon());
    return differences(output, [&](std::size_t i) { return reduced<T>(step_, size_, rank_, i); });
  }

  std::size_t broadcast() {
    const MemoryView data = operand(0);
    communicator_.broadcast(data, step_.root, soon());
    return differences(data, [&](std::size_t i) { return element<T>(step_, step_.root, 0, i); });
  }

  std::size_t gather() {
    const bool to_all = step_.kind == OperationKind::kAllGather;
    const MemoryView input = operand(0);
    std::vector<MemoryView> outputs;
    for (int r = 0; r < size_ && (to_all || is_root_); ++r) {
      outputs.push_back(memory());
    }
    if (to_all) {
      communicator_.all_gather(input, outputs, soon());
    } else {
      communicator_.gather(input, outputs, step_.root, soon());
    }
    std::size_t count = 0;
    for (std::size_t r = 0; r < outputs.size(); ++r) {
      count += differences(outputs[r], [&](std::size_t i) { return element<T>(step_, static_cast<int>(r), 0, i); });
    }
    return count;
  }

  std::size_t scatter() {
    std::vector<ConstMemoryView> inputs;
    for (int r = 0; r < size_ && is_root_; ++r) {
      inputs.emplace_back(operand(r));
    }
    const MemoryView output = memory();
    communicator_.scatter(inputs, output, step_.root, soon());
    return differences(output, [&](std::size_t i) { return element<T>(step_, step_.root, rank_, i); });
  }

  Communicator& communicator_;
  const Step step_;
  const int rank_;
  const int size_;
  const bool is_root_;
  const bool in_arena_;
  std::vector<std::vector<T>> heap_;
  std::vector<std::shared_ptr<Buffer>> buffers_;
};

std::string describe(const Step& step) {
  return std::string(name(step.kind)) + " of " + std::to_string(step.count) + ", root " + std::to_string(step.root) +
         ", reduction " + std::to_string(static_cast<int>(step.op)) + ", arenas " + std::to_string(step.ranks_in_arena);
}

template <class T>
void expect_right(Communicator& communicator, const Step& step) {
  EXPECT_EQ(Part<T>(communicator, step).run(), 0u)
      << describe(step) << " " << accelerate_cpp::name(kDType<T>) << " on rank " << communicator.rank();
}

class ShmExchange : public ::testing::TestWithParam<int> {
 protected:
  static constexpr std::uint32_t kNone = 0;
  static constexpr std::uint32_t kAll = ~0u;

  template <class Body>
  static void run_ranks(const Body& body) {
    testing::run_threads(GetParam(), [&](Store& store, int rank) {
      const auto communicator = ShmCommunicator::connect(store, rank, GetParam(), soon(), {});
      body(*communicator);
    });
  }

  // How many bytes of one operand fill a slot of `slot_bytes`, for operations that put one block per rank into it and
  // for those that put one.
  static std::size_t fill(OperationKind kind, std::size_t slot_bytes) {
    const bool block_per_rank = kind == OperationKind::kReduceScatter || kind == OperationKind::kScatter;
    return block_per_rank ? slot_bytes / static_cast<std::size_t>(GetParam()) / 64 * 64 : slot_bytes;
  }
};

TEST_P(ShmExchange, IsRightAboutTheSizeThatIsSmall) {
  run_ranks([](Communicator& communicator) {
    unsigned seed = 0;
    for (const OperationKind kind : kKinds) {
      const std::size_t bytes = fill(kind, kSmallBytes);
      for (const std::uint32_t arenas : {kNone, kAll}) {
        for (const int change : {-1, 0, 1}) {
          const auto near = [&](std::size_t size_bytes) { return size_bytes + static_cast<std::size_t>(change); };
          const Step step{kind, 0, GetParam() - 1, ReduceOp::kSum, ++seed, arenas};
          Step bytewise = step;
          bytewise.count = near(bytes);
          expect_right<std::int8_t>(communicator, bytewise);
          Step wide = step;
          wide.count = near(bytes / sizeof(std::int64_t));
          expect_right<std::int64_t>(communicator, wide);
        }
      }
    }
  });
}

TEST_P(ShmExchange, IsRightAboutTheBoundariesOfPieces) {
  run_ranks([](Communicator& communicator) {
    unsigned seed = 100;
    for (const OperationKind kind : kKinds) {
      const std::size_t piece = fill(kind, kPieceBytes) / sizeof(std::int32_t);
      for (const std::size_t pieces : {1u, 2u, 4u}) {
        for (const int change : {-1, 0, 1}) {
          const std::size_t count = pieces * piece + static_cast<std::size_t>(change);
          const bool in_arena = pieces == 1 && change == 1;
          expect_right<std::int32_t>(communicator, {kind, count, 0, ReduceOp::kSum, ++seed, in_arena ? kAll : kNone});
        }
      }
    }
  });
}

// An all_reduce rounds its pieces down so that every rank's slice is a whole number of cache lines.
TEST_P(ShmExchange, IsRightAboutTheBoundariesOfPiecesThatAreReduced) {
  run_ranks([](Communicator& communicator) {
    const auto size = static_cast<std::size_t>(GetParam());
    const std::size_t piece = kPieceBytes / 64 / size * 64 * size / sizeof(std::int32_t);
    unsigned seed = 200;
    for (const std::size_t pieces : {1u, 3u, 5u}) {
      for (const int change : {-17, -1, 0, 1, 17}) {
        const std::size_t count = pieces * piece + static_cast<std::size_t>(change);
        expect_right<std::int32_t>(communicator, {OperationKind::kAllReduce, count, 0, ReduceOp::kMax, ++seed, kNone});
      }
    }
  });
}

TEST_P(ShmExchange, IsRightWhenOnlySomeRanksHaveTheirOperandsInTheirArenas) {
  run_ranks([](Communicator& communicator) {
    unsigned seed = 300;
    for (const OperationKind kind : kKinds) {
      for (std::uint32_t arenas = 0; arenas < (1u << GetParam()); ++arenas) {
        expect_right<std::int32_t>(communicator, {kind, 20000 + arenas, static_cast<int>(arenas) % GetParam(),
                                                  ReduceOp::kMin, ++seed, arenas});
      }
    }
  });
}

// A sequence that all ranks draw alike.
std::vector<Step> random_steps(unsigned seed, int size, int num_steps) {
  constexpr ReduceOp kOps[] = {ReduceOp::kSum, ReduceOp::kMin, ReduceOp::kMax};
  std::mt19937 random(seed);
  std::vector<Step> steps;
  for (int i = 0; i < num_steps; ++i) {
    const auto kind = static_cast<OperationKind>(random() % 7);  // barriers too
    const std::size_t scale = std::size_t{1} << (random() % 20);
    const std::size_t count = random() % (scale + 1);
    const int root = static_cast<int>(random() % static_cast<unsigned>(size));
    const std::uint32_t arenas = random() % 3 == 0 ? ~0u : random() % 2 == 0 ? 0u : random();
    steps.push_back({kind, count, root, kOps[random() % 3], static_cast<unsigned>(random()), arenas});
  }
  return steps;
}

TEST_P(ShmExchange, IsRightForOperationsOfAllKindsAndSizesOneAfterAnother) {
  for (unsigned seed = 1; seed <= 3; ++seed) {
    run_ranks([seed](Communicator& communicator) {
      for (const Step& step : random_steps(seed, GetParam(), 80)) {
        switch (step.seed % 3) {
          case 0:
            expect_right<std::int8_t>(communicator, step);
            break;
          case 1:
            expect_right<std::int32_t>(communicator, step);
            break;
          default:
            expect_right<std::int64_t>(communicator, step);
        }
      }
    });
  }
}

INSTANTIATE_TEST_SUITE_P(Ranks, ShmExchange, ::testing::Values(2, 3, 4));

}  // namespace
}  // namespace accelerate_cpp::comm
