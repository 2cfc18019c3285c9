#include "core/comm/nccl/nccl_types.h"

#include <cstring>
#include <string>

#include "core/base/check.h"
#include "core/base/half.h"
#include "core/comm/reduce_kernels.h"

namespace accelerate_cpp::comm {
namespace {

[[noreturn]] void refuse(DType dtype, ReduceOp op, const char* advice) {
  throw InvalidArgument("NCCL cannot reduce " + std::string(name(dtype)) + " with " + name(op) + ". " + advice);
}

NcclReduction boolean_reduction(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kMax:
    case ReduceOp::kBitOr:
      return {NcclDataType::kUint8, NcclRedOp::kMax, false};
    case ReduceOp::kProduct:
    case ReduceOp::kMin:
    case ReduceOp::kBitAnd:
      return {NcclDataType::kUint8, NcclRedOp::kMin, false};
    default:
      refuse(DType::kBool, op, "Sum the values as uint8 and look whether the result is odd, or reduce on the CPU");
  }
}

NcclDataType number_type(DType dtype, ReduceOp op) {
  switch (dtype) {
    case DType::kFloat32:
      return NcclDataType::kFloat32;
    case DType::kFloat64:
      return NcclDataType::kFloat64;
    case DType::kFloat16:
      return NcclDataType::kFloat16;
    case DType::kBFloat16:
      return NcclDataType::kBfloat16;
    case DType::kInt8:
      return NcclDataType::kInt8;
    case DType::kUInt8:
      return NcclDataType::kUint8;
    case DType::kInt32:
      return NcclDataType::kInt32;
    case DType::kInt64:
      return NcclDataType::kInt64;
    default:
      refuse(dtype, op, "Convert to int32 first, or reduce on the CPU");
  }
}

template <class T>
void write(std::array<std::byte, 8>& place, T value) {
  std::memcpy(place.data(), &value, sizeof(value));
}

}  // namespace

NcclReduction nccl_reduction(DType dtype, ReduceOp op) {
  check_reduction(dtype, op);
  if (dtype == DType::kBool) {
    return boolean_reduction(op);
  }
  const NcclDataType type = number_type(dtype, op);
  switch (op) {
    case ReduceOp::kSum:
      return {type, NcclRedOp::kSum, false};
    case ReduceOp::kAvg:
      return {type, NcclRedOp::kAvg, false};
    case ReduceOp::kMin:
      return {type, NcclRedOp::kMin, false};
    case ReduceOp::kMax:
      return {type, NcclRedOp::kMax, false};
    case ReduceOp::kProduct:
      return {type, NcclRedOp::kProd, false};
    case ReduceOp::kPreMulSum:
      return {type, NcclRedOp::kSum, true};
    default:
      refuse(dtype, op, "It has no bitwise operations; reduce on the CPU");
  }
}

std::array<std::byte, 8> nccl_factor(DType dtype, double factor) {
  std::array<std::byte, 8> place{};
  switch (dtype) {
    case DType::kFloat32:
      write(place, static_cast<float>(factor));
      break;
    case DType::kFloat64:
      write(place, factor);
      break;
    case DType::kFloat16:
      write(place, to_float16(static_cast<float>(factor)));
      break;
    case DType::kBFloat16:
      write(place, to_bfloat16(static_cast<float>(factor)));
      break;
    default:
      ACCELERATE_CHECK(false, std::string("a factor for ") + name(dtype));
  }
  return place;
}

}  // namespace accelerate_cpp::comm
