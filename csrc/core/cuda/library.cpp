#include "core/cuda/library.h"

#include <dlfcn.h>
#if defined(__linux__)
#include <link.h>
#endif

#include <cerrno>
#include <filesystem>
#include <utility>

#include "core/base/error.h"

namespace accelerate_cpp::cuda {
namespace {

// On systems other than Linux, the name by which it was found.
std::string file_of([[maybe_unused]] void* handle, const std::string& name) {
#if defined(__linux__)
  link_map* map = nullptr;
  if (::dlinfo(handle, RTLD_DI_LINKMAP, &map) == 0 && map != nullptr && map->l_name[0] != '\0') {
    return map->l_name;
  }
#endif
  return name;
}

}  // namespace

Library::Library(std::string title, const std::vector<LibraryName>& names) : title_(std::move(title)) {
  std::string tried;
  for (const LibraryName& candidate : names) {
    handle_ = ::dlopen(candidate.name.c_str(), RTLD_NOW | RTLD_LOCAL | (candidate.only_if_loaded ? RTLD_NOLOAD : 0));
    if (handle_ != nullptr) {
      path_ = file_of(handle_, candidate.name);
      return;
    }
    const char* const reason = ::dlerror();
    tried += (tried.empty() ? "" : "; ") + candidate.name + " (" +
             (candidate.only_if_loaded ? "not loaded by this process" : (reason == nullptr ? "no reason" : reason)) +
             ")";
  }
  throw SystemFailure(title_ + " was not found. Tried, in this order: " + tried + ". Install it or give its path",
                      ENOENT);
}

void* Library::find(const char* name) const {
  return ::dlsym(handle_, name);
}

void* Library::symbol(const char* name) const {
  void* const address = find(name);
  if (address == nullptr) {
    throw SystemFailure(
        title_ + " at " + path_ + " has no entry point " + name + ": it is not that library, or a version too old",
        ENOSYS);
  }
  return address;
}

std::vector<LibraryName> nvidia_library_names(const std::string& path, const std::string& beside,
                                              const std::vector<std::string>& sonames,
                                              const std::vector<std::string>& folders) {
  if (!path.empty()) {
    return {{path, false}};
  }
  std::vector<LibraryName> names;
  for (const bool only_if_loaded : {true, false}) {
    for (const std::string& soname : sonames) {
      names.push_back({soname, only_if_loaded});
    }
  }
  if (!beside.empty()) {
    const std::filesystem::path around = std::filesystem::path(beside).parent_path();
    for (const std::string& folder : folders) {
      for (const std::string& soname : sonames) {
        names.push_back({(around / folder / soname).string(), false});
      }
    }
  }
  return names;
}

}  // namespace accelerate_cpp::cuda
