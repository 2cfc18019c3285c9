// How the blocks of a model are shared out to devices. A block is what must not be split: a layer, or a tensor of its
// own. Blocks come in the order of the model, in which activations pass through them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace accelerate_cpp::placement {

struct Partition {
  std::vector<int> device_of_block;  // for each block the index of its device
  std::vector<std::int64_t> loads;   // bytes on each device
};

// Neighbouring blocks that make up a module: those from `begin` to before `end`. It is split if they are on several
// devices.
struct Module {
  std::size_t begin;
  std::size_t end;
};

// Neighbouring blocks stay together, so activations go from device to device once: the first devices get the first
// blocks. The largest load is as small as it can be, or, to split fewer modules, up to `tolerance` (0.05 for 5 %) above
// what no partition can be below: the larger of the mean load and the largest block. As few of `modules` as possible
// are split; among those partitions the loads are as even as they can be (their squares have the smallest sum). Nothing
// if no such partition keeps within `capacities`, in bytes. Takes time in proportion to the square of the number of
// blocks. Throws InvalidArgument for a negative size or tolerance, a module that is not among the blocks, and for no
// device.
std::optional<Partition> balanced_partition(const std::vector<std::int64_t>& block_bytes,
                                            const std::vector<std::int64_t>& capacities,
                                            const std::vector<Module>& modules = {}, double tolerance = 0);

// Any partition within `capacities`, in any order: activations may go back and forth, but nothing is offloaded. Nothing
// if there is none, or if none was found in `most_steps` choices of a device for a block; with fewer steps the answer
// is certain. Throws as above.
std::optional<Partition> any_fit(const std::vector<std::int64_t>& block_bytes,
                                 const std::vector<std::int64_t>& capacities, std::int64_t most_steps);

}  // namespace accelerate_cpp::placement
