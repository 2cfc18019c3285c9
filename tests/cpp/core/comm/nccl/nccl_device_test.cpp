// On the real NCCL and on real GPUs, one rank per GPU, ranks being threads; skipped where either is missing. The
// variables ACCELERATE_TEST_NCCL and ACCELERATE_TEST_CUDART may name the files of the libraries.
#include <dlfcn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "core/base/error.h"
#include "core/comm/nccl/nccl_comm.h"
#include "core/comm/ranks.h"

#if !defined(ACCELERATE_TEST_BESIDE)
#define ACCELERATE_TEST_BESIDE ""
#endif

namespace accelerate_cpp::comm::testing {
namespace {

using ::testing::HasSubstr;

std::string variable(const char* name) {
  const char* const value = std::getenv(name);
  return value == nullptr ? "" : value;
}

std::shared_ptr<const NcclApi> real_nccl() {
  return std::make_shared<const NcclApi>(variable("ACCELERATE_TEST_NCCL"), ACCELERATE_TEST_BESIDE);
}

std::shared_ptr<const CudaApi> real_cuda() {
  return std::make_shared<const CudaApi>(variable("ACCELERATE_TEST_CUDART"), ACCELERATE_TEST_BESIDE);
}

NcclContext real_context(int device) {
  return {real_nccl(), std::make_shared<const CudaDevice>(real_cuda(), device)};
}

// Why the real libraries cannot be used here; empty when they can. `gpus` becomes the number of GPUs.
std::string obstacle(int& gpus) {
  try {
    real_nccl();
    const auto cuda = real_cuda();
    cuda->check(cuda->get_device_count(&gpus), "cudaGetDeviceCount");
  } catch (const SystemFailure& error) {
    return error.what();
  }
  return gpus == 0 ? "there is no GPU" : "";
}

// cudaMemcpy, which only a test needs: 4 as the kind is cudaMemcpyDefault. It waits for no other stream.
void copy(const CudaApi& cuda, void* destination, const void* source, std::size_t size_bytes) {
  void* const library = ::dlopen(cuda.path.c_str(), RTLD_NOW | RTLD_LOCAL);
  auto* const copies =
      reinterpret_cast<CudaStatus (*)(void*, const void*, std::size_t, int)>(::dlsym(library, "cudaMemcpy"));
  cuda.check(copies(destination, source, size_bytes, 4), "cudaMemcpy");
}

class NcclOnGpus : public ::testing::Test {
 protected:
  void SetUp() override {
    const std::string reason = obstacle(gpus_);
    if (!reason.empty()) {
      GTEST_SKIP() << "NCCL cannot be tried on GPUs here: " << reason;
    }
  }
  // Whether there are so many; if not, the test is skipped, and has to return.
  bool has(int gpus) const {
    const auto skip = [&] { GTEST_SKIP() << "needs " << gpus << " GPUs, found " << gpus_; };
    if (gpus_ < gpus) {
      skip();
    }
    return gpus_ >= gpus;
  }

  int gpus_ = 0;
};

TEST(RealNccl, IsNewEnoughAndMakesIds) {
  std::shared_ptr<const NcclApi> api;
  try {
    api = real_nccl();
  } catch (const SystemFailure& error) {
    GTEST_SKIP() << "NCCL cannot be opened here: " << error.what();
  }
  EXPECT_GE(api->version, NcclApi::kMinimumVersion);
  EXPECT_EQ(api->registers(), api->version >= 21903);
  NcclUniqueId first{};
  NcclUniqueId second{};
  api->check(api->get_unique_id(&first), "ncclGetUniqueId");
  api->check(api->get_unique_id(&second), "ncclGetUniqueId");
  EXPECT_NE(std::memcmp(&first, &second, sizeof(first)), 0);
  EXPECT_STRNE(api->get_error_string(NcclResult::kSystemError), "");
}

TEST(RealNccl, IsRefusedCleanlyWhereThereIsNoGpu) {
  int gpus = 0;
  if (obstacle(gpus).empty()) {
    GTEST_SKIP() << "there are " << gpus << " GPUs";
  }
  EXPECT_THROW(real_context(0), Error);
}

TEST_F(NcclOnGpus, SumsRegisteredAndOtherMemoryWithoutTheHost) {
  run_threads(std::min(gpus_, 8), [this](Store& store, int rank) {
    const int size = std::min(gpus_, 8);
    const auto comm = NcclComm::connect(store, rank, size, real_context(rank), soon());
    const CudaApi& cuda = comm->context().device->api();
    const DeviceGuard guard(*comm->context().device);
    DeviceStream stream(comm->context().device);
    DeviceEvent done(comm->context().device);
    for (const std::size_t count : {std::size_t{1}, std::size_t{1000}, std::size_t{10000019}}) {
      std::vector<float> values(count, static_cast<float>(rank + 1));
      const auto registered = comm->allocate(count * sizeof(float));
      void* plain = nullptr;
      cuda.check(cuda.allocate(&plain, count * sizeof(float)), "cudaMalloc");
      for (void* const memory : {static_cast<void*>(registered->data()), plain}) {
        copy(cuda, memory, values.data(), count * sizeof(float));
        comm->all_reduce({memory, count, DType::kFloat32}, ReduceOp::kSum, stream.get());
        done.record(stream.get());
        comm->wait(done, soon());
        std::vector<float> sums(count);
        copy(cuda, sums.data(), memory, count * sizeof(float));
        EXPECT_EQ(sums, std::vector<float>(count, static_cast<float>(size * (size + 1)) / 2)) << count;
      }
      cuda.check(cuda.release(plain), "cudaFree");
    }
  });
}

TEST_F(NcclOnGpus, TimesOutWhenARankNeverJoins) {
  MemoryStore store;
  EXPECT_THAT(message_of<Timeout>(
                  [&] { NcclComm::connect(store, 0, 2, real_context(0), Deadline::after(std::chrono::seconds(3))); }),
              HasSubstr("rank 0 of 2"));
}

TEST_F(NcclOnGpus, TimesOutWhenARankNeverComesAndStopsTheKernel) {
  if (!has(2)) {
    return;
  }
  run_threads(2, [](Store& store, int rank) {
    const auto comm = NcclComm::connect(store, rank, 2, real_context(rank), soon());
    DeviceStream stream(comm->context().device);
    DeviceEvent done(comm->context().device);
    const auto memory = comm->allocate(4);
    const MemoryView data{memory->data(), 1, DType::kFloat32};
    comm->all_reduce(data, ReduceOp::kSum, stream.get());
    done.record(stream.get());
    comm->wait(done, soon());
    if (rank == 0) {
      comm->all_reduce(data, ReduceOp::kSum, stream.get());
      done.record(stream.get());
      EXPECT_THROW(comm->wait(done, Deadline::after(std::chrono::seconds(3))), Timeout);
      store.set("given up", "");
      const CudaApi& cuda = comm->context().device->api();
      const DeviceGuard guard(*comm->context().device);
      cuda.check(cuda.device_synchronize(), "cudaDeviceSynchronize");
    } else {
      store.get("given up", soon());
      comm->abort("the other rank has given up");
    }
  });
}

}  // namespace
}  // namespace accelerate_cpp::comm::testing
