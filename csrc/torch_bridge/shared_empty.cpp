#include "torch_bridge/shared_empty.h"

#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <memory>
#include <string>

#include "core/base/error.h"
#include "core/comm/shared_buffer.h"

namespace accelerate_cpp::comm {
namespace {

std::int64_t size_bytes(const std::vector<std::int64_t>& size, at::ScalarType dtype) {
  for (const std::int64_t dimension : size) {
    if (dimension < 0) {
      throw InvalidArgument("a tensor has no dimension of size " + std::to_string(dimension));
    }
  }
  if (std::find(size.begin(), size.end(), 0) != size.end()) {
    return 0;
  }
  auto bytes = static_cast<std::int64_t>(c10::elementSize(dtype));
  for (const std::int64_t dimension : size) {
    if (__builtin_mul_overflow(bytes, dimension, &bytes)) {
      throw InvalidArgument("a tensor of this shape has more bytes than can be addressed");
    }
  }
  return bytes;
}

}  // namespace

at::Tensor shared_empty(const std::vector<std::int64_t>& size, at::ScalarType dtype) {
  std::shared_ptr<Buffer> buffer = allocate_shared(static_cast<std::size_t>(size_bytes(size, dtype)));
  void* const data = buffer->data();
  return at::from_blob(data, size, [buffer](void*) {}, at::TensorOptions().dtype(dtype));
}

bool is_shared_tensor(const at::Tensor& tensor) {
  if (!tensor.device().is_cpu() || tensor.layout() != at::kStrided || !tensor.has_storage()) {
    return false;
  }
  return is_shared(tensor.storage().data(), tensor.storage().nbytes());
}

}  // namespace accelerate_cpp::comm
