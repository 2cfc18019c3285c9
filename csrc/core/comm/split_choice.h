// Which ranks form a new group when a group is split.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

namespace accelerate_cpp::comm {

// What a rank passes to Communicator::split.
struct SplitChoice {
  std::int32_t color;
  std::int32_t key;
};

// The ranks that have passed `color`, by key, then by rank; `choices` are in rank order.
std::vector<int> members_of(const std::vector<SplitChoice>& choices, int color);

// The same for this rank's own choice. Collective: `all_gather` takes the bytes of this rank and returns those of all
// ranks, in rank order.
template <class AllGather>
std::vector<int> agree_on_members(const SplitChoice& own, const AllGather& all_gather) {
  const std::string all = all_gather(std::string(reinterpret_cast<const char*>(&own), sizeof(own)));
  std::vector<SplitChoice> choices(all.size() / sizeof(SplitChoice));
  std::memcpy(choices.data(), all.data(), all.size());
  return members_of(choices, own.color);
}

}  // namespace accelerate_cpp::comm
