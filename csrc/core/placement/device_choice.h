// Which device a process trains on.
#pragma once

#include <string>
#include <vector>

namespace accelerate_cpp::placement {

struct DeviceRequest {
  bool force_cpu = false;  // the user asked for the CPU
  std::string forced;      // the user's own choice, for example "cuda:1"; empty when there is none
  int local_rank = 0;      // rank of this process on its host
  // What this build of torch sees, best first, without the CPU: {"cuda", 8}, {"mps", 1, false}, ...
  struct Accelerator {
    std::string type;
    int count;
    bool index_by_rank = true;  // otherwise the type alone names the device of a process
  };
  std::vector<Accelerator> accelerators;
};

// "cpu", "cuda:3", "mps", ... The user's own choice wins, then force_cpu, then the first accelerator that is there, by
// local rank. Throws InvalidArgument when the choice is not a device, is not present, or there are more local ranks
// than devices.
std::string choose_device(const DeviceRequest& request);

}  // namespace accelerate_cpp::placement
