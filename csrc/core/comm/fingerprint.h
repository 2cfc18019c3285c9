// A 64-bit digest (FNV-1a) with which ranks notice that their data differ.
#pragma once

#include <cstdint>
#include <string>

namespace accelerate_cpp::comm {

class Fingerprint {
 public:
  void mix(std::uint64_t value) { value_ = (value_ ^ value) * 1099511628211u; }
  void mix(const std::string& text) {
    for (const char character : text) {
      mix(static_cast<unsigned char>(character));
    }
  }
  std::uint64_t value() const { return value_; }

 private:
  std::uint64_t value_ = 14695981039346656037u;
};

}  // namespace accelerate_cpp::comm
