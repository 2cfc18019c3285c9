// How the blocks of a model are shared out to devices. A block is what must not be split: a layer, or a tensor of its
// own. Blocks come in the order of the model, in which activations pass through them.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

namespace accelerate_cpp::placement {

struct Partition {
  std::vector<int> device_of_block;  // for each block the index of its device
  std::vector<std::int64_t> loads;   // bytes on each device
};

// Neighbouring blocks stay together, so activations go from device to device once: the first devices get the first
// blocks. The largest load is as small as it can be; among those partitions the loads are as even as they can be (their
// squares have the smallest sum). Nothing if no such partition keeps within `capacities`, in bytes.
// Throws InvalidArgument for a negative size, and for no device.
std::optional<Partition> balanced_partition(const std::vector<std::int64_t>& block_bytes,
                                            const std::vector<std::int64_t>& capacities);

// Any way to keep within `capacities`, whatever the order: activations may go back and forth, but nothing is offloaded.
// Nothing if there is none, or none was found in `most_steps` choices of a device for a block. Up to that many it is
// certain. Throws as above.
std::optional<Partition> any_fit(const std::vector<std::int64_t>& block_bytes,
                                 const std::vector<std::int64_t>& capacities, std::int64_t most_steps);

}  // namespace accelerate_cpp::placement
