// Sends and receives of C10dBackend.
#include <ATen/TensorOperators.h>
#include <ATen/core/ivalue.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <vector>

#include "core/base/error.h"
#include "torch_bridge/backends.h"

namespace accelerate_cpp::comm {
namespace {

using testing::expect_equal;
using testing::filled;
using ::testing::HasSubstr;
using testing::message_of;
using testing::options;
using testing::run_backends;

TEST(C10dPointToPoint, SendsAndReceivesByRankAndTagInAnyOrder) {
  run_backends(3, [](C10dBackend& backend, int rank) {
    for (const std::int64_t count : {0, 4, 300000}) {
      std::vector<WorkPointer> works;
      std::vector<Tensors> received;
      for (const int tag : {2, 1}) {
        for (int peer = 2; peer >= 0; --peer) {
          if (peer != rank) {
            received.push_back({filled(-1, {count})});
            works.push_back(backend.recv(received.back(), peer, tag));
          }
        }
      }
      for (const int tag : {1, 2}) {
        for (int peer = 0; peer < 3; ++peer) {
          Tensors sent = {filled(100 * tag + 10 * rank + peer, {count})};
          if (peer != rank) {
            works.push_back(backend.send(sent, peer, tag));
          }
        }
      }
      for (const WorkPointer& work : works) {
        EXPECT_TRUE(work->wait());
      }
      std::size_t next = 0;
      for (const int tag : {2, 1}) {
        for (int peer = 2; peer >= 0; --peer) {
          if (peer != rank) {
            expect_equal(received[next++][0], filled(100 * tag + 10 * peer + rank, {count}));
          }
        }
      }
    }
  });
}

TEST(C10dPointToPoint, SendsTensorsOfAnyStridesAndDtype) {
  run_backends(2, [](C10dBackend& backend, int rank) {
    for (const at::ScalarType dtype : {at::kFloat, at::kComplexDouble, at::kUInt16, at::kBool}) {
      const at::Tensor matrix = at::arange(6, at::kLong).view({2, 3}).to(dtype);
      if (rank == 0) {
        Tensors sent = {matrix.t()};
        backend.send(sent, 1, 0)->wait();
      } else {
        const at::Tensor home = at::zeros({3, 2}, dtype);
        Tensors received = {home.t().t()};
        backend.recv(received, 0, 0)->wait();
        expect_equal(home, matrix.t().contiguous());
      }
    }
  });
}

TEST(C10dPointToPoint, ReceivesFromWhoeverSends) {
  run_backends(3, [](C10dBackend& backend, int rank) {
    if (rank != 1) {
      Tensors sent = {filled(rank)};
      backend.send(sent, 1, 9)->wait();
      return;
    }
    int seen = 0;
    for (int i = 0; i < 2; ++i) {
      Tensors received = {filled(-1)};
      const WorkPointer work = backend.recvAnysource(received, 9);
      work->wait();
      expect_equal(received[0], filled(work->sourceRank()));
      seen |= 1 << work->sourceRank();
    }
    EXPECT_EQ(seen, 5);
  });
}

TEST(C10dPointToPoint, ReceivesWhileNobodyWaits) {
  run_backends(2, [](C10dBackend& backend, int rank) {
    const at::Tensor base = at::zeros({2, 2}, at::kFloat);
    Tensors tensors = {rank == 0 ? filled(5, {2, 2}) : base.t()};
    const WorkPointer work = rank == 0 ? backend.send(tensors, 1, 0) : backend.recv(tensors, 0, 0);
    const auto future = work->getFuture();
    future->wait();
    expect_equal(future->value().toTensorVector().at(0), filled(5, {2, 2}));
    expect_equal(rank == 0 ? tensors[0] : base, filled(5, {2, 2}));
  });
}

TEST(C10dPointToPoint, SendsWhileACollectiveWaits) {
  run_backends(2, [](C10dBackend& backend, int rank) {
    Tensors tensors = {filled(rank, {100000})};
    if (rank == 0) {
      // Rank 1 enters the collective only when it has the message, which comes after it in this rank's program.
      const WorkPointer collective = backend.barrier(options<::c10d::BarrierOptions>(true));
      collective->getFuture();
      const WorkPointer sent = backend.send(tensors, 1, 0);
      collective->wait();
      sent->wait();
    } else {
      backend.recv(tensors, 0, 0)->wait();
      backend.barrier(options<::c10d::BarrierOptions>(false));
      expect_equal(tensors[0], filled(0, {100000}));
    }
  });
}

TEST(C10dPointToPoint, RefusesRanksThatAreNotThere) {
  run_backends(2, [](C10dBackend& backend, int) {
    Tensors tensors = {filled(1)};
    EXPECT_THROW(backend.send(tensors, 2, 0), InvalidArgument);
    EXPECT_THROW(backend.recv(tensors, -1, 0), InvalidArgument) << "any source has a call of its own";
    Tensors two = {filled(1), filled(2)};
    EXPECT_THAT(message_of<InvalidArgument>([&] { backend.send(two, 1, 0); }),
                HasSubstr("send: expected one tensor (or list) per process, found 2"));
  });
}

}  // namespace
}  // namespace accelerate_cpp::comm
