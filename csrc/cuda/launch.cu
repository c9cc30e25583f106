// SPDX-License-Identifier: BSD-3-Clause
// Splits a list into launches, lays out the workspace and starts the kernels.

#include <algorithm>
#include <atomic>
#include <memory>
#include <stdexcept>
#include <string>

#include "kernels.cuh"
#include "launch.h"

namespace fastclip {
namespace cuda {
namespace {

void check(cudaError_t error, const char* action) {
  if (error != cudaSuccess) {
    throw std::runtime_error(std::string("CUDA could not ") + action + ": " + cudaGetErrorString(error));
  }
}

// The first launch of a kernel loads its module, which stream capture permits in relaxed mode only.
class RelaxedCapture {
 public:
  RelaxedCapture() { check(cudaThreadExchangeStreamCaptureMode(&mode_), "change the capture mode"); }
  ~RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

constexpr int kMaxDevices = 64;

// Number of blocks of the kernel that the current device runs at once; cached per device.
template <auto kernel>
uint32_t resident_blocks() {
  static std::atomic<uint32_t> known[kMaxDevices];
  int device = 0;
  check(cudaGetDevice(&device), "get the current device");
  if (device < kMaxDevices && known[device] > 0) return known[device];
  const RelaxedCapture relaxed;
  int multiprocessors = 0, blocks = 0;
  check(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device),
        "get the number of multiprocessors");
  check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, kThreads, 0), "load a kernel");
  const auto resident = static_cast<uint32_t>(multiprocessors * std::max(blocks, 1));
  if (device < kMaxDevices) known[device] = resident;
  return resident;
}

template <auto kernel, class... Parameters>
void launch(uint32_t chunks, void* stream, const Parameters&... parameters) {
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(std::max(1u, std::min(chunks, resident_blocks<kernel>())));
  config.blockDim = dim3(kThreads);
  config.stream = static_cast<cudaStream_t>(stream);
  check(cudaLaunchKernelEx(&config, kernel, parameters...), "launch a kernel");
}

uint64_t address_of(const Item& item) { return reinterpret_cast<uint64_t>(item.data); }

// Bytes from the last aligned address at or before an item's first element to the item's end.
uint64_t extent_of(const Item& item) {
  if (item.numel == 0) return 0;
  return address_of(item) % kVectorBytes + static_cast<uint64_t>(item.numel) * item_size(item.dtype);
}

uint64_t chunks_of(const Item& item) { return (extent_of(item) + kChunkBytes - 1) / kChunkBytes; }

constexpr uint32_t kAllRounds = 0xffffffff;

// Fills in the metadata of `count` items. In a given round, items of other rounds are marked as skipped.
void fill_metadata(const Item* items, uint32_t count, uint32_t round, TensorListMetadata* metadata) {
  uint32_t chunks = 0;
  for (uint32_t i = 0; i < count; ++i) {
    const Item& item = items[i];
    const auto own = static_cast<uint32_t>(chunks_of(item));
    metadata->data[i] = item.data;
    metadata->first_chunk[i] = chunks;
    const auto last_end = static_cast<uint32_t>(own ? extent_of(item) - uint64_t{own - 1} * kChunkBytes : 0);
    metadata->last_end[i] = last_end | static_cast<uint32_t>(item.dtype) << TensorListMetadata::kDTypeShift;
    metadata->index[i] = round == kAllRounds || round == item.repeat ? item.index : kSkipTensor;
    chunks += own;
  }
  metadata->count = count;
  metadata->chunks = chunks;
}

}  // namespace

// Offsets into the workspace: first what must be zero before the first launch, then the rest.
struct LaunchPlan::Layout {
  size_t zeroed = 0;
  size_t bytes = 0;
  size_t blocks_done, segment_done, segments, partials, counts, group_of, factors, scale_needed;

  explicit Layout(const LaunchPlan& plan) {
    size_t most_segments = 0, chunks = 0;
    for (const Launch& launch : plan.launches_) {
      most_segments = std::max<size_t>(most_segments, first_segment(launch.chunks, launch.count) + 1);
      chunks += launch.chunks;
    }
    blocks_done = add<uint32_t>(1);
    segment_done = add<uint32_t>(most_segments);
    zeroed = bytes;
    segments = add<PartialStats>(most_segments);
    partials = add<double>(chunks);
    counts = add<Counts>(chunks);
    group_of = add<uint32_t>(plan.items_.size());
    factors = add<double>(plan.num_groups_);
    scale_needed = add<uint32_t>(1);
  }

  template <class Type>
  size_t add(size_t count) {
    const size_t begin = bytes;
    bytes += (count * sizeof(Type) + 15) / 16 * 16;
    return begin;
  }

  Workspace of_launch(void* memory, const Launch& launch) const {
    char* base = static_cast<char*>(memory);
    const auto at = [&](size_t offset) { return static_cast<void*>(base + offset); };
    return {static_cast<uint32_t*>(at(blocks_done)),
            static_cast<uint32_t*>(at(segment_done)),
            static_cast<PartialStats*>(at(segments)),
            static_cast<double*>(at(partials)) + launch.first_chunk,
            static_cast<Counts*>(at(counts)) + launch.first_chunk,
            static_cast<uint32_t*>(at(group_of)),
            static_cast<double*>(at(factors)),
            static_cast<uint32_t*>(at(scale_needed))};
  }
};

LaunchPlan::LaunchPlan(std::vector<Item> items, uint32_t num_groups)
    : items_(std::move(items)), num_groups_(num_groups) {
  uint64_t first_chunk = 0;
  for (size_t first = 0; first < items_.size(); first += kMaxTensors) {
    const auto count = static_cast<uint32_t>(std::min<size_t>(kMaxTensors, items_.size() - first));
    uint64_t chunks = 0;
    for (size_t i = first; i < first + count; ++i) {
      chunks += chunks_of(items_[i]);
      rounds_ = std::max(rounds_, items_[i].repeat + 1);
    }
    launches_.push_back({first, count, first_chunk, static_cast<uint32_t>(chunks)});
    first_chunk += chunks;
  }
  workspace_bytes_ = Layout(*this).bytes;
}

void LaunchPlan::statistics(Norm norm, const StatisticsOptions& options, double* stats, void* workspace,
                            void* stream) const {
  const Layout layout(*this);
  check(cudaMemsetAsync(workspace, 0, layout.zeroed, static_cast<cudaStream_t>(stream)), "clear memory");
  const auto start =
      norm == kNorm1   ? launch<statistics_kernel<kNorm1>, TensorListMetadata, StatisticsArguments>
      : norm == kNorm2 ? launch<statistics_kernel<kNorm2>, TensorListMetadata, StatisticsArguments>
                       : launch<statistics_kernel<kNormInf>, TensorListMetadata, StatisticsArguments>;
  const std::unique_ptr<TensorListMetadata> metadata(new TensorListMetadata);  // without zeroing its 32 KB
  for (const Launch& part : launches_) {
    fill_metadata(&items_[part.first_item], part.count, kAllRounds, metadata.get());
    const StatisticsArguments arguments = {layout.of_launch(workspace, part),
                                           reinterpret_cast<PartialStats*>(stats),
                                           static_cast<uint32_t>(part.first_item),
                                           static_cast<uint32_t>(items_.size()),
                                           &part == &launches_.back(),
                                           options};
    start(part.chunks, stream, *metadata, arguments);
  }
}

// Gradients with exactly the same memory are written in separate rounds. Within a round the launches go from
// the last to the first, as the chunks within a launch do.
template <class Work>
void LaunchPlan::for_each_round(const Work& work) const {
  const std::unique_ptr<TensorListMetadata> metadata(new TensorListMetadata);  // without zeroing its 32 KB
  for (uint32_t round = 0; round < rounds_; ++round) {
    for (size_t i = 0; i < launches_.size(); ++i) {
      const Launch& part = launches_[kScaleBackwards ? launches_.size() - 1 - i : i];
      if (part.chunks == 0) continue;
      fill_metadata(&items_[part.first_item], part.count, round, metadata.get());
      work(part, *metadata);
    }
  }
}

void LaunchPlan::apply_clip(bool zero_nonfinite, void* workspace, void* stream) const {
  const Layout layout(*this);
  for_each_round([&](const Launch& part, const TensorListMetadata& metadata) {
    const Workspace memory = layout.of_launch(workspace, part);
    const ScaleArguments arguments = {
        memory.scale_needed, {memory.factors, true, num_groups_ > 1}, memory.partials, zero_nonfinite};
    launch<scale_kernel>(part.chunks, stream, metadata, arguments);
  });
}

void LaunchPlan::scale(DeviceScalars factors, bool zero_nonfinite, void* stream) const {
  for_each_round([&](const Launch& part, const TensorListMetadata& metadata) {
    const ScaleArguments arguments = {nullptr, factors, nullptr, zero_nonfinite};
    launch<scale_kernel>(part.chunks, stream, metadata, arguments);
  });
}

// Clamping is idempotent: the first round is enough.
void LaunchPlan::clamp(double limit, void* stream) const {
  const std::unique_ptr<TensorListMetadata> metadata(new TensorListMetadata);  // without zeroing its 32 KB
  for (const Launch& part : launches_) {
    if (part.chunks == 0) continue;
    fill_metadata(&items_[part.first_item], part.count, 0, metadata.get());
    launch<clamp_kernel>(part.chunks, stream, *metadata, limit);
  }
}

}  // namespace cuda
}  // namespace fastclip
