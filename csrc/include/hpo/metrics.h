// The slots of the metrics vector, in the order of hpo_core/metrics.py: a test compares the two.
#pragma once

namespace hpo {

enum Metric : int {
  kTokens,
  kSelected,
  kRows,
  kLoss,
  kLogRatioSum,
  kLogRatioSquare,
  kRatioDeviation,
  kRatioDeviationSquare,
  kLogRatioMin,
  kLogRatioMax,
  kClippedHighPositive,
  kClippedLowPositive,
  kClippedLowNegative,
  kClippedHighNegative,
  kReferenceLogRatio,
  kReferenceLogRatioSquare,
  kReferenceK3,
  kPenalty,
  kEntropy,
  kEntropyTokens,
  kNanTokens,
  kInfiniteTokens,
  kBadOffsets,
  kBadAdvantages,
  kMetrics
};

}  // namespace hpo
