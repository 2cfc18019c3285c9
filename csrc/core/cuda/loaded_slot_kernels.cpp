#include "core/cuda/loaded_slot_kernels.h"

#include <array>
#include <string>
#include <utility>

#include "core/base/error.h"

namespace accelerate_cpp::cuda {
namespace {

// Makes a context current in this thread until the end of the scope, then restores the previous one.
class Current {
 public:
  Current(const DriverApi& driver, Context context) : driver_(driver) {
    driver.check(driver.context_push(context), "cuCtxPushCurrent");
  }
  ~Current() {
    Context popped = nullptr;
    driver_.context_pop(&popped);
  }
  Current(const Current&) = delete;
  Current& operator=(const Current&) = delete;

 private:
  const DriverApi& driver_;
};

int attribute(const DriverApi& driver, DeviceAttribute which, int device) {
  int value = 0;
  driver.check(driver.device_get_attribute(&value, which, device), "cuDeviceGetAttribute");
  return value;
}

}  // namespace

LoadedSlotKernels::LoadedSlotKernels(std::shared_ptr<const DriverApi> driver, const KernelCompiler& compiler,
                                     int ordinal)
    : driver_(std::move(driver)) {
  int device = 0;
  driver_->check(driver_->device_get(&device, ordinal), "cuDeviceGet");
  const int capability = 10 * attribute(*driver_, DeviceAttribute::kComputeCapabilityMajor, device) +
                         attribute(*driver_, DeviceAttribute::kComputeCapabilityMinor, device);
  const KernelImage image = compiler.slot_kernels(capability);
  architecture_ = image.architecture;
  load(device, image);
}

void LoadedSlotKernels::load(int device, const KernelImage& image) {
  driver_->check(driver_->primary_context_retain(&context_, device), "cuDevicePrimaryCtxRetain");
  const Current current(*driver_, context_);
  Module module = nullptr;
  driver_->check(driver_->module_load_data(&module, image.bytes.c_str()), "cuModuleLoadData");
  const auto function = [&](const std::string& name) {
    Function found = nullptr;
    driver_->check(driver_->module_get_function(&found, module, name.c_str()), "cuModuleGetFunction");
    return found;
  };
  for (const auto& [kernels, dtype] :
       {std::pair(&float32_, DType::kFloat32), std::pair(&float64_, DType::kFloat64),
        std::pair(&float16_, DType::kFloat16), std::pair(&bfloat16_, DType::kBFloat16)}) {
    *kernels = {function(std::string("measure_") + name(dtype)), function(std::string("scale_") + name(dtype))};
  }
  combine_ = function("combine_chunks");
}

void LoadedSlotKernels::run(const SlotPass& pass, Stream stream) const {
  const Kernels* kernels = nullptr;
  switch (pass.dtype) {
    case DType::kFloat32:
      kernels = &float32_;
      break;
    case DType::kFloat64:
      kernels = &float64_;
      break;
    case DType::kFloat16:
      kernels = &float16_;
      break;
    case DType::kBFloat16:
      kernels = &bfloat16_;
      break;
    default:
      throw InvalidArgument(std::string("gradients are floating-point numbers; found ") + name(pass.dtype));
  }
  const Current current(*driver_, context_);
  SlotPass values = pass;
  double factor = pass.factor.value_or(1.0);
  if (pass.num_chunks > 0) {
    std::array<void*, 4> parameters{&values.bucket, &values.chunks, &factor, &values.partials};
    launch(pass.factor ? kernels->scale : kernels->measure, pass.num_chunks, parameters.data(), stream);
  }
  if (pass.num_slots > 0) {
    std::array<void*, 3> parameters{&values.partials, &values.first_chunks, &values.rows};
    launch(combine_, pass.num_slots, parameters.data(), stream);
  }
}

void LoadedSlotKernels::launch(Function function, unsigned num_blocks, void** parameters, Stream stream) const {
  driver_->check(
      driver_->launch_kernel(function, num_blocks, 1, 1, kBlockThreads, 1, 1, 0, stream, parameters, nullptr),
      "cuLaunchKernel");
}

}  // namespace accelerate_cpp::cuda
