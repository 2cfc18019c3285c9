#include "core/comm/hierarchical.h"

#include <cstring>
#include <deque>
#include <utility>

#include "core/base/background.h"
#include "core/base/check.h"
#include "core/base/error.h"
#include "core/base/view_parts.h"
#include "core/comm/arguments.h"
#include "core/comm/reduce_kernels.h"
#include "core/comm/slices.h"

namespace accelerate_cpp::comm {
namespace {

// Small messages within the host and between hosts need no second message for their data.
constexpr std::size_t kInlineBytes = 256;
// Smaller ones are not worth two more collectives inside the host.
constexpr std::size_t kRailBytes = std::size_t{256} << 10;
constexpr std::size_t kRailPieceBytes = std::size_t{3} << 20;
constexpr std::size_t kPiecesAhead = 3;

// Runs `action`; `among` opens the messages of its errors.
template <class Among>
void run_among(const std::function<void()>& action, const Among& among) {
  try {
    action();
  } catch (const PeerLost& error) {
    throw PeerLost(among() + error.what());
  } catch (const Timeout& error) {
    throw Timeout(among() + error.what());
  }
}

}  // namespace

Hierarchical::Hierarchical(HostLayout layout, Parts parts, WaitHooks hooks)
    : layout_(std::move(layout)),
      parts_(std::move(parts)),
      rank_(parts_.everyone->rank()),
      hooks_(std::move(hooks)),
      check_(rank_, hooks_),
      rail_queue_(hooks_.probe, std::chrono::milliseconds(0), AtExit::kLeft) {
  ACCELERATE_CHECK(parts_.everyone->size() == layout_.size(), "one communicator reaches all ranks");
  ACCELERATE_CHECK(parts_.inside->rank() == layout_.index_within_host(rank_) &&
                       parts_.inside->size() == static_cast<int>(own_ranks().size()),
                   "the communicator inside the host has its ranks, in order");
  ACCELERATE_CHECK((parts_.rail != nullptr) == layout_.is_on_rail(rank_), "the ranks on rails reach the other hosts");
  std::vector<int> places(static_cast<std::size_t>(size()), -1);
  std::vector<int> all(static_cast<std::size_t>(size()));
  for (int r = 0; r < size(); ++r) {
    all[static_cast<std::size_t>(r)] = r;
    places[static_cast<std::size_t>(r)] = layout_.host_of(r) == host() ? layout_.index_within_host(r) : -1;
  }
  const auto near = make_port(parts_.inside, places);
  const auto far = make_port(parts_.everyone, all);
  std::vector<std::shared_ptr<MessageMatcher::Port>> ports;
  for (const int place : places) {
    ports.push_back(place < 0 ? far : near);
  }
  messages_ = std::make_shared<MessageMatcher>(rank_, std::move(ports), kInlineBytes, hooks_);
}

Hierarchical::~Hierarchical() {
  messages_->close();
}

void Hierarchical::run(const CallRecord& record, const Call& call, const Action& body) {
  run_alone(record, [&] {
    check(record, call);
    body();
  });
}

void Hierarchical::run_alone(const CallRecord& record, const Action& action) {
  const std::lock_guard lock(mutex_);
  check_usable(record.describe(hooks_));
  try {
    action();
  } catch (const MismatchedCollective&) {
    throw;
  } catch (...) {
    fail(record.describe(hooks_) + " failed on " + hooks_.name_of(rank_) + ": " + reason_in_flight("interrupted"));
    throw;
  }
}

void Hierarchical::inside(const Action& action) const {
  run_among(action, [] { return std::string("among the ranks of one host: "); });
}

void Hierarchical::between(const Action& action) const {
  run_among(action, [this] {
    std::string others;
    for (const int rank : layout_.ranks_of_rail(layout_.index_within_host(rank_))) {
      others += rank == rank_ ? "" : (others.empty() ? "" : ", ") + hooks_.name_of(rank);
    }
    return "between the hosts, with " + others + ": ";
  });
}

void Hierarchical::check_usable(const std::string& what) const {
  if (process_.forked()) {
    throw communicator_of_parent(what, hooks_.name_of(rank_));
  }
  failure_.check(what, hooks_.number_of(rank_));
}

void Hierarchical::fail(const std::string& reason) noexcept {
  if (process_.forked()) {
    return;
  }
  failure_.set(reason);
  // The other hosts first: ending this host's group may end this process.
  parts_.everyone->abort(reason);
  if (parts_.rail) {
    parts_.rail->abort(reason);
  }
  parts_.inside->abort(reason);
}

void Hierarchical::leave() noexcept {
  parts_.everyone->leave();
  if (parts_.rail) {
    parts_.rail->leave();
  }
  parts_.inside->leave();
}

void Hierarchical::abort(const std::string& reason) noexcept {
  fail(reason);
}

// An average is scaled where the values are read: hosts may have different numbers of ranks.
Hierarchical::TwoReductions Hierarchical::two_levels(const Reduction& reduction) const {
  switch (reduction.op) {
    case ReduceOp::kAvg:
      return {{ReduceOp::kPreMulSum, 1.0 / size()}, ReduceOp::kSum};
    case ReduceOp::kPreMulSum:
      return {reduction, ReduceOp::kSum};
    default:
      return {reduction, reduction.op};
  }
}

void Hierarchical::all_reduce(MemoryView data, Reduction reduction, const Call& call) {
  check_reduction(data.dtype, reduction.op);
  const TwoReductions reductions = two_levels(reduction);
  run({CallKind::kAllReduce, data.dtype, reduction.op, -1, data.count}, call, [&] {
    if (data.size_bytes() < kRailBytes || layout_.num_rails() == 1) {
      all_reduce_by_leaders(data, reductions, call);
    } else {
      all_reduce_by_rails(data, reductions, call);
    }
  });
}

void Hierarchical::all_reduce_by_leaders(MemoryView data, const TwoReductions& reductions, const Call& call) const {
  inside([&] { parts_.inside->reduce(data, 0, reductions.inside, part_of(call)); });
  if (is_leader()) {
    between([&] { parts_.rail->all_reduce(data, reductions.between, part_of(call)); });
  }
  inside([&] { parts_.inside->broadcast(data, 0, part_of(call)); });
}

// In pieces: while the rail carries one, the host reduces the next one and distributes the one before.
void Hierarchical::all_reduce_by_rails(MemoryView data, const TwoReductions& reductions, const Call& call) {
  struct OnRail {
    std::vector<MemoryView> slices;
    std::shared_ptr<Pending> pending;  // null where this rank is on no rail
  };
  const auto place = static_cast<std::size_t>(layout_.index_within_host(rank_));
  const std::size_t step = kRailPieceBytes / element_size(data.dtype);
  std::deque<OnRail> under_way;
  const auto take_oldest = [&] {
    const OnRail piece = under_way.front();
    if (piece.pending) {
      piece.pending->wait(std::nullopt);
    }
    under_way.pop_front();
    inside([&] { parts_.inside->all_gather(piece.slices[place], piece.slices, part_of(call)); });
  };
  try {
    for (std::size_t begin = 0; begin < data.count; begin += step) {
      OnRail piece{slices_for_rails(within(data, begin, step)), nullptr};
      const MemoryView own = piece.slices[place];
      inside([&] { parts_.inside->reduce_scatter(const_views(piece.slices), own, reductions.inside, part_of(call)); });
      if (parts_.rail) {
        piece.pending = rail_queue_.issue(
            [&, own] { between([&] { parts_.rail->all_reduce(own, reductions.between, part_of(call)); }); });
      }
      under_way.push_back(std::move(piece));
      if (under_way.size() > kPiecesAhead) {
        take_oldest();
      }
    }
    while (!under_way.empty()) {
      take_oldest();
    }
  } catch (...) {
    // Pieces under way still use `data`; they end with the group.
    fail("all_reduce failed on " + hooks_.name_of(rank_) + ": " + reason_in_flight("interrupted"));
    for (const OnRail& piece : under_way) {
      while (piece.pending && !piece.pending->ended()) {
        try {
          piece.pending->wait(std::nullopt);
        } catch (...) {  // an interrupt or the end of the group; what counts is thrown below
        }
      }
    }
    throw;
  }
}

// One slice for each rail, and nothing for ranks that are on none.
std::vector<MemoryView> Hierarchical::slices_for_rails(MemoryView piece) const {
  const Slices cut(piece.count, element_size(piece.dtype), layout_.num_rails());
  std::vector<MemoryView> slices;
  for (int place = 0; place < static_cast<int>(own_ranks().size()); ++place) {
    const bool on_rail = place < layout_.num_rails();
    slices.push_back(on_rail ? within(piece, cut.begin(place), cut.count(place)) : MemoryView{nullptr, 0, piece.dtype});
  }
  return slices;
}

void Hierarchical::send_from_leader(MemoryView from, MemoryView to, int root, const Call& call) const {
  const ConstMemoryView nothing{nullptr, 0, to.dtype};
  std::vector<ConstMemoryView> parts;
  if (is_leader()) {
    parts.assign(own_ranks().size(), nothing);
    parts[static_cast<std::size_t>(layout_.index_within_host(root))] = from;
  }
  inside(
      [&] { parts_.inside->scatter(parts, rank_ == root ? to : MemoryView{nullptr, 0, to.dtype}, 0, part_of(call)); });
}

void Hierarchical::reduce(MemoryView data, int root, Reduction reduction, const Call& call) {
  check_reduction(data.dtype, reduction.op);
  check_root("reduce", root, size());
  const auto [within, across] = two_levels(reduction);
  run({CallKind::kReduce, data.dtype, reduction.op, root, data.count}, call, [&, w = within, a = across] {
    MemoryView partial = data;
    if (is_leader() && rank_ != root) {  // its own operand stays as it is
      partial = scratch(data.count, data.dtype);
      copy_to(data.data, partial);
    }
    inside([&] { parts_.inside->reduce(partial, 0, w, part_of(call)); });
    const int root_host = layout_.host_of(root);
    if (is_leader()) {
      between([&] { parts_.rail->reduce(partial, root_host, a, part_of(call)); });
    }
    if (host() == root_host && !layout_.is_leader(root)) {
      send_from_leader(partial, data, root, call);
    }
  });
}

void Hierarchical::broadcast(MemoryView data, int root, const Call& call) {
  check_root("broadcast", root, size());
  run({CallKind::kBroadcast, data.dtype, ReduceOp::kSum, root, data.count}, call, [&] {
    const int root_host = layout_.host_of(root);
    if (host() == root_host) {
      inside([&] { parts_.inside->broadcast(data, layout_.index_within_host(root), part_of(call)); });
    }
    if (is_leader()) {
      between([&] { parts_.rail->broadcast(data, root_host, part_of(call)); });
    }
    if (host() != root_host) {
      inside([&] { parts_.inside->broadcast(data, 0, part_of(call)); });
    }
  });
}

MemoryView Hierarchical::scratch(std::size_t count, DType dtype) {
  const std::size_t needed = count * element_size(dtype);
  if (needed > scratch_bytes_) {
    scratch_ = nullptr;
    scratch_bytes_ = 0;
    scratch_ = parts_.inside->allocate(needed);
    scratch_bytes_ = needed;
  }
  return {needed == 0 ? nullptr : scratch_->data(), count, dtype};
}

void Hierarchical::barrier(const Call& call) {
  run({CallKind::kBarrier}, call, [] {});  // the check ends when every rank has entered it
}

std::shared_ptr<Transfer> Hierarchical::send(ConstMemoryView data, int destination, std::uint64_t tag,
                                             const Call& call) {
  check_usable("send to " + hooks_.name_of(destination));
  return messages_->send(data, destination, tag, call);
}

std::shared_ptr<Transfer> Hierarchical::receive(MemoryView data, int source, std::uint64_t tag, const Call& call) {
  check_usable("receive from " + hooks_.name_of(source));
  return messages_->receive(data, source, tag, call);
}

std::shared_ptr<Buffer> Hierarchical::allocate(std::size_t size_bytes) {
  return parts_.inside->allocate(size_bytes);
}

}  // namespace accelerate_cpp::comm
