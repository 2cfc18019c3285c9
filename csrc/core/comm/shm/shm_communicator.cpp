#include "core/comm/shm/shm_communicator.h"

#include <algorithm>
#include <cstring>

#include "core/comm/arguments.h"
#include "core/comm/reduce_kernels.h"
#include "core/comm/shm/shm_gradient_exchange.h"
#include "core/comm/shm/staged_all_reduce.h"
#include "core/comm/slices.h"

namespace accelerate_cpp::comm {
namespace {

class ArenaBuffer final : public Buffer {
 public:
  ArenaBuffer(std::shared_ptr<Arena> arena, std::size_t size_bytes) : block_(std::move(arena), size_bytes) {}
  void* data() override { return block_.segment()->data(); }

 private:
  OwnedBlock block_;
};

std::vector<const std::byte*> pointers(const std::vector<ConstMemoryView>& views) {
  std::vector<const std::byte*> result;
  for (const ConstMemoryView& view : views) {
    result.push_back(view.bytes());
  }
  return result;
}

}  // namespace

std::shared_ptr<ShmCommunicator> ShmCommunicator::connect(Store& store, int rank, int size, Deadline deadline,
                                                          InterruptProbe probe) {
  auto group = std::make_shared<Group>(store, rank, size, kStagingBytes, deadline, std::move(probe));
  return std::shared_ptr<ShmCommunicator>(new ShmCommunicator(std::move(group)));
}

Operation ShmCommunicator::at(Operation operation, const void* data, std::size_t size_bytes) const {
  if (const auto place = group_->arena()->find(data, size_bytes)) {
    operation.in_arena = true;
    operation.segment = place->segment;
    operation.offset_bytes = place->offset_bytes;
  }
  return operation;
}

bool ShmCommunicator::announced_in_arena(int first, int last) const {
  for (int r = first; r <= last; ++r) {
    if (!group_->announced(r).in_arena) {
      return false;
    }
  }
  return true;
}

std::byte* ShmCommunicator::peer_operand(int peer, const Deadline& deadline) {
  const Operation& operation = group_->announced(peer);
  return group_->peer_segment(peer, operation.segment, deadline)->data() + operation.offset_bytes;
}

void ShmCommunicator::all_reduce(MemoryView data, ReduceOp op, Deadline deadline) {
  check_reduction(data.dtype, op);
  Operation operation{OperationKind::kAllReduce, data.dtype, op};
  operation.count = data.count;
  const std::size_t size_bytes = data.size_bytes();
  if (size_bytes <= kSmallBytes) {
    const double scale = reduction_scale(op, size());
    return run({operation,
                {data.bytes()},
                1,
                size_bytes,
                0,
                size() - 1,
                false,
                [=, this](const void* const* sources, std::size_t, std::size_t) {
                  void* const destination = data.data;
                  reduce(data.dtype, op, {sources, size(), &destination, 1, data.count, scale});
                }},
               deadline);
  }
  group_->run(at(operation, data.data, size_bytes), [&] {
    group_->announce();
    group_->await_announcements(deadline);
    if (announced_in_arena(0, size() - 1)) {
      all_reduce_in_arena(data, op, deadline);
    } else {
      StagedAllReduce(staging_, rank(), size(), data, op, deadline).run();
    }
  });
}

void ShmCommunicator::all_reduce_in_arena(MemoryView data, ReduceOp op, const Deadline& deadline) {
  const Slices slices(data.count, element_size(data.dtype), size());
  const std::size_t begin_bytes = slices.begin(rank()) * element_size(data.dtype);
  std::vector<void*> operands;
  for (int r = 0; r < size(); ++r) {
    operands.push_back((r == rank() ? data.bytes() : peer_operand(r, deadline)) + begin_bytes);
  }
  reduce(data.dtype, op,
         {operands.data(), size(), operands.data(), size(), slices.count(rank()), reduction_scale(op, size())});
  const std::uint64_t piece = staging_.first_piece();
  staging_.publish_staged(piece);
  staging_.publish_consumed(piece);
  staging_.await_all_consumed(piece, deadline);
  staging_.finish(1);
}

void ShmCommunicator::reduce_scatter(const std::vector<ConstMemoryView>& inputs, MemoryView output, ReduceOp op,
                                     Deadline deadline) {
  check_reduction(output.dtype, op);
  check_per_rank("reduce_scatter", output, inputs, size());
  Operation operation{OperationKind::kReduceScatter, output.dtype, op};
  operation.count = output.count;
  const double scale = reduction_scale(op, size());
  run({operation, pointers(inputs), size(), output.size_bytes(), 0, size() - 1, false,
       [=, this](const void* const* sources, std::size_t begin, std::size_t length) {
         void* const destination = output.bytes() + begin;
         reduce(output.dtype, op, {sources, size(), &destination, 1, length / element_size(output.dtype), scale});
       }},
      deadline);
}

void ShmCommunicator::broadcast(MemoryView data, int root, Deadline deadline) {
  check_root("broadcast", root, size());
  Operation operation{OperationKind::kBroadcast, data.dtype};
  operation.root = root;
  operation.count = data.count;
  const bool is_root = rank() == root;
  run({at(operation, data.data, data.size_bytes()),
       is_root ? std::vector<const std::byte*>{data.bytes()} : std::vector<const std::byte*>{}, 1, data.size_bytes(),
       is_root ? 1 : root, is_root ? 0 : root, true,
       [=](const void* const* sources, std::size_t begin, std::size_t length) {
         std::memcpy(data.bytes() + begin, sources[root], length);
       }},
      deadline);
}

void ShmCommunicator::all_gather(ConstMemoryView input, const std::vector<MemoryView>& outputs, Deadline deadline) {
  check_per_rank("all_gather", input, outputs, size());
  Operation operation{OperationKind::kAllGather, input.dtype};
  operation.count = input.count;
  run({at(operation, input.data, input.size_bytes()),
       {input.bytes()},
       1,
       input.size_bytes(),
       0,
       size() - 1,
       true,
       [=, &outputs](const void* const* sources, std::size_t begin, std::size_t length) {
         for (std::size_t r = 0; r < outputs.size(); ++r) {
           std::memmove(outputs[r].bytes() + begin, sources[r], length);
         }
       }},
      deadline);
}

void ShmCommunicator::gather(ConstMemoryView input, const std::vector<MemoryView>& outputs, int root,
                             Deadline deadline) {
  check_root("gather", root, size());
  const bool is_root = rank() == root;
  if (is_root) {
    check_per_rank("gather", input, outputs, size());
  }
  Operation operation{OperationKind::kGather, input.dtype};
  operation.root = root;
  operation.count = input.count;
  run({at(operation, input.data, input.size_bytes()),
       {input.bytes()},
       1,
       input.size_bytes(),
       0,
       is_root ? size() - 1 : -1,
       true,
       [=, &outputs](const void* const* sources, std::size_t begin, std::size_t length) {
         for (std::size_t r = 0; r < outputs.size(); ++r) {
           std::memmove(outputs[r].bytes() + begin, sources[r], length);
         }
       }},
      deadline);
}

void ShmCommunicator::scatter(const std::vector<ConstMemoryView>& inputs, MemoryView output, int root,
                              Deadline deadline) {
  check_root("scatter", root, size());
  if (rank() == root) {
    check_per_rank("scatter", output, inputs, size());
  }
  Operation operation{OperationKind::kScatter, output.dtype};
  operation.root = root;
  operation.count = output.count;
  run({operation, rank() == root ? pointers(inputs) : std::vector<const std::byte*>{}, size(), output.size_bytes(),
       root, root, false,
       [=](const void* const* sources, std::size_t begin, std::size_t length) {
         std::memmove(output.bytes() + begin, sources[root], length);
       }},
      deadline);
}

void ShmCommunicator::barrier(Deadline deadline) {
  group_->run({OperationKind::kBarrier}, [&] {
    group_->announce();
    group_->await_announcements(deadline);
  });
}

std::shared_ptr<Buffer> ShmCommunicator::allocate(std::size_t size_bytes) {
  return std::make_shared<ArenaBuffer>(group_->arena(), size_bytes);
}

std::unique_ptr<GradientExchange> ShmCommunicator::gradient_exchange(const std::vector<BucketSpec>& buckets,
                                                                     Deadline deadline) {
  return std::make_unique<ShmGradientExchange>(*this, group_, buckets, deadline);
}

void ShmCommunicator::abort(const std::string& reason) noexcept {
  group_->abort(reason);
}

}  // namespace accelerate_cpp::comm
