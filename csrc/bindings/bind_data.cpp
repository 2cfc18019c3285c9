#include <algorithm>
#include <cstdint>

#include "bindings/bindings.h"
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

}  // namespace

void bind_data(py::module_& module) {
  module.def("permuted_indices", &permuted_indices, py::arg("size"), py::arg("seed"), py::arg("turn"), py::arg("start"),
             py::arg("stop"), py::call_guard<py::gil_scoped_release>(),
             "Positions `start` up to `stop` of a shuffled order of the numbers below `size`, as int64 "
             "(csrc/core/data/permutation.h).");
}

}  // namespace accelerate_cpp::bindings
