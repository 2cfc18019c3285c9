// How the ranks of several hosts compare what they call, and meet.
#include <cstring>
#include <numeric>
#include <string>
#include <vector>

#include "core/base/error.h"
#include "core/comm/fingerprint.h"
#include "core/comm/hierarchical.h"

namespace accelerate_cpp::comm {

std::vector<int> Hierarchical::check(const CallRecord& record, const Call& call) {
  return check_.check(
      record, call, [&](const CallDigest& own) { return agree(own, call); },
      [&](const std::string& own) { return all_gather_bytes(own, call); });
}

std::vector<int> Hierarchical::meet(const std::string& topic, const Call& call) {
  CallRecord record{CallKind::kMeeting};
  Fingerprint fingerprint;
  fingerprint.mix(topic);
  record.count = fingerprint.value();
  const bool had_failed = failure_.reason().has_value();
  std::vector<int> here;
  try {
    run_alone(record, [&] { here = check(record, call); });
  } catch (const PeerLost&) {
    if (had_failed || someone_has_left()) {
      return {rank_};
    }
    throw;
  }
  if (here.empty()) {  // all agree
    here.resize(static_cast<std::size_t>(size()));
    std::iota(here.begin(), here.end(), 0);
  }
  return here;
}

std::string Hierarchical::all_gather_bytes(const std::string& own, const Call& call) const {
  const std::size_t length = own.size();
  const auto view = [length](std::string& text, std::size_t place) {
    return MemoryView{text.data() + place * length, length, DType::kUInt8};
  };
  std::string of_host(length * own_ranks().size(), '\0');
  std::string all(length * static_cast<std::size_t>(size()), '\0');
  std::vector<MemoryView> places;
  for (std::size_t i = 0; is_leader() && i < own_ranks().size(); ++i) {
    places.push_back(view(of_host, i));
  }
  inside([&] { parts_.inside->gather({own.data(), length, DType::kUInt8}, places, 0, part_of(call)); });
  if (is_leader()) {
    std::string by_host(all.size(), '\0');
    std::vector<MemoryView> blocks;
    std::size_t first = 0;
    for (int h = 0; h < layout_.num_hosts(); ++h) {
      const std::size_t count = layout_.ranks_of(h).size();
      blocks.push_back({view(by_host, first).data, count * length, DType::kUInt8});
      first += count;
    }
    between([&] { parts_.rail->all_gather({of_host.data(), of_host.size(), DType::kUInt8}, blocks, part_of(call)); });
    for (int r = 0; r < size(); ++r) {
      const std::byte* const block = blocks[static_cast<std::size_t>(layout_.host_of(r))].bytes();
      std::memcpy(view(all, static_cast<std::size_t>(r)).data,
                  block + static_cast<std::size_t>(layout_.index_within_host(r)) * length, length);
    }
  }
  inside([&] { parts_.inside->broadcast({all.data(), all.size(), DType::kUInt8}, 0, part_of(call)); });
  return all;
}

bool Hierarchical::agree(const CallDigest& own, const Call& call) const {
  struct OfHost {
    CallDigest digest;
    std::uint64_t disagrees;
  };
  const auto bytes_of = [](auto& value) { return MemoryView{&value, sizeof(value), DType::kUInt8}; };
  const auto views_of = [&](auto& values) {
    std::vector<MemoryView> views;
    for (auto& value : values) {
      views.push_back(bytes_of(value));
    }
    return views;
  };
  std::vector<CallDigest> near(own_ranks().size());
  CallDigest mine = own;
  inside([&] { parts_.inside->all_gather(bytes_of(mine), views_of(near), part_of(call)); });
  std::uint8_t fits = 0;
  if (parts_.rail) {
    OfHost of_host{near.front(), 0};
    of_host.digest.balance = 0;
    for (const CallDigest& digest : near) {
      of_host.digest.balance += digest.balance;
      of_host.disagrees |= digest.common != near.front().common ? 1 : 0;
    }
    std::vector<OfHost> hosts(static_cast<std::size_t>(layout_.num_hosts()));
    between([&] { parts_.rail->all_gather(bytes_of(of_host), views_of(hosts), part_of(call)); });
    std::vector<CallDigest> digests;
    bool all_agree = true;
    for (const OfHost& one : hosts) {
      digests.push_back(one.digest);
      all_agree = all_agree && one.disagrees == 0;
    }
    fits = all_agree && fit_together(digests) ? 1 : 0;
  }
  if (static_cast<int>(own_ranks().size()) > layout_.num_rails()) {
    inside([&] { parts_.inside->broadcast(bytes_of(fits), 0, part_of(call)); });
  }
  return fits != 0;
}

}  // namespace accelerate_cpp::comm
