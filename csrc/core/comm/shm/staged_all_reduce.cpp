#include "core/comm/shm/staged_all_reduce.h"

#include <cstring>

#include "core/comm/copy.h"
#include "core/comm/reduce_kernels.h"

namespace accelerate_cpp::comm {
namespace {

// Elements of a piece: as many whole cache lines per rank as fit.
std::size_t elements_per_piece(int size, const MemoryView& data) {
  const std::size_t ranks = static_cast<std::size_t>(size);
  return piece_bytes_for(data.size_bytes()) / 64 / ranks * 64 * ranks / element_size(data.dtype);
}

}  // namespace

StagedAllReduce::StagedAllReduce(Staging& staging, int rank, int size, MemoryView data, ReduceOp op,
                                 const double* factors, const Deadline& deadline)
    : staging_(staging),
      rank_(rank),
      size_(size),
      data_(data),
      op_(op),
      factors_(factors),
      deadline_(deadline),
      element_bytes_(element_size(data.dtype)),
      piece_elements_(elements_per_piece(size, data)),
      residency_(residency_of(data.size_bytes())),
      sources_(static_cast<std::size_t>(size)),
      first_(staging.begin(piece_bytes_for(data.size_bytes()))) {}

StagedAllReduce::Piece StagedAllReduce::piece(std::size_t index) const {
  const std::size_t begin = index * piece_elements_;
  const Slices slices(std::min(piece_elements_, data_.count - begin), element_bytes_, size_);
  return {data_.bytes() + begin * element_bytes_, slices, slices.count(0) * element_bytes_};
}

void StagedAllReduce::stage(std::size_t index) {
  const Piece part = piece(index);
  staging_.await_free_input(first_ + index, deadline_);
  for (int r = 0; r < size_; ++r) {
    if (r != rank_) {
      std::byte* const place = staging_.input(rank_, first_ + index) + static_cast<std::size_t>(r) * part.stride_bytes;
      std::memcpy(place, slice(part, r), part.slices.count(r) * element_bytes_);
    }
  }
  staging_.publish_staged(first_ + index);
}

void StagedAllReduce::reduce_own(std::size_t index) {
  const Piece part = piece(index);
  staging_.await_all_staged(first_ + index, deadline_);
  for (int r = 0; r < size_; ++r) {
    const std::byte* const staged =
        staging_.input(r, first_ + index) + static_cast<std::size_t>(rank_) * part.stride_bytes;
    sources_[static_cast<std::size_t>(r)] = r == rank_ ? slice(part, rank_) : staged;
  }
  void* destinations[] = {slice(part, rank_), staging_.output(rank_, first_ + index)};
  reduce(data_.dtype, op_,
         {sources_.data(), size_, destinations, 2, part.slices.count(rank_), reduction_scale(op_, size_), factors_});
  staging_.publish_consumed(first_ + index);
}

void StagedAllReduce::collect(std::size_t index) {
  const Piece part = piece(index);
  staging_.await_all_consumed(first_ + index, deadline_);
  for (int r = 0; r < size_; ++r) {
    if (r != rank_) {
      copy(slice(part, r), staging_.output(r, first_ + index), part.slices.count(r) * element_bytes_, residency_);
    }
  }
}

void StagedAllReduce::run() {
  const std::size_t num_pieces = (data_.count + piece_elements_ - 1) / piece_elements_;
  for (std::size_t k = 0; k < num_pieces + 2; ++k) {
    if (k < num_pieces) {
      stage(k);
    }
    if (k >= 1 && k - 1 < num_pieces) {
      reduce_own(k - 1);
    }
    if (k >= 2) {
      collect(k - 2);
    }
  }
  staging_.finish(num_pieces);
}

}  // namespace accelerate_cpp::comm
