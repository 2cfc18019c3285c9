#include "core/offload/read_ahead.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <string>

namespace accelerate_cpp::offload {
namespace {

// Linux maps up to 16 pages around one that is asked for: what is to be told apart lies further away.
constexpr std::size_t kPages = 256;

// A file that the process has mapped, and none of which it has touched.
class ReadAheadTest : public ::testing::Test {
 protected:
  ReadAheadTest() : page_(static_cast<std::size_t>(::sysconf(_SC_PAGESIZE))) {
    std::string path = ::testing::TempDir() + "/weights-XXXXXX";
    const int descriptor = ::mkstemp(path.data());
    ::unlink(path.c_str());
    EXPECT_EQ(::ftruncate(descriptor, static_cast<off_t>(kPages * page_)), 0);
    mapped_ = ::mmap(nullptr, kPages * page_, PROT_READ, MAP_PRIVATE, descriptor, 0);
    EXPECT_NE(mapped_, MAP_FAILED);
    ::close(descriptor);
  }
  ~ReadAheadTest() override { ::munmap(mapped_, kPages * page_); }

  MappedRange pages(std::size_t first, std::size_t count) const {
    return {reinterpret_cast<std::uintptr_t>(mapped_) + first * page_, count * page_};
  }
  // Whether this process finds the page in memory, without a fault.
  bool is_there(std::size_t page) const {
    const std::uintptr_t number = reinterpret_cast<std::uintptr_t>(mapped_) / page_ + page;
    std::uint64_t entry = 0;
    const int map = ::open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
    EXPECT_EQ(::pread(map, &entry, sizeof(entry), static_cast<off_t>(number * sizeof(entry))), sizeof(entry));
    ::close(map);
    return (entry >> 63) != 0;
  }

  std::size_t page_;
  void* mapped_ = nullptr;
};

TEST_F(ReadAheadTest, ReadsThePresentUnitAndThoseAfterItUpToTheWindow) {
  ReadAhead reader({{pages(0, 4)}, {pages(32, 2), pages(64, 2)}, {pages(128, 128)}}, 4 * page_);
  reader.arrive(0);
  reader.await_idle();
  for (const std::size_t page : {0, 3, 32, 33, 64, 65}) {
    EXPECT_TRUE(is_there(page)) << page;
  }
  EXPECT_FALSE(is_there(128)) << "beyond the window";
  EXPECT_EQ(reader.bytes_ahead(), 4 * page_);
  reader.arrive(1);
  reader.await_idle();
  EXPECT_TRUE(is_there(131));
  EXPECT_FALSE(is_there(255)) << "beyond the window";
}

TEST_F(ReadAheadTest, TakesRangesThatBeginWithinAPage) {
  MappedRange range = pages(32, 1);
  range.address += page_ / 2;  // ends in the middle of page 33
  ReadAhead reader({{range}}, page_);
  reader.arrive(0);
  reader.await_idle();
  EXPECT_TRUE(is_there(32));
  EXPECT_TRUE(is_there(33));
}

TEST_F(ReadAheadTest, DoesNothingWhereNothingIsMapped) {
  void* const gone = ::mmap(nullptr, page_, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(gone, MAP_FAILED);
  ASSERT_EQ(::munmap(gone, page_), 0);
  ReadAhead reader({{{reinterpret_cast<std::uintptr_t>(gone), page_}}, {pages(0, 1)}}, page_);
  reader.arrive(0);
  reader.await_idle();
  EXPECT_TRUE(is_there(0));
}

}  // namespace
}  // namespace accelerate_cpp::offload
