#include "torch_bridge/ahead_copies.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <utility>

#include "core/base/background.h"

namespace accelerate_cpp::offload {
namespace {

struct Made {
  std::vector<at::Tensor> tensors;
  std::vector<std::uint32_t> versions;  // of the copied tensors
  c10::Event done;                      // on the stream of the copies
};

// Counts the changes of a tensor in place.
std::uint32_t version_of(const Weight& weight) {
  return weight.tensor.is_inference() ? 0 : static_cast<std::uint32_t>(weight.tensor._version());
}

std::vector<std::size_t> sizes_of(const std::vector<std::vector<Weight>>& units) {
  std::vector<std::size_t> sizes;
  for (const std::vector<Weight>& weights : units) {
    std::size_t bytes = 0;
    for (const Weight& weight : weights) {
      bytes += static_cast<std::size_t>(weight.tensor.numel()) * c10::elementSize(weight.dtype);
    }
    sizes.push_back(bytes);
  }
  return sizes;
}

}  // namespace

struct AheadCopies::Copies {
  Copies(std::vector<std::vector<Weight>> units_, at::Device device_)
      : units(std::move(units_)),
        device(device_),
        guard(device.type()),
        stream(guard.getStreamFromGlobalPool(device, /*isHighPriority=*/false)) {
    for (std::vector<Weight>& weights : units) {
      for (Weight& weight : weights) {
        weight.tensor = weight.tensor.detach();  // so that threads release nothing that belongs to the interpreter
      }
    }
  }

  void make(std::size_t unit);
  bool are_of_today(std::size_t unit, const Made& copies) const;
  void make_ready(Made& copies) const;

  std::vector<std::vector<Weight>> units;
  const at::Device device;
  const c10::impl::VirtualGuardImpl guard;
  const c10::Stream stream;
  const OwnerProcess process;

  std::mutex mutex;
  std::map<std::size_t, Made> made;  // by unit
};

void AheadCopies::Copies::make(std::size_t unit) {
  try {
    const at::NoGradGuard no_grad;
    const c10::DeviceGuard on_device(device);
    const c10::StreamGuard on_stream(stream);
    Made copies{{}, {}, c10::Event(device.type())};
    for (const Weight& weight : units[unit]) {
      copies.versions.push_back(version_of(weight));
      copies.tensors.push_back(weight.tensor.to(device, weight.dtype, /*non_blocking=*/true, /*copy=*/true));
    }
    copies.done.record(stream);
    const std::lock_guard lock(mutex);
    made.insert_or_assign(unit, std::move(copies));
  } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch): whoever needs the unit copies it, and is told
  }
}

bool AheadCopies::Copies::are_of_today(std::size_t unit, const Made& copies) const {
  const std::vector<Weight>& weights = units[unit];
  return std::equal(weights.begin(), weights.end(), copies.versions.begin(),
                    [](const Weight& weight, std::uint32_t version) { return version_of(weight) == version; });
}

void AheadCopies::Copies::make_ready(Made& copies) const {
  const c10::Stream current = guard.getStream(device);
  copies.done.block(current);
  for (const at::Tensor& tensor : copies.tensors) {
    if (tensor.nbytes() > 0) {
      guard.recordDataPtrOnStream(tensor.storage().data_ptr(), current);
    }
  }
}

AheadCopies::AheadCopies(std::vector<std::vector<Weight>> units, at::Device device, std::size_t window_bytes)
    : copies_(std::make_shared<Copies>(std::move(units), device)),
      worker_(
          AheadPlan(sizes_of(copies_->units), window_bytes, Granularity::kWholeUnits), 0,
          [copies = copies_](const AheadPlan::Step& step) { copies->make(step.unit); }, AtExit::kAwaited) {}

std::vector<at::Tensor> AheadCopies::take(std::size_t unit) {
  if (copies_->process.forked()) {  // the mutex may have been held
    return {};
  }
  worker_.arrive(unit);
  std::vector<at::Tensor> taken;
  const std::lock_guard lock(copies_->mutex);
  const auto found = copies_->made.find(unit);
  if (found != copies_->made.end() && copies_->are_of_today(unit, found->second)) {
    copies_->make_ready(found->second);
    taken = std::move(found->second.tensors);
  }
  std::erase_if(copies_->made, [this](const auto& entry) { return !worker_.expects(entry.first); });
  return taken;
}

}  // namespace accelerate_cpp::offload
