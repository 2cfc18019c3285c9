// What asynchronous calls of torch.distributed return.
#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "core/comm/communicator.h"
#include "core/comm/pending.h"

namespace accelerate_cpp::comm {

using Tensors = std::vector<at::Tensor>;
using WorkPointer = c10::intrusive_ptr<::c10d::Work>;

// Called within a catch block: rethrows the exception in a form whose type survives torch.
using Rethrow = std::function<void()>;

// `error` as `rethrow` would throw it.
std::exception_ptr translated(const std::exception_ptr& error, const Rethrow& rethrow);

// An operation that has already finished.
WorkPointer completed_work(::c10d::OpType type, std::uint64_t sequence, Tensors results);

// An operation that could not even be issued.
WorkPointer failed_work(::c10d::OpType type, std::exception_ptr error);

// An operation under way. `transfer` says where a received message came from; null for collectives.
//
// wait() throws why the operation failed. With a timeout it throws Timeout when that passes first, and the operation
// goes on. Futures hold `results`, complete without the interpreter lock, and make the operation go on by itself.
WorkPointer pending_work(::c10d::OpType type, std::uint64_t sequence, Tensors results, std::shared_ptr<Pending> pending,
                         std::shared_ptr<const Transfer> transfer, Rethrow rethrow);

// Several operations as one, which ends when all have and fails when one has.
WorkPointer coalesced_work(std::vector<WorkPointer> works);

}  // namespace accelerate_cpp::comm
