// The text of slot_kernels.h and of what it includes, for NVRTC. The build makes the definitions from the files
// (cmake/EmbedText.cmake).
#pragma once

namespace accelerate_cpp::cuda {

extern const char* const kSlotKernelsSource;
extern const char* const kSlotLayoutSource;

}  // namespace accelerate_cpp::cuda
