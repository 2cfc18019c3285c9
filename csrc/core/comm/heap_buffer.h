// Ordinary memory as a Buffer: zero-filled, aligned to 64 bytes.
#pragma once

#include <cerrno>
#include <cstddef>
#include <cstring>
#include <new>
#include <string>

#include "core/base/error.h"
#include "core/comm/communicator.h"

namespace accelerate_cpp::comm {

class HeapBuffer final : public Buffer {
 public:
  // Throws SystemFailure when there is not enough memory.
  explicit HeapBuffer(std::size_t size_bytes) : data_(::operator new(size_bytes, kAlignment, std::nothrow)) {
    if (data_ == nullptr) {
      throw SystemFailure("allocating " + std::to_string(size_bytes) + " bytes of memory", ENOMEM);
    }
    std::memset(data_, 0, size_bytes);
  }
  ~HeapBuffer() override { ::operator delete(data_, kAlignment); }
  HeapBuffer(const HeapBuffer&) = delete;
  HeapBuffer& operator=(const HeapBuffer&) = delete;

  void* data() override { return data_; }

 private:
  static constexpr std::align_val_t kAlignment{64};

  void* data_;
};

}  // namespace accelerate_cpp::comm
