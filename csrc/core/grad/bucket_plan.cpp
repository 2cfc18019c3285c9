#include "core/grad/bucket_plan.h"

#include <map>
#include <string>

#include "core/base/error.h"

namespace accelerate_cpp::grad {
namespace {

constexpr std::size_t kSlotAlignmentBytes = 64;

std::size_t padded_count(const ParameterSpec& parameter) {
  const std::size_t step = kSlotAlignmentBytes / element_size(parameter.dtype);
  return (parameter.count + step - 1) / step * step;
}

void check_permutation(const std::vector<std::size_t>& order, std::size_t size) {
  std::vector<bool> seen(size, false);
  for (const std::size_t parameter : order) {
    if (parameter >= size || seen[parameter]) {
      throw InvalidArgument("the order of " + std::to_string(size) + " parameters names parameter " +
                            std::to_string(parameter) + " twice or out of range");
    }
    seen[parameter] = true;
  }
  if (order.size() != size) {
    throw InvalidArgument("the order names " + std::to_string(order.size()) + " of " + std::to_string(size) +
                          " parameters");
  }
}

}  // namespace

BucketPlan plan_buckets(const std::vector<ParameterSpec>& parameters, const std::vector<std::size_t>& order,
                        std::size_t first_cap_bytes, std::size_t cap_bytes) {
  check_permutation(order, parameters.size());
  if (first_cap_bytes == 0 || cap_bytes == 0) {
    throw InvalidArgument("a bucket must be able to hold something; expected caps above 0 bytes");
  }
  BucketPlan plan;
  plan.slots.resize(parameters.size());
  std::map<DType, std::size_t> open;  // the bucket that is being filled, per dtype
  for (const std::size_t parameter : order) {
    const ParameterSpec& spec = parameters[parameter];
    const std::size_t count = padded_count(spec);
    const auto current = open.find(spec.dtype);
    bool fits = current != open.end();
    if (fits) {
      const std::size_t cap = current->second == 0 ? first_cap_bytes : cap_bytes;
      fits = (plan.buckets[current->second].count + count) * element_size(spec.dtype) <= cap;
    }
    if (!fits) {
      open[spec.dtype] = plan.buckets.size();
      plan.buckets.push_back({spec.dtype, 0, {}});
    }
    const std::size_t index = open[spec.dtype];
    BucketLayout& bucket = plan.buckets[index];
    plan.slots[parameter] = {index, bucket.parameters.size(), bucket.count};
    bucket.parameters.push_back(parameter);
    bucket.count += count;
  }
  return plan;
}

}  // namespace accelerate_cpp::grad
