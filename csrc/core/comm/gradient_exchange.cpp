#include "core/comm/gradient_exchange.h"

#include <cmath>
#include <string>

#include "core/base/error.h"

namespace accelerate_cpp::comm {

double checked_weight(double weight) {
  if (!std::isfinite(weight) || weight < 0.0) {
    throw InvalidArgument("the weight of gradients is " + std::to_string(weight) +
                          "; expected a finite number that is not negative, such as a number of tokens");
  }
  return weight;
}

}  // namespace accelerate_cpp::comm
