// recurrence, row_counts and row_spans.
#pragma once
#include <cstdint>

namespace hpo {

// y[i] = x[i] + g[i] y[i + 1] from the end of every row to its begin, y = 0 behind a row and outside all rows.
struct RecurrenceArgs {
  int64_t units, rows;
  const double* values;       // [units]
  const double* gains;        // [units]
  const int64_t* cu_seqlens;  // [rows + 1]
  double* scanned;            // [units]
};

// The divisor of the weights of rows: all valid tokens, the rows that have some, or these rows and then the tokens of each.
enum class Denominator : int32_t { tokens = 0, rows = 1, rows_and_tokens = 2 };

struct RowCountsArgs {
  int64_t tokens, rows;
  const uint8_t* mask;        // [tokens] or null
  const int64_t* cu_seqlens;  // [rows + 1]
  int64_t* counts;  // [rows]: valid tokens of each row; with weights [rows + 1]: the last is the sum that divides all
  float* weights;  // [rows]: factor / denominator, 0 where that is 0; null: counts alone
  Denominator denominator;
  double factor;
};

struct RowSpansArgs {
  int64_t tokens, rows;
  const uint8_t* mask;  // [tokens]
  const int64_t* cu_seqlens;  // [rows + 1]
  // [2 rows + 2]: the first offset; the first valid token of each row, and the one after its last; the last offset. A broken
  // row has tokens + 1 and -1: rows of these offsets that begin or end there are broken, too.
  int64_t* spans;
};

}  // namespace hpo

extern "C" {
int hpo_recurrence(const hpo::RecurrenceArgs* args, int64_t context);
int hpo_row_counts(const hpo::RowCountsArgs* args, int64_t context);
int hpo_row_spans(const hpo::RowSpansArgs* args, int64_t context);
}
