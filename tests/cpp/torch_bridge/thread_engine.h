// A torch process group for ranks that are threads of a test. It can behave as Gloo does where that is peculiar:
// messages cannot be asked whether they have ended, and a wait for one that times out breaks every connection.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <atomic>
#include <chrono>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

namespace accelerate_cpp::comm::testing {

// What lies between the ranks of one engine.
class Wire {
 public:
  using Channel = std::tuple<int, int, int>;  // from, to, tag

  void put(const Channel& channel, const at::Tensor& data) {
    const std::lock_guard lock(mutex_);
    messages_[channel].push_back(data.clone());
    num_bytes += data.nbytes();
  }
  bool take(const Channel& channel, const at::Tensor& target) {
    const std::lock_guard lock(mutex_);
    std::deque<at::Tensor>& queue = messages_[channel];
    if (queue.empty()) {
      return false;
    }
    if (queue.front().nbytes() != target.nbytes()) {
      throw std::logic_error("the engine was asked for " + std::to_string(target.nbytes()) + " bytes where " +
                             std::to_string(queue.front().nbytes()) + " came, which may crash a real one");
    }
    std::memcpy(target.data_ptr(), queue.front().data_ptr(), target.nbytes());
    queue.pop_front();
    return true;
  }

  std::atomic<bool> broken{false};
  std::atomic<std::size_t> num_bytes{0};

 private:
  std::mutex mutex_;
  std::map<Channel, std::deque<at::Tensor>> messages_;
};

class ThreadWork final : public ::c10d::Work {
 public:
  ThreadWork(std::shared_ptr<Wire> wire, std::function<bool()> advance, bool only_waits)
      : wire_(std::move(wire)), advance_(std::move(advance)), only_waits_(only_waits) {}

  bool isCompleted() override { return only_waits_ ? ended_.load() : look(); }

  bool wait(std::chrono::milliseconds timeout) override {
    const auto end = std::chrono::steady_clock::now() + timeout;
    while (!look() && !aborted_) {
      if (timeout != ::kNoTimeout && std::chrono::steady_clock::now() >= end) {
        wire_->broken = wire_->broken || only_waits_;
        throw std::runtime_error("timed out");
      }
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
    if (failed_) {
      throw std::runtime_error(
          "Connection closed by peer [10.0.0.2]:7777. This is typically caused by that\nand where that was found");
    }
    return !aborted_;
  }

  void abort() override { aborted_ = true; }

 private:
  bool look() {
    const std::lock_guard lock(looking_);
    if (!ended_) {
      failed_ = wire_->broken.load();
      ended_ = failed_ || advance_();
    }
    return ended_;
  }

  const std::shared_ptr<Wire> wire_;
  const std::function<bool()> advance_;
  const bool only_waits_;
  std::mutex looking_;
  std::atomic<bool> ended_{false};
  std::atomic<bool> failed_{false};
  std::atomic<bool> aborted_{false};
};

class ThreadEngine final : public ::c10d::Backend {
 public:
  ThreadEngine(std::shared_ptr<Wire> wire, int rank, int size, std::string name)
      : Backend(rank, size), wire_(std::move(wire)), name_(std::move(name)) {}

  const std::string getBackendName() const override { return name_; }

  c10::intrusive_ptr<::c10d::Work> alltoall_base(at::Tensor& output, at::Tensor& input,
                                                 std::vector<std::int64_t>& output_counts,
                                                 std::vector<std::int64_t>& input_counts,
                                                 const ::c10d::AllToAllOptions&) override {
    const int tag = -1 - num_all_to_alls_++;
    std::vector<std::pair<int, at::Tensor>> missing;
    std::int64_t sent = 0;
    std::int64_t received = 0;
    for (int r = 0; r < getSize(); ++r) {
      const auto place = static_cast<std::size_t>(r);
      wire_->put({getRank(), r, tag}, input.narrow(0, sent, input_counts[place]));
      missing.emplace_back(r, output.narrow(0, received, output_counts[place]));
      sent += input_counts[place];
      received += output_counts[place];
    }
    return work(
        [this, tag, missing]() mutable {
          while (!missing.empty() && wire_->take({missing.back().first, getRank(), tag}, missing.back().second)) {
            missing.pop_back();
          }
          return missing.empty();
        },
        false);
  }

  c10::intrusive_ptr<::c10d::Work> send(std::vector<at::Tensor>& tensors, int destination, int tag) override {
    wire_->put({getRank(), destination, tag}, tensors.at(0));
    return work([] { return true; }, is_like_gloo());
  }

  c10::intrusive_ptr<::c10d::Work> recv(std::vector<at::Tensor>& tensors, int source, int tag) override {
    return work([this, source, tag, data = tensors.at(0)] { return wire_->take({source, getRank(), tag}, data); },
                is_like_gloo());
  }

 private:
  bool is_like_gloo() const { return name_ == "gloo"; }
  c10::intrusive_ptr<::c10d::Work> work(std::function<bool()> advance, bool only_waits) {
    if (wire_->broken) {
      throw std::runtime_error("Connection closed by peer [10.0.0.2]:7777");
    }
    return c10::make_intrusive<ThreadWork>(wire_, std::move(advance), only_waits);
  }

  const std::shared_ptr<Wire> wire_;
  const std::string name_;
  int num_all_to_alls_ = 0;
};

}  // namespace accelerate_cpp::comm::testing
