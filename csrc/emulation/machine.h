// The emulated device. The threads of a block are fibers that switch only where a thread waits: after a barrier the first
// thread, in the requested order, runs to the next barrier before the second starts. Two threads that race therefore run in one
// order under `forward` and in the other order under `reverse`. Blocks run one after another; those of a cooperative launch all
// exist at once, and each runs to the grid barrier before the next one starts. In a random order a thread may also stop before
// any access to memory, atomic operation or fence, for another thread of its block or for another block: three exist at once.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "block.h"
#include "launch_limits.h"
#include "memory_model.h"
#include "order.h"

namespace hpo::emulation {

class Machine {
 public:
  SharedMemory& shared() { return block_->shared; }

  // Runs `call(closure)` as every thread of the grid, all blocks `together` or one by one. Throws if the kernel does something
  // wrong; the next launch starts afresh.
  void launch(const char* name, dim3 grid, dim3 block, size_t dynamic_bytes, bool together, void (*call)(void*),
              void* closure) {
    std::lock_guard<std::mutex> lock(mutex_);
    name_ = name;
    const std::string beyond = limit_broken_by(grid, block, dynamic_bytes, together);
    if (!beyond.empty()) throw std::runtime_error("emulated kernel " + name_ + ": invalid launch with " + beyond);
    order_.read();
    call_ = call;
    closure_ = closure;
    gridDim = grid;
    blockDim = block;
    dynamic_bytes_ = dynamic_bytes;
    together_ = together;
    const size_t blocks = size_t(grid.x) * grid.y * grid.z;
    memory_.begin_launch(blocks, size_t(block.x) * block.y * block.z);
    const size_t places = together ? blocks : std::min(blocks, size_t(order_.is_random ? 3 : 1));
    make_blocks(places);
    try {
      run_blocks(blocks, places);
    } catch (...) {
      forget_fibers();
      throw;
    }
  }

  // __syncthreads: waits for every thread of the block; returns whether any predicate is true.
  bool barrier(bool predicate, Site site) {
    if (arrive(predicate, site)) release(*block_);
    yield();
    return current_->result != 0;
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

  // Lets other threads or blocks run first if the order is random: real races would show at atomics and fences.
  void perhaps_yield() {
    if (!order_.is_random || order_.draw() % 4 != 0) return;
    if (order_.draw() % 4 != 0) yield();
    else leave_block();
  }

  void fence() {
    perhaps_yield();
    memory_.fence(block_->number, thread());
  }

  void before_atomic(uintptr_t address) {
    perhaps_yield();
    if (is_global(address)) memory_.atomic(block_->number, thread(), address);
  }

  void read_only(uintptr_t address, size_t bytes, Site site) {
    const std::string wrong = is_global(address) ? memory_.read_only(address, bytes) : "";
    if (!wrong.empty()) fail(wrong, site);
  }

  // The hook before each access, mostly to the stack. It throws nothing, because compilers believe that a hook returns.
  void access(uintptr_t address, size_t bytes, bool writes) {
    const uintptr_t frame = reinterpret_cast<uintptr_t>(__builtin_frame_address(0));
    if (stack_.load(std::memory_order_relaxed).holds(frame) && is_global(address)) access_global(address, bytes, writes);
  }

  [[gnu::noinline]] void access_global(uintptr_t address, size_t bytes, bool writes) {
    if (address % bytes != 0) stop(std::string("a misaligned ") + (writes ? "store" : "load"), bytes);
    if (order_.is_random && order_.draw() % 64 == 0) leave_block();
    if (bytes < 4) return;
    const std::string wrong = writes ? memory_.write(block_->number, thread(), address, bytes)
                                     : memory_.read(block_->number, thread(), address, bytes);
    if (!wrong.empty()) stop(wrong, bytes);
  }

  [[noreturn]] void fail(const std::string& what, Site site) { throw error(what + ", at " + site.text()); }
  [[noreturn]] void fail(const std::string& what) { throw error(what + ", behind " + current_->site.text()); }

  unsigned lane() const { return current_->lane; }

 private:
  std::runtime_error error(const std::string& what) const {
    return std::runtime_error("emulated kernel " + name_ + ", block " + text(blockIdx) + ", thread " + text(threadIdx) + ": " +
                              what);
  }

  // Leaves the kernel without an exception in the current thread.
  void stop(const std::string& what, size_t bytes) {
    const std::string size = " (" + std::to_string(bytes) + " bytes)";
    error_ = std::make_exception_ptr(error(what + size + ", behind " + current_->site.text()));
    current_->fiber->switch_to(host_);
  }

  bool is_global(uintptr_t address) const {
    return !stack_.load(std::memory_order_relaxed).holds(address) && !block_->shared.holds(address);
  }
  size_t thread() const { return size_t(current_ - block_->threads.data()); }

  static uint3 unflatten(size_t number, dim3 shape) {
    return {unsigned(number % shape.x), unsigned(number / shape.x % shape.y), unsigned(number / shape.x / shape.y)};
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
      block.turns = order_.permutation(count);
    }
  }

  void begin(Block& block, size_t number) {
    block.index = unflatten(number, gridDim);
    block.number = number;
    block.shared.begin_block(dynamic_bytes_);
    for (Thread& thread : block.threads) thread.state = Thread::kNew, thread.site = Site("the launch", 0);
    for (Warp& warp : block.warps) warp.returned = 0;
    block.waiting = block.returned = 0;
    block.at_grid_barrier = false;
    restart_turns(block);
  }

  // Runs all blocks of the grid. As many as a launch has places exist at once, and wait for each other at grid barriers.
  void run_blocks(size_t blocks, size_t places) {
    const std::vector<size_t> numbers = together_ ? Order::ascending(blocks) : order_.permutation(blocks);
    size_t begun = 0;
    while (begun < places) begin(*blocks_[begun], numbers[begun]), ++begun;
    bool any = true;
    while (any || leave_grid_barrier(places)) {
      any = false;
      for (size_t place : order_.permutation(places)) {
        Block& block = *blocks_[place];
        if (block.has_returned() && begun < blocks) begin(block, numbers[begun++]);
        if (block.has_returned() || block.at_grid_barrier) continue;
        run_block(block);
        any = true;
      }
    }
  }

  // Runs a block until every thread has returned or waits at a grid barrier, or one leaves for another block.
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
    memory_.grid_barrier();
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
      block.vote = false;
    } else if (block.barrier_site != site) {
      fail("a barrier, while other threads of the block wait at the one of " + block.barrier_site.text(), site);
    }
    current_->site = site;
    current_->state = Thread::kWaiting;
    block.vote |= predicate;
    return ++block.waiting == block.threads.size();
  }

  void release(Block& block) {
    block.waiting = 0;
    block.at_grid_barrier = false;
    memory_.barrier(block.number);
    for (Thread& thread : block.threads) {
      thread.state = Thread::kReady;
      thread.result = block.vote;
    }
    restart_turns(block);
  }

  // After a barrier the turns start from the first thread again, after a warp operation from the first of the warp.
  void restart_turns(Block& block) { block.turn = order_.is_random ? block.turns.size() : 0; }
  void restart_turns(size_t warp) {
    Block& block = *block_;
    const size_t first = warp * warpSize, end = std::min(first + warpSize, block.turns.size());
    if (!order_.is_random && !order_.is_reverse) block.turn = first;
    if (order_.is_reverse) block.turn = block.turns.size() - end;
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
      if (order_.is_random) order_.shuffle(block.turns);
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

  // Lets another block run; returns when it is the caller's turn again.
  void leave_block() {
    restart_turns(*block_);
    current_->fiber->switch_to(host_);
  }

  void enter(Thread& thread, Fiber& from) {
    if (thread.state == Thread::kNew) thread.fiber = idle_fiber();
    make_current(thread);
    from.switch_to(*thread.fiber);
  }

  void make_current(Thread& thread) {
    thread.state = Thread::kReady;
    current_ = &thread;
    stack_.store(thread.fiber->stack(), std::memory_order_relaxed);
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
  Order order_;
  size_t dynamic_bytes_ = 0;
  bool together_ = false;
  MemoryModel memory_;
  std::vector<std::unique_ptr<Block>> blocks_;
  Block* block_ = nullptr;
  Thread* current_ = nullptr;
  std::atomic<Fiber::Stack> stack_{};  // of the current thread; on another one runs the host, perhaps in a thread beside it

  Fiber host_;
  std::vector<std::unique_ptr<Fiber>> fibers_;
  std::vector<Fiber*> idle_;
  std::exception_ptr error_;
};

}  // namespace hpo::emulation
