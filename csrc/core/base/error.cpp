#include "core/base/error.h"

#include <system_error>

namespace accelerate_cpp {

SystemFailure::SystemFailure(const std::string& call, int error_number)
    : Error(call + ": " + std::generic_category().message(error_number) + " (errno " + std::to_string(error_number) +
            ")"),
      error_number_(error_number) {}

}  // namespace accelerate_cpp
