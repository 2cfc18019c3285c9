// The collectives of C10dBackend. Each checks its arguments in the caller's thread and submits the operation.
#include <ATen/MemoryOverlap.h>

#include <string>
#include <utility>

#include "core/base/error.h"
#include "torch_bridge/c10d_arguments.h"
#include "torch_bridge/c10d_backend.h"
#include "torch_bridge/c10d_reduction.h"
#include "torch_bridge/sparse_all_reduce.h"
#include "torch_bridge/tensor_list.h"
#include "torch_bridge/tensor_view.h"
#include "torch_bridge/torch_versions.h"

namespace accelerate_cpp::comm {
namespace {

using ::c10d::OpType;

void check_lengths(const char* operation, std::size_t outputs, std::size_t inputs) {
  if (outputs != inputs) {
    throw InvalidArgument(std::string(operation) + ": expected as many outputs as inputs, found " +
                          std::to_string(outputs) + " and " + std::to_string(inputs));
  }
}

// One of several operations that are submitted together.
Call part_of(const Call& call, const Contiguous& data) {
  return {call.deadline, shape_of(data.tensor()), call.location};
}

}  // namespace

WorkPointer C10dBackend::broadcast(Tensors& tensors, const ::c10d::BroadcastOptions& options) {
  return issue(OpType::BROADCAST, [&] {
    Contiguous data(single(tensors, "broadcast"), Use::kMove);
    const Order order{OpType::BROADCAST, "shm:broadcast", options.asyncOp, options.timeout, shape_of(data.tensor())};
    const auto root = static_cast<int>(options.rootRank);
    count(CallKind::kBroadcast, data.tensor());
    return submit(order, tensors, [data, root](Communicator& communicator, const Call& call) mutable {
      communicator.broadcast(communicator.rank() == root ? data.load() : data.reserve(), root, call);
      data.store();
    });
  });
}

WorkPointer C10dBackend::allreduce(Tensors& tensors, const ::c10d::AllreduceOptions& options) {
  if (tensors.size() == 1 && tensors.front().layout() != at::kStrided) {
    return allreduce_sparse(tensors, options);
  }
  return issue(OpType::ALLREDUCE, [&] {
    Contiguous data(single(tensors, "all_reduce"));
    const Reduction reduction = reduction_of(options.reduceOp, data.tensor().is_complex());
    const Order order{OpType::ALLREDUCE, "shm:all_reduce", options.asyncOp, options.timeout, shape_of(data.tensor())};
    count(CallKind::kAllReduce, data.tensor());
    return submit(order, tensors, [data, reduction](Communicator& communicator, const Call& call) mutable {
      communicator.all_reduce(data.load(), reduction, call);
      data.store();
    });
  });
}

WorkPointer C10dBackend::allreduce_sparse(Tensors& tensors, const ::c10d::AllreduceOptions& options) {
  return issue(OpType::_ALLREDUCE_SPARSE, [&] {
    const at::Tensor tensor = single(tensors, "all_reduce");
    const Reduction reduction = reduction_of(options.reduceOp, tensor.is_complex());
    const Order order{OpType::_ALLREDUCE_SPARSE, "shm:all_reduce_sparse", options.asyncOp, options.timeout,
                      shape_of(tensor)};
    if (tensor.is_sparse()) {
      traffic_.add(CallKind::kAllReduce, tensor._indices().nbytes() + tensor._values().nbytes());
    }
    return submit(order, tensors, [tensor, reduction](Communicator& communicator, const Call& call) {
      sparse_all_reduce(communicator, tensor, reduction, call);
    });
  });
}

WorkPointer C10dBackend::allreduce_coalesced(Tensors& tensors, const ::c10d::AllreduceCoalescedOptions& options) {
  return issue(OpType::ALLREDUCE_COALESCED, [&] {
    std::vector<std::pair<Contiguous, Reduction>> parts;
    for (const at::Tensor& tensor : tensors) {
      parts.emplace_back(Contiguous(tensor), reduction_of(options.reduceOp, tensor.is_complex()));
    }
    const Order order{OpType::ALLREDUCE_COALESCED, "shm:all_reduce_coalesced", options.asyncOp, options.timeout};
    count_each(CallKind::kAllReduce, tensors);
    return submit(order, tensors, [parts](Communicator& communicator, const Call& call) mutable {
      for (auto& [data, reduction] : parts) {
        communicator.all_reduce(data.load(), reduction, part_of(call, data));
        data.store();
      }
    });
  });
}

WorkPointer C10dBackend::reduce(Tensors& tensors, const ::c10d::ReduceOptions& options) {
  return issue(OpType::REDUCE, [&] {
    Contiguous data(single(tensors, "reduce"));
    const Reduction reduction = reduction_of(options.reduceOp, data.tensor().is_complex());
    const Order order{OpType::REDUCE, "shm:reduce", options.asyncOp, options.timeout, shape_of(data.tensor())};
    const auto root = static_cast<int>(options.rootRank);
    count(CallKind::kReduce, data.tensor());
    return submit(order, tensors, [data, reduction, root](Communicator& communicator, const Call& call) mutable {
      communicator.reduce(data.load(), root, reduction, call);
      if (communicator.rank() == root) {
        data.store();
      }
    });
  });
}

WorkPointer C10dBackend::allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                   const ::c10d::AllgatherOptions& options) {
  return issue(OpType::ALLGATHER, [&] {
    Contiguous input(single(inputs, "all_gather"), Use::kMove);
    const Tensors& results = single(outputs, "all_gather");
    TensorList parts(results, Use::kMove);
    const bool equal = parts.all_have(input.count());
    const Order order{OpType::ALLGATHER, "shm:all_gather", options.asyncOp, options.timeout,
                      equal ? shape_of(input.tensor()) : Shape()};
    count(CallKind::kAllGather, input.tensor());
    return submit(order, results, [input, parts](Communicator& communicator, const Call& call) mutable {
      communicator.all_gather(input.load(), parts.reserve(), call);
      parts.store();
    });
  });
}

WorkPointer C10dBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                         const ::c10d::AllgatherOptions& options) {
  return issue(OpType::_ALLGATHER_BASE, [&] {
    WholeAndPart operands("all_gather_into_tensor", output, input, getSize(), Use::kMove);
    const Order order{OpType::_ALLGATHER_BASE, "shm:all_gather_into_tensor", options.asyncOp, options.timeout,
                      shape_of(input)};
    count(CallKind::kAllGather, input);
    return submit(order, {output}, [operands](Communicator& communicator, const Call& call) mutable {
      auto& [whole, part] = operands;
      communicator.all_gather(part.load(), split_view(whole.reserve(), communicator.size()), call);
      whole.store();
    });
  });
}

WorkPointer C10dBackend::allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                                             const ::c10d::AllgatherOptions& options) {
  return issue(OpType::ALLGATHER_COALESCED, [&] {
    check_lengths("all_gather_coalesced", outputs.size(), static_cast<std::size_t>(getSize()));
    Tensors results;
    for (const Tensors& of_rank : outputs) {
      check_lengths("all_gather_coalesced", of_rank.size(), inputs.size());
      results.insert(results.end(), of_rank.begin(), of_rank.end());
    }
    std::vector<std::pair<Contiguous, TensorList>> parts;
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      Tensors own;
      for (const Tensors& of_rank : outputs) {
        own.push_back(of_rank[i]);
      }
      parts.emplace_back(Contiguous(inputs[i], Use::kMove), TensorList(own, Use::kMove));
    }
    const Order order{OpType::ALLGATHER_COALESCED, "shm:all_gather_coalesced", options.asyncOp, options.timeout};
    count_each(CallKind::kAllGather, inputs);
    return submit(order, results, [parts](Communicator& communicator, const Call& call) mutable {
      for (auto& [input, gathered] : parts) {
        communicator.all_gather(input.load(), gathered.reserve(), call);
        gathered.store();
      }
    });
  });
}

WorkPointer C10dBackend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                         const ::c10d::AllgatherOptions& options) {
  return issue(OpType::COALESCED, [&] {
    check_lengths("all_gather_into_tensor_coalesced", outputs.size(), inputs.size());
    std::vector<WholeAndPart> parts;
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      parts.emplace_back("all_gather_into_tensor_coalesced", outputs[i], inputs[i], getSize(), Use::kMove);
    }
    const Order order{OpType::COALESCED, "shm:all_gather_into_tensor_coalesced", options.asyncOp, options.timeout};
    count_each(CallKind::kAllGather, inputs);
    return submit(order, outputs, [parts](Communicator& communicator, const Call& call) mutable {
      for (auto& [whole, part] : parts) {
        communicator.all_gather(part.load(), split_view(whole.reserve(), communicator.size()), part_of(call, part));
        whole.store();
      }
    });
  });
}

WorkPointer C10dBackend::gather(std::vector<Tensors>& outputs, Tensors& inputs, const ::c10d::GatherOptions& options) {
  return issue(OpType::GATHER, [&] {
    Contiguous input(single(inputs, "gather"), Use::kMove);
    const auto root = static_cast<int>(options.rootRank);
    const Tensors results = root == getRank() ? single(outputs, "gather") : Tensors{};
    TensorList parts(results, Use::kMove);
    const Order order{OpType::GATHER, "shm:gather", options.asyncOp, options.timeout};
    count(CallKind::kGather, input.tensor());
    return submit(order, results, [input, parts, root](Communicator& communicator, const Call& call) mutable {
      communicator.gather(input.load(), parts.reserve(), root, call);
      parts.store();
    });
  });
}

WorkPointer C10dBackend::scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                 const ::c10d::ScatterOptions& options) {
  return issue(OpType::SCATTER, [&] {
    Contiguous output(single(outputs, "scatter"), Use::kMove);
    const auto root = static_cast<int>(options.rootRank);
    TensorList parts(root == getRank() ? single(inputs, "scatter") : Tensors{}, Use::kMove);
    const Order order{OpType::SCATTER, "shm:scatter", options.asyncOp, options.timeout};
    count_joint(CallKind::kScatter, root == getRank() ? inputs.front() : Tensors{});
    return submit(order, outputs, [output, parts, root](Communicator& communicator, const Call& call) mutable {
      communicator.scatter(parts.load(), output.reserve(), root, call);
      output.store();
    });
  });
}

WorkPointer C10dBackend::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                        const ::c10d::ReduceScatterOptions& options) {
  return issue(OpType::REDUCE_SCATTER, [&] {
    Contiguous output(single(outputs, "reduce_scatter"));
    TensorList parts(single(inputs, "reduce_scatter"), Use::kCompute);
    const Reduction reduction = reduction_of(options.reduceOp, output.tensor().is_complex());
    const Order order{OpType::REDUCE_SCATTER, "shm:reduce_scatter", options.asyncOp, options.timeout};
    count_joint(CallKind::kReduceScatter, inputs.front());
    return submit(order, outputs, [output, parts, reduction](Communicator& communicator, const Call& call) mutable {
      communicator.reduce_scatter(parts.load(), output.reserve(), reduction, call);
      output.store();
    });
  });
}

WorkPointer C10dBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                              const ::c10d::ReduceScatterOptions& options) {
  return issue(OpType::_REDUCE_SCATTER_BASE, [&] {
    WholeAndPart operands("reduce_scatter_tensor", input, output, getSize(), Use::kCompute);
    const Reduction reduction = reduction_of(options.reduceOp, input.is_complex());
    const Order order{OpType::_REDUCE_SCATTER_BASE, "shm:reduce_scatter_tensor", options.asyncOp, options.timeout};
    count(CallKind::kReduceScatter, input);
    return submit(order, {output}, [operands, reduction](Communicator& communicator, const Call& call) mutable {
      auto& [whole, part] = operands;
      communicator.reduce_scatter(const_views(split_view(whole.load(), communicator.size())), part.reserve(), reduction,
                                  call);
      part.store();
    });
  });
}

WorkPointer C10dBackend::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                         const ::c10d::ReduceScatterOptions& options) {
  constexpr const char* kName = "reduce_scatter_tensor_coalesced";
  return issue(kReduceScatterTensorCoalesced, [&] {
    check_lengths(kName, outputs.size(), inputs.size());
    std::vector<std::pair<WholeAndPart, Reduction>> parts;
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      parts.emplace_back(WholeAndPart(kName, inputs[i], outputs[i], getSize(), Use::kCompute),
                         reduction_of(options.reduceOp, inputs[i].is_complex()));
    }
    const Order order{kReduceScatterTensorCoalesced, "shm:reduce_scatter_tensor_coalesced", options.asyncOp,
                      options.timeout};
    count_each(CallKind::kReduceScatter, inputs);
    return submit(order, outputs, [parts](Communicator& communicator, const Call& call) mutable {
      for (auto& [operands, reduction] : parts) {
        auto& [whole, part] = operands;
        communicator.reduce_scatter(const_views(split_view(whole.load(), communicator.size())), part.reserve(),
                                    reduction, call);
        part.store();
      }
    });
  });
}

WorkPointer C10dBackend::alltoall(Tensors& outputs, Tensors& inputs, const ::c10d::AllToAllOptions& options) {
  return issue(OpType::ALLTOALL, [&] {
    TensorList from(inputs, Use::kMove);
    TensorList to(outputs, Use::kMove);
    const Order order{OpType::ALLTOALL, "shm:all_to_all", options.asyncOp, options.timeout};
    count_joint(CallKind::kAllToAll, inputs);
    return submit(order, outputs, [from, to](Communicator& communicator, const Call& call) mutable {
      communicator.all_to_all(from.load(), to.reserve(), call);
      to.store();
    });
  });
}

WorkPointer C10dBackend::alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<std::int64_t>& output_splits,
                                       std::vector<std::int64_t>& input_splits,
                                       const ::c10d::AllToAllOptions& options) {
  constexpr const char* kName = "all_to_all_single";
  return issue(OpType::ALLTOALL_BASE, [&] {
    const bool apart = at::get_overlap_status(output, input) == at::MemOverlapStatus::No;
    Rows from(kName, apart ? input : input.clone(), input_splits, getSize());
    Rows to(kName, output, output_splits, getSize());
    const Order order{OpType::ALLTOALL_BASE, "shm:all_to_all_single", options.asyncOp, options.timeout};
    count(CallKind::kAllToAll, input);
    return submit(order, {output}, [from, to](Communicator& communicator, const Call& call) mutable {
      communicator.all_to_all(from.load(), to.reserve(), call);
      to.store();
    });
  });
}

WorkPointer C10dBackend::barrier(const ::c10d::BarrierOptions& options) {
  return issue(OpType::BARRIER, [&] {
    const Order order{OpType::BARRIER, "shm:barrier", options.asyncOp, options.timeout};
    traffic_.add(CallKind::kBarrier, 0);
    return submit(order, {}, [](Communicator& communicator, const Call& call) { communicator.barrier(call); });
  });
}

}  // namespace accelerate_cpp::comm
