// ACCELERATE_CHECK(condition, message): a broken invariant throws InternalError with the place and the message.
#pragma once

#include <string>

#include "core/base/error.h"

#define ACCELERATE_CHECK(condition, message)                                                       \
  do {                                                                                             \
    if (!(condition)) [[unlikely]] {                                                               \
      throw ::accelerate_cpp::InternalError(std::string(__FILE__ ":") + std::to_string(__LINE__) + \
                                            ": " #condition " does not hold: " + (message));       \
    }                                                                                              \
  } while (false)
