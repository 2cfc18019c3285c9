// What a Group says about its ranks: who waits for whom, where everyone is, and how their calls differ.
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "core/comm/shm/group.h"

namespace accelerate_cpp::comm {
namespace {

// How long ranks that have found a mismatch wait for each other's call sites.
constexpr std::chrono::milliseconds kPlaceWait{1000};

std::string list(const std::uint64_t* first, int count) {
  std::string text = "[";
  for (int i = 0; i < count; ++i) {
    text += (i == 0 ? "" : ", ") + std::to_string(first[i]);
  }
  return text + "]";
}

// Where the rank called operation `sequence`, if it has published that.
CallSite site_of(const RankControl& control, std::uint64_t sequence) {
  const auto& place = control.places[sequence & 1];
  return CallSite(place.is_of(sequence) ? place.read() : "");
}

// A copy of something that its owner may be writing; only valid if the owner turns out not to have written meanwhile.
#if defined(__GNUC__)
__attribute__((noinline, no_sanitize("thread")))
#endif
Operation torn_copy(const Operation& shared) {
  using Word __attribute__((may_alias)) = std::uint64_t;
  static_assert(sizeof(Operation) % sizeof(Word) == 0 && std::is_trivially_copyable_v<Operation>);
  Operation copy{{CallKind::kBarrier}};
  const Word* const from = reinterpret_cast<const Word*>(&shared);
  Word* const to = reinterpret_cast<Word*>(&copy);
  for (std::size_t i = 0; i < sizeof(Operation) / sizeof(Word); ++i) {
    to[i] = __atomic_load_n(from + i, __ATOMIC_RELAXED);
  }
  return copy;
}

}  // namespace

std::string Group::own_place() const {
  return location_.empty() ? hooks_.call_site() : std::string(location_);
}

void Group::publish_place() {
  auto& place = own().places[number_ & 1];
  if (current_.signature.kind == CallKind::kMeeting || place.is_of(number_)) {
    return;
  }
  place.write(number_, own_place().c_str());
  own().event.notify();
}

void Group::await_places() {
  const auto give_up = std::chrono::steady_clock::now() + kPlaceWait;
  for (int peer = 0; peer < size_; ++peer) {
    const auto& place = control(peer).places[sequence_ & 1];
    const auto known = [&] { return place.is_of(sequence_) || std::chrono::steady_clock::now() >= give_up; };
    control(peer).event.wait_until(known, {}, [] {});
  }
}

void Group::throw_mismatch() {
  publish_place();
  await_places();
  std::string table = "ranks called different collectives as operation #" + std::to_string(sequence_) + ":";
  for (int rank = 0; rank < size_; ++rank) {
    const CallSite site = site_of(control(rank), sequence_);
    table += "\n  " + hooks_.name_of(rank) + ": " +
             site.name(announced(rank).signature.describe(hooks_) + describe_counts(rank)) + site.suffix();
  }
  throw MismatchedCollective(
      table + "\nEvery rank must call the same collectives in the same order, with equal shapes and dtypes");
}

void Group::throw_lost(int peer, const Loss& lost) {
  publish_place();
  lost.raise(describe_wait(peer));
}

std::string Group::describe_counts(int rank) const {
  if (!announced(rank).has_counts) {
    return "";
  }
  const std::uint64_t* const table = counts(rank, sequence_);
  return ", gives " + list(table, size_) + " and expects " + list(table + size_, size_) + " elements";
}

std::string Group::describe_wait(int peer) const {
  const bool meets = current_.signature.kind == CallKind::kMeeting;
  const std::string own = meets ? own_place() : "";
  const CallSite site = meets ? CallSite(own) : site_of(control(rank_), number_);
  const std::string number = meets ? "" : " (operation #" + std::to_string(number_) + ")";
  return site.name(current_.signature.describe(hooks_)) + number + site.suffix() + " on " + hooks_.name_of(rank_) +
         " waited for " + hooks_.name_of(peer) + ": ";
}

std::string Group::standing(int peer) const {
  RankControl& control = this->control(peer);
  const std::string who = hooks_.name_of(peer);
  Operation operation{{CallKind::kBarrier}};
  std::uint64_t reached = 0;
  do {  // the peer may go on and overwrite the description while it is copied
    reached = control.announced.load(std::memory_order_acquire);
    operation = torn_copy(control.operations[reached & 1]);
    // A load could be reordered before the copy; adding 0 cannot.
  } while (control.announced.fetch_add(0, std::memory_order_acq_rel) != reached);
  if (reached == 0) {
    return who + " has not called a collective of this group";
  }
  const CallSite site = site_of(control, reached);
  return who + " last reached operation #" + std::to_string(reached) + " (" +
         site.name(operation.signature.describe(hooks_)) + ")" + site.suffix();
}

std::string Group::standings() const {
  std::string text;
  for (int rank = 0; rank < size_; ++rank) {
    text += "\n  " + standing(rank);
  }
  return text;
}

}  // namespace accelerate_cpp::comm
