// Neighbouring tokens of a row, read by one lane: 128 bits at once where they lie on such a boundary, else one by one.
#pragma once
#include "units.cuh"

namespace hpo {

// Whether addresses allow vectors of four: floats on 16 bytes, masks on 4. Null pointers do.
HPO_INLINE bool allows_wide(const void* array, size_t bytes) { return reinterpret_cast<uintptr_t>(array) % bytes == 0; }

// WIDTH = 4: aligned in the pack, so that a whole vector is one load of each array. WIDTH = 1: aligned in the row, for sums
// whose order must not depend on where the row lies.
template <int WIDTH>
struct Vector {
  int64_t token;  // the first
  int from, to;   // token + [from, to) is the row's range, of which the vector may have a part or nothing
  bool whole;     // the vector is full, and every input may be read at once

  __device__ __forceinline__ bool full() const { return from <= 0 && to >= WIDTH; }
  __device__ __forceinline__ bool has(int i) const { return from <= i && i < to; }

  // Bit i: token + i belongs to the row.
  __device__ __forceinline__ unsigned inside() const { return (1u << min(max(to, 0), WIDTH)) - (1u << max(from, 0)); }

  // Whether this array may be accessed at once, wherever the others begin.
  template <class T>
  __device__ __forceinline__ bool at_once(const T* array) const {
    return WIDTH == 4 && full() && allows_wide(array, 4 * sizeof(T));
  }

  // The token that is read for i: token + i, or the nearest in the range. A load behind a condition would cost more registers.
  __device__ __forceinline__ int64_t at(int i) const { return token + min(max(i, from), to - 1); }

  __device__ __forceinline__ Vector<1> only(int i) const { return {token + i, 0, 1, false}; }
};

// The vector at `base + at` where the tokens from `base + begin` to `base + end` are the row's; begin < at + WIDTH.
template <int WIDTH>
__device__ __forceinline__ Vector<WIDTH> vector_at(int64_t base, int at, int begin, int end, bool wide) {
  Vector<WIDTH> vector = {base + at, begin - at, end - at, false};
  vector.whole = wide && vector.full();
  return vector;
}

// An index that is not a constant would put the values into memory.
__device__ __forceinline__ float pick(const float (&values)[4], int i) {
  return i < 2 ? (i == 0 ? values[0] : values[1]) : (i == 2 ? values[2] : values[3]);
}

// The same for a value that is written.
__device__ __forceinline__ void put(float (&values)[4], int i, float value) {
#pragma unroll
  for (int k = 0; k < 4; ++k) values[k] = i == k ? value : values[k];
}

// Calls `visit` with this lane's vectors in the unit. shared: a row behind the unit's may own some of its tokens,
// which are then visited one by one.
template <int WIDTH, class Visit>
__device__ __forceinline__ void for_each_vector(const Pack& pack, const Unit& unit, bool wide, bool shared, Visit visit) {
  const int before = WIDTH == 4 ? int(unit.begin) & 3 : 0, end = before + unit.length;
  const int64_t aligned = unit.begin - before;
#pragma unroll 1
  for (int at = lane() * WIDTH; at < end; at += kWarp * WIDTH) {
    if (WIDTH == 1 && shared && find_owner(pack, aligned + at) != unit.row) continue;
    visit(vector_at<WIDTH>(aligned, at, before, end, wide));
  }
}

// WHOLE: all arrays may be read at once.
template <bool WHOLE, int WIDTH>
__device__ __forceinline__ void read(const float* array, const Vector<WIDTH>& vector, float (&values)[WIDTH]) {
  if (WHOLE || vector.at_once(array)) {
    const float4 four = __ldg(reinterpret_cast<const float4*>(array + vector.token));
    const float each[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) values[i] = each[i];
  } else {
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) values[i] = __ldg(array + vector.at(i));
  }
}

// Four bytes of a mask; a byte other than 0 is true.
template <bool WHOLE, int WIDTH>
__device__ __forceinline__ void read(const uint8_t* array, const Vector<WIDTH>& vector, uint32_t& bytes) {
  if (WHOLE || vector.at_once(array)) {
    bytes = __ldg(reinterpret_cast<const uint32_t*>(array + vector.token));
  } else {
    bytes = 0;
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) bytes |= uint32_t(__ldg(array + vector.at(i))) << (8 * i);
  }
}

__device__ __forceinline__ bool byte_of(uint32_t bytes, int i) { return (bytes >> (8 * i) & 0xFF) != 0; }

// Whether no byte is 0: a borrow would come out of one that is, or of one above it.
__device__ __forceinline__ bool all_bytes(uint32_t bytes) { return ((bytes - 0x01010101u) & ~bytes & 0x80808080u) == 0; }

template <int WIDTH>
__device__ __forceinline__ void write(float* array, const Vector<WIDTH>& vector, const float (&values)[WIDTH]) {
  if constexpr (WIDTH == 4) {
    if (vector.at_once(array)) {
      // An assignment would not do: nvcc takes it apart, to share its stores with those below.
      __stwb(reinterpret_cast<float4*>(array + vector.token), make_float4(values[0], values[1], values[2], values[3]));
      return;
    }
  }
#pragma unroll
  for (int i = 0; i < WIDTH; ++i) {
    if (vector.has(i)) array[vector.token + i] = values[i];
  }
}

}  // namespace hpo
