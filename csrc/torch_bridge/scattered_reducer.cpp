#include "torch_bridge/scattered_reducer.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "core/base/check.h"
#include "core/base/round_up.h"
#include "core/comm/copy.h"
#include "core/comm/ordered.h"
#include "torch_bridge/c10d_backend.h"
#include "torch_bridge/pass_checks.h"
#include "torch_bridge/tensor_view.h"
#if defined(ACCELERATE_HAS_SHM)
#include "core/comm/shm/shm_communicator.h"
#include "core/grad/shm_scattered_exchange.h"
#endif

namespace accelerate_cpp::grad {
namespace {

// Slots begin at multiples of as many elements, so that kernels find them aligned.
constexpr std::size_t kAlignment = 16;

std::chrono::milliseconds timeout_of(const BackendPointer& ranks) {
  const auto* const own = dynamic_cast<const comm::C10dBackend*>(ranks.get());
  return own != nullptr ? own->timeout() : std::chrono::milliseconds(0);
}

std::unique_ptr<ScatteredExchange> make_exchange(const BackendPointer& ranks, BackendPointer replicas,
                                                 std::vector<ScatteredBucket> buckets, std::size_t num_flags,
                                                 bool overlaps, Deadline deadline) {
#if defined(ACCELERATE_HAS_SHM)
  auto* const own = dynamic_cast<comm::C10dBackend*>(ranks.get());
  if (own != nullptr && !replicas) {
    if (auto* const ordered = dynamic_cast<comm::OrderedCommunicator*>(own->communicator().get())) {
      if (auto* const shm = dynamic_cast<comm::ShmCommunicator*>(&ordered->in_turn())) {
        return std::make_unique<ShmScatteredExchange>(*shm, ordered->queue(), std::move(buckets), num_flags, deadline);
      }
    }
  }
#endif
  return std::make_unique<C10dScatteredExchange>(ranks, std::move(replicas), std::move(buckets), overlaps);
}

}  // namespace

std::shared_ptr<ScatteredReducer> ScatteredReducer::create(const BackendPointer& ranks, BackendPointer replicas,
                                                           std::vector<ScatteredWeight> weights,
                                                           const ScatteredReducerOptions& options, Begin begin,
                                                           Rethrow rethrow) {
  std::shared_ptr<ScatteredReducer> reducer(new ScatteredReducer(ranks, std::move(replicas), std::move(weights),
                                                                 options, std::move(begin), std::move(rethrow)));
  reducer->own_weights();
  return reducer;
}

ScatteredReducer::ScatteredReducer(const BackendPointer& ranks, BackendPointer replicas,
                                   std::vector<ScatteredWeight> weights, const ScatteredReducerOptions& options,
                                   Begin begin, Rethrow rethrow)
    : options_(options),
      timeout_(timeout_of(ranks)),
      begin_(std::move(begin)),
      rethrow_(std::move(rethrow)),
      num_ranks_(static_cast<std::size_t>(ranks->getSize())),
      rank_(static_cast<std::size_t>(ranks->getRank())) {
  for (ScatteredWeight& given : weights) {
    const at::Tensor& whole = given.whole;
    if (!whole.is_leaf() || !whole.device().is_cpu() || whole.layout() != at::kStrided || whole.dim() == 0) {
      throw InvalidArgument("parameter " + given.name + ": expected a dense leaf on the CPU that has rows");
    }
    const auto rows = static_cast<std::size_t>(whole.size(0));
    const std::size_t share = rows == 0 ? 0 : (rows + num_ranks_ - 1) / num_ranks_ * (elements_of(whole).count / rows);
    weights_.push_back({std::move(given), share});
  }
  for (const BackendPointer& backend : {ranks, replicas}) {
    auto* const own = dynamic_cast<comm::C10dBackend*>(backend.get());
    if (own != nullptr && own->communicator()->can_withdraw()) {
      failures_.emplace_back(own->communicator(), nullptr);
    }
  }
  exchange_ = make_exchange(ranks, std::move(replicas), plan(), weights_.size(), options_.overlaps, deadline());
}

void ScatteredReducer::own_weights() {
  std::vector<at::Tensor> tensors;
  for (const Weight& weight : weights_) {
    tensors.push_back(weight.given.whole);
  }
  ownership_ =
      std::make_shared<ParameterOwnership>(std::move(tensors), [weak = weak_from_this()](std::size_t weight, bool) {
        if (const std::shared_ptr<ScatteredReducer> reducer = weak.lock()) {
          reducer->on_gradient(weight);
        }
      });
  ownership_->take_free();
}

// Gradients tend to arrive in the reverse of the order in which weights are registered. Those of one dtype share
// buckets; a weight is divided only if it is larger than a bucket.
std::vector<ScatteredBucket> ScatteredReducer::plan() {
  std::vector<ScatteredBucket> buckets;
  std::vector<std::pair<DType, std::size_t>> open;  // the bucket of each dtype that may have room
  for (std::size_t index = weights_.size(); index-- > 0;) {
    Weight& weight = weights_[index];
    const Elements elements = elements_of(weight.given.whole);
    const std::size_t own = std::min(weight.share, elements.count - std::min(elements.count, rank_ * weight.share));
    const std::size_t room = round_up(
        std::max<std::size_t>(options_.bucket_bytes / num_ranks_ / element_size(elements.dtype), 1), kAlignment);
    std::size_t begin = 0;
    do {
      auto found = std::find_if(open.begin(), open.end(), [&](const auto& one) { return one.first == elements.dtype; });
      if (found == open.end()) {
        found = open.insert(open.end(), {elements.dtype, buckets.size()});
        buckets.push_back({elements.dtype, 0, {}});
        pieces_.emplace_back();
      }
      const std::size_t offset = round_up(buckets[found->second].block, kAlignment);
      const std::size_t left = weight.share - begin;
      if (offset > 0 && offset + std::min(left, room) > room) {
        open.erase(found);
        continue;
      }
      const std::size_t count = std::min(left, room - offset);
      weight.places.push_back({found->second, pieces_[found->second].size()});
      pieces_[found->second].push_back({index, begin, count, offset});
      buckets[found->second].slots.push_back({offset, std::min(count, own - std::min(own, begin))});
      buckets[found->second].block = offset + count;
      begin += count;
    } while (begin < weight.share || weight.places.empty());
  }
  return buckets;
}

void ScatteredReducer::expect() {
  caller_tells_ = true;
  for (PassFailure& failure : failures_) {
    failure.begin_pass();
  }
}

void ScatteredReducer::begin(std::vector<RowsOfWeight> rows, bool deferred) {
  check_not_forked(process_);
  if (!caller_tells_) {
    for (PassFailure& failure : failures_) {
      failure.begin_pass();
    }
  }
  graph_task_ = torch::autograd::get_current_graph_task_id();
  if (synchronizing()) {
    take_rows(std::move(rows));
    deferred_ = deferred;
    next_ = 0;
    memory_ = {};
    used_.assign(weights_.size(), 0);
    missing_.assign(pieces_.size(), 0);
    for (Weight& weight : weights_) {
      weight.awaited = weight.given.whole.requires_grad();
      weight.arrived = false;
      for (const auto& [bucket, slot] : weight.places) {
        missing_[bucket] += weight.awaited ? 1 : 0;
      }
    }
    exchange_->begin(deadline());
  }
  in_pass_ = true;
}

void ScatteredReducer::take_rows(std::vector<RowsOfWeight> rows) {
  ACCELERATE_CHECK(rows.size() == weights_.size(), "averages of each weight have a place");
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const Elements whole = elements_of(weights_[i].given.whole);
    const std::size_t before = std::min(whole.count, rank_ * weights_[i].share);
    const MemoryView view = view_of(rows[i].rows);
    ACCELERATE_CHECK(view.dtype == whole.dtype && view.count == std::min(weights_[i].share, whole.count - before),
                     "rows are those of this rank: parameter " + weights_[i].given.name);
  }
  rows_ = std::move(rows);
}

void ScatteredReducer::on_gradient(std::size_t index) {
  try {
    if (!in_pass_) {
      begin_();
      ACCELERATE_CHECK(in_pass_, "a pass has begun");
    } else if (!caller_tells_ && graph_task_ != torch::autograd::get_current_graph_task_id()) {
      throw_other_pass();
    }
    if (!synchronizing()) {
      return;
    }
    Weight& weight = weights_[index];
    if (std::exchange(weight.arrived, true)) {
      if (deferred_) {
        return;  // nothing has been handed on
      }
      throw_second_gradient(weight.given.name);
    }
    for (const auto& [bucket, slot] : weight.places) {
      missing_[bucket] -= weight.awaited ? 1 : 0;
    }
    if (deferred_) {
      return;
    }
    fill_next_with(weight);  // while it is in cache
    while (next_ < pieces_.size() && missing_[next_] == 0) {
      publish();
    }
    fill_next_with(weight);  // so that it is freed, if it is divided
  } catch (...) {
    rethrow_();
  }
}

void ScatteredReducer::fill_next_with(const Weight& weight) {
  for (const auto& [bucket, slot] : weight.places) {
    if (bucket == next_ && !is_filled(slot)) {
      fill(slot);
    }
  }
}

void ScatteredReducer::fill(std::size_t slot) {
  if (memory_.data == nullptr) {
    memory_ = exchange_->open(deadline());
    filled_.assign(pieces_[next_].size(), false);
  }
  const Piece& piece = pieces_[next_][slot];
  Weight& weight = weights_[piece.weight];
  at::Tensor& gradient = weight.given.whole.mutable_grad();
  if (gradient.defined()) {
    prepare_for_copy(weight);
    used_[piece.weight] = 1;
  }
  const Elements whole = elements_of(weight.given.whole);
  const std::size_t element_bytes = element_size(whole.dtype);
  const auto* const from = gradient.defined() ? static_cast<const std::byte*>(gradient.const_data_ptr()) : nullptr;
  const std::size_t block = memory_.count / num_ranks_;
  for (std::size_t rank = 0; rank < num_ranks_; ++rank) {
    const std::size_t begin = std::min(whole.count, rank * weight.share + piece.begin);
    const std::size_t end = std::min({whole.count, (rank + 1) * weight.share, begin + piece.count});
    std::byte* const to = memory_.bytes() + (rank * block + piece.offset) * element_bytes;
    if (end <= begin) {
      continue;
    }
    if (from != nullptr) {
      comm::copy(to, from + begin * element_bytes, (end - begin) * element_bytes, comm::Residency::kCached);
    } else {
      std::memset(to, 0, (end - begin) * element_bytes);
    }
  }
  filled_[slot] = true;
  if (piece.begin + piece.count == weight.share) {
    gradient.reset();
  }
}

// Makes the gradient of a weight one whose memory can be copied.
void ScatteredReducer::prepare_for_copy(const Weight& weight) {
  const at::NoGradGuard no_graph;
  at::Tensor& gradient = weight.given.whole.mutable_grad();
  check_no_graph(gradient);
  if (gradient.scalar_type() != weight.given.whole.scalar_type() || !gradient.device().is_cpu()) {
    throw InvalidArgument("parameter " + weight.given.name + " of dtype " +
                          c10::toString(weight.given.whole.scalar_type()) + " received a gradient of dtype " +
                          c10::toString(gradient.scalar_type()) + " on " + gradient.device().str());
  }
  if (gradient.layout() != at::kStrided) {
    gradient = gradient.to_dense();
  }
  if (!gradient.is_contiguous() || gradient.is_conj() || gradient.is_neg()) {
    gradient = gradient.contiguous().resolve_conj().resolve_neg();
  }
}

void ScatteredReducer::publish() {
  const std::vector<Piece>& pieces = pieces_[next_];
  std::vector<Share> shares;
  for (std::size_t slot = 0; slot < pieces.size(); ++slot) {
    if (!is_filled(slot)) {
      fill(slot);
    }
    const RowsOfWeight& rows = rows_[pieces[slot].weight];
    auto* const data = static_cast<std::byte*>(rows.rows.mutable_data_ptr());
    const std::size_t skipped = pieces[slot].begin * element_size(memory_.dtype);
    shares.push_back({data == nullptr ? nullptr : data + skipped, rows.adds});
  }
  exchange_->publish(std::move(shares));
  memory_ = {};
  ++next_;
  exchange_->progress();
}

std::vector<bool> ScatteredReducer::finish() {
  caller_tells_ = false;
  if (!std::exchange(in_pass_, false) || !synchronizing()) {
    return {};
  }
  while (next_ < pieces_.size()) {
    publish();
  }
  exchange_->finish({used_.data(), used_.size(), DType::kUInt8}, deadline());
  rows_.clear();
  return {used_.begin(), used_.end()};
}

void ScatteredReducer::fail(const std::string& reason) noexcept {
  in_pass_ = caller_tells_ = false;
  rows_.clear();
  if (synchronizing()) {
    for (PassFailure& failure : failures_) {
      failure.tell(reason, false, deadline());
    }
  }
}

}  // namespace accelerate_cpp::grad
