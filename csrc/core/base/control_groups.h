// The control groups of Linux that a process is in.
#pragma once

#include <optional>
#include <string>
#include <vector>

namespace accelerate_cpp {

// A control group: its folder, and the folder in which its hierarchy begins.
struct ControlGroup {
  std::string folder;
  std::string root;
};

// The control groups, of version 2 and of version 1, that limit what `controller` ("memory", "cpu") names, from a file
// like /proc/self/cgroup, with their hierarchies mounted below `mounts` as usual (/sys/fs/cgroup and
// /sys/fs/cgroup/memory).
std::vector<ControlGroup> control_groups(const std::string& listing, const std::string& mounts,
                                         const std::string& controller);

// The folders of the group and of its ancestors, from below to above. A container may see the names of its groups but
// not the groups themselves; then only the root has any limits.
std::vector<std::string> with_ancestors(const ControlGroup& group);

}  // namespace accelerate_cpp
