// The inside of the NCCL double: the ranks of one communicator and the operations in which they meet. Everything is
// guarded by gpu_double().mutex.
#pragma once

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "core/comm/nccl/nccl_api.h"

namespace accelerate_cpp::comm {

namespace testing {

class Clique;

// What one rank asks of one operation.
struct Task {
  enum class Kind { kAllReduce, kReduceScatter, kBroadcast, kAllGather, kSend, kReceive };

  Kind kind;
  const std::byte* input = nullptr;
  std::byte* output = nullptr;
  std::size_t count = 0;
  NcclDataType type = NcclDataType::kUint8;
  NcclRedOp op = NcclRedOp::kSum;
  int peer = -1;  // or the root
  NcclHandle comm = nullptr;
  CudaStream stream = nullptr;

  bool is_collective() const { return kind != Kind::kSend && kind != Kind::kReceive; }
};

}  // namespace testing

struct NcclCommOpaque {
  std::shared_ptr<testing::Clique> clique;
  int rank = 0;
  int device = 0;
  int polls_left = 0;                          // until `deferred` happens
  std::deque<std::function<void()>> deferred;  // what was asked and is not on its stream yet
  std::function<bool()> joining;               // whether initialisation has ended; null: it has, or the farewell
  bool finalized = false;
  std::size_t next_collective = 0;
  std::map<void*, std::pair<const std::byte*, std::size_t>> registrations;  // of memory
};

namespace testing {

class Clique {
 public:
  explicit Clique(int size) : members_(static_cast<std::size_t>(size)) {}

  int size() const { return static_cast<int>(members_.size()); }
  // Empty, or why `comm` cannot be a member.
  std::string join(NcclHandle comm);
  void leave(int rank, bool in_order);
  bool complete() const;
  bool all_finalized() const;

  // Puts the tasks of one group onto the stream.
  static void enqueue(const std::vector<Task>& tasks);

 private:
  // An operation in which all ranks meet.
  struct Meeting {
    std::vector<std::unique_ptr<Task>> tasks;  // by rank
    bool over = false;
  };
  using Flag = std::shared_ptr<bool>;
  struct Message {
    Task task;
    Flag over;
  };
  struct Box {
    std::deque<Message> sends;
    std::deque<Message> receives;
  };

  void meet(Meeting& meeting);
  void pass_messages(Box& box);
  static bool alike(const Task& a, const Task& b);

  std::vector<NcclHandle> members_;  // by rank; null: not there yet, or gone
  std::size_t joined_ = 0;
  bool dead_ = false;  // a member was aborted: nothing happens any more
  std::map<std::size_t, Meeting> meetings_;
  std::map<std::pair<int, int>, Box> boxes_;  // by source and destination
};

}  // namespace testing
}  // namespace accelerate_cpp::comm
