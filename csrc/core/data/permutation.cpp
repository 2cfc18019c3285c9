#include "core/data/permutation.h"

#include <bit>

#include "core/base/check.h"

namespace accelerate_cpp::data {
namespace {

constexpr std::uint64_t kGoldenRatio = 0x9e3779b97f4a7c15;  // 2^64 divided by it

// Every bit of the result depends on every bit of `value`: the finaliser of SplitMix64 (Steele, Lea and Flood, "Fast
// Splittable Pseudorandom Number Generators", 2014).
std::uint64_t mixed(std::uint64_t value) {
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9;
  value = (value ^ (value >> 27)) * 0x94d049bb133111eb;
  return value ^ (value >> 31);
}

std::uint64_t lowest(int bits) {
  return (std::uint64_t{1} << bits) - 1;
}

}  // namespace

Permutation::Permutation(std::uint64_t size, std::uint64_t seed, std::uint64_t turn) : size_(size) {
  const int bits = size == 0 ? 0 : std::bit_width(size - 1);
  high_bits_ = bits / 2;
  low_bits_ = bits - high_bits_;
  // Twelve rounds are enough when each half has many values; for a few numbers they would favour some orders.
  rounds_ = bits > 12 ? 12 : kMostRounds;
  std::uint64_t state = mixed(seed + kGoldenRatio) ^ mixed(turn * kGoldenRatio);
  for (std::uint64_t& key : keys_) {
    state += kGoldenRatio;
    key = mixed(state);
  }
}

std::uint64_t Permutation::at(std::uint64_t position) const {
  ACCELERATE_CHECK(position < size_, "positions are below the size");
  std::uint64_t value = enciphered(position);
  while (value >= size_) {  // half of all numbers at most lie there
    value = enciphered(value);
  }
  return value;
}

std::uint64_t Permutation::enciphered(std::uint64_t value) const {
  const std::uint64_t low_mask = lowest(low_bits_), high_mask = lowest(high_bits_);
  std::uint64_t low = value & low_mask, high = value >> low_bits_;
  for (int round = 0; round < rounds_; round += 2) {
    high ^= mixed(low + keys_[round]) & high_mask;
    low ^= mixed(high + keys_[round + 1]) & low_mask;
  }
  return (high << low_bits_) | low;
}

}  // namespace accelerate_cpp::data
