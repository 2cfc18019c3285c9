#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "bindings/bindings.h"
#include "core/base/crc32.h"
#include "core/base/error.h"
#include "core/comm/copy.h"
#include "core/data/permutation.h"

namespace accelerate_cpp::bindings {
namespace {

at::Tensor permuted_indices(std::uint64_t size, std::uint64_t seed, std::uint64_t turn, std::uint64_t start,
                            std::uint64_t stop) {
  const data::Permutation permutation(size, seed, turn);
  start = std::min(start, size);
  stop = std::clamp(stop, start, size);
  const at::Tensor indices = at::empty({static_cast<std::int64_t>(stop - start)}, at::kLong);
  auto* index = indices.mutable_data_ptr<std::int64_t>();
  for (std::uint64_t position = start; position < stop; ++position) {
    *index++ = static_cast<std::int64_t>(permutation.at(position));
  }
  return indices;
}

void copy_tensors(const std::vector<at::Tensor>& targets, const std::vector<at::Tensor>& sources, int num_threads) {
  if (targets.size() != sources.size()) {
    throw InvalidArgument("copy_tensors: expected as many targets as sources, found " + std::to_string(targets.size()) +
                          " and " + std::to_string(sources.size()));
  }
  std::vector<comm::Copy> copies;
  for (std::size_t index = 0; index < sources.size(); ++index) {
    const at::Tensor &target = targets[index], &source = sources[index];
    const bool plain = source.is_cpu() && target.is_cpu() && source.is_contiguous() && target.is_contiguous();
    if (!plain || source.nbytes() != target.nbytes()) {
      throw InvalidArgument("copy_tensors: expected contiguous CPU tensors of equal size, found others at place " +
                            std::to_string(index));
    }
    copies.push_back({target.mutable_data_ptr(), source.const_data_ptr(), source.nbytes()});
  }
  comm::copy_all(copies, num_threads);
}

std::uint32_t crc32_of(const py::buffer& data, std::uint32_t before) {
  py::buffer_info view = data.request();
  if (PyBuffer_IsContiguous(view.view(), 'C') == 0) {
    throw InvalidArgument("crc32: expected contiguous memory, found a view with strides");
  }
  const py::gil_scoped_release release;
  return crc32(before, view.ptr, static_cast<std::size_t>(view.size * view.itemsize));
}

}  // namespace

void bind_data(py::module_& module) {
  module.def("permuted_indices", &permuted_indices, py::arg("size"), py::arg("seed"), py::arg("turn"), py::arg("start"),
             py::arg("stop"), py::call_guard<py::gil_scoped_release>(),
             "Positions `start` up to `stop` of a shuffled order of the numbers below `size`, as int64 "
             "(csrc/core/data/permutation.h).");
  module.def("copy_tensors", &copy_tensors, py::arg("targets"), py::arg("sources"), py::arg("num_threads"),
             py::call_guard<py::gil_scoped_release>(),
             "Copies the bytes of contiguous CPU tensors into others of the same sizes, past the caches where they are "
             "many, by up to so many threads (csrc/core/comm/copy.h).");
  module.def("crc32", &crc32_of, py::arg("data"), py::arg("before") = 0,
             "The CRC-32 of zip archives of contiguous `data`, which follows bytes with the checksum `before` "
             "(csrc/core/base/crc32.h).");
}

}  // namespace accelerate_cpp::bindings
