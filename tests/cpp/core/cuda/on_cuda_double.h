// Tests on the double of the CUDA driver and NVRTC.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/comm/ranks.h"
#include "core/cuda/cuda_double.h"

namespace accelerate_cpp::cuda::testing {

using comm::testing::message_of;

class OnCudaDouble : public ::testing::Test {
 protected:
  OnCudaDouble() { cuda_double().reset(); }
  ~OnCudaDouble() override {
    EXPECT_THAT(cuda_double().problems, ::testing::IsEmpty());
    EXPECT_EQ(cuda_double().num_contexts(), 0);
  }
};

}  // namespace accelerate_cpp::cuda::testing
