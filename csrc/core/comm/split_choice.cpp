#include "core/comm/split_choice.h"

#include <algorithm>
#include <cstddef>

namespace accelerate_cpp::comm {

std::vector<int> members_of(const std::vector<SplitChoice>& choices, int color) {
  std::vector<int> members;
  for (std::size_t r = 0; r < choices.size(); ++r) {
    if (choices[r].color == color) {
      members.push_back(static_cast<int>(r));
    }
  }
  std::stable_sort(members.begin(), members.end(), [&](int a, int b) {
    return choices[static_cast<std::size_t>(a)].key < choices[static_cast<std::size_t>(b)].key;
  });
  return members;
}

}  // namespace accelerate_cpp::comm
