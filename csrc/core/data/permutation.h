// A shuffled order of any length that is never stored: the index at a position is computed from the position and a
// seed, so a pass can begin anywhere at no cost. A Feistel network over the next power of two (Luby and Rackoff, "How
// to Construct Pseudorandom Permutations from Pseudorandom Functions", 1988), walked until it lands below the length
// (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002). Not for secrets. For 2^k numbers with k above 3,
// it only generates even permutations.
#pragma once

#include <array>
#include <cstdint>

namespace accelerate_cpp::data {

class Permutation {
 public:
  // Of the numbers below `size`. Different `turn`s of one seed are independent of each other, as different seeds are.
  Permutation(std::uint64_t size, std::uint64_t seed, std::uint64_t turn = 0);

  std::uint64_t size() const { return size_; }

  // The number at `position`, which is below size(). A few tens of nanoseconds. Thread-safe.
  std::uint64_t at(std::uint64_t position) const;

 private:
  static constexpr int kMostRounds = 48;

  std::uint64_t enciphered(std::uint64_t value) const;

  std::uint64_t size_;
  int low_bits_, high_bits_;  // of a number that the network takes
  int rounds_;
  std::array<std::uint64_t, kMostRounds> keys_;
};

}  // namespace accelerate_cpp::data
