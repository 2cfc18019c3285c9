#include "torch_bridge/parameter_ownership.h"

#include <ATen/ops/full.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/sum.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

namespace accelerate_cpp::grad {
namespace {

using ::testing::ElementsAre;

at::Tensor parameter() {
  return at::full({3}, 1, at::kFloat).set_requires_grad(true);
}

// What a group of parameters hears of their gradients: "1" for one that came, "1-" for one that did not.
struct Heard {
  explicit Heard(const std::vector<at::Tensor>& tensors)
      : ownership(std::make_shared<ParameterOwnership>(tensors, [this](std::size_t index, bool came) {
          heard.push_back(std::to_string(index) + (came ? "" : "-"));
        })) {
    ownership->take_free();
  }

  std::vector<std::string> heard;
  std::shared_ptr<ParameterOwnership> ownership;
};

TEST(ParameterOwnership, HearsOfGradientsAndWhetherTheyCame) {
  const at::Tensor first = parameter();
  const at::Tensor second = parameter();
  const Heard all({first, second});
  second.mul(2).sum().backward();
  EXPECT_THAT(all.heard, ElementsAre("1"));
  const at::Tensor loss = first.mul(2).sum();
  first.set_requires_grad(false);
  loss.backward();
  EXPECT_THAT(all.heard, ElementsAre("1", "0-"));
}

TEST(ParameterOwnership, IsOfTheNewerOneUntilThatIsGone) {
  const at::Tensor shared = parameter();
  const Heard older({parameter(), shared});
  {
    const auto tensors = std::vector<at::Tensor>{shared};
    const auto newer = std::make_shared<ParameterOwnership>(tensors, [](std::size_t, bool) {});
    older.ownership->give_up(*newer);
    newer->take_free();
    EXPECT_FALSE(older.ownership->owns(1));
    EXPECT_TRUE(older.ownership->owns(0));
    EXPECT_TRUE(newer->owns(0));
    older.ownership->take_free();
    shared.mul(2).sum().backward();
    EXPECT_THAT(older.heard, ElementsAre());
  }
  older.ownership->take_free();
  shared.mul(2).sum().backward();
  EXPECT_THAT(older.heard, ElementsAre("1"));
}

TEST(ParameterOwnership, AveragesWhenItselfOrAnOlderOneThatHasTheParameterSynchronises) {
  const at::Tensor shared = parameter();
  const at::Tensor own = parameter();
  const Heard older({shared});
  const Heard newer({shared, own});
  older.ownership->give_up(*newer.ownership);
  newer.ownership->set_synchronizing(false);
  EXPECT_TRUE(newer.ownership->averages(0));
  EXPECT_FALSE(newer.ownership->averages(1));
  older.ownership->set_synchronizing(false);
  EXPECT_FALSE(newer.ownership->averages(0));
}

TEST(ParameterOwnership, FindsItsParameters) {
  const at::Tensor own = parameter();
  const Heard all({parameter(), own});
  EXPECT_EQ(all.ownership->find(own), 1u);
  EXPECT_EQ(all.ownership->find(parameter()), std::nullopt);
}

}  // namespace
}  // namespace accelerate_cpp::grad
