// Converts the arguments of c10d operations for communicators.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <string>
#include <vector>

#include "core/base/error.h"
#include "core/comm/call.h"

namespace accelerate_cpp::comm {

// The only element. The list arguments of c10d date from processes that drive several devices; ours drive one. Throws
// InvalidArgument for any other number.
template <class T>
T& single(std::vector<T>& list, const char* operation) {
  if (list.size() != 1) {
    throw InvalidArgument(std::string(operation) + ": expected one tensor (or list) per process, found " +
                          std::to_string(list.size()));
  }
  return list.front();
}

// Valid for as long as the tensor keeps its shape.
inline Shape shape_of(const at::Tensor& tensor) {
  return {tensor.sizes().data(), tensor.sizes().size()};
}

}  // namespace accelerate_cpp::comm
