#include "core/base/cores.h"

#include <gtest/gtest.h>
#include <sched.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "core/comm/ranks.h"

namespace accelerate_cpp {
namespace {

TEST(CoreSets, AreThoseThatTheThreadMayRunOn) {
  cpu_set_t set;
  CPU_ZERO(&set);
  ASSERT_EQ(::sched_getaffinity(0, sizeof(set), &set), 0);
  const CoreSet cores = CoreSet::of_thread();
  EXPECT_EQ(cores.count(), CPU_COUNT(&set));
  for (int core = 0; core < CPU_SETSIZE; ++core) {
    const auto bit = cores.words()[static_cast<std::size_t>(core) / 64] >> (core % 64) & 1;
    EXPECT_EQ(bit != 0, CPU_ISSET(core, &set) != 0) << core;
  }
}

TEST(CoreSets, AreJoinedCountingNoCoreTwice) {
  CoreSet::Words one{};
  CoreSet::Words other{};
  one[0] = 0b0111;
  other[0] = 0b1100;
  other[63] = std::uint64_t{1} << 63;
  CoreSet both(one);
  both |= CoreSet(other);
  EXPECT_EQ(both.count(), 5);
}

// A made-up /proc and tree of control groups.
class CpuQuotas : public ::testing::Test {
 protected:
  CpuQuotas() : root_(comm::testing::make_temporary_folder()) {}
  ~CpuQuotas() override { std::filesystem::remove_all(root_); }

  void write(const std::string& name, const std::string& text) const {
    std::filesystem::create_directories((root_ / name).parent_path());
    std::ofstream(root_ / name) << text << "\n";
  }
  CpuQuota quota(const std::string& listing) const {
    write("self/cgroup", listing);
    return cpu_quota(root_.string(), root_.string());
  }

 private:
  const std::filesystem::path root_;
};

TEST_F(CpuQuotas, AreNoneWithoutALimit) {
  EXPECT_EQ(quota("0::/job").cores, 0.0);
  write("job/cpu.max", "max 100000");
  write("cpu/job/cpu.cfs_quota_us", "-1");
  write("cpu/job/cpu.cfs_period_us", "100000");
  EXPECT_EQ(quota("4:cpu,cpuacct:/job\n0::/job").cores, 0.0);
}

TEST_F(CpuQuotas, AreTheTightestOnTheWayToTheRoot) {
  write("box/job/cpu.max", "max 100000");
  write("box/cpu.max", "450000 100000");
  write("cpu.max", "900000 100000");
  EXPECT_DOUBLE_EQ(quota("9:name=systemd:/\n0::/box/job").cores, 4.5);
}

TEST_F(CpuQuotas, OfVersion1AreReadToo) {
  write("cpu/box/job/cpu.cfs_quota_us", "300000");
  write("cpu/box/job/cpu.cfs_period_us", "100000");
  write("cpu/box/cpu.cfs_quota_us", "100000");
  write("cpu/box/cpu.cfs_period_us", "50000");
  EXPECT_DOUBLE_EQ(quota("4:cpu,cpuacct:/box/job\n0::/").cores, 2.0);
}

TEST_F(CpuQuotas, TellWhoSharesThem) {
  write("box/cpu.max", "450000 100000");
  const std::uint64_t one = quota("0::/box/one").group;
  EXPECT_EQ(quota("0::/box/two").group, one);
  write("box/two/cpu.max", "100000 100000");
  EXPECT_NE(quota("0::/box/two").group, one);
}

TEST(UsableCores, AreNoMoreThanTheThreadMayRunOn) {
  EXPECT_GT(usable_cores(), 0.0);
  EXPECT_LE(usable_cores(), CoreSet::of_thread().count());
}

}  // namespace
}  // namespace accelerate_cpp
