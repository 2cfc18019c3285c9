#include "torch_bridge/bound_gradient.h"

#include <cstddef>
#include <utility>

namespace accelerate_cpp::grad {
namespace {

// The slot and tensor_.
constexpr std::size_t kHolders = 2;

// The name of this method depends on the version of torch.
template <class PyObjectSlot>
bool has_python_object(const PyObjectSlot& slot) {
  if constexpr (requires { slot.load_pyobj(); }) {
    return slot.load_pyobj() != nullptr;
  } else {
    return slot.check_pyobj().has_value();
  }
}

}  // namespace

BoundGradient::BoundGradient(const at::Tensor& slot, std::optional<Measurement> statistics)
    : tensor_(slot.unsafeGetTensorImpl()->shallow_copy_and_detach(slot.unsafeGetTensorImpl()->version_counter(),
                                                                  /*allow_tensor_metadata_change=*/true)),
      version_(tensor_._version()),
      statistics_(std::move(statistics)) {}

std::optional<Measurement> BoundGradient::statistics() const {
  const bool untouched = statistics_ && tensor_._version() == version_ && tensor_.storage().use_count() == kHolders &&
                         !has_python_object(*tensor_.unsafeGetTensorImpl()->pyobj_slot());
  return untouched ? statistics_ : std::nullopt;
}

}  // namespace accelerate_cpp::grad
