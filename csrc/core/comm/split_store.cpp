#include "core/comm/split_store.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>

#include "core/base/check.h"
#include "core/base/error.h"
#include "core/comm/split_choice.h"

namespace accelerate_cpp::comm {
namespace {

// What one rank publishes at a time.
struct Record {
  static constexpr std::size_t kTextBytes = 248;

  std::uint32_t key_bytes;
  std::uint32_t value_bytes;
  char text[kTextBytes];  // the key, then the value
};

template <class Element>
std::vector<Element> gather(Communicator& parent, const Element& own, const Call& call) {
  std::vector<Element> all(static_cast<std::size_t>(parent.size()));
  std::vector<MemoryView> views;
  for (Element& element : all) {
    views.push_back({&element, sizeof(Element), DType::kUInt8});
  }
  parent.all_gather({&own, sizeof(Element), DType::kUInt8}, views, call);
  return all;
}

}  // namespace

SplitStore::SplitStore(Communicator& parent, int color, int key, const Call& call) : parent_(parent), call_(call) {
  members_ = members_of(gather(parent, SplitChoice{color, key}, call), color);
  new_rank_ = static_cast<int>(std::find(members_.begin(), members_.end(), parent.rank()) - members_.begin());
}

void SplitStore::publish(const std::string& key, const std::string& value) {
  ACCELERATE_CHECK(key.size() + value.size() <= Record::kTextBytes, "an address for a new group is short: " + key);
  Record own{static_cast<std::uint32_t>(key.size()), static_cast<std::uint32_t>(value.size()), {}};
  std::memcpy(own.text, key.data(), key.size());
  std::memcpy(own.text + key.size(), value.data(), value.size());
  const std::vector<Record> records = gather(parent_, own, call_);
  for (const int member : members_) {
    const Record& record = records[static_cast<std::size_t>(member)];
    const char* const text = record.text;
    values_[std::string(text, record.key_bytes)] = std::string(text + record.key_bytes, record.value_bytes);
  }
}

void SplitStore::set(const std::string& key, const std::string& value) {
  publish(key, value);
}

std::string SplitStore::get(const std::string& key, Deadline) {
  const auto found = values_.find(key);
  ACCELERATE_CHECK(found != values_.end(), "no rank of the new group has set " + key);
  return found->second;
}

}  // namespace accelerate_cpp::comm
