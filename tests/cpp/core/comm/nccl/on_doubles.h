// Tests on the doubles of CUDA and NCCL, which are checked for cleanliness after each test.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core/comm/nccl/gpu_double.h"
#include "core/comm/nccl/nccl_comm.h"
#include "core/comm/nccl/nccl_double.h"
#include "core/comm/ranks.h"

#if !defined(ACCELERATE_NCCL_DOUBLE) || !defined(ACCELERATE_CUDART_DOUBLE)
#error "the build defines where the doubles are"
#endif

namespace accelerate_cpp::comm::testing {

class OnDoubles : public ::testing::Test {
 protected:
  OnDoubles() {
    gpu_double().reset();
    nccl_double().reset();
  }
  ~OnDoubles() override {
    EXPECT_THAT(gpu_double().problems, ::testing::IsEmpty());
    EXPECT_EQ(gpu_double().leaks(), "");
    EXPECT_EQ(nccl_double().leaks(), "");
    EXPECT_EQ(nccl_double().open_groups, 0);
  }

  static std::shared_ptr<const CudaDevice> device(int index = 0) {
    return std::make_shared<const CudaDevice>(std::make_shared<const CudaApi>(ACCELERATE_CUDART_DOUBLE), index);
  }
  static NcclContext context(int index = 0) {
    return {std::make_shared<const NcclApi>(ACCELERATE_NCCL_DOUBLE), device(index)};
  }

  // Runs `body` in each rank, on the device of the same number, with a stream of that device.
  using Body = std::function<void(NcclComm& comm, CudaStream stream)>;
  static void run_ranks(int size, const Body& body, const NcclOptions& options = {}) {
    run_threads(size, [&](Store& store, int rank) {
      const auto comm = NcclComm::connect(store, rank, size, context(rank), soon(), options);
      DeviceStream stream(comm->context().device);
      body(*comm, stream.get());
    });
  }

  // Waits for all that is on `stream`.
  static void finish(NcclComm& comm, CudaStream stream, Deadline deadline = soon()) {
    DeviceEvent event(comm.context().device);
    event.record(stream);
    comm.wait(event, deadline);
  }
};

// Memory of the device with numbers in it, seen from the host once the device is idle.
template <class T>
class Numbers {
 public:
  Numbers(NcclComm& comm, std::vector<T> values, DType dtype = DType::kFloat32)
      : memory_(comm.allocate(values.size() * sizeof(T))), count_(values.size()), dtype_(dtype) {
    std::copy(values.begin(), values.end(), data());  // the doubles' memory is the host's
  }
  T* data() const { return reinterpret_cast<T*>(memory_->data()); }
  MemoryView view() const { return {data(), count_, dtype_}; }
  std::vector<T> values() const { return std::vector<T>(data(), data() + count_); }

 private:
  std::shared_ptr<NcclMemory> memory_;
  std::size_t count_;
  DType dtype_;
};

}  // namespace accelerate_cpp::comm::testing
