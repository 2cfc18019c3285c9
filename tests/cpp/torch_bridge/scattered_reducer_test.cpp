#include "torch_bridge/scattered_reducer.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "torch_bridge/backends.h"

namespace accelerate_cpp::grad {
namespace {

using comm::testing::message_of;
using comm::testing::run_backends;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

// Weights of one rank, the rows that it keeps of their averages, and the reducer.
class Model {
 public:
  Model(comm::C10dBackend& backend, const std::vector<at::Tensor>& wholes, std::size_t bucket_bytes = 1 << 20)
      : rank_(backend.getRank()), size_(backend.getSize()) {
    std::vector<ScatteredWeight> weights;
    for (const at::Tensor& whole : wholes) {
      wholes_.push_back(whole.clone().set_requires_grad(true));
      rows.push_back(at::full_like(own(whole), -1, at::MemoryFormat::Contiguous));
      adds.push_back(false);
      weights.push_back({"w" + std::to_string(weights.size()), wholes_.back()});
    }
    reducer = ScatteredReducer::create(
        BackendPointer::reclaim_copy(&backend), {}, weights, {bucket_bytes, false}, [this] { begin(); }, [] { throw; });
  }

  const at::Tensor& operator[](std::size_t index) const { return wholes_[index]; }

  // The rows of a tensor that this rank has.
  at::Tensor own(const at::Tensor& whole) const {
    const std::int64_t share = (whole.size(0) + size_ - 1) / size_;
    const std::int64_t first = std::min(rank_ * share, whole.size(0));
    return whole.slice(0, first, std::min(first + share, whole.size(0)));
  }

  void begin(bool deferred = false) {
    std::vector<RowsOfWeight> all;
    for (std::size_t i = 0; i < rows.size(); ++i) {
      all.push_back({rows[i], adds[i]});
    }
    reducer->begin(std::move(all), deferred);
  }

  std::vector<bool> backward(const at::Tensor& loss) {
    reducer->expect();
    loss.backward();
    return reducer->finish();
  }

  std::vector<at::Tensor> rows;
  std::vector<bool> adds;
  std::shared_ptr<ScatteredReducer> reducer;

 private:
  std::int64_t rank_;
  std::int64_t size_;
  std::vector<at::Tensor> wholes_;
};

// Gradients of rank r are these, times r + 1.
at::Tensor pattern(const at::Tensor& like) {
  return at::arange(like.numel(), at::kDouble).view(like.sizes()).to(like.scalar_type());
}

void expect_averages(const Model& model, std::size_t index, double factor) {
  const at::Tensor expected = model.own(pattern(model[index])) * factor;
  EXPECT_TRUE(at::equal(model.rows[index], expected)) << "weight " << index << ": " << model.rows[index];
  EXPECT_FALSE(model[index].grad().defined()) << "what was averaged is freed";
}

at::Tensor loss_of(const Model& model, std::size_t num_weights, int rank) {
  at::Tensor loss = at::zeros({}, at::kDouble);
  for (std::size_t i = 0; i < num_weights; ++i) {
    loss = loss + (model[i] * pattern(model[i]) * (rank + 1)).sum().to(at::kDouble);
  }
  return loss;
}

TEST(ScatteredReducers, GiveEachRankTheAveragesOfItsRows) {
  const std::vector<at::Tensor> wholes{at::zeros({7, 3}), at::zeros({2}), at::zeros({40, 5}, at::kDouble),
                                       at::zeros({1, 4}), at::zeros({0, 3})};
  for (const std::size_t bucket_bytes : {std::size_t{1}, std::size_t{500}, std::size_t{1} << 20}) {
    for (const int size : {1, 2, 3}) {
      run_backends(size, [&](comm::C10dBackend& backend, int rank) {
        Model model(backend, wholes, bucket_bytes);
        for (int pass = 0; pass < 3; ++pass) {
          EXPECT_THAT(model.backward(loss_of(model, wholes.size(), rank)), ElementsAre(true, true, true, true, true));
          for (std::size_t i = 0; i < wholes.size(); ++i) {
            expect_averages(model, i, (size + 1) / 2.0);
          }
        }
      });
    }
  }
}

TEST(ScatteredReducers, AddWhereTheCallerSaysSo) {
  run_backends(2, [](comm::C10dBackend& backend, int rank) {
    Model model(backend, {at::zeros({6}), at::zeros({6})}, 1);
    model.rows[1].zero_();
    model.adds[1] = true;
    for (int pass = 1; pass <= 3; ++pass) {
      model.backward(loss_of(model, 2, rank));
      expect_averages(model, 0, 1.5);
      expect_averages(model, 1, 1.5 * pass);
    }
  });
}

TEST(ScatteredReducers, TakeZerosWhereARankHasNoGradientAndTellWhichAreUsed) {
  run_backends(2, [](comm::C10dBackend& backend, int rank) {
    Model model(backend, {at::zeros({4}), at::zeros({4}), at::zeros({4})});
    EXPECT_THAT(model.backward((model[0] * pattern(model[0])).sum() * (rank == 0 ? 1 : 0) +
                               (rank == 1 ? (model[2] * pattern(model[2])).sum() : at::zeros({}))),
                ElementsAre(true, false, true));
    expect_averages(model, 0, 0.5);
    expect_averages(model, 2, 0.5);
    EXPECT_TRUE(at::equal(model.rows[1], at::zeros({2})));
  });
}

TEST(ScatteredReducers, FreeAGradientThatIsDividedWhenItArrives) {
  run_backends(2, [](comm::C10dBackend& backend, int rank) {
    Model model(backend, {at::zeros({2}), at::zeros({400})}, 1000);  // the smaller one is in the bucket of the tail
    model.reducer->expect();
    (model[1] * pattern(model[1]) * (rank + 1)).sum().backward();
    EXPECT_FALSE(model[1].grad().defined());
    model.reducer->finish();
    expect_averages(model, 1, 1.5);
  });
}

TEST(ScatteredReducers, AcceptASecondGradientWhileNothingIsHandedOn) {
  run_backends(1, [](comm::C10dBackend& backend, int) {
    Model model(backend, {at::zeros({4})});
    model.reducer->expect();
    model.begin(true);
    model[0].sum().backward();
    (model[0] * 2).sum().backward();
    model.reducer->finish();
    EXPECT_TRUE(at::equal(model.rows[0], at::full({4}, 3.0)));
  });
}

TEST(ScatteredReducers, DeferWhatOtherModelsMayComeBefore) {
  run_backends(2, [](comm::C10dBackend& backend, int rank) {
    Model model(backend, {at::zeros({4}), at::zeros({4})}, 1);
    model.reducer->expect();
    model.begin(true);
    loss_of(model, 2, rank).backward();
    EXPECT_TRUE(model[0].grad().defined() && model[1].grad().defined());
    model.reducer->finish();
    expect_averages(model, 0, 1.5);
    expect_averages(model, 1, 1.5);
  });
}

TEST(ScatteredReducers, TakeInWhatPassesWithoutAveragingHaveLeft) {
  run_backends(2, [](comm::C10dBackend& backend, int rank) {
    Model model(backend, {at::zeros({4})});
    model.reducer->set_synchronizing(false);
    EXPECT_THAT(model.backward(loss_of(model, 1, rank)), ElementsAre());
    EXPECT_TRUE(at::equal(model[0].grad(), pattern(model[0]) * (rank + 1)));
    model.reducer->set_synchronizing(true);
    model.backward(loss_of(model, 1, rank));
    expect_averages(model, 0, 3.0);
  });
}

TEST(ScatteredReducers, TakeGradientsOfAnyLayoutAndComplexOnes) {
  run_backends(2, [](comm::C10dBackend& backend, int rank) {
    const double factor = rank + 1;
    Model model(backend, {at::zeros({4, 3}), at::zeros({3}, at::kComplexFloat), at::zeros({4, 2})});
    model.reducer->expect();
    model.begin(true);
    model[0].mutable_grad() = pattern(at::zeros({3, 4})).t() * factor;
    const at::Tensor complex = at::complex(at::arange(3.0), at::ones({3})).to(at::kComplexFloat);
    model[1].mutable_grad() = (complex * factor).conj();
    model[2].mutable_grad() = at::sparse_coo_tensor(at::full({1, 2}, 1, at::kLong), at::ones({2, 2}) * factor, {4, 2});
    model.reducer->finish();
    EXPECT_TRUE(at::equal(model.rows[0], model.own(pattern(at::zeros({3, 4})).t() * 1.5)));
    EXPECT_TRUE(at::equal(model.rows[1], model.own((complex * 1.5).conj().resolve_conj())));
    at::Tensor dense = at::zeros({4, 2});
    dense[1] = 3.0;
    EXPECT_TRUE(at::equal(model.rows[2], model.own(dense)));
  });
}

TEST(ScatteredReducers, LeaveOutWeightsThatAreFrozenInAPass) {
  run_backends(2, [](comm::C10dBackend& backend, int rank) {
    Model model(backend, {at::zeros({4}), at::zeros({4})}, 1);
    model[1].set_requires_grad(false);
    EXPECT_THAT(model.backward(loss_of(model, 2, rank)), ElementsAre(true, false));
    expect_averages(model, 0, 1.5);
    model[1].set_requires_grad(true);
    EXPECT_THAT(model.backward(loss_of(model, 2, rank)), ElementsAre(true, true));
    expect_averages(model, 1, 1.5);
  });
}

TEST(ScatteredReducers, LetTheOthersKnowWhenAPassFailsAndGoOn) {
  for (const std::size_t bucket_bytes : {std::size_t{1}, std::size_t{1} << 20}) {
    run_backends(2, [bucket_bytes](comm::C10dBackend& backend, int rank) {
      Model model(backend, {at::zeros({40}), at::zeros({40})}, bucket_bytes);
      for (int time = 0; time < 3; ++time) {
        if (rank == 1) {
          model.reducer->expect();
          model.reducer->fail("out of memory");
        } else {
          EXPECT_THAT(message_of<PeerWithdrew>([&] {
                        model.reducer->expect();
                        loss_of(model, 2, rank).backward();
                        model.reducer->finish();
                      }),
                      HasSubstr("rank 1 withdrew: out of memory"));
          model.reducer->fail("the other rank withdrew");
        }
        model[0].mutable_grad().reset();
        model[1].mutable_grad().reset();
        model.backward(loss_of(model, 2, rank));
        expect_averages(model, 0, 1.5);
        expect_averages(model, 1, 1.5);
      }
    });
  }
}

TEST(ScatteredReducers, RefuseGradientsWithAGraph) {
  run_backends(1, [](comm::C10dBackend& backend, int) {
    Model model(backend, {at::zeros({4})});
    model.reducer->expect();
    EXPECT_THAT(message_of<InvalidArgument>(
                    [&] { model[0].square().sum().backward({}, /*retain_graph=*/true, /*create_graph=*/true); }),
                HasSubstr("backward(create_graph=True)"));
    model.reducer->fail("it has a graph");
  });
}

TEST(ScatteredReducers, RefuseASecondGradientAfterTheFirstWasHandedOn) {
  run_backends(1, [](comm::C10dBackend& backend, int) {
    Model model(backend, {at::zeros({4})});
    model.reducer->expect();
    model[0].sum().backward();
    EXPECT_THAT(message_of<InvalidArgument>([&] { model[0].sum().backward(); }),
                HasSubstr("parameter w0 received two gradients"));
    model.reducer->fail("of two gradients");
  });
}

TEST(ScatteredReducers, RefuseAGradientOfAnotherPassUnlessTheCallerTellsTheEnd) {
  run_backends(1, [](comm::C10dBackend& backend, int) {
    Model model(backend, {at::zeros({4}), at::zeros({4})});
    model[0].sum().backward();
    EXPECT_THAT(message_of<InvalidArgument>([&] { model[1].sum().backward(); }),
                HasSubstr("another backward pass than the one in progress"));
    model.reducer->fail("of another pass");
  });
}

TEST(ScatteredReducers, RefuseWeightsWithoutRows) {
  EXPECT_THROW(ScatteredReducer::create(
                   comm::testing::alone(), {}, {{"scalar", at::zeros({}).set_requires_grad(true)}}, {1, false}, [] {},
                   [] { throw; }),
               InvalidArgument);
}

}  // namespace
}  // namespace accelerate_cpp::grad
