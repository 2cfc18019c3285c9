#include "core/placement/partition.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <string>

#include "core/base/error.h"

namespace accelerate_cpp::placement {
namespace {

using Bytes = std::int64_t;

void require_sizes(const std::vector<Bytes>& block_bytes, const std::vector<Bytes>& capacities) {
  if (capacities.empty()) {
    throw InvalidArgument("blocks cannot be shared out to no device: expected at least one capacity");
  }
  for (const std::vector<Bytes>* sizes : {&block_bytes, &capacities}) {
    for (const Bytes bytes : *sizes) {
      if (bytes < 0) {
        throw InvalidArgument("a size of " + std::to_string(bytes) + " bytes: expected 0 or more");
      }
    }
  }
}

void require_modules(const std::vector<Module>& modules, std::size_t num_blocks, double tolerance) {
  if (!(tolerance >= 0)) {
    throw InvalidArgument("a tolerance of " + std::to_string(tolerance) + ": expected 0 or more");
  }
  for (const Module& module : modules) {
    if (module.begin >= module.end || module.end > num_blocks) {
      throw InvalidArgument("a module of the blocks from " + std::to_string(module.begin) + " to before " +
                            std::to_string(module.end) + ": there are " + std::to_string(num_blocks));
    }
  }
}

std::vector<Bytes> loads_of(const std::vector<Bytes>& block_bytes, const std::vector<int>& device_of_block,
                            std::size_t num_devices) {
  std::vector<Bytes> loads(num_devices, 0);
  for (std::size_t block = 0; block < block_bytes.size(); ++block) {
    loads[static_cast<std::size_t>(device_of_block[block])] += block_bytes[block];
  }
  return loads;
}

// Whether the blocks fit in order when no device may have more than `limit`. To fill each device as far as possible is
// never worse than to leave room.
bool fits_in_order(const std::vector<Bytes>& block_bytes, const std::vector<Bytes>& capacities, Bytes limit) {
  std::size_t device = 0;
  Bytes load = 0;
  for (const Bytes bytes : block_bytes) {
    while (load + bytes > std::min(limit, capacities[device])) {
      load = 0;
      if (++device == capacities.size()) {
        return false;
      }
    }
    load += bytes;
  }
  return true;
}

// The smallest largest load with which the blocks fit in order; nothing if they do not.
std::optional<Bytes> smallest_limit(const std::vector<Bytes>& block_bytes, const std::vector<Bytes>& capacities) {
  Bytes high = std::accumulate(block_bytes.begin(), block_bytes.end(), Bytes{0});
  if (!fits_in_order(block_bytes, capacities, high)) {
    return std::nullopt;
  }
  Bytes low = 0;
  while (low < high) {
    const Bytes middle = low + (high - low) / 2;
    if (fits_in_order(block_bytes, capacities, middle)) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return high;
}

// The largest load that is good enough: the smallest possible one, or one close to the lower bound.
Bytes allowed_limit(const std::vector<Bytes>& block_bytes, std::size_t num_devices, Bytes smallest, double tolerance) {
  const Bytes total = std::accumulate(block_bytes.begin(), block_bytes.end(), Bytes{0});
  const double mean = static_cast<double>(total) / static_cast<double>(num_devices);
  const auto largest =
      block_bytes.empty() ? 0.0 : static_cast<double>(*std::max_element(block_bytes.begin(), block_bytes.end()));
  return std::max(smallest, static_cast<Bytes>((1 + tolerance) * std::max(mean, largest)));
}

// The way to share out the blocks in order that splits the fewest modules, and is the most even of those, with no load
// above `limit`, with which they fit.
class WholePartition {
 public:
  WholePartition(const std::vector<Bytes>& block_bytes, const std::vector<Bytes>& capacities,
                 const std::vector<Module>& modules, Bytes limit)
      : capacities_(capacities), limit_(limit), ends_(block_bytes.size() + 1, 0), begins_around_(ends_.size()) {
    std::partial_sum(block_bytes.begin(), block_bytes.end(), ends_.begin() + 1);
    for (const Module& module : modules) {
      for (std::size_t cut = module.begin + 1; cut < module.end; ++cut) {
        begins_around_[cut].push_back(module.begin);
      }
    }
    for (std::vector<std::size_t>& begins : begins_around_) {
      std::sort(begins.rbegin(), begins.rend());
    }
  }

  std::vector<int> devices() {
    const std::size_t count = ends_.size();
    std::vector<Cost> best(count);  // of the first blocks on the devices so far
    best[0] = Cost{0, 0};
    for (std::size_t device = 0; device < capacities_.size(); ++device) {
      best = with_device(device, best);
    }
    std::vector<int> devices(count - 1);
    std::size_t end = count - 1;
    for (std::size_t device = capacities_.size(); device-- > 0;) {
      const std::size_t begin = begins_[device][end];
      std::fill(devices.begin() + static_cast<std::ptrdiff_t>(begin),
                devices.begin() + static_cast<std::ptrdiff_t>(end), static_cast<int>(device));
      end = begin;
    }
    return devices;
  }

 private:
  struct Cost {
    std::size_t split = std::numeric_limits<std::size_t>::max();  // modules; this many: there is no way
    double squares = 0;                                           // of loads

    bool operator<(const Cost& other) const {
      return split != other.split ? split < other.split : squares < other.squares;
    }
  };

  // The smallest costs with one more device, which takes the blocks from `begins_[device][end]` to `end`.
  std::vector<Cost> with_device(std::size_t device, const std::vector<Cost>& before) {
    const Bytes room = std::min(limit_, capacities_[device]);
    std::vector<Cost> best(ends_.size());
    std::vector<std::size_t>& begins = begins_.emplace_back(ends_.size(), 0);
    for (std::size_t end = 0; end < ends_.size(); ++end) {
      // Modules that are split at `end`, and not before: of those around it the ones that begin at `begin` or later.
      const std::vector<std::size_t>& around = begins_around_[end];
      std::size_t split = 0;
      for (std::size_t begin = end + 1; begin-- > 0 && ends_[end] - ends_[begin] <= room;) {
        while (split < around.size() && around[split] >= begin) {
          ++split;
        }
        if (before[begin].split == Cost{}.split) {
          continue;
        }
        const auto load = static_cast<double>(ends_[end] - ends_[begin]);
        const Cost cost{before[begin].split + split, before[begin].squares + load * load};
        if (cost < best[end]) {
          best[end] = cost;
          begins[end] = begin;
        }
      }
    }
    return best;
  }

  const std::vector<Bytes>& capacities_;
  Bytes limit_;
  std::vector<Bytes> ends_;                              // bytes of all blocks before each
  std::vector<std::vector<std::size_t>> begins_around_;  // of the modules around each place between blocks, last first
  std::vector<std::vector<std::size_t>> begins_;
};

// Places the blocks one after the other, the largest first, and backtracks when one does not fit.
class FitSearch {
 public:
  FitSearch(const std::vector<Bytes>& block_bytes, const std::vector<Bytes>& capacities, std::int64_t most_steps)
      : bytes_(block_bytes),
        order_(block_bytes.size()),
        room_(capacities),
        device_of_block_(block_bytes.size(), 0),
        steps_left_(most_steps) {
    std::iota(order_.begin(), order_.end(), std::size_t{0});
    std::stable_sort(order_.begin(), order_.end(), [&](std::size_t a, std::size_t b) { return bytes_[a] > bytes_[b]; });
  }

  bool found() { return place(0); }

  const std::vector<int>& devices() const { return device_of_block_; }

 private:
  bool place(std::size_t position) {
    if (position == order_.size()) {
      return true;
    }
    const std::size_t block = order_[position];
    for (std::size_t device = 0; device < room_.size(); ++device) {
      if (bytes_[block] > room_[device] || is_like_an_earlier_one(device)) {
        continue;
      }
      if (steps_left_-- <= 0) {
        return false;
      }
      room_[device] -= bytes_[block];
      device_of_block_[block] = static_cast<int>(device);
      if (place(position + 1)) {
        return true;
      }
      room_[device] += bytes_[block];
    }
    return false;
  }

  // What holds for a device holds for any other with as much room left.
  bool is_like_an_earlier_one(std::size_t device) const {
    const auto end = room_.begin() + static_cast<std::ptrdiff_t>(device);
    return std::find(room_.begin(), end, room_[device]) != end;
  }

  const std::vector<Bytes>& bytes_;
  std::vector<std::size_t> order_;
  std::vector<Bytes> room_;
  std::vector<int> device_of_block_;
  std::int64_t steps_left_;
};

}  // namespace

std::optional<Partition> balanced_partition(const std::vector<std::int64_t>& block_bytes,
                                            const std::vector<std::int64_t>& capacities,
                                            const std::vector<Module>& modules, double tolerance) {
  require_sizes(block_bytes, capacities);
  require_modules(modules, block_bytes.size(), tolerance);
  const std::optional<Bytes> smallest = smallest_limit(block_bytes, capacities);
  if (!smallest) {
    return std::nullopt;
  }
  const Bytes limit = allowed_limit(block_bytes, capacities.size(), *smallest, tolerance);
  std::vector<int> devices = WholePartition(block_bytes, capacities, modules, limit).devices();
  std::vector<Bytes> loads = loads_of(block_bytes, devices, capacities.size());
  return Partition{std::move(devices), std::move(loads)};
}

std::optional<Partition> any_fit(const std::vector<std::int64_t>& block_bytes,
                                 const std::vector<std::int64_t>& capacities, std::int64_t most_steps) {
  require_sizes(block_bytes, capacities);
  const Bytes needed = std::accumulate(block_bytes.begin(), block_bytes.end(), Bytes{0});
  const Bytes room = std::accumulate(capacities.begin(), capacities.end(), Bytes{0});
  FitSearch search(block_bytes, capacities, most_steps);
  if (needed > room || !search.found()) {
    return std::nullopt;
  }
  return Partition{search.devices(), loads_of(block_bytes, search.devices(), capacities.size())};
}

}  // namespace accelerate_cpp::placement
