#include "core/comm/nccl/group_board.h"

#include <charconv>
#include <utility>

#include "core/base/error.h"

namespace accelerate_cpp::comm {
namespace {

std::optional<std::uint64_t> number_in(const std::string& text) {
  std::uint64_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  return error == std::errc{} && end == text.data() + text.size() ? std::optional(number) : std::nullopt;
}

}  // namespace

GroupBoard::GroupBoard(std::shared_ptr<Store> store, std::string prefix, int rank)
    : store_(std::move(store)), prefix_(std::move(prefix)), rank_(rank) {}

std::optional<std::string> GroupBoard::look(const std::string& key) const {
  return look_until(key, Deadline::after(std::chrono::milliseconds(0)));
}

std::optional<std::string> GroupBoard::look_until(const std::string& key, Deadline deadline) const {
  try {
    return store_->get(prefix_ + key, deadline);
  } catch (const Timeout&) {
    return std::nullopt;
  }
}

void GroupBoard::publish_failure(const Failure& failure) noexcept {
  try {
    publish("/failure", (failure.is_mismatch ? "M" : "F") + std::to_string(failure.sequence) + "\n" + failure.text);
  } catch (...) {  // NOLINT(bugprone-empty-catch): a store that is gone leaves nobody to tell
  }
}

std::optional<GroupBoard::Failure> GroupBoard::failure() const {
  const std::optional<std::string> text = look("/failure");
  if (!text.has_value()) {
    return std::nullopt;
  }
  const std::size_t line_end = text->find('\n');
  Failure failure{false, 0, *text};
  if (line_end != std::string::npos && line_end > 0) {
    failure.is_mismatch = text->front() == 'M';
    failure.sequence = number_in(text->substr(1, line_end - 1)).value_or(0);
    failure.text = text->substr(line_end + 1);
  }
  return failure;
}

std::string GroupBoard::call_key(int rank, std::uint64_t sequence) {
  return "/call/" + std::to_string(sequence) + "/" + std::to_string(rank);
}

void GroupBoard::publish_call(std::uint64_t sequence, const CallRecord& record) {
  publish(call_key(rank_, sequence), record.encode());
}

std::optional<CallRecord> GroupBoard::call_of(int peer, std::uint64_t sequence) const {
  return call_of(peer, sequence, Deadline::after(std::chrono::milliseconds(0)));
}

std::optional<CallRecord> GroupBoard::call_of(int peer, std::uint64_t sequence, Deadline deadline) const {
  const std::optional<std::string> text = look_until(call_key(peer, sequence), deadline);
  return text.has_value() ? CallRecord::decode(*text) : std::nullopt;
}

void GroupBoard::publish_leaving(std::uint64_t sequence) noexcept {
  try {
    publish("/left/" + std::to_string(rank_), std::to_string(sequence));
  } catch (...) {  // NOLINT(bugprone-empty-catch): a store that is gone leaves nobody to tell
  }
}

std::optional<std::uint64_t> GroupBoard::last_operation_of(int peer) const {
  const std::optional<std::string> text = look("/left/" + std::to_string(peer));
  return text.has_value() ? number_in(*text) : std::nullopt;
}

}  // namespace accelerate_cpp::comm
