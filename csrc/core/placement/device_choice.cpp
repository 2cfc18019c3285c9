#include "core/placement/device_choice.h"

#include <algorithm>
#include <cctype>

#include "core/base/error.h"

namespace accelerate_cpp::placement {
namespace {

std::string present(const std::vector<DeviceRequest::Accelerator>& accelerators) {
  std::string text = "cpu";
  for (const auto& accelerator : accelerators) {
    text += ", " + std::to_string(accelerator.count) + " x " + accelerator.type;
  }
  return text;
}

bool all_digits(const std::string& text) {
  return !text.empty() && text.size() <= 4 &&
         std::all_of(text.begin(), text.end(), [](unsigned char c) { return std::isdigit(c) != 0; });
}

std::string check_forced(const DeviceRequest& request) {
  const std::size_t colon = request.forced.find(':');
  const std::string type = request.forced.substr(0, colon);
  const std::string index = colon == std::string::npos ? "0" : request.forced.substr(colon + 1);
  if (!all_digits(index) || type.empty()) {
    throw InvalidArgument("'" + request.forced +
                          "' is not a device; expected a type, or a type and an index, such as cuda:1");
  }
  if (type == "cpu" || type == "meta") {
    return request.forced;
  }
  for (const auto& accelerator : request.accelerators) {
    if (accelerator.type == type && std::stoi(index) < accelerator.count) {
      return request.forced;
    }
  }
  throw InvalidArgument("device '" + request.forced + "' is not present; this process sees " +
                        present(request.accelerators));
}

}  // namespace

std::string choose_device(const DeviceRequest& request) {
  if (!request.forced.empty()) {
    return check_forced(request);
  }
  if (request.force_cpu || request.accelerators.empty()) {
    return "cpu";
  }
  const auto& best = request.accelerators.front();
  if (!best.index_by_rank) {
    return best.type;
  }
  if (request.local_rank < 0 || request.local_rank >= best.count) {
    throw InvalidArgument("local rank " + std::to_string(request.local_rank) + " has no device: this host shows " +
                          std::to_string(best.count) + " of type " + best.type +
                          ". Start at most that many processes, or use the CPU");
  }
  return best.type + ":" + std::to_string(request.local_rank);
}

}  // namespace accelerate_cpp::placement
