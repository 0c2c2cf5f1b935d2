// The arithmetic of row weights, shared by C++ and CUDA. The definition is hpo_core/reference/segments.py.
#pragma once
#include "api/segments.h"
#include "math.h"

namespace hpo {

// The part of a row in the sum that divides all weights.
HPO_INLINE int64_t share_of_row(Denominator denominator, int64_t count) {
  return denominator == Denominator::tokens ? count : int64_t(count > 0);
}

// The quotient is rounded before the second division, as that of a count over several processes is.
HPO_INLINE float row_weight(const RowCountsArgs& args, int64_t total, int64_t count) {
  const float scale = total > 0 ? float(args.factor / double(total)) : 0.0f;
  if (args.denominator != Denominator::rows_and_tokens) return scale;
  return count > 0 ? scale / float(count) : 0.0f;
}

}  // namespace hpo
