// The operations of Hierarchical in which every rank has a separate operand for every other, and split().
#include <algorithm>
#include <utility>

#include "core/base/view_parts.h"
#include "core/comm/arguments.h"
#include "core/comm/hierarchical.h"
#include "core/comm/reduce_kernels.h"
#include "core/comm/split_choice.h"

namespace accelerate_cpp::comm {
namespace {

constexpr std::size_t kPieceBytes = std::size_t{16} << 20;

using Counts = std::vector<std::uint64_t>;

Counts equal_counts(std::size_t count, int size) {
  return Counts(static_cast<std::size_t>(size), count);
}

// `one` is the operand that this rank has once.
CallRecord sized_record(CallKind kind, ConstMemoryView one, Counts gives, Counts expects, int root = -1,
                        ReduceOp op = ReduceOp::kSum) {
  return {kind, one.dtype, op, root, one.count, std::move(gives), std::move(expects)};
}

}  // namespace

template <class View>
std::vector<View> Hierarchical::of_own_host(const std::vector<View>& parts) const {
  std::vector<View> own;
  for (const int r : own_ranks()) {
    own.push_back(parts[static_cast<std::size_t>(r)]);
  }
  return own;
}

template <class View>
std::vector<View> Hierarchical::of_other_hosts(std::vector<View> parts, DType dtype) const {
  for (const int r : own_ranks()) {
    parts[static_cast<std::size_t>(r)] = View{nullptr, 0, dtype};
  }
  return parts;
}

std::vector<Hierarchical::Piece> Hierarchical::pieces_of(const std::vector<ConstMemoryView>& parts) const {
  const std::size_t row_bytes = parts.size() * element_size(parts.front().dtype);
  const std::size_t step = std::max<std::size_t>(kPieceBytes / row_bytes, 1);
  std::vector<Piece> pieces;
  for (std::size_t begin = 0; begin < longest(parts); begin += step) {
    pieces.push_back({begin, step});
  }
  return pieces;
}

Hierarchical::Blocks Hierarchical::blocks(const std::vector<ConstMemoryView>& parts, const Piece& piece) {
  const DType dtype = parts.front().dtype;
  std::size_t total = 0;
  for (const ConstMemoryView& part : parts) {
    total += within(part, piece.begin, piece.count).count;
  }
  Blocks result{scratch(total, dtype), {}, std::vector<MemoryView>(parts.size())};
  std::byte* next = result.whole.bytes();
  for (int h = 0; h < layout_.num_hosts(); ++h) {
    MemoryView block{next, 0, dtype};
    for (const int r : layout_.ranks_of(h)) {
      const std::size_t count = within(parts[static_cast<std::size_t>(r)], piece.begin, piece.count).count;
      result.of_rank[static_cast<std::size_t>(r)] = {next, count, dtype};
      block.count += count;
      next += count * element_size(dtype);
    }
    result.of_host.push_back(block);
  }
  return result;
}

void Hierarchical::reduce_scatter(const std::vector<ConstMemoryView>& inputs, MemoryView output, Reduction reduction,
                                  const Call& call) {
  check_reduction(output.dtype, reduction.op);
  check_parts("reduce_scatter", "input", inputs, output.dtype, size());
  check_counts_equal("reduce_scatter", inputs[static_cast<std::size_t>(rank_)], output);
  const CallRecord record = sized_record(CallKind::kReduceScatter, output, counts_of(inputs, size()),
                                         equal_counts(output.count, size()), -1, reduction.op);
  run(record, call, [&] {
    for (const Piece& piece : pieces_of(inputs)) {
      reduce_scatter_piece(inputs, within(output, piece.begin, piece.count), reduction, piece, call);
    }
  });
}

void Hierarchical::reduce_scatter_piece(const std::vector<ConstMemoryView>& inputs, MemoryView output,
                                        const Reduction& reduction, const Piece& piece, const Call& call) {
  const Blocks packed = blocks(inputs, piece);
  for (std::size_t r = 0; r < inputs.size(); ++r) {
    copy_to(within(inputs[r], piece.begin, piece.count).data, packed.of_rank[r]);
  }
  const auto [inner, outer] = two_levels(reduction);
  inside([&, op = inner] { parts_.inside->reduce(packed.whole, 0, op, part_of(call)); });
  std::vector<ConstMemoryView> results;
  if (is_leader()) {
    const MemoryView own = packed.of_host[static_cast<std::size_t>(host())];
    between([&, op = outer] { parts_.rail->reduce_scatter(const_views(packed.of_host), own, op, part_of(call)); });
    results = const_views(of_own_host(packed.of_rank));
  }
  inside([&] { parts_.inside->scatter(results, output, 0, part_of(call)); });
}

void Hierarchical::all_gather(ConstMemoryView input, const std::vector<MemoryView>& outputs, const Call& call) {
  check_parts("all_gather", "output", outputs, input.dtype, size());
  check_counts_equal("all_gather", input, outputs[static_cast<std::size_t>(rank_)]);
  const CallRecord record =
      sized_record(CallKind::kAllGather, input, equal_counts(input.count, size()), counts_of(outputs, size()));
  run(record, call, [&] {
    inside([&] { parts_.inside->all_gather(input, of_own_host(outputs), part_of(call)); });
    if (is_leader()) {
      for (const Piece& piece : pieces_of(const_views(outputs))) {
        gather_from_hosts(outputs, piece, call);
      }
    }
    for (const MemoryView& output : of_other_hosts(outputs, input.dtype)) {
      if (output.count > 0) {
        inside([&] { parts_.inside->broadcast(output, 0, part_of(call)); });
      }
    }
  });
}

void Hierarchical::gather_from_hosts(const std::vector<MemoryView>& outputs, const Piece& piece, const Call& call) {
  const Blocks packed = blocks(const_views(outputs), piece);
  for (const int r : own_ranks()) {
    const auto place = static_cast<std::size_t>(r);
    copy_to(within(outputs[place], piece.begin, piece.count).data, packed.of_rank[place]);
  }
  const MemoryView own = packed.of_host[static_cast<std::size_t>(host())];
  between([&] { parts_.rail->all_gather(own, packed.of_host, part_of(call)); });
  for (std::size_t r = 0; r < outputs.size(); ++r) {
    if (layout_.host_of(static_cast<int>(r)) != host()) {
      copy_to(packed.of_rank[r].data, within(outputs[r], piece.begin, piece.count));
    }
  }
}

void Hierarchical::gather(ConstMemoryView input, const std::vector<MemoryView>& outputs, int root, const Call& call) {
  check_root("gather", root, size());
  const bool is_root = rank_ == root;
  if (is_root) {
    check_parts("gather", "output", outputs, input.dtype, size());
    check_counts_equal("gather", input, outputs[static_cast<std::size_t>(rank_)]);
  }
  const CallRecord record = sized_record(CallKind::kGather, input, one_count(root, input.count, size()),
                                         counts_of(is_root ? outputs : std::vector<MemoryView>{}, size()), root);
  run(record, call, [&] {
    const bool near = host() == layout_.host_of(root);
    if (near) {
      const auto places = is_root ? of_own_host(outputs) : std::vector<MemoryView>{};
      inside([&] { parts_.inside->gather(input, places, layout_.index_within_host(root), part_of(call)); });
    }
    parts_.everyone->gather(near ? ConstMemoryView{nullptr, 0, input.dtype} : input,
                            is_root ? of_other_hosts(outputs, input.dtype) : std::vector<MemoryView>{}, root,
                            part_of(call));
  });
}

void Hierarchical::scatter(const std::vector<ConstMemoryView>& inputs, MemoryView output, int root, const Call& call) {
  check_root("scatter", root, size());
  const bool is_root = rank_ == root;
  if (is_root) {
    check_parts("scatter", "input", inputs, output.dtype, size());
    check_counts_equal("scatter", inputs[static_cast<std::size_t>(rank_)], output);
  }
  const CallRecord record =
      sized_record(CallKind::kScatter, output, counts_of(is_root ? inputs : std::vector<ConstMemoryView>{}, size()),
                   one_count(root, output.count, size()), root);
  run(record, call, [&] {
    const bool near = host() == layout_.host_of(root);
    if (near) {
      const auto places = is_root ? of_own_host(inputs) : std::vector<ConstMemoryView>{};
      inside([&] { parts_.inside->scatter(places, output, layout_.index_within_host(root), part_of(call)); });
    }
    parts_.everyone->scatter(is_root ? of_other_hosts(inputs, output.dtype) : std::vector<ConstMemoryView>{},
                             near ? MemoryView{nullptr, 0, output.dtype} : output, root, part_of(call));
  });
}

void Hierarchical::all_to_all(const std::vector<ConstMemoryView>& inputs, const std::vector<MemoryView>& outputs,
                              const Call& call) {
  const DType dtype = inputs.empty() ? DType::kUInt8 : inputs.front().dtype;
  check_parts("all_to_all", "input", inputs, dtype, size());
  check_parts("all_to_all", "output", outputs, dtype, size());
  const auto own = static_cast<std::size_t>(rank_);
  check_counts_equal("all_to_all", inputs[own], outputs[own]);
  const CallRecord record =
      sized_record(CallKind::kAllToAll, inputs[own], counts_of(inputs, size()), counts_of(outputs, size()));
  run(record, call, [&] {
    inside([&] { parts_.inside->all_to_all(of_own_host(inputs), of_own_host(outputs), part_of(call)); });
    parts_.everyone->all_to_all(of_other_hosts(inputs, dtype), of_other_hosts(outputs, dtype), part_of(call));
  });
}

std::shared_ptr<Communicator> Hierarchical::split(int color, int key, const Call& call) {
  std::shared_ptr<Communicator> result;
  run({CallKind::kSplit}, call, [&] {
    const std::vector<int> members =
        agree_on_members({color, key}, [&](const std::string& own) { return all_gather_bytes(own, call); });
    const auto place = std::find(members.begin(), members.end(), rank_) - members.begin();
    std::vector<int> hosts;
    for (const int member : members) {
      hosts.push_back(layout_.host_of(member));
    }
    const HostLayout layout(hosts);
    const int new_rank = static_cast<int>(place);
    const bool far = color >= 0 && layout.num_hosts() > 1;
    Parts parts;
    inside([&] { parts.inside = parts_.inside->split(color, new_rank, part_of(call)); });
    parts.everyone = parts_.everyone->split(far ? color : -1, new_rank, part_of(call));
    // Each rail of each new group gets a color of its own: no two groups share their first member.
    const bool on_rail = far && layout.is_on_rail(new_rank);
    const int rail = on_rail ? members.front() * size() + layout.index_within_host(new_rank) : -1;
    parts.rail = parts_.everyone->split(rail, new_rank, part_of(call));
    result = far ? std::make_shared<Hierarchical>(layout, parts, hooks_.among(members)) : parts.inside;
  });
  return result;
}

}  // namespace accelerate_cpp::comm
