#include "torch_bridge/c10d_backend.h"

#include <ATen/core/List.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>

#include <utility>

#include "core/base/error.h"
#include "torch_bridge/tensor_view.h"

namespace accelerate_cpp::comm {
namespace {

// An operation that has already finished.
class CompletedWork final : public ::c10d::Work {
 public:
  CompletedWork(::c10d::OpType type, std::vector<at::Tensor> results) : Work(-1, type), results_(std::move(results)) {}

  bool isCompleted() override { return true; }
  bool isSuccess() const override { return true; }
  bool wait(std::chrono::milliseconds) override { return true; }
  void synchronize() override {}
  std::vector<at::Tensor> result() override { return results_; }

  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    future->markCompleted(c10::IValue(results_));
    return future;
  }

 private:
  std::vector<at::Tensor> results_;
};

C10dBackend::WorkPointer completed(::c10d::OpType type, std::vector<at::Tensor> results) {
  return c10::make_intrusive<CompletedWork>(type, std::move(results));
}

// The list-of-lists arguments of c10d date from processes that drive several devices; ours drive one.
template <class T>
T& single(std::vector<T>& list, const char* operation) {
  if (list.size() != 1) {
    throw InvalidArgument(std::string(operation) + ": expected one tensor (or list) per process, found " +
                          std::to_string(list.size()));
  }
  return list.front();
}

ReduceOp convert(const ::c10d::ReduceOp& op) {
  switch (op) {
    case ::c10d::ReduceOp::SUM:
      return ReduceOp::kSum;
    case ::c10d::ReduceOp::AVG:
      return ReduceOp::kAvg;
    case ::c10d::ReduceOp::MIN:
      return ReduceOp::kMin;
    case ::c10d::ReduceOp::MAX:
      return ReduceOp::kMax;
    case ::c10d::ReduceOp::PRODUCT:
      return ReduceOp::kProduct;
    default:
      throw InvalidArgument("this reduction is not available on backend shm; expected SUM, AVG, MIN, MAX or PRODUCT");
  }
}

// Several tensors as contiguous views; write_back() copies results home.
class ContiguousList {
 public:
  explicit ContiguousList(const std::vector<at::Tensor>& tensors) {
    for (const at::Tensor& tensor : tensors) {
      parts_.emplace_back(tensor);
    }
  }
  std::vector<MemoryView> views() const {
    std::vector<MemoryView> result;
    for (const Contiguous& part : parts_) {
      result.push_back(part.view());
    }
    return result;
  }
  std::vector<ConstMemoryView> const_views() const {
    const std::vector<MemoryView> all = views();
    return {all.begin(), all.end()};
  }
  void write_back() const {
    for (const Contiguous& part : parts_) {
      part.write_back();
    }
  }

 private:
  std::vector<Contiguous> parts_;
};

}  // namespace

C10dBackend::C10dBackend(std::shared_ptr<Communicator> communicator, std::string backend_name,
                         std::chrono::milliseconds timeout)
    : Backend(communicator->rank(), communicator->size()),
      communicator_(std::move(communicator)),
      options_(c10::make_intrusive<Options>(std::move(backend_name), timeout)) {}

Deadline C10dBackend::deadline(std::chrono::milliseconds requested) const {
  return Deadline::after(requested == ::c10d::kUnsetTimeout ? options_->timeout : requested);
}

C10dBackend::WorkPointer C10dBackend::broadcast(Tensors& tensors, const ::c10d::BroadcastOptions& options) {
  const Contiguous data(single(tensors, "broadcast"));
  communicator_->broadcast(data.view(), static_cast<int>(options.rootRank), deadline(options.timeout));
  data.write_back();
  return completed(::c10d::OpType::BROADCAST, tensors);
}

C10dBackend::WorkPointer C10dBackend::allreduce(Tensors& tensors, const ::c10d::AllreduceOptions& options) {
  const Contiguous data(single(tensors, "all_reduce"));
  communicator_->all_reduce(data.view(), convert(options.reduceOp), deadline(options.timeout));
  data.write_back();
  return completed(::c10d::OpType::ALLREDUCE, tensors);
}

C10dBackend::WorkPointer C10dBackend::allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                                const ::c10d::AllgatherOptions& options) {
  const Contiguous input(single(inputs, "all_gather"));
  const ContiguousList parts(single(outputs, "all_gather"));
  communicator_->all_gather(input.view(), parts.views(), deadline(options.timeout));
  parts.write_back();
  return completed(::c10d::OpType::ALLGATHER, outputs.front());
}

C10dBackend::WorkPointer C10dBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                      const ::c10d::AllgatherOptions& options) {
  const Contiguous source(input);
  communicator_->all_gather(source.view(), split_view(output, getSize()), deadline(options.timeout));
  return completed(::c10d::OpType::_ALLGATHER_BASE, {output});
}

C10dBackend::WorkPointer C10dBackend::gather(std::vector<Tensors>& outputs, Tensors& inputs,
                                             const ::c10d::GatherOptions& options) {
  const Contiguous input(single(inputs, "gather"));
  const bool is_root = options.rootRank == getRank();
  const Tensors results = is_root ? single(outputs, "gather") : Tensors{};
  const ContiguousList parts(results);
  communicator_->gather(input.view(), parts.views(), static_cast<int>(options.rootRank), deadline(options.timeout));
  parts.write_back();
  return completed(::c10d::OpType::GATHER, results);
}

C10dBackend::WorkPointer C10dBackend::scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                              const ::c10d::ScatterOptions& options) {
  const Contiguous output(single(outputs, "scatter"));
  const bool is_root = options.rootRank == getRank();
  const ContiguousList parts(is_root ? single(inputs, "scatter") : Tensors{});
  communicator_->scatter(parts.const_views(), output.view(), static_cast<int>(options.rootRank),
                         deadline(options.timeout));
  output.write_back();
  return completed(::c10d::OpType::SCATTER, outputs);
}

C10dBackend::WorkPointer C10dBackend::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                                     const ::c10d::ReduceScatterOptions& options) {
  const Contiguous output(single(outputs, "reduce_scatter"));
  const ContiguousList parts(single(inputs, "reduce_scatter"));
  communicator_->reduce_scatter(parts.const_views(), output.view(), convert(options.reduceOp),
                                deadline(options.timeout));
  output.write_back();
  return completed(::c10d::OpType::REDUCE_SCATTER, outputs);
}

C10dBackend::WorkPointer C10dBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                           const ::c10d::ReduceScatterOptions& options) {
  const Contiguous result(output);
  const std::vector<MemoryView> parts = split_view(input, getSize());
  communicator_->reduce_scatter({parts.begin(), parts.end()}, result.view(), convert(options.reduceOp),
                                deadline(options.timeout));
  result.write_back();
  return completed(::c10d::OpType::_REDUCE_SCATTER_BASE, {output});
}

C10dBackend::WorkPointer C10dBackend::barrier(const ::c10d::BarrierOptions& options) {
  communicator_->barrier(deadline(options.timeout));
  return completed(::c10d::OpType::BARRIER, {});
}

}  // namespace accelerate_cpp::comm
