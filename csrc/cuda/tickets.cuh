// Counters of the blocks that are done, for launches that clear nothing before: each is 0 before a launch and again after it,
// see last_block. A stream has one, because its launches come one after the other.
#pragma once
#include <map>
#include <mutex>
#include <utility>

#include "hpo/cuda.h"

namespace hpo {

constexpr int kTickets = 1024;

static __device__ unsigned tickets[kTickets];  // 0 when the module is loaded

// Where a launch finds its counter.
struct Ticket {
  unsigned* own;  // null: it is tickets[number]
  int number;

  __device__ __forceinline__ unsigned* get() const { return own ? own : &tickets[number]; }
};

// The counter of a launch on this stream, on the device of this thread. A launch clears and takes `spare` where another
// launch could run beside it: in a graph that is recorded, on the stream that is another one in each thread, and on every
// stream after the first thousand.
// Streams are told apart by their ids: a new one may have the handle of one that is destroyed and whose launches still run.
inline Ticket take_ticket(cudaStream_t stream, unsigned* spare) {
  static std::mutex mutex;
  static std::map<std::pair<int, unsigned long long>, int> numbers;
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long id = 0;
  cudaStreamIsCapturing(stream, &status);
  if (status == cudaStreamCaptureStatusNone && stream != cudaStreamPerThread && cudaStreamGetId(stream, &id) == cudaSuccess) {
    int device = 0;
    cudaGetDevice(&device);
    std::lock_guard<std::mutex> lock(mutex);
    auto entry = numbers.find({device, id});
    if (entry == numbers.end() && numbers.size() < kTickets) {
      entry = numbers.emplace(std::pair(device, id), int(numbers.size())).first;
    }
    if (entry != numbers.end()) return {nullptr, entry->second};
  }
  cudaMemsetAsync(spare, 0, sizeof *spare, stream);
  return {spare, 0};
}

}  // namespace hpo
