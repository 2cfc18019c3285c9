#include "core/base/control_groups.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "core/comm/ranks.h"

namespace accelerate_cpp {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

// Folders and roots of the groups that a listing names.
std::vector<std::string> groups(const std::string& listing, const std::string& controller) {
  const std::filesystem::path folder = comm::testing::make_temporary_folder();
  std::ofstream(folder / "listing") << listing << "\n";
  std::vector<std::string> found;
  for (const ControlGroup& group : control_groups((folder / "listing").string(), "/mounts", controller)) {
    found.push_back(group.folder + " in " + group.root);
  }
  std::filesystem::remove_all(folder);
  return found;
}

TEST(ControlGroups, AreThoseOfBothVersions) {
  EXPECT_THAT(groups("0::/user.slice/job", "memory"), ElementsAre("/mounts/user.slice/job in /mounts"));
  EXPECT_THAT(groups("9:name=systemd:/\n5:cpu,memory:/a:b/c\n3:memory_not:/x\n0::/", "memory"),
              ElementsAre("/mounts/memory/a:b/c in /mounts/memory", "/mounts/ in /mounts"));
  EXPECT_THAT(groups("5:cpu,cpuacct:/job", "cpu"), ElementsAre("/mounts/cpu/job in /mounts/cpu"));
  EXPECT_THAT(groups("no list\nat:all", "memory"), IsEmpty());
  EXPECT_THAT(control_groups("/no/such/listing", "/mounts", "cpu"), IsEmpty());
}

TEST(ControlGroups, HaveTheirAncestorsUpToTheRoot) {
  EXPECT_THAT(with_ancestors({"/mounts/cpu/a/b", "/mounts/cpu"}),
              ElementsAre("/mounts/cpu/a/b", "/mounts/cpu/a", "/mounts/cpu"));
  EXPECT_THAT(with_ancestors({"/mounts/", "/mounts"}), ElementsAre("/mounts/", "/mounts"));
}

}  // namespace
}  // namespace accelerate_cpp
