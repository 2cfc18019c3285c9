#include "torch_bridge/c10d_engine.h"

#include <ATen/ops/empty.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <thread>
#include <utility>

#include "core/base/background.h"
#include "core/base/error.h"
#include "core/comm/waiting_time.h"

namespace accelerate_cpp::comm {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

constexpr milliseconds kSlice{50};
constexpr std::chrono::microseconds kPoll{100};
// Who hears of a loss by a closed connection gives those that know more time to tell it: ranks of the host of the lost
// one, which may not have seen its end yet, or itself, which told before it ended, so that the word is on its way.
constexpr milliseconds kWaitForReason{1000};
constexpr milliseconds kWaitForLastWord{300};
// The engine's own timeouts close its connections, so ours come first.
constexpr milliseconds kMargin{10000};
constexpr milliseconds kForever = std::chrono::hours(24 * 3650);

// A fresh page takes longer to get than to copy. So memory is kept for two operations under way and one that has ended.
constexpr std::size_t kKeptMemory = 6;
constexpr std::size_t kKeptBytes = std::size_t{8} << 20;
constexpr std::size_t kWorthKeepingBytes = std::size_t{64} << 10;

// The first line of the error, without the advice that Gloo gives in all of its errors.
std::string account_of(const std::exception& error) {
  const auto* const torch_error = dynamic_cast<const c10::Error*>(&error);
  const std::string text = torch_error != nullptr ? torch_error->what_without_backtrace() : error.what();
  return text.substr(0, std::min(text.find('\n'), text.find(". This is typically caused by")));
}

bool tells_of_closed_connection(const std::string& account) {
  const auto has = [&account](const char* words) { return account.find(words) != std::string::npos; };
  return has("by peer") || has("by remote peer") || has("Broken pipe");
}

at::Tensor bytes(std::int64_t count) {
  return at::empty({count}, at::TensorOptions(at::kByte));
}

std::int64_t sum(const std::vector<std::int64_t>& counts) {
  return std::accumulate(counts.begin(), counts.end(), std::int64_t{0});
}

}  // namespace

C10dEngine::C10dEngine(Connect connect, StorePointer store, const Place& place, WaitHooks hooks)
    : connect_(std::move(connect)),
      store_(std::move(store)),
      hooks_(std::move(hooks)),
      backend_(connect_(c10::make_intrusive<::c10d::PrefixStore>(place.name, store_), place.rank, place.size)),
      is_gloo_(backend_->getBackendName() == "gloo"),
      share_hosts_(place.share_hosts),
      news_(store_, place.name) {}

C10dEngine::~C10dEngine() {
  // Once the group has failed, an operation may be under way that never ends, and the engine would wait for it; in a
  // forked child its threads do not exist.
  if (!is_usable()) {
    static_cast<void>(backend_.release());
  }
}

C10dEngine::AllToAll::AllToAll(C10dEngine& engine, const std::vector<ConstMemoryView>& inputs,
                               const std::vector<std::size_t>& expected_bytes, const Deadline& deadline,
                               const Operation& operation)
    : engine_(engine) {
  std::vector<std::int64_t> sent_bytes;
  for (int r = 0; r < engine.size(); ++r) {
    const auto place = static_cast<std::size_t>(r);
    const bool own = r == engine.rank();
    sent_bytes.push_back(own ? 0 : static_cast<std::int64_t>(inputs[place].size_bytes()));
    received_bytes_.push_back(own ? 0 : static_cast<std::int64_t>(expected_bytes[place]));
  }
  sent_ = engine.take_memory(sum(sent_bytes));
  received_ = engine.take_memory(sum(received_bytes_));
  auto* next = static_cast<std::byte*>(sent_.data_ptr());
  for (std::size_t r = 0; r < inputs.size(); ++r) {
    if (sent_bytes[r] > 0) {
      std::memcpy(next, inputs[r].data, inputs[r].size_bytes());
      next += sent_bytes[r];
    }
  }
  ::c10d::AllToAllOptions options;
  options.timeout = std::min(deadline.remaining(), kForever) + kMargin;
  std::vector<std::int64_t> received_bytes = received_bytes_;  // Gloo empties the lists that it is given
  work_ = engine.posted(operation, [&](::c10d::Backend& backend) {
    return backend.alltoall_base(received_, sent_, received_bytes, sent_bytes, options);
  });
}

C10dEngine::AllToAll::~AllToAll() {
  if (ended_ && work_) {  // otherwise the engine may still use it
    engine_.give_memory(std::move(sent_));
    engine_.give_memory(std::move(received_));
  }
}

void C10dEngine::AllToAll::finish(const Deadline& deadline, Operation& operation) {
  engine_.wait(*work_, deadline, operation);
  ended_ = true;
}

at::Tensor C10dEngine::take_memory(std::int64_t num_bytes) {
  const std::lock_guard lock(memory_mutex_);
  const auto fits = [num_bytes](const at::Tensor& memory) {
    const auto kept = static_cast<std::int64_t>(memory.storage().nbytes());
    return kept >= num_bytes && kept / 2 <= num_bytes;
  };
  const auto found = std::find_if(memory_.begin(), memory_.end(), fits);
  if (num_bytes == 0 || found == memory_.end()) {
    return bytes(num_bytes);
  }
  const at::Tensor whole = std::move(*found);
  memory_.erase(found);
  return whole.as_strided({num_bytes}, {1});
}

void C10dEngine::give_memory(at::Tensor memory) {
  const std::size_t num_bytes = memory.defined() ? memory.storage().nbytes() : 0;
  if (num_bytes < kWorthKeepingBytes || num_bytes > kKeptBytes) {
    return;
  }
  const std::lock_guard lock(memory_mutex_);
  if (memory_.size() == kKeptMemory) {
    memory_.erase(memory_.begin());
  }
  memory_.push_back(std::move(memory));
}

const std::byte* C10dEngine::AllToAll::from(int rank) const {
  const auto first = received_bytes_.begin();
  return static_cast<const std::byte*>(received_.data_ptr()) + std::accumulate(first, first + rank, std::int64_t{0});
}

template <class Post>
C10dEngine::WorkPointer C10dEngine::posted(const Operation& operation, const Post& post) {
  const std::lock_guard lock(posting_);
  try {
    return post(*backend_);
  } catch (const std::exception& error) {
    std::rethrow_exception(translated(error, operation));
  }
}

C10dEngine::WorkPointer C10dEngine::send(const at::Tensor& data, int destination, int tag) {
  std::vector<at::Tensor> tensors = {data};
  return posted({"send"}, [&](::c10d::Backend& backend) { return backend.send(tensors, destination, tag); });
}

C10dEngine::WorkPointer C10dEngine::receive(const at::Tensor& data, int source, int tag) {
  std::vector<at::Tensor> tensors = {data};
  return posted({"receive"}, [&](::c10d::Backend& backend) { return backend.recv(tensors, source, tag); });
}

void C10dEngine::wait_in_background(::c10d::Work& work, const std::function<bool()>& stopped) const {
  if (!is_gloo_) {
    while (!work.isCompleted() && !stopped()) {
      std::this_thread::sleep_for(kPoll);
    }
  }
  // Messages of Gloo cannot be asked whether they have ended, and a wait that times out closes its connections.
  if (!stopped()) {
    work.wait(is_gloo_ ? kForever : ::kNoTimeout);
  }
}

void C10dEngine::wait(::c10d::Work& work, const Deadline& deadline, Operation& operation) {
  const Waiting waiting;
  while (!work.isCompleted()) {
    pause(work);
    if (!work.isCompleted()) {
      look_around(deadline, operation);
    }
  }
  try {
    work.wait();
  } catch (const std::exception& error) {
    std::rethrow_exception(translated(error, operation));
  }
}

// A wait that times out does no harm to a collective of Gloo; to other engines it may be fatal.
void C10dEngine::pause(::c10d::Work& work) const {
  if (!is_gloo_) {
    return std::this_thread::sleep_for(kPoll);
  }
  try {
    work.wait(kSlice);
  } catch (const std::exception&) {  // the end of the slice, or a failure, which the work keeps
  }
}

bool C10dEngine::is_usable() const {
  return !process_.forked() && !news_.failure().reason();
}

void C10dEngine::check_process(const std::string& operation) const {
  if (process_.forked()) {
    throw communicator_of_parent(operation, who());
  }
}

void C10dEngine::check_usable(const std::string& operation) const {
  check_process(operation);
  news_.failure().check(operation, hooks_.number_of(rank()));
}

void C10dEngine::look_around(const Deadline& deadline, Operation& operation) {
  hooks_.probe();
  check_process(operation.text);
  news_.ask_now_and_then();
  const std::string what = operation.text + " on " + who();
  if (const auto reason = told_reason(operation)) {
    throw PeerLost(what + ": " + *reason);
  }
  const auto waited = deadline.waited();
  if (deadline.expired()) {
    throw Timeout(what + " has not completed after " + std::to_string(waited.count()) +
                  " ms: it waited for other hosts, which may be stopped, slow, or in code that does not call this "
                  "operation");
  }
  if (!operation.warned && waited >= hooks_.warn_after) {
    operation.warned = true;
    hooks_.warn(what + " has waited for other hosts for " + std::to_string(waited.count() / 1000) + " s");
  }
}

std::optional<std::string> C10dEngine::told_reason(const Operation& operation) const {
  const auto departure = news_.departure();
  const bool lacks = departure && departure->num_operations < operation.number;
  const auto failure = news_.failure().reason();
  return failure || !lacks ? failure : departure->who + " has left the group without this operation";
}

std::exception_ptr C10dEngine::translated(const std::exception& error, const Operation& operation) {
  const steady_clock::rep now = steady_clock::now().time_since_epoch().count();
  steady_clock::rep first = 0;
  first = first_loss_.compare_exchange_strong(first, now) ? now : first;
  const milliseconds patience = share_hosts_ ? kWaitForReason : kWaitForLastWord;
  const auto give_up = steady_clock::time_point(steady_clock::duration(first)) + patience;
  news_.ask();
  // Without a probe, which waits for the interpreter: a thread that has it may wait for a lock of this one.
  while (!told_reason(operation) && steady_clock::now() < give_up) {
    std::this_thread::sleep_for(kSlice);
    news_.ask();
  }
  const std::string account = account_of(error);
  const bool is_the_other = size() == 2 && tells_of_closed_connection(account);
  const std::string lost = is_the_other ? hooks_.name_of(1 - rank()) : "a rank";
  const std::string reason = told_reason(operation).value_or(lost + " was lost: " + account);
  return std::make_exception_ptr(PeerLost(operation.text + " on " + who() + ": " + reason));
}

void C10dEngine::fail(const std::string& reason) noexcept {
  if (!process_.forked()) {
    news_.tell_failure(who(), reason);
  }
}

void C10dEngine::leave(std::uint64_t num_operations, std::vector<std::uint64_t> num_messages) noexcept {
  if (is_usable()) {
    news_.tell_departure(rank(), {num_operations, who(), std::move(num_messages)});
  }
}

}  // namespace accelerate_cpp::comm
