// group_normalise and group_statistics.
#pragma once
#include <cstdint>

namespace hpo {

enum class Center : int32_t { mean = 0, leave_one_out = 1 };
enum class Scale : int32_t { none = 0, group = 1, batch = 2, absolute = 3, mean = 4, root_mean = 5 };
enum class EpsMode : int32_t { add = 0, sqrt = 1, floor = 2, add_share = 3 };
enum class Part : int32_t { normalised = 0, mean = 1 };
enum class Presence : int32_t { always = 0, spread = 1, nonzero = 2 };
enum class Share : int32_t { sum = 0, equal = 1, count = 2, deviation = 3 };

// A grouping of units, and how the statistics of a group become a term of its units.
struct GroupTerm {
  const float* values;          // [units]
  const int64_t* ids;           // [units], any integers, negative: in no group; null: one group
  const float* weights;         // [units], in the statistics; not above 0 or not finite: no member; null: 1 each
  Center center;                // a unit equal to its group's centre gets exactly 0, whatever eps is
  Scale scale;                  // mean, root_mean: a group whose mean is not above 0 gets exactly 0, whatever eps is
  int32_t ddof;
  EpsMode eps_mode;
  double eps;
  int32_t singleton_raw;        // 1: a group of one keeps its raw value (centre 0, group scale 1); 0: exactly 0
  Part part;
  Presence presence;
  double coefficient;
};

constexpr int kMostTerms = 8;

struct GroupNormaliseArgs {
  int64_t units;
  int32_t count;                // of terms, 1 to kMostTerms
  GroupTerm terms[kMostTerms];
  const uint8_t* mask;          // [units], which of them enter the statistics; null: all
  const uint8_t* apply_mask;    // [units], which of them receive an advantage; null: those of mask
  Share share;
  double share_eps, share_least;
  float* advantages;            // [units]
  void* workspace;              // group_normalise_workspace(units, count) bytes
};

// The statistics of the group of every unit.
struct GroupStatisticsArgs {
  int64_t units;
  const float* values;    // [units]
  const int64_t* ids;     // [units], negative: in no group; null: one group
  const float* weights;   // [units], not above 0 or not finite: no member; null: 1 each
  const uint8_t* mask;    // [units], which of them are members; null: all
  double* statistics;     // [6][units]: members, their weight, mean, sum of w (x - mean)^2, least, greatest; else 0
  void* workspace;        // group_statistics_workspace(units) bytes
};

}  // namespace hpo

extern "C" {
int64_t hpo_group_normalise_workspace(int64_t units, int32_t terms);
int hpo_group_normalise(const hpo::GroupNormaliseArgs* args, int64_t context);
int64_t hpo_group_statistics_workspace(int64_t units);
int hpo_group_statistics(const hpo::GroupStatisticsArgs* args, int64_t context);
}
