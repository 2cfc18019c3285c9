#include "xla_calls/handlers.h"

#include <xla/ffi/api/ffi.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/check.h"
#include "core/base/error.h"
#include "core/base/view_parts.h"
#include "xla_calls/groups.h"

namespace accelerate_cpp::xla_calls {
namespace {

namespace ffi = xla::ffi;
using comm::Call;
using comm::ReduceOp;
using comm::Shape;

// Buffers without the tokens among them.
struct Buffers {
  std::vector<ffi::AnyBuffer> operands;
  std::vector<ffi::AnyBuffer> results;

  Buffers(const ffi::RemainingArgs& given, const ffi::RemainingRets& returned) {
    for (std::size_t index = 0; index < given.size(); ++index) {
      add(given.get<ffi::AnyBuffer>(index).value(), operands);
    }
    for (std::size_t index = 0; index < returned.size(); ++index) {
      add(*returned.get<ffi::AnyBuffer>(index).value(), results);
    }
    ACCELERATE_CHECK(operands.size() == results.size(), "each operand has a result");
  }

 private:
  static void add(const ffi::AnyBuffer& buffer, std::vector<ffi::AnyBuffer>& to) {
    if (buffer.element_type() != ffi::DataType::TOKEN) {
      to.push_back(buffer);
    }
  }
};

ReduceOp reduction(std::string_view name) {
  static constexpr std::array<std::pair<std::string_view, ReduceOp>, 5> kNames{{{"sum", ReduceOp::kSum},
                                                                                {"mean", ReduceOp::kAvg},
                                                                                {"max", ReduceOp::kMax},
                                                                                {"min", ReduceOp::kMin},
                                                                                {"product", ReduceOp::kProduct}}};
  for (const auto& [known, op] : kNames) {
    if (known == name) {
      return op;
    }
  }
  throw InvalidArgument("op " + std::string(name) + ": expected sum, mean, max, min or product");
}

Shape shape_of(const ffi::AnyBuffer& buffer) {
  return {buffer.dimensions().begin(), buffer.dimensions().size()};
}

// The elements of a buffer that is moved; those of types that collectives do not know as their bytes.
MemoryView moved(const ffi::AnyBuffer& buffer) {
  void* const data = buffer.untyped_data();
  switch (buffer.element_type()) {
    case ffi::DataType::F32:
      return {data, buffer.element_count(), DType::kFloat32};
    case ffi::DataType::F64:
      return {data, buffer.element_count(), DType::kFloat64};
    case ffi::DataType::F16:
      return {data, buffer.element_count(), DType::kFloat16};
    case ffi::DataType::BF16:
      return {data, buffer.element_count(), DType::kBFloat16};
    case ffi::DataType::S8:
      return {data, buffer.element_count(), DType::kInt8};
    case ffi::DataType::S16:
      return {data, buffer.element_count(), DType::kInt16};
    case ffi::DataType::S32:
      return {data, buffer.element_count(), DType::kInt32};
    case ffi::DataType::S64:
      return {data, buffer.element_count(), DType::kInt64};
    case ffi::DataType::PRED:
      return {data, buffer.element_count(), DType::kBool};
    default:
      return {data, buffer.size_bytes(), DType::kUInt8};
  }
}

// The elements of a buffer that is reduced. Unsigned numbers add and multiply as signed ones do, and the two parts of a
// complex number add by themselves.
MemoryView reduced(const ffi::AnyBuffer& buffer, ReduceOp op) {
  void* const data = buffer.untyped_data();
  const std::size_t count = buffer.element_count();
  const bool adds = op == ReduceOp::kSum || op == ReduceOp::kAvg;
  const bool wraps = op == ReduceOp::kSum || op == ReduceOp::kProduct;
  switch (buffer.element_type()) {
    case ffi::DataType::F32:
    case ffi::DataType::F64:
    case ffi::DataType::F16:
    case ffi::DataType::BF16:
    case ffi::DataType::S8:
    case ffi::DataType::S16:
    case ffi::DataType::S32:
    case ffi::DataType::S64:
    case ffi::DataType::PRED:
    case ffi::DataType::U8:
      return moved(buffer);
    case ffi::DataType::U16:
      if (wraps) return {data, count, DType::kInt16};
      break;
    case ffi::DataType::U32:
      if (wraps) return {data, count, DType::kInt32};
      break;
    case ffi::DataType::U64:
      if (wraps) return {data, count, DType::kInt64};
      break;
    case ffi::DataType::C64:
      if (adds) return {data, 2 * count, DType::kFloat32};
      break;
    case ffi::DataType::C128:
      if (adds) return {data, 2 * count, DType::kFloat64};
      break;
    default:
      break;
  }
  throw InvalidArgument(std::string(comm::name(op)) +
                        " of this element type: expected float16, bfloat16, float32, float64, bool, or signed "
                        "integers; also uint8, sums and products of other unsigned integers, and sums and means of "
                        "complex numbers. Convert the array first");
}

// The `parts` equal pieces of a view.
template <class View>
std::vector<View> pieces(const View& whole, int parts) {
  const std::size_t count = whole.count / static_cast<std::size_t>(parts);
  std::vector<View> result;
  for (int part = 0; part < parts; ++part) {
    result.push_back(within(whole, static_cast<std::size_t>(part) * count, count));
  }
  return result;
}

// Calls action(group, buffers); an exception becomes an error of XLA.
template <class Action>
ffi::Error call(std::int64_t number, const ffi::RemainingArgs& given, const ffi::RemainingRets& returned,
                const Action& action) {
  std::shared_ptr<Group> group;
  try {
    group = group_of(number);
  } catch (const InvalidArgument& error) {
    return ffi::Error::Internal(std::string("InvalidArgument: ") + error.what());
  }
  try {
    const std::lock_guard lock(group->mutex());
    action(*group, Buffers(given, returned));
    return ffi::Error::Success();
  } catch (...) {
    return ffi::Error::Internal(group->text_of(std::current_exception()));
  }
}

ffi::Error all_reduce(ffi::RemainingArgs given, ffi::RemainingRets returned, std::int64_t number, std::string_view op,
                      std::string_view site) {
  return call(number, given, returned, [&](Group& group, const Buffers& buffers) {
    const ReduceOp combination = reduction(op);
    std::vector<comm::Reduced> operands;
    for (std::size_t index = 0; index < buffers.operands.size(); ++index) {
      const ffi::AnyBuffer& operand = buffers.operands[index];
      operands.push_back(
          {reduced(operand, combination), reduced(buffers.results[index], combination), shape_of(operand)});
    }
    group.together().run(operands, combination, group.deadline(), site);
  });
}

ffi::Error all_gather(ffi::RemainingArgs given, ffi::RemainingRets returned, std::int64_t number,
                      std::string_view site) {
  return call(number, given, returned, [&](Group& group, const Buffers& buffers) {
    comm::Communicator& communicator = group.communicator();
    for (std::size_t index = 0; index < buffers.operands.size(); ++index) {
      const ffi::AnyBuffer& operand = buffers.operands[index];
      communicator.all_gather(moved(operand), pieces(moved(buffers.results[index]), communicator.size()),
                              Call(group.deadline(), shape_of(operand), site));
    }
  });
}

ffi::Error broadcast(ffi::RemainingArgs given, ffi::RemainingRets returned, std::int64_t number, std::int64_t root,
                     std::string_view site) {
  return call(number, given, returned, [&](Group& group, const Buffers& buffers) {
    for (std::size_t index = 0; index < buffers.operands.size(); ++index) {
      const ffi::AnyBuffer& operand = buffers.operands[index];
      const MemoryView result = moved(buffers.results[index]);
      copy_to(operand.untyped_data(), result);
      group.communicator().broadcast(result, static_cast<int>(root), Call(group.deadline(), shape_of(operand), site));
    }
  });
}

ffi::Error reduce_scatter(ffi::RemainingArgs given, ffi::RemainingRets returned, std::int64_t number,
                          std::string_view op, std::string_view site) {
  return call(number, given, returned, [&](Group& group, const Buffers& buffers) {
    const ReduceOp combination = reduction(op);
    comm::Communicator& communicator = group.communicator();
    for (std::size_t index = 0; index < buffers.operands.size(); ++index) {
      const ffi::AnyBuffer& operand = buffers.operands[index];
      communicator.reduce_scatter(const_views(pieces(reduced(operand, combination), communicator.size())),
                                  reduced(buffers.results[index], combination), combination,
                                  Call(group.deadline(), shape_of(operand), site));
    }
  });
}

ffi::Error reduce(ffi::RemainingArgs given, ffi::RemainingRets returned, std::int64_t number, std::string_view op,
                  std::int64_t root, std::string_view site) {
  return call(number, given, returned, [&](Group& group, const Buffers& buffers) {
    const ReduceOp combination = reduction(op);
    comm::Communicator& communicator = group.communicator();
    for (std::size_t index = 0; index < buffers.operands.size(); ++index) {
      const ffi::AnyBuffer& operand = buffers.operands[index];
      const MemoryView result = reduced(buffers.results[index], combination);
      copy_to(operand.untyped_data(), result);
      communicator.reduce(result, static_cast<int>(root), combination, Call(group.deadline(), shape_of(operand), site));
      if (communicator.rank() != root && result.count > 0) {
        std::memset(result.data, 0, result.size_bytes());
      }
    }
  });
}

ffi::Error barrier(ffi::RemainingArgs given, ffi::RemainingRets returned, std::int64_t number, std::string_view site) {
  return call(number, given, returned,
              [&](Group& group, const Buffers&) { group.communicator().barrier(Call(group.deadline(), {}, site)); });
}

#define ACCELERATE_BIND ffi::Ffi::Bind().RemainingArgs().RemainingRets().Attr<std::int64_t>("group")
XLA_FFI_DEFINE_HANDLER(kAllReduce, all_reduce,
                       ACCELERATE_BIND.Attr<std::string_view>("op").Attr<std::string_view>("site"));
XLA_FFI_DEFINE_HANDLER(kAllGather, all_gather, ACCELERATE_BIND.Attr<std::string_view>("site"));
XLA_FFI_DEFINE_HANDLER(kBroadcast, broadcast,
                       ACCELERATE_BIND.Attr<std::int64_t>("root").Attr<std::string_view>("site"));
XLA_FFI_DEFINE_HANDLER(kReduceScatter, reduce_scatter,
                       ACCELERATE_BIND.Attr<std::string_view>("op").Attr<std::string_view>("site"));
XLA_FFI_DEFINE_HANDLER(
    kReduce, reduce,
    ACCELERATE_BIND.Attr<std::string_view>("op").Attr<std::int64_t>("root").Attr<std::string_view>("site"));
XLA_FFI_DEFINE_HANDLER(kBarrier, barrier, ACCELERATE_BIND.Attr<std::string_view>("site"));
#undef ACCELERATE_BIND

}  // namespace

std::array<NamedHandler, 6> handlers() {
  return {{{"all_reduce", reinterpret_cast<void*>(kAllReduce)},
           {"all_gather", reinterpret_cast<void*>(kAllGather)},
           {"broadcast", reinterpret_cast<void*>(kBroadcast)},
           {"reduce_scatter", reinterpret_cast<void*>(kReduceScatter)},
           {"reduce", reinterpret_cast<void*>(kReduce)},
           {"barrier", reinterpret_cast<void*>(kBarrier)}}};
}

}  // namespace accelerate_cpp::xla_calls
