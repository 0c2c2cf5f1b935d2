// The emulated device. Blocks run one after another. The threads of a block are fibers that switch only where a thread waits:
// after a barrier the first thread, in the requested order, runs to the next barrier before the second starts. Two threads
// that race therefore run in one order under `forward` and in the other order under `reverse`. The blocks of a cooperative
// launch all exist at once, and each runs to the grid barrier before the next one starts.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "fiber.h"
#include "shared_memory.h"

struct uint3 {
  unsigned x, y, z;
};

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

inline uint3 threadIdx, blockIdx;
inline dim3 blockDim, gridDim;
constexpr int warpSize = 32;

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

enum class WarpOperation { kSync, kShuffle, kBallot };

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
  SharedMemory shared;
  std::vector<Thread> threads;
  std::vector<Warp> warps;
  std::vector<size_t> turns;  // the order of the threads
  size_t turn = 0;
  size_t waiting = 0, returned = 0;
  unsigned votes = 0;
  Site barrier_site;
  bool at_grid_barrier = false;  // every thread waits there
};

class Machine {
 public:
  SharedMemory& shared() { return block_->shared; }

  void set_dynamic_shared_limit(const void* kernel, size_t bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    dynamic_limits_[kernel] = bytes;
  }

  // Multiprocessors of the device. Each holds one block of a cooperative launch.
  static int processors() {
    const char* variable = std::getenv("HPO_EMULATION_PROCESSORS");
    return variable ? std::atoi(variable) : 3;
  }

  // Runs `call(closure)` as every thread of the grid, all blocks `together` or one by one. Throws if the kernel does something
  // wrong; the next launch starts afresh.
  void launch(const char* name, const void* kernel, dim3 grid, dim3 block, size_t dynamic_bytes, bool together,
              void (*call)(void*), void* closure) {
    std::lock_guard<std::mutex> lock(mutex_);
    name_ = name;
    check_configuration(kernel, grid, block, dynamic_bytes, together);
    read_order();
    call_ = call;
    closure_ = closure;
    gridDim = grid;
    blockDim = block;
    dynamic_bytes_ = dynamic_bytes;
    together_ = together;
    const size_t blocks = size_t(grid.x) * grid.y * grid.z;
    make_blocks(together ? blocks : 1);
    try {
      if (together) {
        run_blocks(0, blocks);
      } else {
        for (size_t number : permutation(blocks)) run_blocks(number, 1);
      }
    } catch (...) {
      forget_fibers();
      throw;
    }
  }

  // __syncthreads: waits for every thread of the block; returns the number of true predicates.
  unsigned barrier(bool predicate, Site site) {
    if (arrive(predicate, site)) release(*block_);
    yield();
    return unsigned(current_->result);
  }

  // Waits for every thread of every block.
  void grid_barrier(Site site) {
    if (!together_) fail("a grid barrier, which only a cooperative launch has", site);
    if (arrive(false, site)) block_->at_grid_barrier = true;
    yield();
  }

  // Waits for the lanes of `mask`. A shuffle returns the value of lane `source`, a ballot the lanes with a value.
  uint64_t meet(WarpOperation operation, unsigned mask, uint64_t value, unsigned source, Site site) {
    Thread& me = *current_;
    Warp& warp = block_->warps[me.warp];
    mask &= warp.present;  // the last warp of a block may be incomplete
    if (!(mask >> me.lane & 1)) fail("a warp operation by a lane outside its own mask", site);
    if (mask & warp.returned) fail("a warp operation that names a lane that has returned", site);
    for (const Meeting& other : warp.meetings) {
      const bool another = other.operation != operation || other.mask != mask || other.site != site;
      if (another && other.mask >> me.lane & 1 && other.arrived & mask) {
        fail("a warp operation that names lanes which wait for this one at another, that of " + other.site.text(), site);
      }
    }
    auto meeting =
        std::find_if(warp.meetings.begin(), warp.meetings.end(), [&](const Meeting& other) { return other.mask == mask; });
    if (meeting == warp.meetings.end()) meeting = warp.meetings.insert(meeting, {operation, mask, 0, site});
    me.site = site;
    me.state = Thread::kWaiting;
    me.value = value;
    me.source = source;
    meeting->arrived |= 1u << me.lane;
    if (meeting->arrived == mask) {
      warp.meetings.erase(meeting);
      release(operation, mask, &block_->threads[me.warp * warpSize]);
      restart_turns(me.warp);
    }
    yield();
    return me.result;
  }

  // Lets other threads run first if the order is random: real races would show at atomics and fences.
  void perhaps_yield() {
    if (order_ == kRandom && random_() % 4 == 0) yield();
  }

  [[noreturn]] void fail(const std::string& what, Site site) {
    throw std::runtime_error("emulated kernel " + name_ + ", block " + text(blockIdx) + ", thread " + text(threadIdx) + ": " +
                             what + ", at " + site.text());
  }

  unsigned lane() const { return current_->lane; }

 private:
  enum Order { kForward, kReverse, kRandom };

  static std::string text(uint3 index) {
    return "(" + std::to_string(index.x) + ", " + std::to_string(index.y) + ", " + std::to_string(index.z) + ")";
  }

  static uint3 unflatten(size_t number, dim3 shape) {
    return {unsigned(number % shape.x), unsigned(number / shape.x % shape.y), unsigned(number / shape.x / shape.y)};
  }

  void check_configuration(const void* kernel, dim3 grid, dim3 block, size_t dynamic_bytes, bool together) {
    const size_t threads = size_t(block.x) * block.y * block.z, blocks = size_t(grid.x) * grid.y * grid.z;
    const auto limit = dynamic_limits_.find(kernel);
    const size_t dynamic_limit = limit == dynamic_limits_.end() ? SharedMemory::kDefaultLimit : limit->second;
    std::string what;
    if (!threads || threads > 1024 || block.z > 64) what = "blocks of " + text({block.x, block.y, block.z}) + " threads";
    if (!blocks || grid.x > 0x7fffffff || grid.y > 65535 || grid.z > 65535) {
      what = "a grid of " + text({grid.x, grid.y, grid.z}) + " blocks";
    }
    if (dynamic_bytes > dynamic_limit) {
      what = std::to_string(dynamic_bytes) + " bytes of dynamic shared memory, over " + std::to_string(dynamic_limit);
    }
    if (together && blocks > size_t(processors())) {
      what = std::to_string(blocks) + " blocks together, over " + std::to_string(processors());
    }
    if (!what.empty()) throw std::runtime_error("emulated kernel " + name_ + ": invalid launch with " + what);
  }

  void read_order() {
    const char* variable = std::getenv("HPO_EMULATION_ORDER");
    const std::string order = variable ? variable : "forward";
    if (order == "forward" || order == "reverse") {
      order_ = order == "forward" ? kForward : kReverse;
    } else if (order.rfind("random:", 0) == 0) {
      order_ = kRandom;
      random_.seed(unsigned(std::strtoul(order.c_str() + 7, nullptr, 10)));
    } else {
      throw std::runtime_error("HPO_EMULATION_ORDER is forward, reverse or random:SEED, not " + order);
    }
  }

  std::vector<size_t> permutation(size_t count) {
    std::vector<size_t> numbers(count);
    for (size_t i = 0; i < count; ++i) numbers[i] = order_ == kReverse ? count - 1 - i : i;
    if (order_ == kRandom) std::shuffle(numbers.begin(), numbers.end(), random_);
    return numbers;
  }

  void make_blocks(size_t blocks) {
    const size_t count = size_t(blockDim.x) * blockDim.y * blockDim.z;
    while (blocks_.size() < blocks) blocks_.push_back(std::make_unique<Block>());
    for (size_t number = 0; number < blocks; ++number) {
      Block& block = *blocks_[number];
      block.threads.assign(count, Thread());
      block.warps.assign((count + warpSize - 1) / warpSize, Warp());
      for (size_t i = 0; i < count; ++i) {
        block.threads[i].index = unflatten(i, blockDim);
        block.threads[i].warp = uint16_t(i / warpSize);
        block.threads[i].lane = uint8_t(i % warpSize);
        block.warps[i / warpSize].present |= 1u << i % warpSize;
      }
      block.turns = permutation(count);
    }
  }

  void begin(Block& block, uint3 index) {
    block.index = index;
    block.shared.begin_block(dynamic_bytes_);
    for (Thread& thread : block.threads) thread.state = Thread::kNew;
    for (Warp& warp : block.warps) warp.returned = 0;
    block.waiting = block.returned = 0;
    block.at_grid_barrier = false;
    restart_turns(block);
  }

  // Runs `count` blocks from number `first` on, which wait for each other at every grid barrier.
  void run_blocks(size_t first, size_t count) {
    for (size_t i = 0; i < count; ++i) begin(*blocks_[i], unflatten(first + i, gridDim));
    do {
      for (size_t i : permutation(count)) run_block(*blocks_[i]);
    } while (leave_grid_barrier(count));
  }

  // Runs a block until every thread has returned or waits at a grid barrier.
  void run_block(Block& block) {
    block_ = &block;
    blockIdx = block.index;
    enter(*next_thread(), host_);
    if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
    const std::string array = block.shared.overrun();
    if (!array.empty()) throw std::runtime_error(in_block(block) + ": a write past the end of shared array " + array);
  }

  // Lets the first `count` blocks, which all wait at a grid barrier, continue; false if they have returned instead.
  bool leave_grid_barrier(size_t count) {
    const auto end = blocks_.begin() + std::ptrdiff_t(count);
    const auto found = std::find_if(blocks_.begin(), end, [](const auto& block) { return block->at_grid_barrier; });
    if (found == end) return false;
    const Block& waiting = **found;
    for (auto block = blocks_.begin(); block != end; ++block) {
      const Block& other = **block;
      if (other.at_grid_barrier && !(other.barrier_site != waiting.barrier_site)) continue;
      const std::string does = other.at_grid_barrier ? " waits at the one of " + other.barrier_site.text() : " has returned";
      throw std::runtime_error(in_block(waiting) + ": a grid barrier, while block " + text(other.index) + does + ", at " +
                               waiting.barrier_site.text());
    }
    for (auto block = blocks_.begin(); block != end; ++block) release(**block);
    return true;
  }

  std::string in_block(const Block& block) const { return "emulated kernel " + name_ + ", block " + text(block.index); }

  void forget_fibers() {
    for (auto& block : blocks_) {
      for (Warp& warp : block->warps) warp.meetings.clear();
    }
    idle_.clear();
    for (auto& fiber : fibers_) {
      fiber->restart();
      idle_.push_back(fiber.get());
    }
  }

  // The current thread arrives at a barrier of its block; returns whether it is the last one.
  bool arrive(bool predicate, Site site) {
    Block& block = *block_;
    if (block.returned) fail("a barrier that not every thread will reach, since some have returned", site);
    if (block.waiting == 0) {
      block.barrier_site = site;
      block.votes = 0;
    } else if (block.barrier_site != site) {
      fail("a barrier, while other threads of the block wait at the one of " + block.barrier_site.text(), site);
    }
    current_->site = site;
    current_->state = Thread::kWaiting;
    block.votes += predicate;
    return ++block.waiting == block.threads.size();
  }

  void release(Block& block) {
    block.waiting = 0;
    block.at_grid_barrier = false;
    for (Thread& thread : block.threads) {
      thread.state = Thread::kReady;
      thread.result = block.votes;
    }
    restart_turns(block);
  }

  // After a barrier the turns start from the first thread again, after a warp operation from the first of the warp.
  void restart_turns(Block& block) { block.turn = order_ == kRandom ? block.turns.size() : 0; }
  void restart_turns(size_t warp) {
    Block& block = *block_;
    const size_t first = warp * warpSize, end = std::min(first + warpSize, block.turns.size());
    if (order_ == kForward) block.turn = first;
    if (order_ == kReverse) block.turn = block.turns.size() - end;
  }

  // The thread that has its turn; null if every thread waits or has returned.
  Thread* next_thread() {
    Block& block = *block_;
    for (int pass = 0; pass < 2; ++pass) {
      while (block.turn < block.turns.size()) {
        Thread& thread = block.threads[block.turns[block.turn++]];
        if (thread.state == Thread::kNew || thread.state == Thread::kReady) return &thread;
      }
      block.turn = 0;
      if (order_ == kRandom) std::shuffle(block.turns.begin(), block.turns.end(), random_);
    }
    return nullptr;
  }

  // Lets the next thread run, and returns when it is the caller's turn again.
  void yield() {
    Thread& me = *current_;
    Thread* next = next_thread();
    if (next) {
      if (next != &me) enter(*next, *me.fiber);
    } else if (block_->at_grid_barrier) {
      me.fiber->switch_to(host_);
    } else {
      fail_deadlocked();
    }
  }

  void enter(Thread& thread, Fiber& from) {
    if (thread.state == Thread::kNew) thread.fiber = idle_fiber();
    make_current(thread);
    from.switch_to(*thread.fiber);
  }

  void make_current(Thread& thread) {
    thread.state = Thread::kReady;
    current_ = &thread;
    threadIdx = thread.index;
  }

  Fiber* idle_fiber() {
    if (idle_.empty()) {
      fibers_.push_back(std::make_unique<Fiber>(&Machine::run_threads, fibers_.size()));
      return fibers_.back().get();
    }
    Fiber* fiber = idle_.back();
    idle_.pop_back();
    return fiber;
  }

  // The body of every fiber: it runs one thread after another. Without a barrier one fiber runs the whole block.
  static void run_threads();

  // The current thread has returned: its fiber takes a thread that has not begun, or another fiber continues.
  void finish_thread() {
    Thread& me = *current_;
    Block& block = *block_;
    Warp& warp = block.warps[me.warp];
    me.state = Thread::kReturned;
    warp.returned |= 1u << me.lane;
    ++block.returned;
    if (block.waiting) fail("returned, while other threads of the block wait at a barrier", block.barrier_site);
    for (const Meeting& meeting : warp.meetings) {
      if (meeting.mask & warp.returned) fail("returned, while lanes wait for it at a warp operation", meeting.site);
    }
    Thread* next = next_thread();
    if (next && next->state == Thread::kNew) {
      next->fiber = me.fiber;
      make_current(*next);
      return;
    }
    if (!next && block.returned < block.threads.size()) fail_deadlocked();
    idle_.push_back(me.fiber);
    if (next) {
      enter(*next, *me.fiber);
    } else {
      me.fiber->switch_to(host_);
    }
  }

  [[noreturn]] void fail_deadlocked() {
    std::string what = "a deadlock: no thread can go on";
    int shown = 0;
    for (const Thread& thread : block_->threads) {
      if (thread.state != Thread::kWaiting) continue;
      if (shown++ == 4) break;
      what += "; thread " + text(thread.index) + " waits at " + thread.site.text();
    }
    fail(what, current_->site);
  }

  void release(WarpOperation operation, unsigned mask, Thread* lanes) {
    unsigned ballot = 0;
    for (unsigned lane = 0; lane < warpSize; ++lane) {
      if (mask >> lane & 1) ballot |= unsigned(lanes[lane].value != 0) << lane;
    }
    for (unsigned lane = 0; lane < warpSize; ++lane) {
      if (!(mask >> lane & 1)) continue;
      Thread& thread = lanes[lane];
      if (operation == WarpOperation::kShuffle && !(mask >> thread.source & 1)) {
        fail("a shuffle that reads lane " + std::to_string(thread.source) + ", which is outside its mask", thread.site);
      }
      thread.result = operation == WarpOperation::kShuffle ? lanes[thread.source].value : ballot;
      thread.state = Thread::kReady;
    }
  }

  std::mutex mutex_;
  std::string name_;
  void (*call_)(void*) = nullptr;
  void* closure_ = nullptr;
  std::map<const void*, size_t> dynamic_limits_;

  Order order_ = kForward;
  std::minstd_rand random_;

  size_t dynamic_bytes_ = 0;
  bool together_ = false;
  std::vector<std::unique_ptr<Block>> blocks_;
  Block* block_ = nullptr;
  Thread* current_ = nullptr;

  Fiber host_;
  std::vector<std::unique_ptr<Fiber>> fibers_;
  std::vector<Fiber*> idle_;
  std::exception_ptr error_;
};

inline Machine machine;

inline void Machine::run_threads() {
  for (;;) {
    try {
      machine.call_(machine.closure_);
      machine.finish_thread();
    } catch (...) {
      machine.error_ = std::current_exception();
    }
    // The switch is outside the handler, because the runtime ties the state of a handled exception to its stack.
    if (machine.error_) machine.current_->fiber->switch_to(machine.host_);
  }
}

}  // namespace hpo::emulation
