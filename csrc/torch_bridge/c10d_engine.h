// A torch process group (Gloo, MPI, …) that carries bytes in ordinary memory, and how to wait for it: with interrupts,
// deadlines, and the news that a rank has failed, which ranks tell each other through a store.
//
// The engine only ever works on memory of its own: an operation that is given up (Ctrl-C, a timeout) cannot write into
// the caller's memory later.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "core/base/background.h"
#include "core/base/deadline.h"
#include "core/base/memory_view.h"
#include "core/comm/options.h"
#include "torch_bridge/c10d_news.h"

namespace accelerate_cpp::comm {

class C10dEngine {
 public:
  using WorkPointer = c10::intrusive_ptr<::c10d::Work>;
  using StorePointer = c10::intrusive_ptr<::c10d::Store>;
  // Connects the ranks that share `store`; all of them call it.
  using Connect = std::function<c10::intrusive_ptr<::c10d::Backend>(const StorePointer& store, int rank, int size)>;

  struct Place {
    std::string name;  // of this engine among those that share a store
    int rank;
    int size;
    bool share_hosts = true;  // whether some of its ranks may share a host
  };

  // Collective over the ranks that pass the same name. `store` stays in use; engines that share it fail together.
  C10dEngine(Connect connect, StorePointer store, const Place& place, WaitHooks hooks);
  ~C10dEngine();
  C10dEngine(const C10dEngine&) = delete;
  C10dEngine& operator=(const C10dEngine&) = delete;

  int rank() const { return backend_->getRank(); }
  int size() const { return backend_->getSize(); }
  bool share_hosts() const { return share_hosts_; }
  const Connect& connect() const { return connect_; }
  const StorePointer& store() const { return store_; }
  C10dNews& news() { return news_; }
  const WaitHooks& hooks() const { return hooks_; }

  // What is being waited for.
  struct Operation {
    std::string text;          // "barrier", for messages
    std::uint64_t number = 0;  // among the collectives of this engine, from 1; 0: not a collective
    bool warned = false;       // that the wait is long
  };

  // Blocks of bytes from every rank to every other.
  class AllToAll {
   public:
    // Starts it: inputs[r] is copied and given to rank r, from which expected_bytes[r] come. Collective; what a pair
    // gives and expects must be equal. Nothing moves from this rank to itself.
    AllToAll(C10dEngine& engine, const std::vector<ConstMemoryView>& inputs,
             const std::vector<std::size_t>& expected_bytes, const Deadline& deadline, const Operation& operation);
    // Memory of an operation that has ended serves the next ones.
    ~AllToAll();
    AllToAll(AllToAll&&) = default;
    AllToAll(const AllToAll&) = delete;
    AllToAll& operator=(const AllToAll&) = delete;

    void finish(const Deadline& deadline, Operation& operation);
    // After finish(): what rank r gave, aligned as its size.
    const std::byte* from(int rank) const;

   private:
    C10dEngine& engine_;
    bool ended_ = false;
    at::Tensor sent_;
    at::Tensor received_;
    std::vector<std::int64_t> received_bytes_;
    WorkPointer work_;
  };

  // A message of as many bytes as `data` has. The tensor stays in use until the work has ended.
  WorkPointer send(const at::Tensor& data, int destination, int tag);
  WorkPointer receive(const at::Tensor& data, int source, int tag);
  // Returns when `work` has ended, however long that takes, unless `stopped` becomes true. Throws why it failed.
  void wait_in_background(::c10d::Work& work, const std::function<bool()>& stopped) const;

  bool is_usable() const;
  // What messages call this rank.
  std::string who() const { return hooks_.name_of(rank()); }
  // Throws PeerLost once this group has failed, InvalidArgument in a forked child; `operation` was about to run.
  void check_usable(const std::string& operation) const;
  // Looks at everything that may end a wait that began with `deadline`; each wait calls it every 50 ms or so.
  void look_around(const Deadline& deadline, Operation& operation);
  // The PeerLost for a failure of the engine itself; looks for a moment after the first one whether some rank tells the
  // reason.
  std::exception_ptr translated(const std::exception& error, const Operation& operation);

  // Makes this group fail, here and, within moments, on all ranks. Never throws; the first reason stays.
  void fail(const std::string& reason) noexcept;

  // Tells the others that this rank has left, after so many collectives and so many messages to each rank.
  void leave(std::uint64_t num_operations, std::vector<std::uint64_t> num_messages) noexcept;

 private:
  void check_process(const std::string& operation) const;
  void wait(::c10d::Work& work, const Deadline& deadline, Operation& operation);
  // Memory for `num_bytes` that nothing else uses; if possible, kept from an earlier operation, so that its pages exist
  // already.
  at::Tensor take_memory(std::int64_t num_bytes);
  void give_memory(at::Tensor memory);
  void pause(::c10d::Work& work) const;
  // Why `operation` cannot end, as far as the others have told.
  std::optional<std::string> told_reason(const Operation& operation) const;
  template <class Post>
  WorkPointer posted(const Operation& operation, const Post& post);

  const Connect connect_;
  const StorePointer store_;
  const WaitHooks hooks_;
  const OwnerProcess process_;
  c10::intrusive_ptr<::c10d::Backend> backend_;
  const bool is_gloo_;
  const bool share_hosts_;
  C10dNews news_;
  std::atomic<std::chrono::steady_clock::rep> first_loss_{0};  // when the engine failed first; 0: it has not
  std::mutex posting_;
  std::mutex memory_mutex_;
  std::vector<at::Tensor> memory_;  // at most kKeptMemory, each of at most kKeptBytes
};

}  // namespace accelerate_cpp::comm
