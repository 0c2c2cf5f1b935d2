// Kernels that test the emulation: correct ones, whose results are compared with NumPy, and planted bugs that it must find.
#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace hpo::selftest {

void segmented_sum(const float* values, const int64_t* offsets, float* sums, int segments);
void logsumexp(const float* values, float* out, int rows, int columns);
void logsumexp_bf16(const uint16_t* values, float* out, int rows, int columns);
// Counts of values in [0, bins) and the number of values below each bin. `finished` is 0, and 0 again afterwards.
void histogram(const int* values, int count, unsigned* counts, unsigned* below, unsigned* finished, int bins, int blocks);
void sliding_mean(const float* values, float* means, int count, int radius);
// 17 numbers per thread of one block, and 7 results of atomics: see selftest.cu.
void primitives(double* out, int64_t* atomics, int threads);
// The value of each thread of a cooperative launch after `rounds`: see selftest.cu. `sums` has a number per block.
void rounds(int* sums, int* out, int rounds, int blocks, int threads);
using Plants = std::map<std::string, void (*)(float*)>;
const Plants& planted_in_memory();  // those of selftest_memory.cu
// Runs a planted bug by name, in blocks of 64 threads.
void bug(const std::string& name, float* out);
std::vector<std::string> bugs();

}  // namespace hpo::selftest
