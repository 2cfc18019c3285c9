// A board in the store on which the ranks of a group write what they could not say otherwise: NCCL gives no answer when
// a rank calls something else, has failed or has left. As long as all goes well nothing is read here, and nothing
// written but a note when a rank leaves.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "core/comm/call_record.h"
#include "core/comm/store.h"

namespace accelerate_cpp::comm {

class GroupBoard {
 public:
  // Why a group has ended, written by the first rank that noticed.
  struct Failure {
    bool is_mismatch = false;    // the ranks' calls contradicted each other in operation `sequence`
    std::uint64_t sequence = 0;  // the operation that the failed rank was in, or had finished last
    std::string text;
  };

  // Keys begin with `prefix`, which belongs to this group alone.
  GroupBoard(std::shared_ptr<Store> store, std::string prefix, int rank);

  // The later of two failures may replace the earlier one or be lost: either ends the group. Never throws.
  void publish_failure(const Failure& failure) noexcept;
  std::optional<Failure> failure() const;

  // What this rank asks in operation `sequence`; once per operation.
  void publish_call(std::uint64_t sequence, const CallRecord& record);
  // Empty while `peer` has not said it; with a deadline, waits for it that long.
  std::optional<CallRecord> call_of(int peer, std::uint64_t sequence) const;
  std::optional<CallRecord> call_of(int peer, std::uint64_t sequence, Deadline deadline) const;

  // That this rank is gone for good, `sequence` having been its last operation. Never throws.
  void publish_leaving(std::uint64_t sequence) noexcept;
  std::optional<std::uint64_t> last_operation_of(int peer) const;

  // Further keys of the group's own.
  void publish(const std::string& key, const std::string& value) { store_->set(prefix_ + key, value); }
  std::string await(const std::string& key, Deadline deadline) const { return store_->get(prefix_ + key, deadline); }
  // Empty while nobody has written it.
  std::optional<std::string> look(const std::string& key) const;

  const std::shared_ptr<Store>& store() const { return store_; }
  const std::string& prefix() const { return prefix_; }

 private:
  std::optional<std::string> look_until(const std::string& key, Deadline deadline) const;
  static std::string call_key(int rank, std::uint64_t sequence);

  std::shared_ptr<Store> store_;
  std::string prefix_;
  int rank_;
};

}  // namespace accelerate_cpp::comm
