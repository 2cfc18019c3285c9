// Shared libraries that are opened while the program runs, so that neither building nor loading this one needs them.
#pragma once

#include <string>
#include <vector>

namespace accelerate_cpp::cuda {

struct LibraryName {
  std::string name;             // what the dynamic linker is asked for: a soname or a path
  bool only_if_loaded = false;  // take the library only when this process has loaded it already
};

class Library {
 public:
  // Opens the first of `names` that can be opened; `title` stands for the library in messages. Throws SystemFailure
  // with everything that was tried. The library stays loaded until the process ends: CUDA and NCCL have threads of
  // their own.
  Library(std::string title, const std::vector<LibraryName>& names);

  // The file that was opened.
  const std::string& path() const { return path_; }

  // Sets `function` to the entry point `name`; throws SystemFailure if the library has no such symbol.
  template <class Function>
  void bind(Function*& function, const char* name) const {
    function = reinterpret_cast<Function*>(symbol(name));
  }

  // The same, but null when the library has no entry point of that name.
  template <class Function>
  void bind_if_there(Function*& function, const char* name) const {
    function = reinterpret_cast<Function*>(find(name));
  }

 private:
  void* symbol(const char* name) const;
  void* find(const char* name) const;

  std::string title_;
  std::string path_;
  void* handle_ = nullptr;
};

// The names to try for a library of NVIDIA's. A given `path` is the only candidate. Otherwise: what this process has
// loaded already (torch's CUDA wheels load both libraries), then what the dynamic linker finds, then the `folders` of
// pip's nvidia packages, which lie beside the folder `beside` (torch's, say; may be empty).
std::vector<LibraryName> nvidia_library_names(const std::string& path, const std::string& beside,
                                              const std::vector<std::string>& sonames,
                                              const std::vector<std::string>& folders);

}  // namespace accelerate_cpp::cuda
