// A Communicator as a torch.distributed backend.
//
// Operations run in the caller and are complete when they return, so every Work is complete from the start;
// asynchronous calls keep their meaning, since ranks issue collectives in one order anyway. What is not overridden is
// refused by torch.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "core/comm/communicator.h"

namespace accelerate_cpp::comm {

class C10dBackend final : public ::c10d::Backend {
 public:
  using WorkPointer = c10::intrusive_ptr<::c10d::Work>;
  using Tensors = std::vector<at::Tensor>;

  C10dBackend(std::shared_ptr<Communicator> communicator, std::string backend_name, std::chrono::milliseconds timeout);

  const std::shared_ptr<Communicator>& communicator() const { return communicator_; }
  std::chrono::milliseconds timeout() const { return options_->timeout; }

  const std::string getBackendName() const override { return options_->backend; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return options_; }
  void setTimeout(std::chrono::milliseconds timeout) override { options_->timeout = timeout; }

  WorkPointer broadcast(Tensors& tensors, const ::c10d::BroadcastOptions& options) override;
  WorkPointer allreduce(Tensors& tensors, const ::c10d::AllreduceOptions& options) override;
  WorkPointer allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                        const ::c10d::AllgatherOptions& options) override;
  WorkPointer _allgather_base(at::Tensor& output, at::Tensor& input, const ::c10d::AllgatherOptions& options) override;
  WorkPointer gather(std::vector<Tensors>& outputs, Tensors& inputs, const ::c10d::GatherOptions& options) override;
  WorkPointer scatter(Tensors& outputs, std::vector<Tensors>& inputs, const ::c10d::ScatterOptions& options) override;
  WorkPointer reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                             const ::c10d::ReduceScatterOptions& options) override;
  WorkPointer _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                   const ::c10d::ReduceScatterOptions& options) override;
  WorkPointer barrier(const ::c10d::BarrierOptions& options) override;

 private:
  Deadline deadline(std::chrono::milliseconds requested) const;

  std::shared_ptr<Communicator> communicator_;
  c10::intrusive_ptr<Options> options_;
};

}  // namespace accelerate_cpp::comm
