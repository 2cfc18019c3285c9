// NVIDIA's compiler of CUDA C++ as a library (NVRTC), which torch's CUDA wheels bring along, and our kernels compiled
// by it. A build needs neither NVRTC nor a CUDA toolkit, and compiling needs no GPU.
#pragma once

#include <string>
#include <vector>

namespace accelerate_cpp::cuda {

enum class CompilerStatus : int { kSuccess = 0, kCompilation = 6 };

struct ProgramOpaque;
using Program = ProgramOpaque*;

// What cuModuleLoadData() takes.
struct KernelImage {
  std::string bytes;  // machine code; or text in PTX, which the driver compiles for a device that NVRTC is too old for
  std::string architecture;  // for which NVRTC compiled: "sm_90", "compute_120"
};

class KernelCompiler {
 public:
  // Opens `path`, or libnvrtc where nvidia_library_names() finds it. Throws SystemFailure.
  explicit KernelCompiler(const std::string& path = "", const std::string& beside = "");

  const std::string& path() const { return path_; }  // the file that was opened

  // The compute capabilities that can be compiled for, ascending: 90 for 9.0.
  std::vector<int> capabilities() const;

  // The kernels of slot_kernels.h for a device of that compute capability. Throws SystemFailure, with what the compiler
  // says, when it cannot.
  KernelImage slot_kernels(int capability) const;

 private:
  std::string compile(const std::string& architecture) const;
  std::string log(Program program) const;
  void check(CompilerStatus status, const char* call) const;

  std::string path_;
  CompilerStatus (*create_program_)(Program* program, const char* source, const char* name, int num_headers,
                                    const char* const* headers, const char* const* include_names);
  CompilerStatus (*destroy_program_)(Program* program);
  CompilerStatus (*compile_program_)(Program program, int num_options, const char* const* options);
  CompilerStatus (*get_log_size_)(Program program, std::size_t* size);
  CompilerStatus (*get_log_)(Program program, char* log);
  CompilerStatus (*get_ptx_size_)(Program program, std::size_t* size);
  CompilerStatus (*get_ptx_)(Program program, char* ptx);
  CompilerStatus (*get_cubin_size_)(Program program, std::size_t* size);
  CompilerStatus (*get_cubin_)(Program program, char* cubin);
  CompilerStatus (*get_num_supported_archs_)(int* count);
  CompilerStatus (*get_supported_archs_)(int* capabilities);
  const char* (*get_error_string_)(CompilerStatus status);
};

}  // namespace accelerate_cpp::cuda
