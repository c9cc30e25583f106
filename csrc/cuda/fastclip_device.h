// SPDX-License-Identifier: BSD-3-Clause
// The device that the ops of this folder run on. The tests replace this header to run them on a CPU.

#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>

#include <stdexcept>

#define FASTCLIP_KERNELS(m) STABLE_TORCH_LIBRARY_IMPL(fastclip, CUDA, m)

namespace fastclip {
namespace cuda {

// Makes the device of a gradient current for its lifetime.
class DeviceScope {
 public:
  explicit DeviceScope(const torch::stable::Tensor& grad) : index_(grad.get_device_index()), guard_(index_) {}

  // The cudaStream_t that torch works on.
  void* stream() const {
    void* stream = nullptr;
    if (aoti_torch_get_current_cuda_stream(index_, &stream) != 0) {
      throw std::runtime_error("could not get the current CUDA stream from torch");
    }
    return stream;
  }

 private:
  int32_t index_;
  torch::stable::accelerator::DeviceGuard guard_;
};

}  // namespace cuda
}  // namespace fastclip
