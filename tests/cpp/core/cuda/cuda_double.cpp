#include "core/cuda/cuda_double.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>
#include <mutex>

#include "core/cuda/grid_on_threads.h"
#include "core/cuda/kernel_compiler.h"
#include "core/cuda/slot_kernels.h"

namespace accelerate_cpp::cuda {

struct FunctionOpaque {
  const char* name;
  void (*take)(void*, const Chunk*, double, Partial*);  // null: the function combines
};

struct ProgramOpaque {
  bool has_header = false;
  std::string image;
};

namespace testing {
namespace {

std::array functions{FunctionOpaque{"measure_float32", measure_float32},
                     FunctionOpaque{"scale_float32", scale_float32},
                     FunctionOpaque{"measure_float64", measure_float64},
                     FunctionOpaque{"scale_float64", scale_float64},
                     FunctionOpaque{"measure_float16", measure_float16},
                     FunctionOpaque{"scale_float16", scale_float16},
                     FunctionOpaque{"measure_bfloat16", measure_bfloat16},
                     FunctionOpaque{"scale_bfloat16", scale_bfloat16},
                     FunctionOpaque{"combine_chunks", nullptr}};

// The context and the module.
int the_one = 0;

thread_local int t_num_contexts = 0;

std::recursive_mutex& double_mutex() {
  static std::recursive_mutex mutex;
  return mutex;
}

template <class Status, class Body>
Status entry(const char* name, const Body& body) {
  const std::lock_guard lock(double_mutex());
  const auto found = cuda_double().failures.find(name);
  if (found != cuda_double().failures.end()) {
    return static_cast<Status>(found->second);
  }
  body();
  return Status::kSuccess;
}

template <class Body>
DriverStatus drive(const char* name, const Body& body) {
  return entry<DriverStatus>(name, body);
}

// What needs a context that is current.
template <class Body>
DriverStatus drive_in_context(const char* name, const Body& body) {
  return drive(name, [&] {
    if (t_num_contexts == 0) {
      cuda_double().problems.push_back(std::string(name) + " without a context");
    }
    body();
  });
}

template <class Body>
CompilerStatus compile(const char* name, const Body& body) {
  return entry<CompilerStatus>(name, body);
}

template <class T>
T argument(void** parameters, std::size_t index) {
  return *static_cast<T*>(parameters[index]);
}

void run(const FunctionOpaque& function, unsigned num_blocks, void** parameters) {
  if (function.take == nullptr) {
    launch(num_blocks, combine_chunks, argument<const Partial*>(parameters, 0),
           argument<const unsigned*>(parameters, 1), argument<double*>(parameters, 2));
  } else {
    launch(num_blocks, function.take, argument<void*>(parameters, 0), argument<const Chunk*>(parameters, 1),
           argument<double>(parameters, 2), argument<Partial*>(parameters, 3));
  }
}

}  // namespace

CudaDouble& cuda_double() {
  static CudaDouble instance;
  return instance;
}

void CudaDouble::reset() {
  *this = CudaDouble();
  t_num_contexts = 0;
}

int CudaDouble::num_contexts() const {
  return t_num_contexts;
}

}  // namespace testing
}  // namespace accelerate_cpp::cuda

using namespace accelerate_cpp::cuda;           // NOLINT(google-build-using-namespace)
using namespace accelerate_cpp::cuda::testing;  // NOLINT(google-build-using-namespace)

#define DOUBLE_ENTRY extern "C" __attribute__((visibility("default")))

DOUBLE_ENTRY DriverStatus cuInit(unsigned) {
  return drive("cuInit", [] {});
}

DOUBLE_ENTRY DriverStatus cuDeviceGet(int* device, int ordinal) {
  return drive("cuDeviceGet", [&] { *device = ordinal; });
}

DOUBLE_ENTRY DriverStatus cuDeviceGetAttribute(int* value, DeviceAttribute attribute, int) {
  return drive("cuDeviceGetAttribute", [&] {
    const bool major = attribute == DeviceAttribute::kComputeCapabilityMajor;
    *value = major ? cuda_double().capability / 10 : cuda_double().capability % 10;
  });
}

DOUBLE_ENTRY DriverStatus cuDevicePrimaryCtxRetain(Context* context, int) {
  return drive("cuDevicePrimaryCtxRetain", [&] { *context = reinterpret_cast<Context>(&the_one); });
}

DOUBLE_ENTRY DriverStatus cuCtxPushCurrent_v2(Context context) {
  return drive("cuCtxPushCurrent", [&] {
    if (context != reinterpret_cast<Context>(&the_one)) {
      cuda_double().problems.push_back("a foreign context");
    }
    ++t_num_contexts;
  });
}

DOUBLE_ENTRY DriverStatus cuCtxPopCurrent_v2(Context* context) {
  return drive("cuCtxPopCurrent", [&] {
    *context = reinterpret_cast<Context>(&the_one);
    --t_num_contexts;
  });
}

DOUBLE_ENTRY DriverStatus cuModuleLoadData(Module* module, const void* image) {
  return drive_in_context("cuModuleLoadData", [&] {
    cuda_double().loaded.emplace_back(static_cast<const char*>(image));
    *module = reinterpret_cast<Module>(&the_one);
  });
}

DOUBLE_ENTRY DriverStatus cuModuleGetFunction(Function* function, Module, const char* name) {
  const auto found = std::find_if(functions.begin(), functions.end(),
                                  [&](const FunctionOpaque& one) { return std::strcmp(one.name, name) == 0; });
  if (found == functions.end()) {
    return DriverStatus{500};  // not found
  }
  return drive_in_context("cuModuleGetFunction", [&] { *function = &*found; });
}

DOUBLE_ENTRY DriverStatus cuLaunchKernel(Function function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                                         unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared_bytes,
                                         Stream stream, void** parameters, void** extra) {
  return drive_in_context("cuLaunchKernel", [&] {
    if (grid_x == 0 || grid_y * grid_z * block_y * block_z != 1 || block_x != kBlockThreads || shared_bytes != 0 ||
        extra != nullptr) {
      cuda_double().problems.push_back("a grid that the kernels are not written for");
    }
    cuda_double().launches.push_back({function->name, grid_x, stream});
    run(*function, grid_x, parameters);
  });
}

DOUBLE_ENTRY DriverStatus cuGetErrorString(DriverStatus, const char** text) {
  *text = "an error of the double";
  return DriverStatus::kSuccess;
}

DOUBLE_ENTRY CompilerStatus nvrtcCreateProgram(Program* program, const char* source, const char*, int num_headers,
                                               const char* const* headers, const char* const* include_names) {
  return compile("nvrtcCreateProgram", [&] {
    const std::string include = "#include \"" + std::string(num_headers == 1 ? include_names[0] : "?") + "\"";
    const bool whole =
        std::strstr(source, include.c_str()) != nullptr && std::strstr(headers[0], "struct Chunk") != nullptr;
    *program = new ProgramOpaque{whole, {}};
  });
}

DOUBLE_ENTRY CompilerStatus nvrtcDestroyProgram(Program* program) {
  delete *program;
  *program = nullptr;
  return CompilerStatus::kSuccess;
}

DOUBLE_ENTRY CompilerStatus nvrtcCompileProgram(Program program, int num_options, const char* const* options) {
  if (!program->has_header || num_options < 1) {
    return CompilerStatus::kCompilation;
  }
  return compile("nvrtcCompileProgram", [&] {
    const std::string option = options[0];
    program->image = "image for " + option.substr(option.find('=') + 1);
    cuda_double().compiled.push_back(option);
  });
}

DOUBLE_ENTRY CompilerStatus nvrtcGetProgramLogSize(Program, std::size_t* size) {
  return compile("nvrtcGetProgramLogSize", [&] { *size = sizeof("line 7: no"); });
}

DOUBLE_ENTRY CompilerStatus nvrtcGetProgramLog(Program, char* log) {
  return compile("nvrtcGetProgramLog", [&] { std::strcpy(log, "line 7: no"); });
}

DOUBLE_ENTRY CompilerStatus nvrtcGetPTXSize(Program program, std::size_t* size) {
  return compile("nvrtcGetPTXSize", [&] { *size = program->image.size(); });
}

DOUBLE_ENTRY CompilerStatus nvrtcGetPTX(Program program, char* ptx) {
  return compile("nvrtcGetPTX", [&] { program->image.copy(ptx, program->image.size()); });
}

DOUBLE_ENTRY CompilerStatus nvrtcGetCUBINSize(Program program, std::size_t* size) {
  return compile("nvrtcGetCUBINSize", [&] { *size = program->image.size(); });
}

DOUBLE_ENTRY CompilerStatus nvrtcGetCUBIN(Program program, char* cubin) {
  return compile("nvrtcGetCUBIN", [&] { program->image.copy(cubin, program->image.size()); });
}

DOUBLE_ENTRY CompilerStatus nvrtcGetNumSupportedArchs(int* count) {
  return compile("nvrtcGetNumSupportedArchs", [&] { *count = static_cast<int>(cuda_double().capabilities.size()); });
}

DOUBLE_ENTRY CompilerStatus nvrtcGetSupportedArchs(int* capabilities) {
  return compile("nvrtcGetSupportedArchs", [&] {
    std::copy(cuda_double().capabilities.begin(), cuda_double().capabilities.end(), capabilities);
  });
}

DOUBLE_ENTRY const char* nvrtcGetErrorString(CompilerStatus) {
  return "an error of the double";
}
