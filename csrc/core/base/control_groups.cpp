#include "core/base/control_groups.h"

#include <fstream>
#include <sstream>

namespace accelerate_cpp {
namespace {

// Whether a comma-separated list has `word`.
bool lists(const std::string& text, const std::string& word) {
  std::istringstream words(text);
  for (std::string one; std::getline(words, one, ',');) {
    if (one == word) {
      return true;
    }
  }
  return false;
}

}  // namespace

std::vector<ControlGroup> control_groups(const std::string& listing, const std::string& mounts,
                                         const std::string& controller) {
  std::vector<ControlGroup> groups;
  std::ifstream file(listing);
  // Lines are "number:controllers:/path"; version 2 has the number 0 and no controllers.
  for (std::string line; std::getline(file, line);) {
    const std::size_t first = line.find(':');
    const std::size_t second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) {
      continue;
    }
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const std::string root = controllers.empty() ? mounts : mounts + "/" + controller;
    if (controllers.empty() || lists(controllers, controller)) {
      groups.push_back({root + line.substr(second + 1), root});
    }
  }
  return groups;
}

std::vector<std::string> with_ancestors(const ControlGroup& group) {
  std::vector<std::string> folders;
  for (std::string place = group.folder; place.size() >= group.root.size(); place.erase(place.find_last_of('/'))) {
    folders.push_back(place);
    if (place.find('/') == std::string::npos) {
      break;
    }
  }
  return folders;
}

}  // namespace accelerate_cpp
