// The limits of a launch on the emulated device.
#pragma once
#include <algorithm>
#include <cstdint>
#include <string>

#include "shared_memory.h"

namespace hpo::emulation {

inline std::string text(uint3 index) {
  return "(" + std::to_string(index.x) + ", " + std::to_string(index.y) + ", " + std::to_string(index.z) + ")";
}

// The limit that a launch exceeds, in words; empty if it can begin.
inline std::string limit_broken_by(dim3 grid, dim3 block, size_t dynamic_bytes, bool together) {
  const size_t threads = size_t(block.x) * block.y * block.z, blocks = size_t(grid.x) * grid.y * grid.z;
  const int room = std::max(1, processors() * 3 / 4);
  if (together && blocks > size_t(room)) return std::to_string(blocks) + " blocks together, over " + std::to_string(room);
  if (dynamic_bytes > SharedMemory::kLimit) {
    return std::to_string(dynamic_bytes) + " bytes of dynamic shared memory, over " + std::to_string(SharedMemory::kLimit);
  }
  if (!blocks || grid.x > 0x7fffffff || grid.y > 65535 || grid.z > 65535) {
    return "a grid of " + text({grid.x, grid.y, grid.z}) + " blocks";
  }
  if (!threads || threads > 1024 || block.z > 64) return "blocks of " + text({block.x, block.y, block.z}) + " threads";
  return "";
}

}  // namespace hpo::emulation
