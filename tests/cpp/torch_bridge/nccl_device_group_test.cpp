// Gradients averaged through NCCL, on the doubles of NCCL and of the CUDA runtime. Their device memory is the host's,
// so that tensors of the CPU can lie in it; what NCCL is asked to do happens later, in the order of streams, while
// torch's own operations happen at once. So tests look at sums only behind the stream that awaits them.
#include "torch_bridge/nccl_device_group.h"

#include <ATen/Functions.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "core/base/error.h"
#include "core/comm/nccl/on_doubles.h"
#include "core/comm/shm/shm_communicator.h"
#include "core/grad/gradient_exchange_conformance.h"
#include "torch_bridge/reducers_of_threads.h"

namespace accelerate_cpp::grad {
namespace {

using comm::testing::gpu_double;
using comm::testing::message_of;
using comm::testing::nccl_double;
using comm::testing::soon;
using ::testing::HasSubstr;

const at::TensorOptions kFloats = at::TensorOptions().dtype(at::kFloat);

at::Tensor parameter(std::int64_t count, at::ScalarType dtype = at::kFloat) {
  return at::full({count}, 1, dtype).set_requires_grad(true);
}

// One rank: a communicator of the host and one of NCCL, and the stream of the caller.
struct Rank {
  Rank(comm::Store& store, int rank_, int size_)
      : rank(rank_),
        size(size_),
        host(comm::ShmCommunicator::connect(store, rank_, size_, soon(), {})),
        nccl(comm::NcclComm::connect(store, rank_, size_,
                                     {std::make_shared<const comm::NcclApi>(ACCELERATE_NCCL_DOUBLE),
                                      std::make_shared<const comm::CudaDevice>(
                                          std::make_shared<const comm::CudaApi>(ACCELERATE_CUDART_DOUBLE), rank_)},
                                     soon())),
        stream(nccl->context().device) {}

  DeviceGroup group() const {
    return nccl_device_group(nccl, [current = stream.get()] { return current; });
  }
  // The same, but what it returns waits on the host, too, for tests that look at once.
  DeviceGroup waiting_group() const {
    DeviceGroup group = this->group();
    group.sum_over_ranks = [this, sum = group.sum_over_ranks](const at::Tensor& bucket) {
      return [this, await = sum(bucket)] {
        await();
        finish_stream();
      };
    };
    return group;
  }
  void finish_stream() const {
    comm::DeviceEvent event(nccl->context().device);
    event.record(stream.get());
    nccl->wait(event, soon());
  }
  // Puts a kernel onto the caller's stream.
  void launch(const std::function<void()>& kernel) const {
    gpu_double().enqueue(stream.get(), [kernel] {
      kernel();
      return true;
    });
  }

  const int rank;
  const int size;
  const testing::Communicator host;
  const std::shared_ptr<comm::NcclComm> nccl;
  comm::DeviceStream stream;
};

class NcclDeviceGroups : public comm::testing::OnDoubles {
 protected:
  template <class Body>
  static void run_ranks(int size, const Body& body) {
    comm::testing::run_threads(size, [&](comm::Store& store, int rank) { body(Rank(store, rank, size)); });
  }
};

TEST_F(NcclDeviceGroups, SumWhatTheCallersStreamHasWrittenByThenAndHoldItBackForTheResult) {
  run_ranks(2, [](const Rank& rank) {
    const DeviceGroup group = rank.group();
    const at::Tensor bucket = group.allocate(3, kFloats);
    EXPECT_EQ(bucket.sum().item<float>(), 0);
    auto* const values = bucket.mutable_data_ptr<float>();
    const auto held = gpu_double().hold(rank.stream.get());
    rank.launch([&] { values[1] = static_cast<float>(rank.rank + 1); });
    const auto await = group.sum_over_ranks(bucket);
    EXPECT_FALSE(gpu_double().idle(rank.stream.get()));
    gpu_double().release(held);
    await();
    float seen = 0;
    rank.launch([&] { seen = values[1]; });
    rank.finish_stream();
    EXPECT_EQ(seen, 3);
  });
  EXPECT_EQ(nccl_double().registered_operands, 2u) << "buckets are registered";
}

// The doubles of CUDA sum what lies in memory of the host; only the type of the tensor's device says that it does not.
TEST_F(NcclDeviceGroups, SumBucketsOfAnAccelerator) {
  run_ranks(2, [](const Rank& rank) {
    const DeviceGroup group = rank.waiting_group();
    const at::Tensor bucket = group.allocate(3, kFloats.device(at::Device(at::kPrivateUse1, 0)));
    bucket.fill_(rank.rank + 1);
    group.sum_over_ranks(bucket)();
    EXPECT_EQ(bucket.cpu().sum().item<float>(), 9);
  });
}

TEST_F(NcclDeviceGroups, LetTheCallersStreamGoOnBesideASum) {
  std::atomic<bool> looked{false};
  run_ranks(2, [&](const Rank& rank) {
    const DeviceGroup group = rank.group();
    const at::Tensor bucket = group.allocate(1, kFloats);
    while (rank.rank == 1 && !looked) {
      std::this_thread::yield();
    }
    const auto await = group.sum_over_ranks(bucket);
    if (rank.rank == 0) {
      EXPECT_TRUE(gpu_double().idle(rank.stream.get())) << "nothing on it waits for rank 1";
      await();
      EXPECT_FALSE(gpu_double().idle(rank.stream.get()));
      looked = true;
    } else {
      await();
    }
    rank.finish_stream();
  });
}

TEST_F(NcclDeviceGroups, LetTheExchangeConform) {
  for (int size = 1; size <= 3; ++size) {
    run_ranks(size, [](const Rank& rank) {
      DeviceGradientExchange exchange(
          *rank.host, comm::testing::conformance_buckets(),
          {{parameter(33), parameter(50)},
           {parameter(1, at::kDouble), parameter(60000, at::kDouble), parameter(9992, at::kDouble)},
           {parameter(1)}},
          rank.waiting_group());
      comm::testing::check_gradient_exchange(exchange, rank.rank, rank.size);
    });
  }
}

// A round ends on the host although a rank's GPU is behind, and although ranks had their gradients at different times.
TEST_F(NcclDeviceGroups, LetARoundEndOnTheHostBeforeItsSumsHaveRun) {
  std::atomic<bool> published{false};
  std::atomic<int> finished{0};
  run_ranks(3, [&](const Rank& rank) {
    DeviceGradientExchange exchange(*rank.host, {{DType::kFloat32, 16, {{0, 4}}}, {DType::kFloat32, 16, {{0, 5}}}},
                                    {{parameter(4)}, {parameter(5)}}, rank.group());
    auto* const first = static_cast<float*>(exchange.bucket(0).data);
    auto* const second = static_cast<float*>(exchange.bucket(1).data);
    exchange.begin({}, soon());
    first[3] = second[4] = 3.0f * static_cast<float>(rank.rank + 1);
    // As if the GPU of rank 2 had much to do before its gradients.
    const auto held = rank.rank == 2 ? gpu_double().hold(rank.stream.get()) : nullptr;
    if (rank.rank == 0) {
      exchange.publish(0);
      published = true;
    } else {
      while (!published) {
        std::this_thread::yield();
      }
      exchange.publish(1);
      exchange.publish(0);
    }
    if (rank.rank == 0) {
      exchange.publish(1);
    }
    exchange.finish(soon());
    ++finished;
    if (held) {
      while (finished < 3) {
        std::this_thread::yield();
      }
      EXPECT_EQ(first[3], 3.0f) << "divided, and not summed";
      gpu_double().release(held);
    }
    rank.finish_stream();
    EXPECT_EQ(first[3], 6.0f);
    EXPECT_EQ(second[4], 6.0f);
  });
}

// The mean over the samples, one row each, of the squared output of two layers. Between them a square, not a tanh:
// where threads met in the first tanh of a process, one of them got results that differed in the fifth digit.
at::Tensor loss_of(const std::vector<at::Tensor>& weights, const at::Tensor& samples) {
  return at::matmul(at::matmul(samples, weights[0]).square(), weights[1]).square().mean();
}

std::vector<at::Tensor> two_layers() {
  return {at::linspace(-1, 1, 21).reshape({3, 7}).set_requires_grad(true),
          at::linspace(-2, 1, 7).reshape({7, 1}).set_requires_grad(true)};
}

at::Tensor batch_of(int rank, int pass) {
  return at::arange(12, kFloats).reshape({4, 3}).mul(0.1).add(0.3 * rank - 0.2 * pass);
}

TEST_F(NcclDeviceGroups, LetTheReducerAverageToTheGradientsOfOneProcess) {
  for (int size = 2; size <= 3; ++size) {
    run_ranks(size, [](const Rank& rank) {
      const std::vector<at::Tensor> weights = two_layers();
      ReducerOptions options{16, 16, std::chrono::minutes(2), {}};
      options.device_group = rank.group();
      const auto reducer = testing::reducer_of(rank.host, weights, options);
      EXPECT_EQ(reducer->bucket_sizes_bytes().size(), 2u);
      for (int pass = 0; pass < 3; ++pass) {
        std::vector<at::Tensor> batches;
        for (int r = 0; r < rank.size; ++r) {
          batches.push_back(batch_of(r, pass));
        }
        const std::vector<at::Tensor> alone = two_layers();
        loss_of(alone, at::cat(batches)).backward();
        loss_of(weights, batch_of(rank.rank, pass)).backward();
        rank.finish_stream();
        for (std::size_t i = 0; i < weights.size(); ++i) {
          EXPECT_TRUE(at::allclose(weights[i].grad(), alone[i].grad(), 1e-5, 1e-6)) << i << " in pass " << pass;
          weights[i].mutable_grad().reset();
        }
      }
    });
    EXPECT_EQ(nccl_double().registered_operands, static_cast<std::size_t>(size) * 2 * 3);
    nccl_double().registered_operands = 0;
  }
}

TEST_F(NcclDeviceGroups, EndWithAPassThatFailsOnOneRank) {
  run_ranks(2, [](const Rank& rank) {
    const at::Tensor tensor = parameter(100);
    ReducerOptions options = testing::kOptions;
    options.device_group = rank.group();
    const auto reducer = testing::reducer_of(rank.host, {tensor}, options);
    const auto backward = [&] { tensor.mul(rank.rank + 1).sum().backward(); };
    if (rank.rank == 1) {
      reducer->expect_backward();
      reducer->backward_failed("out of memory");
    } else {
      EXPECT_THAT(message_of<std::exception>(backward), HasSubstr("out of memory"));
    }
    EXPECT_FALSE(tensor.grad().defined());
    EXPECT_NE(rank.nccl->failure(), "");
    EXPECT_TRUE(gpu_double().idle(rank.stream.get())) << "nothing hangs there";
    EXPECT_THAT(message_of<std::exception>(backward), HasSubstr("the next forward pass"));
  });
}

TEST_F(NcclDeviceGroups, EndWhenARankNeverComes) {
  std::atomic<bool> over{false};
  run_ranks(2, [&](const Rank& rank) {
    const at::Tensor tensor = parameter(100);
    ReducerOptions options = testing::kOptions;
    options.device_group = rank.group();
    options.timeout = std::chrono::milliseconds(rank.rank == 0 ? 3000 : 120000);
    rank.host->barrier(soon());  // the timeout is that of what they agree on, too
    const auto reducer = testing::reducer_of(rank.host, {tensor}, options);
    if (rank.rank == 1) {
      while (!over) {
        std::this_thread::yield();
      }
      rank.nccl->abort("the other rank has given up");
      return;
    }
    EXPECT_THAT(message_of<std::exception>([&] { tensor.mul(2).sum().backward(); }), HasSubstr("rank 1"));
    EXPECT_THAT(rank.nccl->failure(), HasSubstr("backward pass"));
    EXPECT_TRUE(gpu_double().idle(rank.stream.get()));
    EXPECT_THROW(options.device_group->sum_over_ranks(at::zeros({1})), PeerLost);
    over = true;
  });
}

// They keep the communicator, which the ranks leave together.
TEST_F(NcclDeviceGroups, LetGradientsOutliveTheReducer) {
  run_ranks(2, [&](const Rank& rank) {
    const at::Tensor tensor = parameter(100);
    ReducerOptions options = testing::kOptions;
    options.device_group = rank.group();
    auto reducer = testing::reducer_of(rank.host, {tensor}, options);
    tensor.mul(rank.rank + 1).sum().backward();
    rank.finish_stream();
    options.device_group.reset();
    reducer.reset();
    EXPECT_EQ(gpu_double().count_calls("ncclMemFree"), 0u);
    EXPECT_EQ(tensor.grad()[99].item<float>(), 1.5f);
    rank.host->barrier(soon());
  });
  EXPECT_EQ(gpu_double().count_calls("ncclMemFree"), 2u);
}

TEST(NcclOn, IsForCudaDevices) {
  EXPECT_THAT(message_of<InvalidArgument>([] { nccl_on(at::kCPU); }), HasSubstr("found cpu"));
}

}  // namespace
}  // namespace accelerate_cpp::grad
