#include "torch_bridge/c10d_backend.h"

#include <algorithm>
#include <utility>

#include "core/base/background.h"
#include "core/base/error.h"
#include "core/comm/ordered.h"
#include "torch_bridge/shared_empty.h"

namespace accelerate_cpp::comm {
namespace {

using ErrorState = std::atomic<::c10d::ErrorType>;

// Remembers the first error after which the group is unusable.
void note(ErrorState& state, const std::exception_ptr& error) {
  ::c10d::ErrorType found = ::c10d::ErrorType::SUCCESS;
  try {
    std::rethrow_exception(error);
  } catch (const Timeout&) {
    found = ::c10d::ErrorType::TIMEOUT;
  } catch (const PeerLost&) {
    found = ::c10d::ErrorType::REMOTE_ERROR;
  } catch (const InvalidArgument&) {
    return;
  } catch (const MismatchedCollective&) {
    return;
  } catch (...) {
    found = ::c10d::ErrorType::COMM_ERROR;
  }
  ::c10d::ErrorType none = ::c10d::ErrorType::SUCCESS;
  state.compare_exchange_strong(none, found);
}

// With cores to spare, the queue's thread does not slow down a rank that computes.
std::chrono::milliseconds grace(const Communicator& communicator) {
  return communicator.cores_per_rank() >= 2.0 ? std::chrono::milliseconds(0) : WorkQueue::kGrace;
}

}  // namespace

C10dBackend::C10dBackend(std::shared_ptr<Communicator> communicator, std::string backend_name,
                         std::chrono::milliseconds timeout, BackendHooks hooks)
    : Backend(communicator->rank(), communicator->size()),
      communicator_(std::move(communicator)),
      options_(c10::make_intrusive<Options>(std::move(backend_name), timeout)),
      hooks_(std::move(hooks)),
      error_(std::make_shared<ErrorState>(::c10d::ErrorType::SUCCESS)),
      queue_(std::make_shared<WorkQueue>(hooks_.probe, grace(*communicator_))),
      ordered_(std::make_shared<OrderedCommunicator>(communicator_, queue_)) {
  hooks_.remember(*this);
}

C10dBackend::~C10dBackend() {
  hooks_.forget(*this);
}

std::chrono::milliseconds C10dBackend::effective_timeout(std::chrono::milliseconds requested) const {
  return requested == ::c10d::kUnsetTimeout ? options_->timeout : requested;
}

WorkPointer C10dBackend::enqueue(const Order& order, std::uint64_t sequence, Tensors results, Operation operation) {
  // The timeout starts when it is the operation's turn: earlier ones have their own.
  auto task = [communicator = communicator_, error = error_, title = order.title,
               timeout = effective_timeout(order.timeout), shape = order.shape, location = hooks_.call_site(),
               operation = std::move(operation)] {
    RECORD_USER_SCOPE(title);
    try {
      operation(*communicator, Call(Deadline::after(timeout), shape, location));
    } catch (...) {
      note(*error, std::current_exception());
      throw;
    }
  };
  return pending_work(order.type, sequence, std::move(results), queue_->issue(std::move(task)), nullptr,
                      hooks_.rethrow);
}

void C10dBackend::count_each(CallKind kind, const Tensors& tensors) {
  for (const at::Tensor& tensor : tensors) {
    count(kind, tensor);
  }
}

void C10dBackend::count_joint(CallKind kind, const Tensors& tensors) {
  std::size_t size_bytes = 0;
  for (const at::Tensor& tensor : tensors) {
    size_bytes += tensor.nbytes();
  }
  traffic_.add(kind, size_bytes);
}

void C10dBackend::monitoredBarrier(const ::c10d::BarrierOptions& options, bool) {
  ::c10d::BarrierOptions here = options;
  here.asyncOp = false;
  barrier(here)->wait();
}

c10::intrusive_ptr<::c10d::Backend> C10dBackend::split(const c10::intrusive_ptr<::c10d::Store>&,
                                                       const std::vector<int>& ranks,
                                                       const c10::intrusive_ptr<Options>& options) {
  queue_->drain();
  const auto own = std::find(ranks.begin(), ranks.end(), getRank());
  // Groups of one split share no rank, so that the first rank of each tells them apart.
  const int color = own == ranks.end() ? -1 : ranks.front();
  std::shared_ptr<Communicator> part =
      communicator_->split(color, static_cast<int>(own - ranks.begin()), Call(deadline(::c10d::kUnsetTimeout)));
  if (!part) {
    return nullptr;
  }
  const std::chrono::milliseconds timeout = options ? options->timeout : options_->timeout;
  return c10::make_intrusive<C10dBackend>(std::move(part), options_->backend, timeout, hooks_);
}

void C10dBackend::shutdown() {
  if (process_.forked() || closed_.exchange(true)) {
    return;  // a forked child has no part in the group
  }
  const auto stop = [this] {
    queue_->stop(std::make_exception_ptr(
        InvalidArgument("this process group was destroyed; create it again with init_process_group or new_group")));
    pump_.stop();
    communicator_->leave();
  };
  try {
    queue_->drain();
  } catch (...) {
    communicator_->abort("the wait for its last operations was interrupted");
    stop();
    hooks_.rethrow();
  }
  stop();
}

void C10dBackend::abort() {
  communicator_->abort("abort() of its process group was called");
}

void C10dBackend::leave(const std::string& reason) {
  if (process_.forked() || closed_.exchange(true)) {
    return;
  }
  if (!reason.empty()) {
    communicator_->abort(reason);
  } else if (!queue_->idle()) {
    communicator_->abort("its process ended while an asynchronous operation was under way");
  }
  queue_->stop(std::make_exception_ptr(InvalidArgument("the interpreter is ending: nothing can be communicated now")));
  pump_.stop();
  communicator_->leave();
}

at::Tensor C10dBackend::allocateTensor(long size, at::TensorOptions options) {
  if (!options.device().is_cpu()) {
    throw InvalidArgument("backend shm allocates CPU tensors, not tensors on " + options.device().str());
  }
  return shared_empty({size}, c10::typeMetaToScalarType(options.dtype()));
}

void C10dBackend::startCoalescing() {
  const std::lock_guard lock(window_mutex_);
  window_.clear();
  window_owner_ = std::this_thread::get_id();
  coalescing_ = true;
}

WorkPointer C10dBackend::endCoalescing() {
  const std::lock_guard lock(window_mutex_);
  coalescing_ = false;
  return coalesced_work(std::exchange(window_, {}));
}

bool C10dBackend::coalesces_here() const {
  if (!coalescing_) {
    return false;
  }
  const std::lock_guard lock(window_mutex_);
  return coalescing_ && window_owner_ == std::this_thread::get_id();
}

WorkPointer C10dBackend::collect(WorkPointer work) {
  if (coalesces_here()) {
    const std::lock_guard lock(window_mutex_);
    window_.push_back(work);
  }
  return work;
}

WorkPointer C10dBackend::refuse(::c10d::OpType type, const std::exception_ptr& error) {
  note(*error_, error);
  if (coalesces_here()) {
    return collect(failed_work(type, translated(error, hooks_.rethrow)));
  }
  try {
    std::rethrow_exception(error);
  } catch (...) {
    hooks_.rethrow();
  }
  throw InternalError("the hook that rethrows exceptions has thrown none");
}

}  // namespace accelerate_cpp::comm
