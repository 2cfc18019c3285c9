// Decides which weights of a model to fetch next, so that they are there when the computation needs them and at most a
// window of bytes is fetched early. A unit is what the computation needs at the same time: the weights of a layer.
#pragma once

#include <cstddef>
#include <deque>
#include <optional>
#include <vector>

namespace accelerate_cpp::offload {

// Whether a part of a unit is useful, or only the whole.
enum class Granularity { kPieces, kWholeUnits };

class AheadPlan {
 public:
  struct Step {
    std::size_t unit;
    std::size_t begin;  // in bytes, from the beginning of the unit
    std::size_t bytes;
  };

  // Units are expected in order, the first again after the last, until they arrive in another order: then each is
  // expected to be followed by the unit that followed it last time. Whole units are not fetched ahead for the next
  // pass, which begins with the unit that arrived first: they would take up room and might change before then. Nor are
  // units larger than the window.
  AheadPlan(std::vector<std::size_t> unit_bytes, std::size_t window_bytes, Granularity granularity);

  // The computation needs `unit` now. Units that were fetched but are no longer expected are forgotten. Returns whether
  // the unit was begun before. In pieces, the rest of it is fetched; a whole unit is not. Throws InvalidArgument when
  // there is no such unit.
  bool arrive(std::size_t unit);

  // The next step, of at most `most_bytes` unless units are whole, which counts as done. Nothing while the window is
  // full, or when everything that is expected is there.
  std::optional<Step> next(std::size_t most_bytes);

  // Whether a thread should be woken: for any whole unit, or else when a quarter of what there could be is missing.
  bool is_behind() const;

  // Whether something of `unit`, which is not the present one, is there early.
  bool has(std::size_t unit) const;

  Granularity granularity() const { return granularity_; }
  std::size_t num_units() const { return unit_bytes_.size(); }
  // What is there early: of the units after the present one.
  std::size_t bytes_ahead() const { return bytes_ahead_; }

 private:
  struct Fetched {
    std::size_t unit;
    std::size_t bytes;
  };

  void start_over(std::size_t unit);
  std::size_t bytes_of(const Fetched& fetched) const { return unit_bytes_[fetched.unit]; }
  // The unit that is expected after the last one, if there is one that may be fetched.
  std::optional<std::size_t> expected() const;

  std::vector<std::size_t> unit_bytes_;
  std::size_t window_bytes_;
  std::size_t total_bytes_;
  Granularity granularity_;
  std::vector<std::size_t> follower_;
  std::optional<std::size_t> first_;  // the unit that arrived first
  std::vector<bool> is_in_;           // whether a unit is among `fetched_`
  std::deque<Fetched> fetched_;       // the present unit, and those expected after it, as far as they were begun
  std::size_t bytes_ahead_ = 0;
};

}  // namespace accelerate_cpp::offload
