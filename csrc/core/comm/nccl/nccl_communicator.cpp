#include "core/comm/nccl/nccl_communicator.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "core/base/error.h"
#include "core/base/view_parts.h"
#include "core/comm/arguments.h"

namespace accelerate_cpp::comm {
namespace {

class DeviceBuffer final : public Buffer {
 public:
  DeviceBuffer(std::shared_ptr<const CudaDevice> device, std::size_t size_bytes)
      : memory_(std::move(device), MemoryKind::kDevice, size_bytes) {}
  void* data() override { return memory_.data(); }

 private:
  CudaMemory memory_;
};

template <class View>
bool equally_large(const std::vector<View>& parts) {
  return std::all_of(parts.begin(), parts.end(), [&](const View& part) { return part.count == parts[0].count; });
}

// Whether the parts, equally large, follow each other in memory.
template <class View>
bool in_one_piece(const std::vector<View>& parts) {
  for (std::size_t r = 1; r < parts.size(); ++r) {
    if (parts[r].bytes() != parts[0].bytes() + r * parts[0].size_bytes()) {
      return false;
    }
  }
  return true;
}

}  // namespace

std::shared_ptr<NcclCommunicator> NcclCommunicator::connect(std::shared_ptr<Store> store, int rank, int size,
                                                            const NcclOptions& options, Deadline deadline) {
  const NcclContext context{std::make_shared<const NcclApi>(options.nccl_path, options.beside),
                            std::make_shared<const CudaDevice>(
                                std::make_shared<const CudaApi>(options.cudart_path, options.beside), options.device)};
  const auto group =
      std::make_shared<NcclGroup>(context, GroupBoard(std::move(store), options.prefix, rank), options, rank, size);
  std::unique_ptr<NcclLink> link =
      NcclSession::join(context, group->board(), rank, size, deadline, group->options().hooks);
  return std::shared_ptr<NcclCommunicator>(new NcclCommunicator(group, std::move(link)));
}

NcclCommunicator::NcclCommunicator(std::shared_ptr<NcclGroup> group, std::unique_ptr<NcclLink> link)
    : group_(std::move(group)),
      session_(group_, std::move(link)),
      transfers_(std::make_shared<NcclPointToPoint>(group_)),
      host_copy_(group_->context().device, MemoryKind::kPinned),
      device_copy_(group_->context().device, MemoryKind::kDevice) {
  session_.set_meanwhile([transfers = transfers_.get()] { transfers->progress(); });
}

NcclCommunicator::~NcclCommunicator() {
  transfers_->close();
}

CallRecord NcclCommunicator::record(CallKind kind, ConstMemoryView operand, int root) const {
  CallRecord record{kind, operand.dtype};
  record.count = operand.count;
  record.root = root;
  return record;
}

CallRecord NcclCommunicator::sized_record(CallKind kind, ConstMemoryView operand, int root) const {
  CallRecord record = this->record(kind, operand, root);
  record.gives.resize(static_cast<std::size_t>(size()));
  record.expects.resize(static_cast<std::size_t>(size()));
  return record;
}

void NcclCommunicator::issue_reduction(const char* call, DType dtype, const Reduction& reduction,
                                       const ReductionBody& body) {
  const NcclReduction said = nccl_reduction(dtype, reduction.op);
  if (said.premultiplied) {
    auto factor = nccl_factor(dtype, reduction.factor);
    session_.issue_premul_sum(call, said.type, factor.data(),
                              [&](const NcclApi& api, NcclRedOp op, NcclComm comm, CudaStream stream) {
                                return body(api, said.type, op, comm, stream);
                              });
    return;
  }
  session_.issue(call, [&](const NcclApi& api, NcclComm comm, CudaStream stream) {
    return body(api, said.type, said.op, comm, stream);
  });
}

void NcclCommunicator::all_reduce(MemoryView data, Reduction reduction, const Call& call) {
  nccl_reduction(data.dtype, reduction.op);
  CallRecord record = this->record(CallKind::kAllReduce, data);
  record.op = reduction.op;
  session_.run(std::move(record), call, [&] {
    if (data.count > 0) {
      issue_reduction("ncclAllReduce", data.dtype, reduction,
                      [&](const NcclApi& api, NcclDataType type, NcclRedOp op, NcclComm comm, CudaStream stream) {
                        return api.all_reduce(data.data, data.data, data.count, type, op, comm, stream);
                      });
    }
  });
}

void NcclCommunicator::reduce(MemoryView data, int root, Reduction reduction, const Call& call) {
  check_root("reduce", root, size());
  nccl_reduction(data.dtype, reduction.op);
  CallRecord record = this->record(CallKind::kReduce, data, root);
  record.op = reduction.op;
  session_.run(std::move(record), call, [&] {
    if (data.count > 0) {
      void* const output = rank() == root ? data.data : nullptr;
      issue_reduction("ncclReduce", data.dtype, reduction,
                      [&](const NcclApi& api, NcclDataType type, NcclRedOp op, NcclComm comm, CudaStream stream) {
                        return api.reduce(data.data, output, data.count, type, op, root, comm, stream);
                      });
    }
  });
}

void NcclCommunicator::reduce_scatter(const std::vector<ConstMemoryView>& inputs, MemoryView output,
                                      Reduction reduction, const Call& call) {
  check_parts("reduce_scatter", "input", inputs, output.dtype, size());
  check_counts_equal("reduce_scatter", inputs[static_cast<std::size_t>(rank())], output);
  nccl_reduction(output.dtype, reduction.op);
  CallRecord record = sized_record(CallKind::kReduceScatter, output);
  record.op = reduction.op;
  record.gives = counts_of(inputs);
  std::fill(record.expects.begin(), record.expects.end(), output.count);
  session_.run(std::move(record), call, [&] {
    if (!equally_large(inputs)) {
      reduce_each(inputs, output, reduction);
    } else if (output.count > 0) {
      const std::byte* const whole = in_one_piece(inputs) ? inputs[0].bytes() : gathered_copy(inputs);
      issue_reduction("ncclReduceScatter", output.dtype, reduction,
                      [&](const NcclApi& api, NcclDataType type, NcclRedOp op, NcclComm comm, CudaStream stream) {
                        return api.reduce_scatter(whole, output.data, output.count, type, op, comm, stream);
                      });
    }
  });
}

// A reduction to each rank in turn. Which ranks choose this depends on the counts alone, which all ranks have equal.
void NcclCommunicator::reduce_each(const std::vector<ConstMemoryView>& inputs, MemoryView output,
                                   const Reduction& reduction) {
  issue_reduction("ncclReduce", output.dtype, reduction,
                  [&](const NcclApi& api, NcclDataType type, NcclRedOp op, NcclComm comm, CudaStream stream) {
                    NcclResult result = NcclResult::kSuccess;
                    for (int r = 0; r < size(); ++r) {
                      const ConstMemoryView& input = inputs[static_cast<std::size_t>(r)];
                      if (input.count > 0) {
                        result = worse(result, api.reduce(input.data, r == rank() ? output.data : nullptr, input.count,
                                                          type, op, r, comm, stream));
                      }
                    }
                    return result;
                  });
}

const std::byte* NcclCommunicator::gathered_copy(const std::vector<ConstMemoryView>& parts) {
  const std::size_t part_bytes = parts[0].size_bytes();
  std::byte* const whole = session_.workspace(parts.size() * part_bytes);
  for (std::size_t r = 0; r < parts.size(); ++r) {
    session_.copy(whole + r * part_bytes, parts[r].data, part_bytes);
  }
  return whole;
}

void NcclCommunicator::broadcast(MemoryView data, int root, const Call& call) {
  check_root("broadcast", root, size());
  session_.run(record(CallKind::kBroadcast, data, root), call, [&] {
    if (data.count > 0) {
      session_.issue("ncclBroadcast", [&](const NcclApi& api, NcclComm comm, CudaStream stream) {
        return api.broadcast(data.data, data.data, data.size_bytes(), NcclDataType::kUint8, root, comm, stream);
      });
    }
  });
}

void NcclCommunicator::all_gather(ConstMemoryView input, const std::vector<MemoryView>& outputs, const Call& call) {
  check_parts("all_gather", "output", outputs, input.dtype, size());
  check_counts_equal("all_gather", input, outputs[static_cast<std::size_t>(rank())]);
  CallRecord record = sized_record(CallKind::kAllGather, input);
  std::fill(record.gives.begin(), record.gives.end(), input.count);
  record.expects = counts_of(outputs);
  session_.run(std::move(record), call, [&] {
    if (!equally_large(outputs)) {
      exchange(std::vector<ConstMemoryView>(outputs.size(), input), outputs);
    } else if (input.count > 0) {
      all_gather_equal(input, outputs);
    }
  });
}

void NcclCommunicator::all_gather_equal(ConstMemoryView input, const std::vector<MemoryView>& outputs) {
  const bool direct = in_one_piece(outputs);
  const std::size_t part_bytes = input.size_bytes();
  std::byte* const whole = direct ? outputs[0].bytes() : session_.workspace(outputs.size() * part_bytes);
  session_.issue("ncclAllGather", [&](const NcclApi& api, NcclComm comm, CudaStream stream) {
    return api.all_gather(input.data, whole, part_bytes, NcclDataType::kUint8, comm, stream);
  });
  for (std::size_t r = 0; r < outputs.size() && !direct; ++r) {
    session_.copy(outputs[r].data, whole + r * part_bytes, part_bytes);
  }
}

void NcclCommunicator::exchange(const std::vector<ConstMemoryView>& inputs, const std::vector<MemoryView>& outputs) {
  session_.issue("ncclSend and ncclRecv", [&](const NcclApi& api, NcclComm comm, CudaStream stream) {
    NcclResult result = NcclResult::kSuccess;
    for (int r = 0; r < size(); ++r) {
      const ConstMemoryView& input = inputs[static_cast<std::size_t>(r)];
      const MemoryView& output = outputs[static_cast<std::size_t>(r)];
      if (r != rank() && input.count > 0) {
        result = worse(result, api.send(input.data, input.size_bytes(), NcclDataType::kUint8, r, comm, stream));
      }
      if (r != rank() && output.count > 0) {
        result = worse(result, api.receive(output.data, output.size_bytes(), NcclDataType::kUint8, r, comm, stream));
      }
    }
    return result;
  });
  const auto own = static_cast<std::size_t>(rank());
  session_.copy(outputs[own].data, inputs[own].data, outputs[own].size_bytes());
}

void NcclCommunicator::gather(ConstMemoryView input, const std::vector<MemoryView>& outputs, int root,
                              const Call& call) {
  check_root("gather", root, size());
  CallRecord record = sized_record(CallKind::kGather, input, root);
  record.gives[static_cast<std::size_t>(root)] = input.count;
  std::vector<MemoryView> taken(static_cast<std::size_t>(size()));
  if (rank() == root) {
    check_parts("gather", "output", outputs, input.dtype, size());
    check_counts_equal("gather", input, outputs[static_cast<std::size_t>(root)]);
    record.expects = counts_of(outputs);
    taken = outputs;
  }
  std::vector<ConstMemoryView> given(taken.size());
  given[static_cast<std::size_t>(root)] = input;
  session_.run(std::move(record), call, [&] { exchange(given, taken); });
}

void NcclCommunicator::scatter(const std::vector<ConstMemoryView>& inputs, MemoryView output, int root,
                               const Call& call) {
  check_root("scatter", root, size());
  CallRecord record = sized_record(CallKind::kScatter, output, root);
  record.expects[static_cast<std::size_t>(root)] = output.count;
  std::vector<ConstMemoryView> given(static_cast<std::size_t>(size()));
  if (rank() == root) {
    check_parts("scatter", "input", inputs, output.dtype, size());
    check_counts_equal("scatter", inputs[static_cast<std::size_t>(root)], output);
    record.gives = counts_of(inputs);
    given = inputs;
  }
  std::vector<MemoryView> taken(given.size());
  taken[static_cast<std::size_t>(root)] = output;
  session_.run(std::move(record), call, [&] { exchange(given, taken); });
}

void NcclCommunicator::all_to_all(const std::vector<ConstMemoryView>& inputs, const std::vector<MemoryView>& outputs,
                                  const Call& call) {
  const DType dtype = inputs.empty() ? DType::kUInt8 : inputs[0].dtype;
  check_parts("all_to_all", "input", inputs, dtype, size());
  check_parts("all_to_all", "output", outputs, dtype, size());
  const auto own = static_cast<std::size_t>(rank());
  check_counts_equal("all_to_all", inputs[own], outputs[own]);
  CallRecord record = sized_record(CallKind::kAllToAll, inputs[own]);
  record.gives = counts_of(inputs);
  record.expects = counts_of(outputs);
  session_.run(std::move(record), call, [&] { exchange(inputs, outputs); });
}

void NcclCommunicator::barrier(const Call& call) {
  session_.run({CallKind::kBarrier}, call, [&] {
    if (!session_.meets_anyway()) {
      std::byte* const nothing = session_.workspace(1);
      session_.issue("ncclAllReduce", [&](const NcclApi& api, NcclComm comm, CudaStream stream) {
        return api.all_reduce(nothing, nothing, 1, NcclDataType::kUint8, NcclRedOp::kMax, comm, stream);
      });
    }
  });
}

std::shared_ptr<Transfer> NcclCommunicator::send(ConstMemoryView data, int destination, std::uint64_t tag,
                                                 const Call& call) {
  return transfers_->send(data, destination, tag, call);
}

std::shared_ptr<Transfer> NcclCommunicator::receive(MemoryView data, int source, std::uint64_t tag, const Call& call) {
  return transfers_->receive(data, source, tag, call);
}

std::shared_ptr<Communicator> NcclCommunicator::split(int color, int key, const Call& call) {
  std::unique_ptr<NcclLink> link;
  std::uint64_t sequence = 0;
  session_.run({CallKind::kSplit}, call, [&] {
    link = session_.split(color, key);
    sequence = session_.sequence();
  });
  if (link == nullptr) {
    return nullptr;
  }
  const int part_rank = link->rank();
  const int part_size = link->size();
  GroupBoard board(group_->board().store(),
                   group_->board().prefix() + "/" + std::to_string(sequence) + "." + std::to_string(color), part_rank);
  auto part = std::make_shared<NcclGroup>(group_->context(), std::move(board), group_->options(), part_rank, part_size);
  return std::shared_ptr<NcclCommunicator>(new NcclCommunicator(std::move(part), std::move(link)));
}

std::shared_ptr<Buffer> NcclCommunicator::allocate(std::size_t size_bytes) {
  return std::make_shared<DeviceBuffer>(group_->context().device, size_bytes);
}

void NcclCommunicator::abort(const std::string& reason) noexcept {
  group_->fail({false, 0, group_->place() + " aborted the group: " + reason});
}

void NcclCommunicator::all_reduce_on_host(MemoryView data, ReduceOp op, const Call& call) {
  const std::size_t size_bytes = data.size_bytes();
  std::byte* const pinned = host_copy_.at_least(size_bytes);
  const MemoryView copy{device_copy_.at_least(size_bytes), data.count, data.dtype};
  std::memcpy(pinned, data.data, size_bytes);
  CallRecord record = this->record(CallKind::kAllReduce, copy);
  record.op = op;
  session_.run(std::move(record), call, [&] {
    session_.copy(copy.data, pinned, size_bytes);
    issue_reduction("ncclAllReduce", copy.dtype, op,
                    [&](const NcclApi& api, NcclDataType type, NcclRedOp said, NcclComm comm, CudaStream stream) {
                      return api.all_reduce(copy.data, copy.data, copy.count, type, said, comm, stream);
                    });
    session_.copy(pinned, copy.data, size_bytes);
  });
  std::memcpy(data.data, pinned, size_bytes);
}

}  // namespace accelerate_cpp::comm
