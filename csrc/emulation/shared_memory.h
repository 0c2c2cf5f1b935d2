// Shared memory of a block: the arrays that its kernel declared, with guard bytes after each, because not every access goes
// through a checked pointer.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "device.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

namespace hpo::emulation {

class SharedMemory {
 public:
  // The limit of static arrays and dynamic memory together, for a kernel that asks for no more.
  static constexpr size_t kLimit = 48 << 10;

  void begin_block(size_t dynamic_bytes) {
    block_ = ++begun_;
    arrays_.clear();
    top_ = static_bytes_ = 0;
    dynamic_bytes_ = dynamic_bytes;
    dynamic_ = place(nullptr, "dynamic shared memory", dynamic_bytes, Site("the launch", 0));
  }

  bool holds(uintptr_t address) const { return address - reinterpret_cast<uintptr_t>(arena_) < kArena; }

  char* dynamic() const { return dynamic_; }
  size_t dynamic_bytes() const { return dynamic_bytes_; }

  // The array of this slot in this block. The first thread that uses it places it; null if there is no room.
  char* find(SharedSlot& slot, const char* name, size_t bytes, Site site) {
    if (slot.block == block_) return slot.address;
    const auto known = std::find_if(arrays_.begin(), arrays_.end(), [&](const Array& array) { return array.slot == &slot; });
    if (known != arrays_.end()) {  // another block has used the slot since
      slot = {block_, known->address};
      return slot.address;
    }
    static_bytes_ += bytes;
    if (static_bytes_ + dynamic_bytes_ > kLimit) return nullptr;
    slot = {block_, place(&slot, name, bytes, site)};
    return slot.address;
  }

  // The name and location of an array with a write past its end; empty if there is none.
  std::string overrun() const {
#if !defined(__SANITIZE_ADDRESS__)  // AddressSanitizer reports the write itself
    for (const Array& array : arrays_) {
      const char* guard = array.address + array.bytes;
      if (std::any_of(guard, guard + kGuard, [](char byte) { return byte != kGuardByte; })) {
        return std::string(array.name) + " of " + array.site.text();
      }
    }
#endif
    return "";
  }

 private:
  struct Array {
    const SharedSlot* slot;  // null: dynamic
    const char* name;
    char* address;
    size_t bytes;
    Site site;
  };

  static constexpr size_t kAlignment = 64, kGuard = 64;
  static constexpr size_t kArena = 4 * kLimit;  // room for guards
  static constexpr char kGuardByte = char(0xA5);

  char* place(const SharedSlot* slot, const char* name, size_t bytes, Site site) {
    const size_t size = (bytes + kGuard + kAlignment - 1) / kAlignment * kAlignment;
    if (top_ + size > kArena) return nullptr;
    char* address = arena_ + top_;
    top_ += size;
#if defined(__SANITIZE_ADDRESS__)
    __asan_poison_memory_region(address, size);
    __asan_unpoison_memory_region(address, bytes);
#else
    std::memset(address + bytes, kGuardByte, kGuard);
#endif
    std::memset(address, 0xFF, bytes);  // NaN as a float, -1 as an integer: kernels must not rely on it
    arrays_.push_back({slot, name, address, bytes, site});
    return address;
  }

  alignas(kAlignment) char arena_[kArena];
  std::vector<Array> arrays_;
  char* dynamic_ = nullptr;
  inline static uint64_t begun_ = 0;  // blocks, of all launches
  uint64_t block_ = 0;
  size_t top_ = 0, static_bytes_ = 0, dynamic_bytes_ = 0;
};

}  // namespace hpo::emulation
