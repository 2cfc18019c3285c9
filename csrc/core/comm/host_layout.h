// Which ranks of a group share a host.
#pragma once

#include <vector>

namespace accelerate_cpp::comm {

class HostLayout {
 public:
  // host_of_rank[r] identifies the host of rank r by any number. Hosts are counted from 0 in the order of their first
  // rank.
  explicit HostLayout(const std::vector<int>& host_of_rank);

  int size() const { return static_cast<int>(host_of_.size()); }
  int num_hosts() const { return static_cast<int>(ranks_.size()); }
  int host_of(int rank) const { return host_of_[static_cast<std::size_t>(rank)]; }
  // The ranks of a host, ascending. The first is its leader.
  const std::vector<int>& ranks_of(int host) const { return ranks_[static_cast<std::size_t>(host)]; }
  int leader_of(int host) const { return ranks_of(host).front(); }
  bool is_leader(int rank) const { return leader_of(host_of(rank)) == rank; }
  // The place of a rank among those of its host.
  int index_within_host(int rank) const { return index_[static_cast<std::size_t>(rank)]; }

  // How many ranks each host has at least. The ranks with the same index below that form a rail.
  int num_rails() const;
  bool is_on_rail(int rank) const { return index_within_host(rank) < num_rails(); }
  // The ranks with this index within their hosts, by host.
  std::vector<int> ranks_of_rail(int index) const;

 private:
  std::vector<int> host_of_;
  std::vector<int> index_;
  std::vector<std::vector<int>> ranks_;
};

}  // namespace accelerate_cpp::comm
