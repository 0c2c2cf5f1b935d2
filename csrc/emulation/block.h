// A block of an emulated launch, with its threads and warps.
#pragma once
#include <cstdint>
#include <vector>

#include "fiber.h"
#include "shared_memory.h"

namespace hpo::emulation {

struct alignas(64) Thread {  // a cache line: a switch touches little else
  enum State : uint8_t { kNew, kReady, kWaiting, kReturned };
  State state = kNew;
  uint8_t lane = 0;
  uint16_t warp = 0;
  unsigned source = 0;  // the lane that its shuffle reads
  uint3 index{};
  Fiber* fiber = nullptr;  // while it has begun and not returned
  Site site;               // of the barrier or warp operation where it waits
  uint64_t value = 0;      // its operand there
  uint64_t result = 0;     // its result there
};

// A warp operation whose lanes arrive one by one.
struct Meeting {
  WarpOperation operation;
  unsigned mask, arrived;
  Site site;
};

struct Warp {
  unsigned present = 0, returned = 0;
  std::vector<Meeting> meetings;
};

// A block that has begun and not returned.
struct Block {
  uint3 index{};
  size_t number = 0;  // in the grid
  SharedMemory shared;
  std::vector<Thread> threads;
  std::vector<Warp> warps;
  std::vector<size_t> turns;  // the order of the threads
  size_t turn = 0;
  size_t waiting = 0, returned = 0;
  bool vote = false;  // whether a predicate at the barrier is true
  Site barrier_site;
  bool at_grid_barrier = false;  // every thread waits there

  bool has_returned() const { return returned == threads.size(); }
};

}  // namespace hpo::emulation
