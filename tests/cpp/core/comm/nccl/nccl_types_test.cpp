#include "core/comm/nccl/nccl_types.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <map>
#include <set>

#include "core/base/error.h"
#include "core/base/half.h"
#include "core/comm/ranks.h"

namespace accelerate_cpp::comm::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

const std::map<DType, NcclDataType> kNumbers = {
    {DType::kFloat32, NcclDataType::kFloat32}, {DType::kFloat64, NcclDataType::kFloat64},
    {DType::kFloat16, NcclDataType::kFloat16}, {DType::kBFloat16, NcclDataType::kBfloat16},
    {DType::kInt8, NcclDataType::kInt8},       {DType::kUInt8, NcclDataType::kUint8},
    {DType::kInt32, NcclDataType::kInt32},     {DType::kInt64, NcclDataType::kInt64},
};

const std::map<ReduceOp, NcclRedOp> kOperations = {
    {ReduceOp::kSum, NcclRedOp::kSum},
    {ReduceOp::kMin, NcclRedOp::kMin},
    {ReduceOp::kMax, NcclRedOp::kMax},
    {ReduceOp::kProduct, NcclRedOp::kProd},
};

TEST(NcclTypes, NumbersAreReducedAsWhatTheyAre) {
  for (const auto& [dtype, type] : kNumbers) {
    for (const auto& [op, said] : kOperations) {
      const NcclReduction reduction = nccl_reduction(dtype, op);
      EXPECT_EQ(reduction.type, type) << name(dtype);
      EXPECT_EQ(reduction.op, said) << name(op);
      EXPECT_FALSE(reduction.premultiplied);
    }
  }
}

TEST(NcclTypes, FloatingNumbersCanBeAveragedAndMultipliedBefore) {
  for (const auto& [dtype, type] : kNumbers) {
    if (is_floating(dtype)) {
      EXPECT_EQ(nccl_reduction(dtype, ReduceOp::kAvg).op, NcclRedOp::kAvg);
      EXPECT_TRUE(nccl_reduction(dtype, ReduceOp::kPreMulSum).premultiplied);
    } else {
      EXPECT_THROW(nccl_reduction(dtype, ReduceOp::kAvg), InvalidArgument);
      EXPECT_THROW(nccl_reduction(dtype, ReduceOp::kPreMulSum), InvalidArgument);
    }
  }
}

TEST(NcclTypes, BooleansAreBytesWhoseMaximumIsOrAndWhoseMinimumIsAnd) {
  for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kMax, ReduceOp::kBitOr}) {
    EXPECT_EQ(nccl_reduction(DType::kBool, op).op, NcclRedOp::kMax) << name(op);
    EXPECT_EQ(nccl_reduction(DType::kBool, op).type, NcclDataType::kUint8);
  }
  for (const ReduceOp op : {ReduceOp::kProduct, ReduceOp::kMin, ReduceOp::kBitAnd}) {
    EXPECT_EQ(nccl_reduction(DType::kBool, op).op, NcclRedOp::kMin) << name(op);
  }
}

TEST(NcclTypes, WhatNcclCannotDoIsRefusedWithAWayOut) {
  EXPECT_THAT(message_of<InvalidArgument>([] { nccl_reduction(DType::kInt16, ReduceOp::kSum); }),
              AllOf(HasSubstr("NCCL cannot reduce int16 with sum"), HasSubstr("Convert to int32")));
  for (const ReduceOp op : {ReduceOp::kBitAnd, ReduceOp::kBitOr, ReduceOp::kBitXor}) {
    EXPECT_THAT(message_of<InvalidArgument>([&] { nccl_reduction(DType::kInt32, op); }),
                AllOf(HasSubstr(name(op)), HasSubstr("on the CPU")));
  }
  EXPECT_THAT(message_of<InvalidArgument>([] { nccl_reduction(DType::kBool, ReduceOp::kBitXor); }), HasSubstr("bool"));
}

template <class T>
T as(const std::array<std::byte, 8>& factor) {
  T value;
  std::memcpy(&value, factor.data(), sizeof(value));
  return value;
}

TEST(NcclTypes, AFactorIsOneElementOfTheType) {
  EXPECT_EQ(as<float>(nccl_factor(DType::kFloat32, 0.1)), 0.1f);
  EXPECT_EQ(as<double>(nccl_factor(DType::kFloat64, 0.1)), 0.1);
  EXPECT_EQ(to_float(as<Float16>(nccl_factor(DType::kFloat16, 0.25))), 0.25f);
  EXPECT_EQ(to_float(as<BFloat16>(nccl_factor(DType::kBFloat16, 0.25))), 0.25f);
  EXPECT_THROW(nccl_factor(DType::kInt32, 2), InternalError);
}

}  // namespace
}  // namespace accelerate_cpp::comm::testing
