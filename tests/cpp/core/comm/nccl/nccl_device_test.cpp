// On the real NCCL and on real GPUs, one rank per GPU, ranks being threads; skipped where either is missing. The
// variables ACCELERATE_TEST_NCCL and ACCELERATE_TEST_CUDART may name the files of the libraries.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>

#include "core/base/error.h"
#include "core/comm/nccl/nccl_communicator.h"
#include "core/comm/nccl/nccl_conformance.h"
#include "core/comm/nccl/staged_communicator.h"

#if !defined(ACCELERATE_TEST_BESIDE)
#define ACCELERATE_TEST_BESIDE ""
#endif

namespace accelerate_cpp::comm::testing {
namespace {

using ::testing::HasSubstr;

NcclOptions real_options(int device) {
  const auto variable = [](const char* name) {
    const char* const value = std::getenv(name);
    return std::string(value == nullptr ? "" : value);
  };
  NcclOptions options;
  options.device = device;
  options.nccl_path = variable("ACCELERATE_TEST_NCCL");
  options.cudart_path = variable("ACCELERATE_TEST_CUDART");
  options.beside = ACCELERATE_TEST_BESIDE;
  return options;
}

// Why the real libraries cannot be used here; empty when they can. `gpus` becomes the number of GPUs.
std::string obstacle(int& gpus) {
  const NcclOptions options = real_options(0);
  try {
    const NcclApi nccl(options.nccl_path, options.beside);
    const CudaApi cuda(options.cudart_path, options.beside);
    cuda.check(cuda.get_device_count(&gpus), "cudaGetDeviceCount");
  } catch (const SystemFailure& error) {
    return error.what();
  }
  return gpus == 0 ? "there is no GPU" : "";
}

class NcclOnGpus : public ::testing::Test {
 protected:
  void SetUp() override {
    const std::string reason = obstacle(gpus_);
    if (!reason.empty()) {
      GTEST_SKIP() << "NCCL cannot be tried on GPUs here: " << reason;
    }
  }
  void need(int gpus) const {
    if (gpus_ < gpus) {
      GTEST_SKIP() << "needs " << gpus << " GPUs, found " << gpus_;
    }
  }
  static std::shared_ptr<Store> borrowed(Store& store) { return {std::shared_ptr<Store>(), &store}; }
  static std::shared_ptr<const CudaDevice> device(int index) {
    return std::make_shared<const CudaDevice>(
        std::make_shared<const CudaApi>(real_options(0).cudart_path, ACCELERATE_TEST_BESIDE), index);
  }
  void check_conformance(int size, bool check_calls) const {
    run_threads(size, [&](Store& store, int rank) {
      NcclOptions options = real_options(rank);
      options.check_calls = check_calls;
      StagedCommunicator communicator(NcclCommunicator::connect(borrowed(store), rank, size, options, soon()),
                                      device(rank));
      check_all_of_nccl(communicator);
    });
  }

  int gpus_ = 0;
};

TEST(RealNccl, IsNewEnoughAndMakesIds) {
  std::unique_ptr<NcclApi> api;
  try {
    api = std::make_unique<NcclApi>(real_options(0).nccl_path, real_options(0).beside);
  } catch (const SystemFailure& error) {
    GTEST_SKIP() << "NCCL cannot be opened here: " << error.what();
  }
  EXPECT_GE(api->version, NcclApi::kMinimumVersion);
  NcclUniqueId first{};
  NcclUniqueId second{};
  api->check(api->get_unique_id(&first), "ncclGetUniqueId");
  api->check(api->get_unique_id(&second), "ncclGetUniqueId");
  EXPECT_NE(std::memcmp(&first, &second, sizeof(first)), 0);
  EXPECT_STRNE(api->get_error_string(NcclResult::kSystemError), "");
}

TEST(RealNccl, IsRefusedCleanlyWhereThereIsNoGpu) {
  int gpus = 0;
  const std::string reason = obstacle(gpus);
  if (reason.empty()) {
    GTEST_SKIP() << "there are " << gpus << " GPUs";
  }
  MemoryStore store;
  const std::shared_ptr<Store> borrowed(std::shared_ptr<Store>(), &store);
  EXPECT_THROW(NcclCommunicator::connect(borrowed, 0, 1, real_options(0), soon()), Error);
}

TEST_F(NcclOnGpus, ConformsWithOneRank) {
  check_conformance(1, true);
}

TEST_F(NcclOnGpus, ConformsWithTwoRanks) {
  need(2);
  check_conformance(2, true);
}

TEST_F(NcclOnGpus, ConformsWithARankOnEveryGpu) {
  need(2);
  check_conformance(std::min(gpus_, 8), true);
}

TEST_F(NcclOnGpus, ConformsWithoutComparingCalls) {
  check_conformance(std::min(gpus_, 8), false);
}

TEST_F(NcclOnGpus, TimesOutWhenARankNeverJoins) {
  MemoryStore store;
  EXPECT_THAT(message_of<Timeout>([&] {
                NcclCommunicator::connect(borrowed(store), 0, 2, real_options(0),
                                          Deadline::after(std::chrono::seconds(3)));
              }),
              HasSubstr("as rank 0 of 2"));
}

TEST_F(NcclOnGpus, TimesOutWhenARankNeverComesAndStopsTheKernel) {
  need(2);
  run_threads(2, [](Store& store, int rank) {
    const auto communicator = NcclCommunicator::connect(borrowed(store), rank, 2, real_options(rank), soon());
    const auto buffer = communicator->allocate(4);
    const MemoryView data{buffer->data(), 1, DType::kFloat32};
    communicator->all_reduce(data, ReduceOp::kMax, soon());
    if (rank == 0) {
      EXPECT_THROW(communicator->all_reduce(data, ReduceOp::kMax, Deadline::after(std::chrono::seconds(3))), Timeout);
    } else {
      while (!GroupBoard(borrowed(store), "nccl", rank).failure().has_value()) {
        std::this_thread::yield();
      }
    }
    EXPECT_THROW(communicator->barrier(soon()), PeerLost);
  });
}

TEST_F(NcclOnGpus, RaisesOnBothRanksWhenTheirCallsDiffer) {
  need(2);
  run_threads(2, [](Store& store, int rank) {
    const auto communicator = NcclCommunicator::connect(borrowed(store), rank, 2, real_options(rank), soon());
    const auto buffer = communicator->allocate(8);
    const MemoryView data{buffer->data(), 2, DType::kFloat32};
    const MemoryView half{buffer->data(), 1, DType::kFloat32};
    EXPECT_THROW(communicator->all_reduce(rank == 0 ? data : half, ReduceOp::kMax, soon()), MismatchedCollective);
  });
}

}  // namespace
}  // namespace accelerate_cpp::comm::testing
