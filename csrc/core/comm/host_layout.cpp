#include "core/comm/host_layout.h"

#include <algorithm>
#include <map>

namespace accelerate_cpp::comm {

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

int HostLayout::num_rails() const {
  std::size_t least = host_of_.size();
  for (const std::vector<int>& ranks : ranks_) {
    least = std::min(least, ranks.size());
  }
  return static_cast<int>(least);
}

std::vector<int> HostLayout::ranks_of_rail(int index) const {
  std::vector<int> rail;
  for (const std::vector<int>& ranks : ranks_) {
    rail.push_back(ranks.at(static_cast<std::size_t>(index)));
  }
  return rail;
}

}  // namespace accelerate_cpp::comm
