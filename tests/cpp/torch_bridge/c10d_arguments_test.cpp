#include "torch_bridge/c10d_arguments.h"

#include <ATen/ops/ones.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace accelerate_cpp::comm {
namespace {

using testing::HasSubstr;
using testing::ThrowsMessage;

TEST(C10dArguments, HoldOneTensorPerProcess) {
  std::vector<int> one{7};
  single(one, "broadcast") = 8;
  EXPECT_EQ(one[0], 8);
  std::vector<int> two{1, 2};
  EXPECT_THAT(
      [&] { single(two, "broadcast"); },
      ThrowsMessage<InvalidArgument>(HasSubstr("broadcast: expected one tensor (or list) per process, found 2")));
  std::vector<int> none;
  EXPECT_THROW(single(none, "reduce"), InvalidArgument);
}

TEST(C10dArguments, ShowTheirShape) {
  const at::Tensor tensor = at::ones({2, 3});
  const Shape shape = shape_of(tensor);
  EXPECT_EQ(shape, (Shape{2, 3}));
  EXPECT_EQ(shape_of(at::ones({})), Shape({}));
}

}  // namespace
}  // namespace accelerate_cpp::comm
