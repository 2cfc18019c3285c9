// One all-reduce of an operand that does not lie in the arena, piece by piece through the staging slots.
//
// Piece k is divided into one slice per rank. A rank copies the slices of the others into its input slot (stage),
// combines everybody's copy of its own slice (reduce), and fetches the combined slices of the others from their output
// slots (collect). Pieces k, k - 1 and k - 2 are in these three phases at once, so that ranks rarely wait for each
// other.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/base/deadline.h"
#include "core/base/memory_view.h"
#include "core/comm/copy.h"
#include "core/comm/options.h"
#include "core/comm/shm/staging.h"
#include "core/comm/slices.h"

namespace accelerate_cpp::comm {

class StagedAllReduce {
 public:
  // `factors`: one per rank for kPreMulSum, else null.
  StagedAllReduce(Staging& staging, int rank, int size, MemoryView data, ReduceOp op, const double* factors,
                  const Deadline& deadline);

  // Returns when `data` holds the result. Every rank must be in the same operation.
  void run();

 private:
  struct Piece {
    std::byte* data;
    Slices slices;
    std::size_t stride_bytes;  // between slices in an input slot
  };

  Piece piece(std::size_t index) const;
  std::byte* slice(const Piece& piece, int rank) const {
    return piece.data + piece.slices.begin(rank) * element_bytes_;
  }
  void stage(std::size_t index);
  void reduce_own(std::size_t index);
  void collect(std::size_t index);

  Staging& staging_;
  const int rank_;
  const int size_;
  const MemoryView data_;
  const ReduceOp op_;
  const double* const factors_;
  const Deadline& deadline_;
  const std::size_t element_bytes_;
  const std::size_t piece_elements_;
  const Residency residency_;
  std::vector<const void*> sources_;
  const std::uint64_t first_;  // number of the first piece
};

}  // namespace accelerate_cpp::comm
