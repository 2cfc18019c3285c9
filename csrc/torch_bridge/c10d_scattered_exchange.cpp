#include "torch_bridge/c10d_scattered_exchange.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <exception>
#include <string>
#include <utility>

#include "torch_bridge/c10d_backend.h"
#include "torch_bridge/shared_empty.h"
#include "torch_bridge/tensor_view.h"

namespace accelerate_cpp::grad {
namespace {

at::ScalarType scalar_type(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return at::kFloat;
    case DType::kFloat64:
      return at::kDouble;
    case DType::kFloat16:
      return at::kHalf;
    case DType::kBFloat16:
      return at::kBFloat16;
    default:
      throw InvalidArgument(std::string("gradients of dtype ") + name(dtype) + " have no average");
  }
}

void all_reduce(const BackendPointer& ranks, const at::Tensor& tensor, ::c10d::ReduceOp::RedOpType op) {
  std::vector<at::Tensor> tensors{tensor};
  ::c10d::AllreduceOptions options;
  options.reduceOp = op;
  options.asyncOp = false;
  ranks->allreduce(tensors, options)->wait();
}

}  // namespace

C10dScatteredExchange::C10dScatteredExchange(BackendPointer ranks, BackendPointer replicas,
                                             std::vector<ScatteredBucket> buckets, bool overlaps)
    : ScatteredExchange(std::move(buckets), ranks->getSize()),
      ranks_(std::move(ranks)),
      replicas_(std::move(replicas)),
      averages_(dynamic_cast<comm::C10dBackend*>(ranks_.get()) != nullptr),
      num_at_once_(overlaps ? 2 : 1) {
  std::size_t largest = 0;
  for (const ScatteredBucket& bucket : this->buckets()) {
    largest = std::max(largest, size_bytes(bucket));
  }
  for (std::size_t i = 0; i < num_at_once_; ++i) {
    memory_.push_back(comm::shared_empty({static_cast<std::int64_t>(largest)}, at::kByte));
  }
}

C10dScatteredExchange::~C10dScatteredExchange() {
  forget_started();
}

// What has been started works on memory of this exchange.
void C10dScatteredExchange::forget_started() noexcept {
  for (const UnderWay& one : under_way_) {
    try {
      one.work->wait();
    } catch (const std::exception&) {
      // It has ended, which is all that is wanted; the error was or will be raised where the round is awaited.
    }
  }
  under_way_.clear();
}

void C10dScatteredExchange::start_round(Deadline) {
  forget_started();
}

at::Tensor C10dScatteredExchange::bucket(std::size_t index) {
  const ScatteredBucket& spec = buckets()[index];
  const at::Tensor& memory = memory_[index % num_at_once_];
  return at::from_blob(
      memory.mutable_data_ptr(), {static_cast<std::int64_t>(num_ranks() * spec.block)}, [memory](void*) {},
      at::TensorOptions().dtype(scalar_type(spec.dtype)));
}

void* C10dScatteredExchange::free_memory(std::size_t index, Deadline) {
  if (under_way_.size() == num_at_once_) {
    take_oldest();
  }
  return memory_[index % num_at_once_].mutable_data_ptr();
}

void C10dScatteredExchange::hand_over(std::size_t index) {
  at::Tensor input = bucket(index);
  at::Tensor averages = at::empty({static_cast<std::int64_t>(buckets()[index].block)}, input.options());
  ::c10d::ReduceScatterOptions options;
  options.reduceOp = averages_ ? ::c10d::ReduceOp::AVG : ::c10d::ReduceOp::SUM;
  options.asyncOp = num_at_once_ > 1;
  c10::intrusive_ptr<::c10d::Work> work = ranks_->_reduce_scatter_base(averages, input, options);
  under_way_.push_back({index, std::move(averages), std::move(work)});
}

void C10dScatteredExchange::take_oldest() {
  UnderWay& oldest = under_way_.front();
  oldest.work->wait();
  if (!averages_) {
    oldest.averages.div_(static_cast<double>(num_ranks()));
  }
  if (replicas_) {
    all_reduce(replicas_, oldest.averages, ::c10d::ReduceOp::SUM);
    oldest.averages.div_(replicas_->getSize());
  }
  deliver(buckets()[oldest.index], shares(oldest.index), view_of(oldest.averages));
  under_way_.pop_front();
}

void C10dScatteredExchange::complete(MemoryView used, Deadline) {
  while (!under_way_.empty()) {
    take_oldest();
  }
  if (used.count > 0) {
    const at::Tensor flags = at::from_blob(used.data, {static_cast<std::int64_t>(used.count)}, at::kByte);
    all_reduce(ranks_, flags, ::c10d::ReduceOp::MAX);
    if (replicas_) {
      all_reduce(replicas_, flags, ::c10d::ReduceOp::MAX);
    }
  }
}

}  // namespace accelerate_cpp::grad
