#include "torch_bridge/c10d_news.h"

#include <sstream>
#include <utility>
#include <vector>

namespace accelerate_cpp::comm {
namespace {

constexpr std::chrono::milliseconds kInterval{300};
constexpr std::chrono::milliseconds kNoTurn{0};
// What a store that answers at all needs on a machine that is busy. Operations time out later by as much.
constexpr std::chrono::milliseconds kPatience{1000};
constexpr std::chrono::milliseconds kLastPatience{2000};
const char* const kFailure = "failure";
const char* const kFirstDeparture = "left/first";

// Empty if nobody has set it, or if the host of the store is gone, which the engine will report.
std::string heard_from(::c10d::Store& store, const std::string& key) noexcept {
  try {
    if (store.check({key})) {
      const std::vector<std::uint8_t> text = store.get(key);
      return {text.begin(), text.end()};
    }
  } catch (const std::exception&) {
  }
  return "";
}

}  // namespace

C10dNews::C10dNews(StorePointer store, std::string group) : store_(std::move(store)), group_(std::move(group)) {}

std::optional<C10dNews::Departure> C10dNews::departure() const {
  const std::lock_guard lock(heard_->mutex);
  return heard_->departure;
}

void C10dNews::tell_failure(const std::string& who, const std::string& reason) noexcept {
  if (heard_->failure.set(reason)) {
    tell(kFailure, who + " failed: " + reason);
  }
}

void C10dNews::tell_departure(int rank, const Departure& departure) noexcept {
  std::string counts;
  for (const std::uint64_t count : departure.num_messages) {
    counts += std::to_string(count) + " ";
  }
  tell(group_ + "/left/" + std::to_string(rank), counts + ";");
  tell(group_ + "/" + kFirstDeparture, std::to_string(departure.num_operations) + " " + departure.who);
}

std::optional<std::uint64_t> C10dNews::messages_of_departed(int rank, int to) const noexcept {
  const auto text = std::make_shared<std::string>();
  const auto ask = [text, key = group_ + "/left/" + std::to_string(rank)](::c10d::Store& store) {
    *text = heard_from(store, key);
  };
  if (!perform(ask, kPatience, kPatience) || text->empty()) {
    return std::nullopt;
  }
  std::istringstream counts(*text);
  std::uint64_t count = 0;
  for (int r = 0; r <= to; ++r) {
    counts >> count;  // 0 after the last one
  }
  return count;
}

void C10dNews::ask_now_and_then() noexcept {
  {
    const std::lock_guard lock(heard_->mutex);
    const Clock::time_point now = Clock::now();
    if (now - heard_->last_asked < kInterval) {
      return;
    }
    heard_->last_asked = now;
  }
  ask();
}

void C10dNews::ask() noexcept {
  const auto asked = [heard = heard_, departed = group_ + "/" + kFirstDeparture](::c10d::Store& store) {
    if (const std::string failure = heard_from(store, kFailure); !failure.empty()) {
      heard->failure.set(failure);
    }
    const std::string first = heard_from(store, departed);
    const std::lock_guard lock(heard->mutex);
    if (!heard->departure && !first.empty()) {
      const std::size_t space = first.find(' ');
      heard->departure = Departure{std::stoull(first.substr(0, space)), first.substr(space + 1)};
    }
  };
  perform(asked, kNoTurn, kPatience);
}

void C10dNews::tell(std::string key, std::string text) const noexcept {
  const auto told = [key = std::move(key), text = std::move(text)](::c10d::Store& store) {
    if (!store.check({key})) {
      store.set(key, std::vector<std::uint8_t>(text.begin(), text.end()));
    }
  };
  perform(told, kPatience, kLastPatience);
}

bool C10dNews::perform(Task task, std::chrono::milliseconds turn, std::chrono::milliseconds patience) const noexcept {
  if (process_.forked()) {
    return false;  // the mutex may be held for good
  }
  std::unique_lock lock(heard_->mutex);
  if (!heard_->changed.wait_for(lock, turn, [this] { return !heard_->busy; })) {
    return false;
  }
  const auto done = std::make_shared<bool>(false);
  const auto body = [heard = heard_, done, store = store_, task = std::move(task)]() mutable {
    try {
      task(*store);
    } catch (const std::exception&) {  // its host is gone, which the engine will report
    }
    store.reset();  // before the object that owns it goes on
    const std::lock_guard end(heard->mutex);
    heard->busy = false;
    *done = true;
    heard->changed.notify_all();
  };
  heard_->busy = true;
  try {
    start_background_thread("accelerate-news", body);
  } catch (const std::exception&) {  // the system refuses a thread, or memory
    heard_->busy = false;
    return false;
  }
  return heard_->changed.wait_for(lock, patience, [&] { return *done; });
}

}  // namespace accelerate_cpp::comm
