// Random programs of collectives and messages, which all ranks draw alike from one seed, compared with plain loops.
//
// ACCELERATE_CPP_TEST_COLLECTIVES says how many operations are run (some hundred unless it is set), and
// ACCELERATE_CPP_TEST_SEED which program comes first; a failure names the seed that replays it as the first one.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "core/base/error.h"
#include "core/comm/communicator.h"
#include "core/comm/ranks.h"
#include "core/comm/shm/staging.h"
#include "core/comm/shm/step_runner.h"

namespace accelerate_cpp::comm::testing {

inline constexpr int kLargestWorld = 8;
inline constexpr int kStepsPerProgram = 40;

inline unsigned long from_environment(const char* variable, unsigned long otherwise) {
  const char* const text = std::getenv(variable);
  return text == nullptr ? otherwise : std::strtoul(text, nullptr, 10);
}

// Draws what all ranks must agree on; every rank has one in the same state.
class Dice {
 public:
  explicit Dice(std::uint64_t seed) : random_(seed) {}

  // From 0 to `below` - 1.
  std::size_t below(std::size_t below) { return random_() % below; }
  bool one_in(std::size_t chances) { return below(chances) == 0; }
  template <class T>
  const T& one_of(const std::vector<T>& choices) {
    return choices[below(choices.size())];
  }
  template <class T>
  void shuffle(std::vector<T>& items) {
    for (std::size_t i = items.size(); i > 1; --i) {
      std::swap(items[i - 1], items[below(i)]);
    }
  }

 private:
  std::mt19937_64 random_;
};

// Bytes of what one rank gives or takes: mostly little, often where one way of travelling gives way to another.
inline std::size_t draw_bytes(Dice& dice, std::size_t size) {
  static const std::vector<std::size_t> kBoundaries = {0,
                                                       1,
                                                       64,
                                                       4096,
                                                       8192,
                                                       kSmallBytes / 2,
                                                       kSmallBytes,
                                                       2 * kSmallBytes,
                                                       2 * kSmallBytes * 3,
                                                       kPieceBytes,
                                                       3 * kPieceBytes};
  if (dice.one_in(3)) {
    const std::size_t bytes = dice.one_of(kBoundaries) / (dice.one_in(2) ? size : 1);
    return bytes + dice.below(3) * 8 - (bytes < 8 ? 0 : 8);
  }
  const std::size_t scale = std::size_t{1} << dice.below(dice.one_in(8) ? 21 : 17);
  return dice.below(scale + 1);
}

inline std::vector<std::size_t> draw_counts(Dice& dice, CallKind kind, std::size_t size, std::size_t element_bytes) {
  const bool one_block = kind == CallKind::kAllReduce || kind == CallKind::kReduce || kind == CallKind::kBroadcast ||
                         kind == CallKind::kBarrier;
  const std::size_t blocks = one_block ? 1 : size;
  const std::size_t equal = draw_bytes(dice, size) / element_bytes / blocks;
  std::vector<std::size_t> counts(kind == CallKind::kAllToAll ? size * size : blocks, equal);
  if (dice.one_in(2)) {  // uneven, some of them empty
    for (std::size_t& count : counts) {
      count = dice.one_in(4) ? 0 : dice.one_in(3) ? equal : dice.below(equal + 2);
    }
  }
  return counts;
}

// Which of the steps are drawn that there are.
struct Drawn {
  std::vector<Placement> placements = {Placement::kHeap, Placement::kShared, Placement::kKept};
  // Whether the communicator adds in the order of ranks. Otherwise sums of floats are compared with a tolerance, and
  // products of them are not drawn, since those of 16 bits overflow in one order and not in another.
  bool in_rank_order = true;
};

inline Step draw_step(Dice& dice, std::size_t size, const Drawn& drawn) {
  static const std::vector<CallKind> kKinds = {
      CallKind::kAllReduce, CallKind::kAllReduce, CallKind::kReduce,  CallKind::kReduceScatter, CallKind::kBroadcast,
      CallKind::kAllGather, CallKind::kGather,    CallKind::kScatter, CallKind::kAllToAll,      CallKind::kBarrier};
  Step step{dice.one_of(kKinds)};
  step.dtype = static_cast<DType>(dice.below(kNumDTypes));
  step.op = dice.one_of(reductions_of(step.dtype));
  step.exact =
      drawn.in_rank_order || !is_floating(step.dtype) || step.op == ReduceOp::kMin || step.op == ReduceOp::kMax;
  step.op = !step.exact && step.op == ReduceOp::kProduct ? ReduceOp::kSum : step.op;
  step.root = static_cast<int>(dice.below(size));
  step.counts = draw_counts(dice, step.kind, size, element_size(step.dtype));
  const Placement common = dice.one_of(drawn.placements);
  const bool alike = !dice.one_in(3);
  for (std::size_t rank = 0; rank < size; ++rank) {
    step.placements.push_back(alike ? common : dice.one_of(drawn.placements));
  }
  step.in_place = dice.one_in(3);
  step.apart = dice.one_in(4);
  step.shift = dice.one_in(2) ? 0 : dice.below(9);
  step.seed = static_cast<unsigned>(dice.below(1u << 30));
  return step;
}

// Point-to-point messages between all ranks, posted in any order.
struct Message {
  int source;
  int destination;
  std::uint64_t tag;
  DType dtype;
  std::size_t count;
  bool any_source;
  unsigned seed;
};

// Receives from any source have tags of their own, from `free_tag` on, so that it is known which message they get.
inline std::vector<Message> draw_messages(Dice& dice, std::size_t size, std::uint64_t& free_tag) {
  std::vector<Message> messages;
  for (std::size_t left = size > 1 ? 1 + dice.below(12) : 0; left > 0; --left) {
    const std::size_t source = dice.below(size);
    const std::size_t destination = (source + 1 + dice.below(size - 1)) % size;
    const auto dtype = static_cast<DType>(dice.below(kNumDTypes));
    const std::size_t count = draw_bytes(dice, size) / element_size(dtype);
    const bool any_source = dice.one_in(4);
    const std::uint64_t tag = any_source ? free_tag++ : dice.below(3);
    messages.push_back({static_cast<int>(source), static_cast<int>(destination), tag, dtype, count, any_source,
                        static_cast<unsigned>(dice.below(1u << 30))});
  }
  return messages;
}

// One rank's half of a message.
struct Posted {
  const Message* message;
  bool is_send;
  std::vector<std::uint8_t> data;  // of elements that are bytes, whatever type they are said to have
  std::shared_ptr<Transfer> transfer;
};

using Key = std::tuple<bool, int, std::uint64_t>;

// What `rank` posts, in a random order in which messages that only their order tells apart keep it.
inline std::vector<Posted> draw_posts(Dice& dice, const std::vector<Message>& messages, int rank) {
  std::map<Key, std::vector<const Message*>> in_order;
  std::vector<Key> keys;
  for (const Message& message : messages) {
    if (message.source == rank || message.destination == rank) {
      const bool is_send = message.source == rank;
      keys.emplace_back(is_send, is_send ? message.destination : message.source, message.tag);
      in_order[keys.back()].push_back(&message);
    }
  }
  dice.shuffle(keys);
  std::vector<Posted> posts;
  for (const Key& key : keys) {
    std::vector<const Message*>& queue = in_order[key];
    posts.push_back({queue.front(), std::get<0>(key), {}, nullptr});
    queue.erase(queue.begin());
  }
  return posts;
}

// One rank's run of a program. The dice are the same on all ranks, unless they are said to be its own.
class Program {
 public:
  Program(std::shared_ptr<Communicator> communicator, std::uint64_t seed, std::string name, Drawn drawn = {})
      : communicator_(std::move(communicator)),
        memory_(*communicator_),
        dice_(seed),
        own_dice_(mix(seed + static_cast<std::uint64_t>(communicator_->rank()))),
        name_(std::move(name)),
        drawn_(std::move(drawn)) {}

  // Ends early when any rank has failed; what the others then meet is not worth telling.
  void run(int num_steps) {
    for (int step = 0; step < num_steps && !::testing::Test::HasFailure(); ++step) {
      doing_ = "step " + std::to_string(step) + ": ";
      try {
        run_step();
      } catch (const std::exception& error) {
        EXPECT_TRUE(::testing::Test::HasFailure()) << where() << " threw: " << error.what();
        return;
      }
    }
  }

 private:
  std::string where() const {
    return name_ + ", " + doing_ + " on rank " + std::to_string(communicator_->rank()) + " of " +
           std::to_string(communicator_->size());
  }
  std::size_t size() const { return static_cast<std::size_t>(communicator_->size()); }

  void run_step() {
    switch (dice_.below(16)) {
      case 0:
        return split();
      case 1:
        return disagree();
      case 2:
      case 3:
        return pass_messages_on();
      default:
        return run_collective();
    }
  }

  void run_collective() {
    const Step step = draw_step(dice_, size(), drawn_);
    doing_ += to_string(step);
    EXPECT_EQ(wrong_elements(*communicator_, step, memory_), 0u) << where();
  }

  // One rank calls something else; nobody notices anything but the exception.
  void disagree() {
    Step step = draw_step(dice_, size(), drawn_);
    step.kind = CallKind::kAllReduce;
    step.counts = {1 + step.counts[0]};
    doing_ += "one rank differs in " + to_string(step);
    const bool differs = dice_.below(size()) == static_cast<std::size_t>(communicator_->rank());
    step.counts[0] += differs ? 1 : 0;
    if (size() > 1) {
      EXPECT_THROW(wrong_elements(*communicator_, step, memory_), MismatchedCollective) << where();
      EXPECT_EQ(memory_.release(), 0u) << where();
    }
  }

  void pass_messages_on() {
    const std::vector<Message> messages = draw_messages(dice_, size(), free_tag_);
    doing_ += std::to_string(messages.size()) + " messages, ";
    std::vector<Posted> posts = draw_posts(own_dice_, messages, communicator_->rank());
    for (Posted& post : posts) {
      start(post);
      if (own_dice_.one_in(3)) {
        own_dice_.one_of(posts).transfer ? void(posts.front().transfer->poll()) : void();
      }
    }
    if (dice_.one_in(2)) {
      run_collective();
    }
    own_dice_.shuffle(posts);
    for (Posted& post : posts) {
      finish(post);
    }
  }

  void start(Posted& post) {
    const Message& message = *post.message;
    post.data.resize(message.count * element_size(message.dtype));
    if (post.is_send) {
      fill(message, post.data);
      post.transfer = communicator_->send({post.data.data(), message.count, message.dtype}, message.destination,
                                          message.tag, soon());
    } else {
      post.transfer =
          communicator_->receive({post.data.data(), message.count, message.dtype},
                                 message.any_source ? Communicator::kAnySource : message.source, message.tag, soon());
    }
  }

  void finish(Posted& post) {
    const Message& message = *post.message;
    post.transfer->wait(soon());
    std::vector<std::uint8_t> expected(post.data.size());
    fill(message, expected);
    EXPECT_TRUE(post.data == expected) << where() << (post.is_send ? ": sent " : ": received ") << message.count << " "
                                       << accelerate_cpp::name(message.dtype) << " from rank " << message.source
                                       << " with tag " << message.tag;
    EXPECT_TRUE(post.is_send || post.transfer->source() == message.source) << where();
  }

  static void fill(const Message& message, std::vector<std::uint8_t>& data) {
    const Values<std::uint8_t> values(message.seed, message.source, message.destination);
    for (std::size_t i = 0; i < data.size(); ++i) {
      data[i] = values[i];
    }
  }

  // Runs another program in groups that this one is divided into, while others may have none.
  void split() {
    const std::size_t num_colors = 1 + dice_.below(3);
    std::vector<int> colors;
    std::vector<int> keys;
    for (std::size_t rank = 0; rank < size(); ++rank) {
      colors.push_back(static_cast<int>(dice_.below(num_colors)) - (dice_.one_in(8) ? kLargestWorld : 0));
      keys.push_back(static_cast<int>(dice_.below(4)));
    }
    const std::uint64_t seed = dice_.below(1u << 30);
    doing_ += "splitting";
    const int color = colors[static_cast<std::size_t>(communicator_->rank())];
    const auto part = communicator_->split(color, keys[static_cast<std::size_t>(communicator_->rank())], soon());
    EXPECT_EQ(part == nullptr, color < 0) << where();
    if (part && size() > 1) {
      EXPECT_EQ(part->size(), std::count(colors.begin(), colors.end(), color)) << where();
      Program(part, seed + static_cast<std::uint64_t>(color), where() + " into color " + std::to_string(color), drawn_)
          .run(4);
    }
  }

  std::shared_ptr<Communicator> communicator_;
  Memory memory_;
  Dice dice_;
  Dice own_dice_;
  std::string name_;
  Drawn drawn_;
  std::string doing_;
  std::uint64_t free_tag_ = 1000;
};

// The host of every rank: one to three hosts, counted in the order of their first rank.
inline std::vector<int> draw_hosts(int size, std::uint64_t seed) {
  Dice dice(mix(seed));
  const std::size_t num_hosts = 1 + dice.below(3);
  std::map<std::size_t, int> numbers;
  std::vector<int> hosts;
  for (int rank = 0; rank < size; ++rank) {
    const auto next = static_cast<int>(numbers.size());
    hosts.push_back(numbers.emplace(dice.below(num_hosts), next).first->second);
  }
  return hosts;
}

// Connects rank `rank` of `size` to the group of the program with this seed.
using Connect = std::function<std::shared_ptr<Communicator>(Store& store, int rank, int size, std::uint64_t seed)>;

// Programs one after the other, until as many operations are done as are asked for.
inline void run_random_programs(const Connect& connect, const Drawn& drawn = {}) {
  const unsigned long num_steps = from_environment("ACCELERATE_CPP_TEST_COLLECTIVES", 320);
  unsigned long seed = from_environment("ACCELERATE_CPP_TEST_SEED", 1);
  for (unsigned long done = 0; done < num_steps && !::testing::Test::HasFailure(); done += kStepsPerProgram, ++seed) {
    const int size = 1 + static_cast<int>(seed % kLargestWorld);
    run_threads(size, [&](Store& store, int rank) {
      const auto communicator = connect(store, rank, size, seed);
      Program(communicator, seed, "ACCELERATE_CPP_TEST_SEED=" + std::to_string(seed), drawn).run(kStepsPerProgram);
    });
  }
}

}  // namespace accelerate_cpp::comm::testing
