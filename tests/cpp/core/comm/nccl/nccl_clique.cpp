#include "core/comm/nccl/nccl_clique.h"

#include <algorithm>
#include <cstring>

#include "core/comm/nccl/gpu_double.h"
#include "core/comm/nccl/nccl_arithmetic.h"
#include "core/comm/nccl/nccl_double.h"

namespace accelerate_cpp::comm::testing {

std::string Clique::join(NcclHandle comm) {
  NcclHandle& place = members_[static_cast<std::size_t>(comm->rank)];
  if (place != nullptr) {
    return "two members with rank " + std::to_string(comm->rank);
  }
  for (const NcclHandle other : members_) {
    if (other != nullptr && other->device == comm->device) {
      return "Duplicate GPU detected: rank " + std::to_string(comm->rank) + " and rank " + std::to_string(other->rank) +
             " both on device " + std::to_string(comm->device);
    }
  }
  place = comm;
  ++joined_;
  return "";
}

void Clique::leave(int rank, bool in_order) {
  NcclHandle& place = members_[static_cast<std::size_t>(rank)];
  place = nullptr;
  dead_ = dead_ || !in_order;
}

bool Clique::complete() const {
  return joined_ == members_.size();
}

bool Clique::all_finalized() const {
  return std::all_of(members_.begin(), members_.end(),
                     [](NcclHandle comm) { return comm == nullptr || comm->finalized; }) &&
         joined_ == members_.size();
}

bool Clique::alike(const Task& a, const Task& b) {
  return a.kind == b.kind && a.peer == b.peer && a.count * size_of(a.type) == b.count * size_of(b.type);
}

void Clique::enqueue(const std::vector<Task>& tasks) {
  NcclHandle const comm = tasks.front().comm;
  struct State {
    bool started = false;
    std::vector<Flag> messages;
    std::vector<std::size_t> meetings;
  };
  const std::shared_ptr<Clique> clique = comm->clique;
  const int rank = comm->rank;
  const auto work = [clique, comm, rank, tasks, state = std::make_shared<State>()] {
    if (clique->members_[static_cast<std::size_t>(rank)] != comm) {
      return true;  // aborted
    }
    for (std::size_t i = 0; i < tasks.size() && !state->started; ++i) {
      const Task& task = tasks[i];
      if (task.is_collective()) {
        state->meetings.push_back(comm->next_collective++);
        Meeting& meeting = clique->meetings_[state->meetings.back()];
        meeting.tasks.resize(clique->members_.size());
        meeting.tasks[static_cast<std::size_t>(rank)] = std::make_unique<Task>(task);
      } else {
        const bool sends = task.kind == Task::Kind::kSend;
        Box& box = clique->boxes_[sends ? std::pair(rank, task.peer) : std::pair(task.peer, rank)];
        state->messages.push_back(std::make_shared<bool>(false));
        (sends ? box.sends : box.receives).push_back({task, state->messages.back()});
        clique->pass_messages(box);
      }
    }
    state->started = true;
    bool over = std::all_of(state->messages.begin(), state->messages.end(), [](const Flag& flag) { return *flag; });
    for (const std::size_t index : state->meetings) {
      Meeting& meeting = clique->meetings_[index];
      clique->meet(meeting);
      over = over && meeting.over;
    }
    return over;
  };
  gpu_double().enqueue(tasks.front().stream, work);
}

void Clique::pass_messages(Box& box) {
  while (!dead_ && !box.sends.empty() && !box.receives.empty()) {
    Message& send = box.sends.front();
    Message& receive = box.receives.front();
    if (send.task.count * size_of(send.task.type) != receive.task.count * size_of(receive.task.type)) {
      return;
    }
    std::memmove(receive.task.output, send.task.input, send.task.count * size_of(send.task.type));
    *send.over = true;
    *receive.over = true;
    box.sends.pop_front();
    box.receives.pop_front();
  }
}

void Clique::meet(Meeting& meeting) {
  if (meeting.over || dead_) {
    return;
  }
  for (const auto& task : meeting.tasks) {
    if (task == nullptr || !alike(*task, *meeting.tasks.front())) {
      return;
    }
  }
  meeting.over = true;
  const Task& first = *meeting.tasks.front();
  const std::size_t bytes = first.count * size_of(first.type);
  std::vector<const std::byte*> inputs;
  for (const auto& task : meeting.tasks) {
    inputs.push_back(task->input);
  }
  // Results are complete before the first is written: outputs may be inputs.
  std::vector<std::vector<std::byte>> results;
  for (std::size_t r = 0; r < meeting.tasks.size(); ++r) {
    std::vector<const std::byte*> from = inputs;
    if (first.kind == Task::Kind::kBroadcast) {
      const std::byte* const root = inputs[static_cast<std::size_t>(first.peer)];
      results.emplace_back(root, root + bytes);
    } else if (first.kind == Task::Kind::kAllGather) {
      results.emplace_back();
      for (const std::byte* const input : inputs) {
        results.back().insert(results.back().end(), input, input + bytes);
      }
    } else {
      for (const std::byte*& input : from) {
        input += first.kind == Task::Kind::kReduceScatter ? r * bytes : 0;
      }
      results.push_back(reduce_plainly(first.type, first.op, from, first.count));
    }
  }
  for (std::size_t r = 0; r < meeting.tasks.size(); ++r) {
    std::memcpy(meeting.tasks[r]->output, results[r].data(), results[r].size());
  }
}

}  // namespace accelerate_cpp::comm::testing
