#include "core/cuda/kernel_compiler.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>

#include "core/base/error.h"
#include "core/cuda/library.h"
#include "core/cuda/slot_kernels_source.h"

namespace accelerate_cpp::cuda {

KernelCompiler::KernelCompiler(const std::string& path, const std::string& beside) {
  const Library library("The CUDA compiler (libnvrtc; torch's CUDA wheels and pip's nvidia-cuda-nvrtc have it)",
                        nvidia_library_names(path, beside, {"libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so.11.2"},
                                             {"nvidia/cu13/lib", "nvidia/cuda_nvrtc/lib"}));
  path_ = library.path();
  library.bind(create_program_, "nvrtcCreateProgram");
  library.bind(destroy_program_, "nvrtcDestroyProgram");
  library.bind(compile_program_, "nvrtcCompileProgram");
  library.bind(get_log_size_, "nvrtcGetProgramLogSize");
  library.bind(get_log_, "nvrtcGetProgramLog");
  library.bind(get_ptx_size_, "nvrtcGetPTXSize");
  library.bind(get_ptx_, "nvrtcGetPTX");
  library.bind(get_cubin_size_, "nvrtcGetCUBINSize");
  library.bind(get_cubin_, "nvrtcGetCUBIN");
  library.bind(get_num_supported_archs_, "nvrtcGetNumSupportedArchs");
  library.bind(get_supported_archs_, "nvrtcGetSupportedArchs");
  library.bind(get_error_string_, "nvrtcGetErrorString");
}

std::vector<int> KernelCompiler::capabilities() const {
  int count = 0;
  check(get_num_supported_archs_(&count), "nvrtcGetNumSupportedArchs");
  std::vector<int> all(static_cast<std::size_t>(count));
  check(get_supported_archs_(all.data()), "nvrtcGetSupportedArchs");
  std::sort(all.begin(), all.end());
  return all;
}

KernelImage KernelCompiler::slot_kernels(int capability) const {
  const std::vector<int> known = capabilities();
  if (std::binary_search(known.begin(), known.end(), capability)) {
    const std::string architecture = "sm_" + std::to_string(capability);
    return {compile(architecture), architecture};
  }
  // PTX for an older device runs on every newer one, not the other way round.
  const auto newer = std::upper_bound(known.begin(), known.end(), capability);
  if (newer == known.begin()) {
    throw SystemFailure("The CUDA compiler at " + path_ + " compiles for compute capability " +
                            (known.empty() ? "none" : std::to_string(known.front()) + " and newer") + ", not for " +
                            std::to_string(capability),
                        ENOSYS);
  }
  const std::string architecture = "compute_" + std::to_string(*std::prev(newer));
  return {compile(architecture), architecture};
}

std::string KernelCompiler::compile(const std::string& architecture) const {
  Program program = nullptr;
  const char* const name = "core/cuda/slot_layout.h";
  check(create_program_(&program, kSlotKernelsSource, "core/cuda/slot_kernels.h", 1, &kSlotLayoutSource, &name),
        "nvrtcCreateProgram");
  struct Destroyed {
    const KernelCompiler& compiler;
    Program& program;
    ~Destroyed() { compiler.destroy_program_(&program); }
  } const destroyed{*this, program};

  const std::string option = "--gpu-architecture=" + architecture;
  const std::array options{option.c_str(), "--std=c++17"};
  const CompilerStatus status = compile_program_(program, static_cast<int>(options.size()), options.data());
  if (status == CompilerStatus::kCompilation) {
    throw SystemFailure(
        "The CUDA compiler at " + path_ + " refused the kernels for " + architecture + ": " + log(program), EIO);
  }
  check(status, "nvrtcCompileProgram");
  const bool machine_code = architecture.starts_with("sm_");
  std::size_t size = 0;
  check(machine_code ? get_cubin_size_(program, &size) : get_ptx_size_(program, &size), "asking for the size");
  std::string bytes(size, '\0');
  check(machine_code ? get_cubin_(program, bytes.data()) : get_ptx_(program, bytes.data()), "asking for the code");
  return bytes;
}

std::string KernelCompiler::log(Program program) const {
  std::size_t size = 0;
  check(get_log_size_(program, &size), "nvrtcGetProgramLogSize");
  std::string text(size, '\0');
  check(get_log_(program, text.data()), "nvrtcGetProgramLog");
  return text.c_str();  // without its closing zeros
}

void KernelCompiler::check(CompilerStatus status, const char* call) const {
  if (status != CompilerStatus::kSuccess) {
    throw SystemFailure(
        "The CUDA compiler at " + path_ + ": " + call + " failed with \"" + get_error_string_(status) + "\"", EIO);
  }
}

}  // namespace accelerate_cpp::cuda
