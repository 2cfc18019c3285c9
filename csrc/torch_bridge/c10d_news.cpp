#include "torch_bridge/c10d_news.h"

#include <sstream>
#include <utility>
#include <vector>

namespace accelerate_cpp::comm {
namespace {

constexpr std::chrono::milliseconds kInterval{300};
const char* const kFailure = "failure";
const char* const kFirstDeparture = "left/first";

}  // namespace

C10dNews::C10dNews(StorePointer store, std::string group) : store_(std::move(store)), group_(std::move(group)) {}

std::optional<C10dNews::Departure> C10dNews::departure() const {
  const std::lock_guard lock(mutex_);
  return departure_;
}

void C10dNews::tell_failure(const std::string& who, const std::string& reason) noexcept {
  if (failure_.set(reason)) {
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
  const std::string text = heard(group_ + "/left/" + std::to_string(rank));
  if (text.empty()) {
    return std::nullopt;
  }
  std::istringstream counts(text);
  std::uint64_t count = 0;
  for (int r = 0; r <= to; ++r) {
    counts >> count;  // 0 after the last one
  }
  return count;
}

void C10dNews::ask_now_and_then() noexcept {
  {
    const std::lock_guard lock(mutex_);
    const Clock::time_point now = Clock::now();
    if (now - last_asked_ < kInterval) {
      return;
    }
    last_asked_ = now;
  }
  ask();
}

void C10dNews::ask() noexcept {
  if (const std::string failure = heard(kFailure); !failure.empty()) {
    failure_.set(failure);
  }
  const std::string first = heard(group_ + "/" + kFirstDeparture);
  const std::lock_guard lock(mutex_);
  if (!departure_ && !first.empty()) {
    const std::size_t space = first.find(' ');
    departure_ = Departure{std::stoull(first.substr(0, space)), first.substr(space + 1)};
  }
}

std::string C10dNews::heard(const std::string& key) const noexcept {
  try {
    if (store_->check({key})) {
      const std::vector<std::uint8_t> text = store_->get(key);
      return {text.begin(), text.end()};
    }
  } catch (const std::exception&) {
  }
  return "";
}

void C10dNews::tell(const std::string& key, const std::string& text) const noexcept {
  try {
    if (!store_->check({key})) {
      store_->set(key, std::vector<std::uint8_t>(text.begin(), text.end()));
    }
  } catch (const std::exception&) {
  }
}

}  // namespace accelerate_cpp::comm
