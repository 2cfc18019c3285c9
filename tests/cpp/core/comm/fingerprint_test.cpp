#include "core/comm/fingerprint.h"

#include <gtest/gtest.h>

#include <string>

namespace accelerate_cpp::comm {
namespace {

std::uint64_t of(const std::string& text) {
  Fingerprint fingerprint;
  fingerprint.mix(text);
  return fingerprint.value();
}

// Values of the 64-bit FNV-1a reference.
TEST(Fingerprint, IsThatOfFnv1a) {
  EXPECT_EQ(of(""), 0xcbf29ce484222325u);
  EXPECT_EQ(of("a"), 0xaf63dc4c8601ec8cu);
  EXPECT_EQ(of("foobar"), 0x85944171f73967e8u);
}

TEST(Fingerprint, DependsOnTheOrder) {
  EXPECT_NE(of("ab"), of("ba"));
}

}  // namespace
}  // namespace accelerate_cpp::comm
