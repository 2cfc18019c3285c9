// Tests on the doubles of CUDA and NCCL, which are checked for cleanliness after each test.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core/comm/nccl/gpu_double.h"
#include "core/comm/nccl/nccl_communicator.h"
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
  // Of rank `rank`, on the device of the same number. Ranks look at each other's calls at once.
  static NcclOptions options(int rank) {
    NcclOptions options;
    options.device = rank;
    options.nccl_path = ACCELERATE_NCCL_DOUBLE;
    options.cudart_path = ACCELERATE_CUDART_DOUBLE;
    options.stall_after = std::chrono::milliseconds(1);
    return options;
  }

  using Body = std::function<void(NcclCommunicator&)>;
  using Change = std::function<void(NcclOptions&)>;

  // Runs `body` in each rank of a group; `change` may alter the options.
  static void run_ranks(int size, const Body& body, const Change& change = [](NcclOptions&) {}) {
    run_threads(size, [&](Store& store, int rank) {
      NcclOptions of_rank = options(rank);
      change(of_rank);
      body(*NcclCommunicator::connect(borrowed(store), rank, size, of_rank, soon()));
    });
  }

  // A store that outlives who uses it.
  static std::shared_ptr<Store> borrowed(Store& store) { return {std::shared_ptr<Store>(), &store}; }
};

// Memory of the device with numbers in it, seen from the host once the device is idle.
template <class T>
class Numbers {
 public:
  Numbers(Communicator& communicator, std::vector<T> values, DType dtype = DType::kFloat32)
      : buffer_(communicator.allocate(values.size() * sizeof(T))), count_(values.size()), dtype_(dtype) {
    std::copy(values.begin(), values.end(), static_cast<T*>(buffer_->data()));  // the doubles' memory is the host's
  }
  MemoryView view() const { return {buffer_->data(), count_, dtype_}; }
  // Elements [first, first + count).
  MemoryView part(std::size_t first, std::size_t count) const {
    return {static_cast<T*>(buffer_->data()) + first, count, dtype_};
  }
  std::vector<T> values() const {
    const auto* const first = static_cast<const T*>(buffer_->data());
    return std::vector<T>(first, first + count_);
  }

 private:
  std::shared_ptr<Buffer> buffer_;
  std::size_t count_;
  DType dtype_;
};

}  // namespace accelerate_cpp::comm::testing
