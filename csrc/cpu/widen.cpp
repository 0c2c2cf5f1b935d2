// A copy of bfloat16 numbers in float32, for the matrix products of the linear head.
//
// A product leaves the cache lines of its operands in the caches of several cores, and a store to a shared line waits for all
// of them: refilling one buffer block by block took ten times as long as the first filling. Stores past the caches do not wait.
#include "kernels.h"
#include "lanes.h"
#include "parallel.h"

HPO_DECLARE_KERNELS(HPO_ISA)

namespace hpo::HPO_ISA {
namespace {

constexpr int64_t kPart = 16384;

HPO_INLINE Unsigned load_wide(const uint16_t* from) {
#if defined(__AVX512F__)
  return Unsigned(_mm512_maskz_cvtepu16_epi32(0xFFFF, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))));
#elif defined(__AVX2__)
  return Unsigned(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
#else
  Unsigned wide;
  for (int lane = 0; lane < kWidth; ++lane) wide[lane] = from[lane];
  return wide;
#endif
}

}  // namespace

void widen(const uint16_t* from, float* to, int64_t count, int threads) {
  parallel_for(ceil_divide(count, kPart), worthwhile(threads, count), [&](int64_t range) {
    int64_t at = range * kPart;
    const int64_t end = at + kPart < count ? at + kPart : count;
    for (; at < end && uintptr_t(to + at) % sizeof(Floats); ++at) to[at] = from_bits(int32_t(uint32_t(from[at]) << 16));
    for (; at + kWidth <= end; at += kWidth) store_past_caches(Floats(load_wide(from + at) << 16), to + at);
    for (; at < end; ++at) to[at] = from_bits(int32_t(uint32_t(from[at]) << 16));
    end_stores_past_caches();
  });
}

}  // namespace hpo::HPO_ISA
