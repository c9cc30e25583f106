// SPDX-License-Identifier: BSD-3-Clause

#include "chunks.h"

namespace fastclip {
namespace {

// The fixed cost of a chunk, as a number of elements.
constexpr int64_t kChunkCost = 256;

template <class Element>
void copy_strided(char* base, const Strides& strides, const Chunk& chunk, char* buffer, Copy copy) {
  const int last = static_cast<int>(strides.sizes.size()) - 1;
  std::vector<int64_t> index(strides.sizes.size());
  int64_t position = 0, offset = chunk.offset;
  for (int d = last; d >= 0; --d) {
    index[d] = offset % strides.sizes[d];
    offset /= strides.sizes[d];
    position += index[d] * strides.strides[d];
  }
  Element* elements = reinterpret_cast<Element*>(base);
  Element* packed = reinterpret_cast<Element*>(buffer);
  for (int64_t done = 0; done < chunk.size;) {
    const int64_t row = std::min(strides.sizes[last] - index[last], chunk.size - done);
    const int64_t step = strides.strides[last];
    for (int64_t i = 0; i < row; ++i) {
      Element& element = elements[position + i * step];
      copy == Copy::kToBuffer ? packed[done + i] = element : element = packed[done + i];
    }
    done += row;
    index[last] += row;
    position += row * step;
    for (int d = last; d > 0 && index[d] == strides.sizes[d]; --d) {
      position += strides.strides[d - 1] - index[d] * strides.strides[d];
      index[d] = 0;
      ++index[d - 1];
    }
  }
}

}  // namespace

ChunkTable::ChunkTable(const GradientList& list) {
  chunks_.reserve(list.items.size());
  int64_t cost = kChunkSize;  // opens the first batch
  for (int32_t g = 0; g < static_cast<int32_t>(list.size()); ++g) {
    elements_ += list.items[g].numel;
    for (int64_t offset = 0; offset < list.items[g].numel; offset += kChunkSize) {
      if (cost >= kChunkSize) {
        batches_.push_back(size());
        cost = 0;
      }
      const int64_t length = std::min(kChunkSize, list.items[g].numel - offset);
      chunks_.push_back({g, offset, length});
      cost += length + kChunkCost;
    }
  }
  batches_.push_back(size());
}

void copy_with_gaps(const Gradient& grad, const Strides& strides, const Chunk& chunk, char* buffer,
                    Copy copy) {
  const auto copy_elements = grad.item_size() == 8   ? copy_strided<uint64_t>
                             : grad.item_size() == 4 ? copy_strided<uint32_t>
                                                     : copy_strided<uint16_t>;
  copy_elements(grad.data, strides, chunk, buffer, copy);
}

}  // namespace fastclip
