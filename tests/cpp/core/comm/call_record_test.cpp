#include "core/comm/call_record.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>

namespace accelerate_cpp::comm {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

CallRecord all_reduce_of(std::uint64_t count) {
  CallRecord record{CallKind::kAllReduce, DType::kFloat32};
  record.count = count;
  return record;
}

// Of rank `rank` in a gather to rank 0 of rank + 1 elements each.
CallRecord gather_from(int rank, int size) {
  CallRecord record{CallKind::kGather, DType::kInt64};
  record.root = 0;
  record.count = static_cast<std::uint64_t>(rank) + 1;
  record.gives.resize(static_cast<std::size_t>(size));
  record.expects.resize(static_cast<std::size_t>(size));
  record.gives[0] = record.count;
  for (int r = 0; r < size && rank == 0; ++r) {
    record.expects[static_cast<std::size_t>(r)] = static_cast<std::uint64_t>(r) + 1;
  }
  return record;
}

bool fit(const std::vector<CallRecord>& records) {
  std::vector<CallDigest> digests;
  for (const CallRecord& record : records) {
    digests.emplace_back(record, static_cast<int>(digests.size()));
  }
  return fit_together(digests);
}

KnownCalls known(const std::vector<CallRecord>& records) {
  return {records.begin(), records.end()};
}

TEST(CallRecords, SurviveEncoding) {
  CallRecord record = gather_from(0, 3);
  record.op = ReduceOp::kBitXor;
  record.shape = {4, 5};
  record.location = "train.py:88";
  const std::optional<CallRecord> read = CallRecord::decode(record.encode());
  ASSERT_TRUE(read.has_value());
  EXPECT_EQ(read->kind, record.kind);
  EXPECT_EQ(read->dtype, record.dtype);
  EXPECT_EQ(read->op, record.op);
  EXPECT_EQ(read->root, record.root);
  EXPECT_EQ(read->count, record.count);
  EXPECT_EQ(read->gives, record.gives);
  EXPECT_EQ(read->expects, record.expects);
  EXPECT_EQ(read->shape, record.shape);
  EXPECT_EQ(read->location, record.location);
}

TEST(CallRecords, AreNotReadFromAnythingElse) {
  const std::string text = gather_from(0, 3).encode();
  EXPECT_FALSE(CallRecord::decode("").has_value());
  EXPECT_FALSE(CallRecord::decode("something else that is long enough to be a record of a call").has_value());
  for (std::size_t size = 0; size < text.size(); ++size) {
    EXPECT_FALSE(CallRecord::decode(text.substr(0, size)).has_value()) << size;
  }
}

TEST(CallDigests, FitTogetherWhenAllAskForTheSame) {
  EXPECT_TRUE(fit({all_reduce_of(10), all_reduce_of(10), all_reduce_of(10)}));
  EXPECT_TRUE(fit({all_reduce_of(10)}));
}

TEST(CallDigests, DoNotFitWhenAnythingDiffersThatMustBeEqual) {
  const std::vector<std::function<void(CallRecord&)>> changes = {
      [](CallRecord& record) { record.kind = CallKind::kBroadcast; },
      [](CallRecord& record) { record.dtype = DType::kInt32; },
      [](CallRecord& record) { record.op = ReduceOp::kMax; },
      [](CallRecord& record) { record.root = 0; },
      [](CallRecord& record) { record.count = 11; },
      [](CallRecord& record) { record.shape = {10}; },
      [](CallRecord& record) { record.shape = {2, 5}; },
  };
  for (std::size_t i = 0; i < changes.size(); ++i) {
    CallRecord changed = all_reduce_of(10);
    changes[i](changed);
    EXPECT_FALSE(fit({all_reduce_of(10), changed})) << "change " << i;
    EXPECT_TRUE(find_contradiction(known({all_reduce_of(10), changed})).has_value()) << "change " << i;
  }
}

TEST(CallDigests, DoNotCompareThePlaceInTheProgram) {
  CallRecord elsewhere = all_reduce_of(10);
  elsewhere.location = "train.py:88";
  EXPECT_TRUE(fit({all_reduce_of(10), elsewhere}));
  EXPECT_FALSE(find_contradiction(known({all_reduce_of(10), elsewhere})).has_value());
}

TEST(CallDigests, FitTogetherWhenEveryPairAgreesOnItsSize) {
  EXPECT_TRUE(fit({gather_from(0, 3), gather_from(1, 3), gather_from(2, 3)}));
  EXPECT_FALSE(find_contradiction(known({gather_from(0, 3), gather_from(1, 3), gather_from(2, 3)})).has_value());
}

TEST(CallDigests, DoNotFitWhenOnePairDisagrees) {
  std::vector<CallRecord> records = {gather_from(0, 3), gather_from(1, 3), gather_from(2, 3)};
  records[2].gives[0] = 5;
  EXPECT_FALSE(fit(records));
  EXPECT_THAT(find_contradiction(known(records)).value_or("nothing"),
              AllOf(HasSubstr("rank 2 and rank 0"), HasSubstr("5 elements are given, 3 expected")));
}

TEST(CallDigests, DoNotFitWhenTwoRanksSwapSizes) {
  std::vector<CallRecord> records = {gather_from(0, 3), gather_from(1, 3), gather_from(2, 3)};
  std::swap(records[1].gives[0], records[2].gives[0]);
  EXPECT_FALSE(fit(records));
}

TEST(KnownCalls, ContradictOnlyWhereTheyAreKnown) {
  KnownCalls calls(3);
  calls[0] = all_reduce_of(10);
  EXPECT_FALSE(find_contradiction(calls).has_value());
  calls[2] = all_reduce_of(11);
  EXPECT_THAT(find_contradiction(calls).value_or("nothing"), HasSubstr("rank 0 and rank 2"));
}

TEST(KnownCalls, AreShownAsATable) {
  KnownCalls calls(3);
  calls[0] = all_reduce_of(10);
  calls[0]->location = "train.py:88";
  calls[2] = gather_from(2, 3);
  EXPECT_EQ(table_of(calls),
            "\n  rank 0: all_reduce(sum) of 10 float32 at train.py:88"
            "\n  rank 1: not known to wait in this operation"
            "\n  rank 2: gather of 3 int64, root 0");
  calls[0]->location = "save_state\ttrain.py:88";
  EXPECT_THAT(table_of(calls), HasSubstr("\n  rank 0: save_state at train.py:88\n"));
}

}  // namespace
}  // namespace accelerate_cpp::comm
