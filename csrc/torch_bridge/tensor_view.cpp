#include "torch_bridge/tensor_view.h"

#include <ATen/MemoryOverlap.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <optional>
#include <string>
#include <utility>

#include "core/base/error.h"

namespace accelerate_cpp {
namespace {

// What one element of a tensor is made of.
std::optional<Elements> computable(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
      return Elements{DType::kFloat32, 1};
    case at::kDouble:
      return Elements{DType::kFloat64, 1};
    case at::kHalf:
      return Elements{DType::kFloat16, 1};
    case at::kBFloat16:
      return Elements{DType::kBFloat16, 1};
    case at::kChar:
      return Elements{DType::kInt8, 1};
    case at::kShort:
      return Elements{DType::kInt16, 1};
    case at::kInt:
      return Elements{DType::kInt32, 1};
    case at::kLong:
      return Elements{DType::kInt64, 1};
    case at::kByte:
      return Elements{DType::kUInt8, 1};
    case at::kBool:
      return Elements{DType::kBool, 1};
    case at::kComplexFloat:
      return Elements{DType::kFloat32, 2};
    case at::kComplexDouble:
      return Elements{DType::kFloat64, 2};
    case at::kComplexHalf:
      return Elements{DType::kFloat16, 2};
    default:
      return std::nullopt;
  }
}

Elements elements_of(at::ScalarType dtype, Use use) {
  if (const std::optional<Elements> elements = computable(dtype)) {
    return *elements;
  }
  if (use == Use::kMove && !c10::isQIntType(dtype)) {
    return {DType::kUInt8, c10::elementSize(dtype)};
  }
  throw InvalidArgument(
      std::string("tensors of dtype ") + c10::toString(dtype) +
      " cannot be reduced over shared memory; expected float16, bfloat16, float32, float64, int8 to "
      "int64, uint8, bool or complex. Convert the tensor; where it is only to be moved, view its bytes "
      "as uint8");
}

void check_dense(const at::Tensor& tensor) {
  if (!tensor.device().is_cpu() || tensor.layout() != at::kStrided) {
    throw InvalidArgument("shared memory collectives take dense CPU tensors, found a tensor on " +
                          tensor.device().str() + " with layout " +
                          (tensor.layout() == at::kStrided ? "strided" : "sparse"));
  }
}

// Copies must not show: no graph, no version counters, no Python dispatch modes.
struct PlainDispatch {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  c10::impl::ExcludeDispatchKeyGuard below_python{c10::python_ks};
};

}  // namespace

Elements elements_of(const at::Tensor& tensor) {
  const Elements one = elements_of(tensor.scalar_type(), Use::kCompute);
  return {one.dtype, static_cast<std::size_t>(tensor.numel()) * one.count};
}

DType dtype_of(const at::Tensor& tensor) {
  const Elements elements = elements_of(tensor.scalar_type(), Use::kCompute);
  if (elements.count != 1) {
    throw InvalidArgument(std::string("tensors of dtype ") + c10::toString(tensor.scalar_type()) +
                          " are not supported here; expected float16, bfloat16, float32, float64, int8 to int64, uint8 "
                          "or bool. Use torch.view_as_real");
  }
  return elements.dtype;
}

MemoryView view_of(const at::Tensor& tensor, Use use) {
  check_dense(tensor);
  if (!tensor.is_contiguous()) {
    throw InvalidArgument("expected a contiguous tensor; call .contiguous() first");
  }
  const Elements elements = elements_of(tensor.scalar_type(), use);
  return {tensor.data_ptr(), static_cast<std::size_t>(tensor.numel()) * elements.count, elements.dtype};
}

std::vector<MemoryView> split_view(const MemoryView& whole, int count) {
  const auto parts = static_cast<std::size_t>(count);
  if (whole.count % parts != 0) {
    throw InvalidArgument("a tensor of " + std::to_string(whole.count) + " elements cannot be divided evenly among " +
                          std::to_string(count) + " ranks");
  }
  const std::size_t part = whole.count / parts;
  std::vector<MemoryView> views;
  views.reserve(parts);
  for (std::size_t p = 0; p < parts; ++p) {
    views.push_back({whole.bytes() + p * part * element_size(whole.dtype), part, whole.dtype});
  }
  return views;
}

Contiguous::Contiguous(at::Tensor tensor, Use use) : tensor_(std::move(tensor)) {
  check_dense(tensor_);
  const Elements elements = elements_of(tensor_.scalar_type(), use);
  dtype_ = elements.dtype;
  count_ = static_cast<std::size_t>(tensor_.numel()) * elements.count;
}

bool Contiguous::needs_stand_in() const {
  // Conjugation and negation may be pending: then memory does not hold the values.
  return !tensor_.is_contiguous() || tensor_.is_conj() || tensor_.is_neg();
}

MemoryView Contiguous::view() const {
  return {(stand_in_.defined() ? stand_in_ : tensor_).data_ptr(), count_, dtype_};
}

MemoryView Contiguous::load() {
  if (needs_stand_in()) {
    const PlainDispatch plain;
    stand_in_ = tensor_.contiguous().resolve_conj().resolve_neg();
  }
  return view();
}

MemoryView Contiguous::reserve() {
  if (needs_stand_in()) {
    const PlainDispatch plain;
    stand_in_ = at::empty_like(tensor_, tensor_.options(), at::MemoryFormat::Contiguous);
  }
  return view();
}

void Contiguous::store() const {
  if (!stand_in_.defined()) {
    return;
  }
  if (at::has_internal_overlap(tensor_) == at::MemOverlap::Yes) {
    throw InvalidArgument(
        "cannot write results into a tensor whose elements share memory, as expand() makes them; clone "
        "it first");
  }
  const PlainDispatch plain;
  tensor_.copy_(stand_in_);
}

}  // namespace accelerate_cpp
