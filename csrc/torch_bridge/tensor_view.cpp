#include "torch_bridge/tensor_view.h"

#include <ATen/TensorOperators.h>

#include <string>
#include <utility>

#include "core/base/error.h"

namespace accelerate_cpp {

DType dtype_of(const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kFloat:
      return DType::kFloat32;
    case at::kDouble:
      return DType::kFloat64;
    case at::kHalf:
      return DType::kFloat16;
    case at::kBFloat16:
      return DType::kBFloat16;
    case at::kChar:
      return DType::kInt8;
    case at::kShort:
      return DType::kInt16;
    case at::kInt:
      return DType::kInt32;
    case at::kLong:
      return DType::kInt64;
    case at::kByte:
      return DType::kUInt8;
    case at::kBool:
      return DType::kBool;
    default:
      throw InvalidArgument(std::string("tensors of dtype ") + c10::toString(tensor.scalar_type()) +
                            " cannot be communicated over shared memory; expected float16, bfloat16, float32, float64, "
                            "int8 to int64, uint8 or bool. Convert the tensor, or view its bytes as uint8");
  }
}

MemoryView view_of(const at::Tensor& tensor) {
  if (!tensor.device().is_cpu() || tensor.layout() != at::kStrided) {
    throw InvalidArgument("shared memory collectives take dense CPU tensors, found a tensor on " +
                          tensor.device().str() + " with layout " +
                          (tensor.layout() == at::kStrided ? "strided" : "sparse"));
  }
  if (!tensor.is_contiguous()) {
    throw InvalidArgument("expected a contiguous tensor; call .contiguous() first");
  }
  return {tensor.data_ptr(), static_cast<std::size_t>(tensor.numel()), dtype_of(tensor)};
}

std::vector<MemoryView> split_view(const at::Tensor& tensor, int count) {
  const MemoryView whole = view_of(tensor);
  const auto parts = static_cast<std::size_t>(count);
  if (whole.count % parts != 0) {
    throw InvalidArgument("a tensor of " + std::to_string(whole.count) + " elements cannot be divided evenly among " +
                          std::to_string(count) + " ranks");
  }
  const std::size_t part = whole.count / parts;
  std::vector<MemoryView> views;
  for (std::size_t p = 0; p < parts; ++p) {
    views.push_back({whole.bytes() + p * part * element_size(whole.dtype), part, whole.dtype});
  }
  return views;
}

Contiguous::Contiguous(at::Tensor tensor) : original_(std::move(tensor)) {
  contiguous_ = original_.layout() == at::kStrided ? original_.contiguous() : original_;
}

void Contiguous::write_back() const {
  if (!contiguous_.is_same(original_)) {
    original_.copy_(contiguous_);
  }
}

}  // namespace accelerate_cpp
