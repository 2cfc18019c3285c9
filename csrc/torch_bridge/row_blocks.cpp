#include "torch_bridge/row_blocks.h"

#include <algorithm>
#include <cstddef>

#include "core/base/error.h"
#include "core/comm/copy.h"

namespace accelerate_cpp::grad {

void copy_into_blocks(const at::Tensor& gradient, const at::Tensor& bucket, std::int64_t offset, std::int64_t elements,
                      std::int64_t num_blocks) {
  const std::int64_t block = num_blocks > 0 ? bucket.numel() / num_blocks : 0;
  const bool fits = gradient.scalar_type() == bucket.scalar_type() && bucket.is_contiguous() && offset >= 0 &&
                    elements >= 0 && offset + elements <= block && gradient.numel() <= elements * num_blocks &&
                    gradient.device().is_cpu() && bucket.device().is_cpu();
  if (!fits) {
    throw InvalidArgument("copy_into_blocks: a gradient of " + std::to_string(gradient.numel()) +
                          " elements does not fit at " + std::to_string(offset) + " into " +
                          std::to_string(num_blocks) + " blocks of " + std::to_string(block) + ", " +
                          std::to_string(elements) + " each, or has another dtype or device");
  }
  const at::Tensor source = gradient.contiguous().resolve_conj().resolve_neg();
  const std::size_t element_bytes = source.element_size();
  const auto* const from = static_cast<const std::byte*>(source.const_data_ptr());
  auto* const to = static_cast<std::byte*>(bucket.mutable_data_ptr());
  for (std::int64_t b = 0; b < num_blocks; ++b) {
    const std::int64_t begin = std::min(b * elements, source.numel());
    const std::int64_t count = std::min(elements, source.numel() - begin);
    comm::copy(to + static_cast<std::size_t>(b * block + offset) * element_bytes,
               from + static_cast<std::size_t>(begin) * element_bytes, static_cast<std::size_t>(count) * element_bytes,
               comm::Residency::kCached);
  }
}

}  // namespace accelerate_cpp::grad
