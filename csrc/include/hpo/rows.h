// The rows of a pack of tokens, read from their offsets.
#pragma once
#include "math.h"

namespace hpo {

// Offsets are data: whatever they say, a row is a range inside [0, tokens], in order.
struct Range {
  int64_t begin, end;
  bool bad;
};

HPO_INLINE Range row_range(const int64_t* cu_seqlens, int64_t row, int64_t tokens) {
  const int64_t begin = cu_seqlens[row], end = cu_seqlens[row + 1];
  const bool bad = begin < 0 || end < begin || end > tokens;
  return {bad ? 0 : begin, bad ? 0 : end, bad};
}

}  // namespace hpo
