#include "core/comm/shm/shm_communicator.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "core/base/view_parts.h"
#include "core/comm/arguments.h"
#include "core/comm/copy.h"
#include "core/comm/reduce_kernels.h"
#include "core/comm/shared_buffer.h"
#include "core/comm/shm/staged_all_reduce.h"
#include "core/comm/shm/window.h"
#include "core/comm/slices.h"
#include "core/comm/split_store.h"

namespace accelerate_cpp::comm {
namespace {

// Up to this, every rank reducing everything is cheaper than the second wait that sharing the work takes.
constexpr std::size_t kOneShotBytes = 32 * 1024;
static_assert(kOneShotBytes <= kSmallBytes);

}  // namespace

std::shared_ptr<ShmCommunicator> ShmCommunicator::connect(Store& store, int rank, int size, Deadline deadline,
                                                          WaitHooks hooks) {
  auto group = std::make_shared<Group>(store, rank, size, kStagingBytes, deadline, std::move(hooks));
  return std::shared_ptr<ShmCommunicator>(new ShmCommunicator(std::move(group)));
}

ShmCommunicator::ShmCommunicator(std::shared_ptr<Group> group)
    : group_(std::move(group)),
      staging_(*group_),
      point_to_point_(std::make_shared<PointToPoint>(group_)),
      sources_(static_cast<std::size_t>(size())),
      destinations_(static_cast<std::size_t>(size())),
      factors_(static_cast<std::size_t>(size())) {}

bool ShmCommunicator::announced_in_arena(bool wanted) const {
  for (int r = 0; r < size(); ++r) {
    if ((group_->announced(r).in_arena != 0) != wanted) {
      return false;
    }
  }
  return true;
}

const double* ShmCommunicator::factors(const Reduction& reduction) {
  if (reduction.op != ReduceOp::kPreMulSum) {
    return nullptr;
  }
  for (int r = 0; r < size(); ++r) {
    factors_[static_cast<std::size_t>(r)] = group_->announced(r).factor;
  }
  return factors_.data();
}

void ShmCommunicator::all_reduce(MemoryView data, Reduction reduction, const Call& call) {
  check_reduction(data.dtype, reduction.op);
  Operation operation{{CallKind::kAllReduce, data.dtype, reduction.op}};
  operation.signature.count = data.count;
  operation.factor = reduction.factor;
  group_->place_in_arena(operation, data.data, data.size_bytes());
  const std::size_t size_bytes = data.size_bytes();
  const bool small = size_bytes <= kOneShotBytes;
  group_->run(operation, call, [&] {
    if (small && !operation.in_arena && size_bytes > 0) {
      staging_.await_free_small(call.deadline);
      std::memcpy(staging_.small(rank(), group_->next_sequence()), data.data, size_bytes);
    }
    group_->announce();
    group_->await_announcements(call.deadline);
    if (small && announced_in_arena(false)) {
      reduce_small(data, reduction);
    } else if (announced_in_arena(true)) {
      reduce_in_arena(data, reduction, call.deadline);
    } else {
      group_->take_in_segments();
      StagedAllReduce(staging_, rank(), size(), data, reduction.op, factors(reduction), call.deadline).run();
    }
  });
}

void ShmCommunicator::reduce_small(MemoryView data, const Reduction& reduction) {
  for (int r = 0; r < size(); ++r) {
    sources_[static_cast<std::size_t>(r)] = staging_.small(r, group_->next_sequence() - 1);
  }
  void* const destination = data.data;
  comm::reduce(data.dtype, reduction.op,
               {sources_.data(), size(), &destination, 1, data.count, reduction_scale(reduction.op, size()),
                factors(reduction)});
}

void ShmCommunicator::reduce_in_arena(MemoryView data, const Reduction& reduction, const Deadline& deadline) {
  const Slices slices(data.count, element_size(data.dtype), size());
  const std::size_t begin_bytes = slices.begin(rank()) * element_size(data.dtype);
  for (int r = 0; r < size(); ++r) {
    std::byte* const operand = r == rank() ? data.bytes() : group_->operand(r, 0, data.size_bytes(), deadline);
    sources_[static_cast<std::size_t>(r)] = destinations_[static_cast<std::size_t>(r)] = operand + begin_bytes;
  }
  comm::reduce(data.dtype, reduction.op,
               {sources_.data(), size(), destinations_.data(), size(), slices.count(rank()),
                reduction_scale(reduction.op, size()), factors(reduction)});
  staging_.await_all_consumed(staging_.finish_in_place(), deadline);
}

Operation ShmCommunicator::describe_gather(CallKind kind, ConstMemoryView one, int root) const {
  Operation operation{{kind, one.dtype}};
  operation.has_counts = true;
  operation.signature.root = root;
  operation.signature.count = one.count;
  return operation;
}

std::vector<bool> ShmCommunicator::takers(bool all, int root) const {
  std::vector<bool> result(static_cast<std::size_t>(size()), all);
  if (!all) {
    result[static_cast<std::size_t>(root)] = true;
  }
  return result;
}

std::vector<std::uint64_t> ShmCommunicator::counts(const std::vector<bool>& takes, std::uint64_t count) const {
  std::vector<std::uint64_t> result;
  for (const bool takes_this : takes) {
    result.push_back(takes_this ? count : 0);
  }
  return result;
}

void ShmCommunicator::reduce(MemoryView data, int root, Reduction reduction, const Call& call) {
  check_root("reduce", root, size());
  check_reduction(data.dtype, reduction.op);
  Operation operation = describe_gather(CallKind::kReduce, data, root);
  operation.has_counts = false;
  operation.signature.op = reduction.op;
  operation.factor = reduction.factor;
  const std::vector<bool> everyone(static_cast<std::size_t>(size()), true);
  const auto combine = [&](const void* const* sources, std::size_t begin, std::size_t length) {
    void* const destination = data.bytes() + begin;
    comm::reduce(data.dtype, reduction.op,
                 {sources, size(), &destination, 1, length / element_size(data.dtype),
                  reduction_scale(reduction.op, size()), factors(reduction)});
  };
  const bool is_root = rank() == root;
  BlockCollective::run(*group_, staging_, operation,
                       {{data}, takers(false, root), counts(everyone, is_root ? data.count : 0), combine}, call);
}

void ShmCommunicator::reduce_scatter(const std::vector<ConstMemoryView>& inputs, MemoryView output, Reduction reduction,
                                     const Call& call) {
  check_reduction(output.dtype, reduction.op);
  check_parts("reduce_scatter", "input", inputs, output.dtype, size());
  Operation operation = describe_gather(CallKind::kReduceScatter, output, -1);
  operation.signature.op = reduction.op;
  operation.factor = reduction.factor;
  const std::vector<bool> everyone(static_cast<std::size_t>(size()), true);
  const auto combine = [&](const void* const* sources, std::size_t begin, std::size_t length) {
    void* const destination = output.bytes() + begin;
    comm::reduce(output.dtype, reduction.op,
                 {sources, size(), &destination, 1, length / element_size(output.dtype),
                  reduction_scale(reduction.op, size()), factors(reduction)});
  };
  BlockCollective::run(*group_, staging_, operation, {inputs, {}, counts(everyone, output.count), combine}, call);
}

void ShmCommunicator::broadcast(MemoryView data, int root, const Call& call) {
  check_root("broadcast", root, size());
  Operation operation = describe_gather(CallKind::kBroadcast, data, root);
  operation.has_counts = false;
  const bool is_root = rank() == root;
  std::vector<bool> others(static_cast<std::size_t>(size()), true);
  others[static_cast<std::size_t>(root)] = false;
  const Residency residency = residency_of(data.size_bytes());
  const auto take = [&](const void* const* sources, std::size_t begin, std::size_t length) {
    copy(data.bytes() + begin, sources[root], length, residency);
  };
  const std::vector<ConstMemoryView> given =
      is_root ? std::vector<ConstMemoryView>{data} : std::vector<ConstMemoryView>{};
  BlockCollective::run(*group_, staging_, operation,
                       {given, others, counts(takers(false, root), is_root ? 0 : data.count), take}, call);
}

namespace {

// Copies one range of every source into the output for it.
auto copy_into(const std::vector<MemoryView>& outputs) {
  std::size_t result_bytes = 0;
  for (const MemoryView& output : outputs) {
    result_bytes += output.size_bytes();
  }
  const Residency residency = residency_of(result_bytes);
  return [&outputs, residency](const void* const* sources, std::size_t begin, std::size_t length) {
    for (std::size_t r = 0; r < outputs.size(); ++r) {
      if (sources[r] != nullptr && sources[r] != outputs[r].bytes() + begin) {
        copy(outputs[r].bytes() + begin, sources[r], std::min(length, outputs[r].size_bytes() - begin), residency);
      }
    }
  };
}

}  // namespace

void ShmCommunicator::all_gather(ConstMemoryView input, const std::vector<MemoryView>& outputs, const Call& call) {
  check_parts("all_gather", "output", outputs, input.dtype, size());
  BlockCollective::run(*group_, staging_, describe_gather(CallKind::kAllGather, input, -1),
                       {{input}, takers(true, 0), counts_of(outputs, size()), copy_into(outputs)}, call);
}

void ShmCommunicator::gather(ConstMemoryView input, const std::vector<MemoryView>& outputs, int root,
                             const Call& call) {
  check_root("gather", root, size());
  if (rank() == root) {
    check_parts("gather", "output", outputs, input.dtype, size());
  } else {
    check_no_parts("gather", "output", outputs.size(), root);
  }
  BlockCollective::run(*group_, staging_, describe_gather(CallKind::kGather, input, root),
                       {{input}, takers(false, root), counts_of(outputs, size()), copy_into(outputs)}, call);
}

void ShmCommunicator::scatter(const std::vector<ConstMemoryView>& inputs, MemoryView output, int root,
                              const Call& call) {
  check_root("scatter", root, size());
  if (rank() == root) {
    check_parts("scatter", "input", inputs, output.dtype, size());
  } else {
    check_no_parts("scatter", "input", inputs.size(), root);
  }
  const Residency residency = residency_of(output.size_bytes());
  const auto take = [&](const void* const* sources, std::size_t begin, std::size_t length) {
    if (sources[root] != output.bytes() + begin) {
      copy(output.bytes() + begin, sources[root], length, residency);
    }
  };
  BlockCollective::run(*group_, staging_, describe_gather(CallKind::kScatter, output, root),
                       {inputs, {}, counts(takers(false, root), output.count), take}, call);
}

void ShmCommunicator::all_to_all(const std::vector<ConstMemoryView>& inputs, const std::vector<MemoryView>& outputs,
                                 const Call& call) {
  check_parts("all_to_all", "output", outputs, inputs.empty() ? DType::kUInt8 : inputs[0].dtype, size());
  check_parts("all_to_all", "input", inputs, outputs[0].dtype, size());
  Operation operation = describe_gather(CallKind::kAllToAll, inputs[0], -1);
  operation.signature.count = 0;
  for (const ConstMemoryView& input : inputs) {
    operation.signature.count += input.count;
  }
  BlockCollective::run(*group_, staging_, operation, {inputs, {}, counts_of(outputs, size()), copy_into(outputs)},
                       call);
}

void ShmCommunicator::barrier(const Call& call) {
  group_->run({{CallKind::kBarrier}}, call, [&] {
    group_->announce();
    group_->await_announcements(call.deadline);
  });
}

std::shared_ptr<Transfer> ShmCommunicator::send(ConstMemoryView data, int destination, std::uint64_t tag,
                                                const Call& call) {
  return point_to_point_->send(data, destination, tag, call);
}

std::shared_ptr<Transfer> ShmCommunicator::receive(MemoryView data, int source, std::uint64_t tag, const Call& call) {
  return point_to_point_->receive(data, source, tag, call);
}

std::shared_ptr<Communicator> ShmCommunicator::split(int color, int key, const Call& call) {
  SplitStore store(*this, color, key, call);
  if (color < 0) {
    store.publish("", "");
    return nullptr;
  }
  try {
    return connect(store, store.new_rank(), store.new_size(), call.deadline, group_->hooks().among(store.members()));
  } catch (const std::exception& error) {
    abort(std::string("splitting the group failed: ") + error.what());
    throw;
  }
}

std::shared_ptr<Buffer> ShmCommunicator::allocate(std::size_t size_bytes) {
  return allocate_shared(size_bytes);
}

std::shared_ptr<Buffer> ShmCommunicator::window(std::size_t size_bytes, const Call& call) {
  return open_window(*this, size_bytes, call);
}

void ShmCommunicator::leave() noexcept {
  group_->leave();
}

void ShmCommunicator::abort(const std::string& reason) noexcept {
  group_->abort(reason);
}

}  // namespace accelerate_cpp::comm
