#include "core/comm/call_check.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "core/base/error.h"

namespace accelerate_cpp::comm {
namespace {

template <class T>
std::string bytes_of(const T& value) {
  return {reinterpret_cast<const char*>(&value), sizeof(T)};
}

template <class T>
std::vector<T> values_of(const std::string& bytes) {
  std::vector<T> values(bytes.size() / sizeof(T));
  std::memcpy(values.data(), bytes.data(), values.size() * sizeof(T));
  return values;
}

// The ranks that are in the same meeting as the lowest rank that is in any.
std::vector<int> first_meeting(const KnownCalls& calls) {
  std::vector<int> ranks;
  for (std::size_t r = 0; r < calls.size(); ++r) {
    const bool meets = calls[r] && calls[r]->kind == CallKind::kMeeting;
    if (meets && (ranks.empty() || calls[r]->count == calls[static_cast<std::size_t>(ranks.front())]->count)) {
      ranks.push_back(static_cast<int>(r));
    }
  }
  return ranks;
}

}  // namespace

std::vector<int> CallCheck::check(CallRecord record, const Call& call, const Agree& agree,
                                  const AllGather& all_gather) {
  if (record.gives.empty()) {
    record.shape = call.shape;
  }
  while (true) {
    ++sequence_;
    if (agree(CallDigest(record, rank_))) {
      return {};
    }
    const KnownCalls calls = gather_records(record, call, all_gather);
    std::vector<int> meeting = first_meeting(calls);
    if (meeting.empty()) {
      throw_mismatch(calls);
    }
    if (std::find(meeting.begin(), meeting.end(), rank_) != meeting.end()) {
      return meeting;
    }
  }
}

void CallCheck::check(CallRecord record, const Call& call, const AllGather& all_gather) {
  const auto agree = [&](const CallDigest& own) {
    return fit_together(values_of<CallDigest>(all_gather(bytes_of(own))));
  };
  check(std::move(record), call, agree, all_gather);
}

KnownCalls CallCheck::gather_records(CallRecord record, const Call& call, const AllGather& all_gather) const {
  record.location = call.location.empty() ? hooks_.call_site() : std::string(call.location);
  std::string own = record.encode();
  const auto lengths = values_of<std::uint64_t>(all_gather(bytes_of(static_cast<std::uint64_t>(own.size()))));
  const std::size_t longest = *std::max_element(lengths.begin(), lengths.end());
  own.resize(longest);
  const std::string all = all_gather(own);
  KnownCalls calls;
  for (std::size_t r = 0; r < lengths.size(); ++r) {
    calls.push_back(CallRecord::decode(all.substr(r * longest, lengths[r])));
  }
  return calls;
}

void CallCheck::throw_mismatch(const KnownCalls& calls) const {
  throw MismatchedCollective("ranks called different collectives as operation #" + std::to_string(sequence_) + ": " +
                             find_contradiction(calls, hooks_).value_or("their arguments differ") +
                             table_of(calls, hooks_) +
                             "\nEvery rank must call the same collectives in the same order, with equal shapes and "
                             "dtypes");
}

}  // namespace accelerate_cpp::comm
