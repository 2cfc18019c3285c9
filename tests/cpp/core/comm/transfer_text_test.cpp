#include "core/comm/transfer_text.h"

#include <gtest/gtest.h>

#include "core/comm/communicator.h"

namespace accelerate_cpp::comm {
namespace {

TEST(TransferTexts, SayWhatWasAskedFor) {
  TransferText text{true, 3, DType::kFloat32, 1, 7, 0, ""};
  EXPECT_EQ(text.describe(), "send of 3 float32 to rank 1 with tag 7 on rank 0");
  text.is_send = false;
  text.peer = Communicator::kAnySource;
  text.location = "train.py:88";
  EXPECT_EQ(text.describe(), "receive of 3 float32 from any rank with tag 7 on rank 0 at train.py:88");
  text.location = "forward\ttrain.py:88";
  EXPECT_EQ(text.describe(), "receive of 3 float32 from any rank with tag 7 on rank 0 at train.py:88");
}

TEST(TransferTexts, SayWhatDoesNotFit) {
  const TransferText text{false, 3, DType::kFloat32, 1, 7, 0, ""};
  EXPECT_STREQ(
      text.mismatch(1, 4, DType::kInt8).what(),
      "rank 1 sent 4 int8 with tag 7, but the matching call was receive of 3 float32 from rank 1 with tag 7 on "
      "rank 0. Send and receive tensors must have equal shapes and dtypes");
}

}  // namespace
}  // namespace accelerate_cpp::comm
