// The store with which the ranks of a new group find each other when a group is split. Its entries travel over the
// parent.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "core/comm/communicator.h"
#include "core/comm/store.h"

namespace accelerate_cpp::comm {

class SplitStore final : public Store {
 public:
  // Collective over `parent`: ranks that pass the same color belong together.
  SplitStore(Communicator& parent, int color, int key, const Call& call);

  // This rank's place among those of its color: by key, then by rank.
  int new_rank() const { return new_rank_; }
  int new_size() const { return static_cast<int>(members_.size()); }
  // Ranks of the parent, in the order of the new group.
  const std::vector<int>& members() const { return members_; }

  // Collective over `parent`: all ranks, of every color, call publish() or set() the same number of times.
  void publish(const std::string& key, const std::string& value);

  // As publish().
  void set(const std::string& key, const std::string& value) override;
  // What a rank of this color has set so far; never waits.
  std::string get(const std::string& key, Deadline deadline) override;

 private:
  Communicator& parent_;
  const Call call_;
  std::vector<int> members_;
  int new_rank_ = 0;
  std::map<std::string, std::string> values_;
};

}  // namespace accelerate_cpp::comm
