#include "core/cuda/library.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cerrno>
#include <filesystem>

#include "core/base/error.h"
#include "core/comm/nccl/on_doubles.h"

namespace accelerate_cpp::cuda {
namespace {

using comm::testing::message_of;
using comm::testing::nccl_double;
using ::testing::AllOf;
using ::testing::HasSubstr;

std::vector<std::string> described(const std::vector<LibraryName>& names) {
  std::vector<std::string> texts;
  for (const LibraryName& name : names) {
    texts.push_back(name.name + (name.only_if_loaded ? " if loaded" : ""));
  }
  return texts;
}

TEST(LibraryNames, AreTheGivenPathAloneWhenThereIsOne) {
  EXPECT_EQ(described(nvidia_library_names("my/libx.so", "site/torch", {"libx.so.1"}, {"nvidia/x/lib"})),
            std::vector<std::string>{"my/libx.so"});
}

TEST(LibraryNames, AreWhatIsLoadedThenWhatTheLinkerFindsThenTheFoldersBeside) {
  const std::vector<std::string> expected = {
      "libx.so.2 if loaded", "libx.so.1 if loaded",         "libx.so.2",
      "libx.so.1",           "site/nvidia/x/lib/libx.so.2", "site/nvidia/x/lib/libx.so.1"};
  EXPECT_EQ(described(nvidia_library_names("", "site/torch", {"libx.so.2", "libx.so.1"}, {"nvidia/x/lib"})), expected);
}

TEST(LibraryNames, HaveNoFoldersWithoutANeighbour) {
  EXPECT_EQ(nvidia_library_names("", "", {"libx.so.1"}, {"nvidia/x/lib"}).size(), 2u);
}

TEST(Library, OpensTheFirstThatIsThereAndKnowsItsFile) {
  const Library library("The double", {{"libnowhere.so.7"}, {ACCELERATE_NCCL_DOUBLE}});
  EXPECT_EQ(std::filesystem::canonical(library.path()), std::filesystem::canonical(ACCELERATE_NCCL_DOUBLE));
  int (*version)(int*) = nullptr;
  library.bind(version, "ncclGetVersion");
  int number = 0;
  EXPECT_EQ(version(&number), 0);
  EXPECT_EQ(number, nccl_double().version);
}

TEST(Library, FindsWhatIsLoadedWithoutLoadingAnything) {
  const Library library("The double", {{"libnowhere.so.7", true}, {ACCELERATE_NCCL_DOUBLE, true}});
  EXPECT_THAT(library.path(), HasSubstr("nccl_double"));
}

TEST(Library, NamesEverythingItTriedWhenNothingIsThere) {
  const std::string message = message_of<SystemFailure>(
      [] { const Library library("The library of dreams", {{"libnowhere.so.7", true}, {"nowhere/libnowhere.so.7"}}); });
  EXPECT_THAT(message, AllOf(HasSubstr("The library of dreams was not found"),
                             HasSubstr("libnowhere.so.7 (not loaded by this process); "),
                             HasSubstr("nowhere/libnowhere.so.7 ("), HasSubstr("Install it or give its path")));
}

TEST(Library, SaysWhichEntryPointIsMissing) {
  const Library library("The double", {{ACCELERATE_NCCL_DOUBLE}});
  const std::string message = message_of<SystemFailure>([&] {
    void (*function)() = nullptr;
    library.bind(function, "ncclMakesCoffee");
  });
  EXPECT_THAT(message, AllOf(HasSubstr("The double at "), HasSubstr("ncclMakesCoffee")));
  void (*function)() = [] {};
  library.bind_if_there(function, "ncclMakesCoffee");
  EXPECT_EQ(function, nullptr);
}

}  // namespace
}  // namespace accelerate_cpp::cuda
