#include "torch_bridge/c10d_communicator.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <utility>

#include "core/base/error.h"
#include "core/base/view_parts.h"
#include "core/comm/arguments.h"
#include "core/comm/reduce_kernels.h"
#include "core/comm/slices.h"

namespace accelerate_cpp::comm {
namespace {

constexpr std::size_t kStepBytes = std::size_t{4} << 20;  // that one rank gives in one step of a large operation
constexpr std::size_t kDirectBytes = std::size_t{64} << 10;
constexpr std::size_t kInlineBytes = 1024;

using Counts = std::vector<std::uint64_t>;

}  // namespace

C10dCommunicator::C10dCommunicator(std::shared_ptr<C10dEngine> engine, bool check_calls)
    : engine_(std::move(engine)),
      check_calls_(check_calls),
      rank_(engine_->rank()),
      size_(engine_->size()),
      check_(rank_, engine_->hooks()),
      port_(C10dPort::make(engine_)) {
  std::vector<std::shared_ptr<MessageMatcher::Port>> ports(static_cast<std::size_t>(size_), port_);
  messages_ = std::make_shared<MessageMatcher>(rank_, std::move(ports), kInlineBytes, engine_->hooks());
}

C10dCommunicator::~C10dCommunicator() {
  leave();
  messages_->close();
}

void C10dCommunicator::run(const CallRecord& record, const Call& call, const std::function<void()>& body) {
  const std::lock_guard lock(mutex_);
  operation_ = {record.describe(engine_->hooks()), operation_.number + 1};
  engine_->check_usable(operation_.text);
  try {
    if (check_calls_) {
      check_.check(record, call, [&](const std::string& own) { return all_gather_bytes(own, call); });
    }
    body();
  } catch (const MismatchedCollective&) {
    throw;
  } catch (...) {
    engine_->fail(reason_in_flight(operation_.text + " was interrupted"));
    throw;
  }
}

void C10dCommunicator::run_steps(const Plan& plan, const Call& call) {
  struct UnderWay {
    AllToAll blocks;
    std::function<void(const AllToAll& blocks)> take;
  };
  std::deque<UnderWay> under_way;
  std::size_t taken = 0;
  const auto take_oldest = [&] {
    under_way.front().blocks.finish(call.deadline, operation_);
    under_way.front().take(under_way.front().blocks);
    under_way.pop_front();
    ++taken;
  };
  for (const PlannedStep& planned : plan) {
    while (taken < planned.after || under_way.size() == 2) {
      take_oldest();
    }
    Step step = planned.make();
    under_way.push_back(
        {AllToAll(*engine_, step.inputs, step.expected_bytes, call.deadline, operation_), std::move(step.take)});
  }
  while (!under_way.empty()) {
    take_oldest();
  }
}

void C10dCommunicator::run_step(Step step, const Call& call) {
  AllToAll blocks(*engine_, step.inputs, step.expected_bytes, call.deadline, operation_);
  blocks.finish(call.deadline, operation_);
  step.take(blocks);
}

std::string C10dCommunicator::all_gather_bytes(const std::string& own, const Call& call) {
  std::string all(own.size() * static_cast<std::size_t>(size_), '\0');
  std::vector<MemoryView> places;
  for (std::size_t r = 0; r < static_cast<std::size_t>(size_); ++r) {
    places.push_back({all.data() + r * own.size(), own.size(), DType::kUInt8});
  }
  run_step(gather_step({own.data(), own.size(), DType::kUInt8}, places), call);
  return all;
}

bool C10dCommunicator::goes_directly(MemoryView data) const {
  return size_ == 2 || data.size_bytes() <= kDirectBytes;
}

std::size_t C10dCommunicator::step_count(DType dtype) const {
  return std::max<std::size_t>(kStepBytes / element_size(dtype) / static_cast<std::size_t>(std::max(size_ - 1, 1)), 1);
}

std::vector<double> C10dCommunicator::factors(const Reduction& reduction, const Call& call) {
  if (reduction.op != ReduceOp::kPreMulSum) {
    return {};
  }
  const std::string all = all_gather_bytes({reinterpret_cast<const char*>(&reduction.factor), sizeof(double)}, call);
  std::vector<double> result(static_cast<std::size_t>(size_));
  std::memcpy(result.data(), all.data(), all.size());
  return result;
}

void C10dCommunicator::combine(const AllToAll& blocks, ConstMemoryView own, MemoryView output,
                               const Reduction& reduction, const std::vector<double>& factors) const {
  std::vector<const void*> sources;
  for (int r = 0; r < size_; ++r) {
    sources.push_back(r == rank_ ? own.data : blocks.from(r));
  }
  void* destination = output.data;
  comm::reduce(output.dtype, reduction.op,
               {sources.data(), size_, &destination, 1, output.count, reduction_scale(reduction.op, size_),
                factors.empty() ? nullptr : factors.data()});
}

C10dCommunicator::Step C10dCommunicator::gather_step(ConstMemoryView input,
                                                     const std::vector<MemoryView>& outputs) const {
  Step step{Inputs(static_cast<std::size_t>(size_), input), {}, {}};
  for (const MemoryView& output : outputs) {
    step.expected_bytes.push_back(output.size_bytes());
  }
  step.take = [this, input, outputs](const AllToAll& blocks) {
    for (int r = 0; r < size_; ++r) {
      copy_to(r == rank_ ? input.data : blocks.from(r), outputs[static_cast<std::size_t>(r)]);
    }
  };
  return step;
}

C10dCommunicator::Step C10dCommunicator::reduce_step(Inputs inputs, ConstMemoryView own, MemoryView output,
                                                     const Reduction& reduction,
                                                     const std::vector<double>& factors) const {
  return {std::move(inputs), std::vector<std::size_t>(static_cast<std::size_t>(size_), output.size_bytes()),
          [=, this, &factors](const AllToAll& blocks) { combine(blocks, own, output, reduction, factors); }};
}

// For every part of `data` that is cut into one slice per rank: a step, and one that needs its result.
C10dCommunicator::Plan C10dCommunicator::plan_in_slices(
    MemoryView data, const std::function<Step(const std::vector<MemoryView>& slices)>& first,
    const std::function<Step(const std::vector<MemoryView>& slices)>& second) const {
  const std::size_t part_count = kStepBytes / element_size(data.dtype);
  const std::size_t num_parts = (data.count + part_count - 1) / part_count;
  const auto slices = [this, data, part_count](std::size_t part) {
    const MemoryView whole = within(data, part * part_count, part_count);
    const Slices cut(whole.count, element_size(data.dtype), size_);
    std::vector<MemoryView> result;
    for (int r = 0; r < size_; ++r) {
      result.push_back(within(whole, cut.begin(r), cut.count(r)));
    }
    return result;
  };
  Plan plan;
  const auto add_second = [&](std::size_t part, std::size_t after) {
    plan.push_back({[=] { return second(slices(part)); }, after});
  };
  std::size_t first_of_last = 0;  // the place in the plan of the first step of the part before
  for (std::size_t part = 0; part < num_parts; ++part) {
    const std::size_t place = plan.size();
    plan.push_back({[=] { return first(slices(part)); }});
    if (part > 0) {
      add_second(part - 1, first_of_last + 1);
    }
    first_of_last = place;
  }
  add_second(num_parts - 1, first_of_last + 1);
  return plan;
}

void C10dCommunicator::all_reduce(MemoryView data, Reduction reduction, const Call& call) {
  check_reduction(data.dtype, reduction.op);
  run({CallKind::kAllReduce, data.dtype, reduction.op, -1, data.count}, call, [&] {
    const std::vector<double> all_factors = factors(reduction, call);
    if (!goes_directly(data)) {
      const auto own = static_cast<std::size_t>(rank_);
      return run_steps(plan_in_slices(
                           data,
                           [&](const std::vector<MemoryView>& slices) {
                             return reduce_step({slices.begin(), slices.end()}, slices[own], slices[own], reduction,
                                                all_factors);
                           },
                           [&](const std::vector<MemoryView>& slices) { return gather_step(slices[own], slices); }),
                       call);
    }
    Plan plan;
    for (std::size_t begin = 0; begin < data.count; begin += step_count(data.dtype)) {
      const MemoryView part = within(data, begin, step_count(data.dtype));
      plan.push_back({[this, part, &reduction, &all_factors] {
        return reduce_step(Inputs(static_cast<std::size_t>(size_), part), part, part, reduction, all_factors);
      }});
    }
    run_steps(plan, call);
  });
}

void C10dCommunicator::reduce(MemoryView data, int root, Reduction reduction, const Call& call) {
  check_reduction(data.dtype, reduction.op);
  check_root("reduce", root, size_);
  run({CallKind::kReduce, data.dtype, reduction.op, root, data.count}, call, [&] {
    const std::vector<double> all_factors = factors(reduction, call);
    Plan plan;
    for (std::size_t begin = 0; begin < data.count; begin += step_count(data.dtype)) {
      const MemoryView part = within(data, begin, step_count(data.dtype));
      plan.push_back({[&, this, part] {
        Inputs inputs = nothing(part.dtype);
        if (rank_ == root) {
          return reduce_step(std::move(inputs), part, part, reduction, all_factors);
        }
        inputs[static_cast<std::size_t>(root)] = part;
        return Step{std::move(inputs), no_bytes(), [](const AllToAll&) {}};
      }});
    }
    run_steps(plan, call);
  });
}

void C10dCommunicator::reduce_scatter(const std::vector<ConstMemoryView>& inputs, MemoryView output,
                                      Reduction reduction, const Call& call) {
  check_reduction(output.dtype, reduction.op);
  check_parts("reduce_scatter", "input", inputs, output.dtype, size_);
  const ConstMemoryView own = inputs[static_cast<std::size_t>(rank_)];
  check_counts_equal("reduce_scatter", own, output);
  const Counts expected(static_cast<std::size_t>(size_), output.count);
  run({CallKind::kReduceScatter, output.dtype, reduction.op, -1, output.count, counts_of(inputs, size_), expected},
      call, [&] {
        const std::vector<double> all_factors = factors(reduction, call);
        Plan plan;
        const std::size_t count = step_count(output.dtype);
        for (std::size_t begin = 0; begin < longest(inputs); begin += count) {
          plan.push_back({[&, begin] {
            return reduce_step(within(inputs, begin, count), within(own, begin, count), within(output, begin, count),
                               reduction, all_factors);
          }});
        }
        run_steps(plan, call);
      });
}

void C10dCommunicator::broadcast(MemoryView data, int root, const Call& call) {
  check_root("broadcast", root, size_);
  const auto own = static_cast<std::size_t>(rank_);
  const auto from = static_cast<std::size_t>(root);
  run({CallKind::kBroadcast, data.dtype, ReduceOp::kSum, root, data.count}, call, [&] {
    // What the root gives to each rank, `slices[r]`, or the same to all.
    const auto from_root = [&](const std::vector<MemoryView>& slices) {
      Step step{rank_ == root ? Inputs(slices.begin(), slices.end()) : nothing(data.dtype), no_bytes(),
                [](const AllToAll&) {}};
      if (rank_ != root) {
        step.expected_bytes[from] = slices[own].size_bytes();
        step.take = [to = slices[own], root](const AllToAll& blocks) { copy_to(blocks.from(root), to); };
      }
      return step;
    };
    if (!goes_directly(data)) {
      return run_steps(plan_in_slices(data, from_root,
                                      [&](const std::vector<MemoryView>& slices) {
                                        std::vector<MemoryView> wanted = slices;
                                        for (MemoryView& slice : wanted) {  // the root has everything
                                          slice.count = rank_ == root ? 0 : slice.count;
                                        }
                                        Step step = gather_step(slices[own], wanted);
                                        step.inputs[from].count = 0;
                                        return step;
                                      }),
                       call);
    }
    Plan plan;
    for (std::size_t begin = 0; begin < data.count; begin += step_count(data.dtype)) {
      const MemoryView part = within(data, begin, step_count(data.dtype));
      plan.push_back({[&, part] { return from_root(std::vector<MemoryView>(static_cast<std::size_t>(size_), part)); }});
    }
    run_steps(plan, call);
  });
}

void C10dCommunicator::all_gather(ConstMemoryView input, const std::vector<MemoryView>& outputs, const Call& call) {
  check_parts("all_gather", "output", outputs, input.dtype, size_);
  check_counts_equal("all_gather", input, outputs[static_cast<std::size_t>(rank_)]);
  const Counts given(static_cast<std::size_t>(size_), input.count);
  run({CallKind::kAllGather, input.dtype, ReduceOp::kSum, -1, input.count, given, counts_of(outputs, size_)}, call,
      [&] {
        Plan plan;
        const std::size_t count = step_count(input.dtype);
        for (std::size_t begin = 0; begin < longest(outputs); begin += count) {
          plan.push_back(
              {[&, begin] { return gather_step(within(input, begin, count), within(outputs, begin, count)); }});
        }
        run_steps(plan, call);
      });
}

}  // namespace accelerate_cpp::comm
