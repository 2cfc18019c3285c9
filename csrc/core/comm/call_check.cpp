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

}  // namespace

void CallCheck::check(CallRecord record, const Call& call, const Agree& agree, const Exchange& exchange) {
  ++sequence_;
  if (record.gives.empty()) {
    record.shape = call.shape;
  }
  if (!agree(CallDigest(record, rank_))) {
    throw_mismatch(std::move(record), call, exchange);
  }
}

void CallCheck::check(CallRecord record, const Call& call, const Exchange& exchange) {
  const auto agree = [&](const CallDigest& own) {
    return fit_together(values_of<CallDigest>(exchange(bytes_of(own))));
  };
  check(std::move(record), call, agree, exchange);
}

void CallCheck::throw_mismatch(CallRecord record, const Call& call, const Exchange& exchange) const {
  record.location = call.location.empty() ? call_site_() : std::string(call.location);
  std::string own = record.encode();
  const auto lengths = values_of<std::uint64_t>(exchange(bytes_of(static_cast<std::uint64_t>(own.size()))));
  const std::size_t longest = *std::max_element(lengths.begin(), lengths.end());
  own.resize(longest);
  const std::string all = exchange(own);
  KnownCalls calls;
  for (std::size_t r = 0; r < lengths.size(); ++r) {
    calls.push_back(CallRecord::decode(all.substr(r * longest, lengths[r])));
  }
  throw MismatchedCollective("ranks called different collectives as operation #" + std::to_string(sequence_) + ": " +
                             find_contradiction(calls).value_or("their arguments differ") + table_of(calls) +
                             "\nEvery rank must call the same collectives in the same order, with equal shapes and "
                             "dtypes");
}

}  // namespace accelerate_cpp::comm
