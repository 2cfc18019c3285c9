// Reductions and copies as collectives use them, in bytes read and written per second, with memcpy beside them.
//
// Every benchmark runs in one thread and in two, as ranks do: each thread has its slices, in shared pages of ordinary
// size, and the figure of two threads is what both reach together. Names read
//   reduce/<operation>/<dtype>/<instruction set>/<sources>to<destinations, or in_place>/<bytes of a slice>
//   copy/<memcpy, cached or streamed>/<bytes of the result>
#include <benchmark/benchmark.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "core/base/dtype.h"
#include "core/comm/copy.h"
#include "core/comm/reduce_kernels.h"

namespace accelerate_cpp::comm {
namespace {

constexpr std::size_t kKiB = 1024;
constexpr std::size_t kMB = 1000 * 1000;

// Pages like those of the arena, each of them written once.
class SharedPages {
 public:
  explicit SharedPages(std::size_t size_bytes) : size_bytes_(size_bytes) {
    data_ = ::mmap(nullptr, size_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (data_ == MAP_FAILED) {
      std::perror("mapping memory for a benchmark");
      std::abort();
    }
    std::memset(data_, 0, size_bytes);
  }
  ~SharedPages() { ::munmap(data_, size_bytes_); }
  SharedPages(const SharedPages&) = delete;
  SharedPages& operator=(const SharedPages&) = delete;

  void* data() const { return data_; }

 private:
  std::size_t size_bytes_;
  void* data_;
};

constexpr int kInPlace = 0;  // as a number of destinations: the sources are the destinations

struct Shape {
  ReduceOp op;
  DType dtype;
  int num_sources;
  int num_destinations;
  std::size_t slice_bytes;
};

void set_bytes(benchmark::State& state, std::size_t bytes_per_iteration) {
  state.SetBytesProcessed(state.iterations() * static_cast<std::int64_t>(bytes_per_iteration));
}

void run_reduce(benchmark::State& state, const ReduceKernels& kernels, const Shape& shape) {
  std::vector<std::unique_ptr<SharedPages>> places;
  std::vector<const void*> sources;
  std::vector<void*> destinations;
  const int num_places = shape.num_sources + shape.num_destinations;
  for (int k = 0; k < num_places; ++k) {
    places.push_back(std::make_unique<SharedPages>(shape.slice_bytes));
    if (k < shape.num_sources) {
      sources.push_back(places.back()->data());
    }
    if (k >= shape.num_sources || shape.num_destinations == kInPlace) {
      destinations.push_back(places.back()->data());
    }
  }
  const std::vector<double> factors(sources.size(), 0.5);
  const ReduceArguments arguments{sources.data(),
                                  shape.num_sources,
                                  destinations.data(),
                                  static_cast<int>(destinations.size()),
                                  shape.slice_bytes / element_size(shape.dtype),
                                  shape.op == ReduceOp::kAvg ? 1.0 / shape.num_sources : 1.0,
                                  shape.op == ReduceOp::kPreMulSum ? factors.data() : nullptr};
  for (auto iteration : state) {
    static_cast<void>(iteration);
    kernels.reduce(shape.dtype, shape.op, arguments);
    benchmark::ClobberMemory();
  }
  set_bytes(state, (sources.size() + destinations.size()) * shape.slice_bytes);
}

enum class Copy { kMemcpy, kCached, kStreamed };

// Pieces of a result are fetched from the slot where they have just been written.
void run_copy(benchmark::State& state, Copy how, std::size_t result_bytes) {
  constexpr std::size_t kPiece = 256 * kKiB;
  const SharedPages slot(kPiece);
  const SharedPages result(result_bytes);
  for (auto iteration : state) {
    static_cast<void>(iteration);
    for (std::size_t begin = 0; begin < result_bytes; begin += kPiece) {
      void* const place = static_cast<std::byte*>(result.data()) + begin;
      const std::size_t bytes = std::min(kPiece, result_bytes - begin);
      if (how == Copy::kMemcpy) {
        std::memcpy(place, slot.data(), bytes);
      } else {
        copy(place, slot.data(), bytes, how == Copy::kCached ? Residency::kCached : Residency::kStreamed);
      }
    }
    benchmark::ClobberMemory();
  }
  set_bytes(state, 2 * result_bytes);
}

// memcpy between arrays of the size of a slice: the limit of the reductions.
void run_memcpy(benchmark::State& state, std::size_t slice_bytes) {
  const SharedPages source(slice_bytes);
  const SharedPages destination(slice_bytes);
  for (auto iteration : state) {
    static_cast<void>(iteration);
    std::memcpy(destination.data(), source.data(), slice_bytes);
    benchmark::ClobberMemory();
  }
  set_bytes(state, 2 * slice_bytes);
}

template <class Run>
void add(const std::string& name, const Run& run) {
  benchmark::RegisterBenchmark(name.c_str(), run)->UseRealTime()->ThreadRange(1, 2)->Unit(benchmark::kMicrosecond);
}

void add_reduce(const ReduceKernels& kernels, const Shape& shape) {
  const std::string to = shape.num_destinations == kInPlace ? "in_place" : std::to_string(shape.num_destinations);
  add(std::string("reduce/") + name(shape.op) + "/" + name(shape.dtype) + "/" + kernels.instruction_set + "/" +
          std::to_string(shape.num_sources) + "to" + to + "/" + std::to_string(shape.slice_bytes),
      [kernels, shape](benchmark::State& state) { run_reduce(state, kernels, shape); });
}

// Slices of all-reduces of 64 KiB, 1 MB, 25 MB and 100 MB among two ranks.
constexpr std::size_t kSlices[] = {32 * kKiB, kMB / 2, 25 * kMB / 2, 50 * kMB};

void add_all() {
  const std::vector<ReduceKernels> present = present_reduce_kernels();
  const ReduceKernels& best = present.front();
  for (const std::size_t slice : kSlices) {
    add("memcpy/" + std::to_string(slice), [slice](benchmark::State& state) { run_memcpy(state, slice); });
    for (const ReduceKernels& kernels : present) {
      for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
        add_reduce(kernels, {ReduceOp::kAvg, dtype, 2, kInPlace, slice});
      }
    }
    add_reduce(best, {ReduceOp::kSum, DType::kFloat32, 2, 1, slice});
    add_reduce(best, {ReduceOp::kSum, DType::kFloat32, 2, 2, slice});
  }
  for (const int num_sources : {2, 4, 8}) {
    add_reduce(best, {ReduceOp::kAvg, DType::kFloat32, num_sources, 2, 64 * kKiB});
  }
  for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kPreMulSum, ReduceOp::kProduct, ReduceOp::kMin}) {
    add_reduce(best, {op, DType::kFloat32, 2, kInPlace, 64 * kKiB});
  }
  for (const DType dtype : {DType::kFloat64, DType::kInt8, DType::kInt16, DType::kInt32, DType::kInt64}) {
    add_reduce(best, {ReduceOp::kSum, dtype, 2, kInPlace, 64 * kKiB});
    add_reduce(best, {ReduceOp::kMax, dtype, 2, kInPlace, 64 * kKiB});
  }
  for (const std::size_t result : {kMB, 25 * kMB, 100 * kMB}) {
    const auto bytes = std::to_string(result);
    add("copy/memcpy/" + bytes, [result](benchmark::State& state) { run_copy(state, Copy::kMemcpy, result); });
    add("copy/cached/" + bytes, [result](benchmark::State& state) { run_copy(state, Copy::kCached, result); });
    add("copy/streamed/" + bytes, [result](benchmark::State& state) { run_copy(state, Copy::kStreamed, result); });
  }
}

}  // namespace
}  // namespace accelerate_cpp::comm

int main(int argc, char** argv) {
  accelerate_cpp::comm::add_all();
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) {
    return 1;
  }
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
  return 0;
}
