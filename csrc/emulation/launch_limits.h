// What a launch on the emulated device may ask for.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <string>

#include "shared_memory.h"

namespace hpo::emulation {

inline std::string text(uint3 index) {
  return "(" + std::to_string(index.x) + ", " + std::to_string(index.y) + ", " + std::to_string(index.z) + ")";
}

class Limits {
 public:
  // Multiprocessors of the device. Each holds one block of a cooperative launch, but a quarter are taken by other kernels.
  static int processors() {
    const char* variable = std::getenv("HPO_EMULATION_PROCESSORS");
    return variable ? std::atoi(variable) : 4;
  }

  // False if no kernel can have so much dynamic shared memory.
  bool set_dynamic_shared(const void* kernel, int bytes) {
    if (bytes < 0 || size_t(bytes) > SharedMemory::kLimit) return false;
    dynamic_shared_[kernel] = size_t(bytes);
    return true;
  }

  // What a launch asks for that is too much; empty if it can begin.
  std::string broken_by(const void* kernel, dim3 grid, dim3 block, size_t dynamic_bytes, bool together) const {
    const size_t threads = size_t(block.x) * block.y * block.z, blocks = size_t(grid.x) * grid.y * grid.z;
    const auto raised = dynamic_shared_.find(kernel);
    const size_t dynamic_limit = raised == dynamic_shared_.end() ? SharedMemory::kDefaultLimit : raised->second;
    const int room = std::max(1, processors() * 3 / 4);
    if (together && blocks > size_t(room)) return std::to_string(blocks) + " blocks together, over " + std::to_string(room);
    if (dynamic_bytes > dynamic_limit) {
      return std::to_string(dynamic_bytes) + " bytes of dynamic shared memory, over " + std::to_string(dynamic_limit);
    }
    if (!blocks || grid.x > 0x7fffffff || grid.y > 65535 || grid.z > 65535) {
      return "a grid of " + text({grid.x, grid.y, grid.z}) + " blocks";
    }
    if (!threads || threads > 1024 || block.z > 64) return "blocks of " + text({block.x, block.y, block.z}) + " threads";
    return "";
  }

 private:
  std::map<const void*, size_t> dynamic_shared_;
};

}  // namespace hpo::emulation
