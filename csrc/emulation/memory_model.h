// The writes of other blocks on which a read may rely. Kernels call it at every access to global memory of at least four bytes,
// because they are compiled with the hooks of -fsanitize=thread (machine.cpp), behind which stands this model instead.
//
// A write of another block in the same launch is visible behind a grid barrier; or if a thread of its block, the writing one or
// one behind a block barrier, did a __threadfence and then an atomic operation, and a thread of the reading block a later one
// on the same word and then a __threadfence, and is the reading one or came to a block barrier behind that. Every other read
// could return an old value on a GPU, and fails here. A word that is read through the read-only path must not be written in the
// launch at all.
//
// The value that an atomic operation saw is not followed exactly: an operation on a word of another block sees the writes that
// all blocks have released.
#pragma once
#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

namespace hpo::emulation {

class MemoryModel {
 public:
  using Time = uint32_t;  // counts fences, barriers and atomic operations of a launch

  void begin_launch(size_t blocks, size_t threads_of_block) {
    if (pages_.size() > kMostPages) {
      pages_.clear();
      std::fill(std::begin(cache_), std::end(cache_), Cached());
    }
    ++launch_;
    now_ = 1;
    grid_barrier_ = 0;
    threads_of_block_ = threads_of_block;
    blocks_.clear();
    blocks_.resize(blocks);
  }

  void grid_barrier() { grid_barrier_ = now_++; }

  void barrier(size_t block) {
    Published& own = blocks_[block];
    own.barrier = now_++;
    own.acquired = own.acquired_by_some;
  }

  void fence(size_t block, size_t thread) {
    Fences& fences = fences_of(block, thread);
    Published& own = blocks_[block];
    fences.last = now_++;
    fences.barrier = own.barrier;
    fences.acquired = fences.synchronised;
    own.acquired_by_some = std::max(own.acquired_by_some, fences.acquired);
  }

  void atomic(size_t block, size_t thread, uintptr_t address) {
    Fences& fences = fences_of(block, thread);
    Published& own = blocks_[block];
    Cell& word = cell(address);
    if (word.launch == launch_ && word.writer / threads_of_block_ != block) fences.synchronised = now_;
    fences.released = fences.last;
    own.released = std::max(own.released, fences.barrier);
    ++now_;
    write(block, thread, word);
  }

  // The fault of the access, in words; empty if there is none.
  std::string write(size_t block, size_t thread, uintptr_t address, size_t bytes) {
    for (size_t at = 0; at < bytes; at += kWord) {
      Cell& word = cell(address + at);
      if (word.read_only == launch_) return "writes what this launch reads through the read-only path";
      write(block, thread, word);
    }
    return "";
  }

  std::string read(size_t block, size_t thread, uintptr_t address, size_t bytes) {
    for (size_t at = 0; at < bytes; at += kWord) {
      const Cell* const word = find(address + at);
      if (!word || word->launch != launch_) continue;
      const size_t writer = word->writer / threads_of_block_;
      if (writer == block || word->time <= grid_barrier_ || sees(block, thread, *word)) continue;
      return "reads what block " + std::to_string(writer) + " writes, without a fence and an atomic operation of both blocks";
    }
    return "";
  }

  std::string read_only(uintptr_t address, size_t bytes) {
    for (size_t at = 0; at < bytes; at += kWord) {
      Cell& word = cell(address + at);
      word.read_only = launch_;
      if (word.launch == launch_) return "reads through the read-only path what this launch has written";
    }
    return "";
  }

 private:
  static constexpr size_t kWord = 4, kPage = 4096, kMostPages = 4096, kCached = 256;

  struct Cell {
    uint32_t launch = 0;  // of the last write
    Time time = 0;
    uint32_t writer = 0;  // the thread in the grid
    uint32_t read_only = 0;  // the launch that reads it through the read-only path
  };
  struct Page {
    Cell cells[kPage / kWord];
  };
  struct Cached {
    uintptr_t number = 0;
    Page* page = nullptr;  // null: nothing was written to the page
  };

  struct Fences {  // of a thread
    Time last = 0, barrier = 0;  // and the block barrier before it
    Time released = 0;  // the one before the last atomic operation
    Time synchronised = 0, acquired = 0;  // the last atomic operation on a word of another block; that before the last fence
  };

  struct Published {
    Time barrier = 0, released = 0;  // block barriers: the last; that before the fence of a thread that did an atomic operation
    Time acquired = 0, acquired_by_some = 0;  // for every thread; for some thread since the last block barrier
    std::unique_ptr<Fences[]> threads;
  };

  Fences& fences_of(size_t block, size_t thread) {
    std::unique_ptr<Fences[]>& threads = blocks_[block].threads;
    if (!threads) threads = std::make_unique<Fences[]>(threads_of_block_);
    return threads[thread];
  }

  bool sees(size_t block, size_t thread, const Cell& word) const {
    const Published &reader = blocks_[block], &writer = blocks_[word.writer / threads_of_block_];
    if (!reader.threads || !writer.threads) return false;
    const Time by_itself = writer.threads[word.writer % threads_of_block_].released;
    const bool published = word.time <= std::max(by_itself, writer.released);
    return published && word.time <= std::max(reader.acquired, reader.threads[thread].acquired);
  }

  void write(size_t block, size_t thread, Cell& word) const {
    word.launch = launch_;
    word.time = now_;
    word.writer = uint32_t(block * threads_of_block_ + thread);
  }

  Cell* find(uintptr_t address) {
    const uintptr_t number = address / kPage;
    Cached& cached = cache_[number % kCached];
    if (cached.number != number) {
      const auto found = pages_.find(number);
      cached = {number, found == pages_.end() ? nullptr : found->second.get()};
    }
    return cached.page ? &cached.page->cells[address % kPage / kWord] : nullptr;
  }

  Cell& cell(uintptr_t address) {
    if (Cell* const found = find(address)) return *found;
    const uintptr_t number = address / kPage;
    Page* const page = (pages_[number] = std::make_unique<Page>()).get();
    cache_[number % kCached] = {number, page};
    return page->cells[address % kPage / kWord];
  }

  std::unordered_map<uintptr_t, std::unique_ptr<Page>> pages_;
  Cached cache_[kCached];
  std::vector<Published> blocks_;
  size_t threads_of_block_ = 1;
  uint32_t launch_ = 0;
  Time now_ = 1, grid_barrier_ = 0;
};

}  // namespace hpo::emulation
