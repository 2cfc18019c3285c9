#include "core/comm/host_layout.h"

#include <map>

namespace accelerate_cpp::comm {
namespace {

std::string numbered(const std::vector<int>& ranks) {
  std::string text;
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    text += (i == 0 ? "" : ", ") + std::to_string(i) + ": rank " + std::to_string(ranks[i]);
  }
  return text;
}

}  // namespace

HostLayout::HostLayout(const std::vector<int>& host_of_rank) {
  std::map<int, int> numbers;
  for (std::size_t rank = 0; rank < host_of_rank.size(); ++rank) {
    const int host = numbers.emplace(host_of_rank[rank], static_cast<int>(numbers.size())).first->second;
    ranks_.resize(numbers.size());
    std::vector<int>& ranks = ranks_[static_cast<std::size_t>(host)];
    host_of_.push_back(host);
    index_.push_back(static_cast<int>(ranks.size()));
    ranks.push_back(static_cast<int>(rank));
  }
}

std::string HostLayout::names_within(int host) const {
  return numbered(ranks_of(host));
}

std::string HostLayout::names_of_leaders() const {
  std::vector<int> leaders;
  for (const std::vector<int>& ranks : ranks_) {
    leaders.push_back(ranks.front());
  }
  return numbered(leaders);
}

}  // namespace accelerate_cpp::comm
