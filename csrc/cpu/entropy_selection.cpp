// order_statistic and select. The definition is hpo_core/reference/entropy.py.
#include "hpo/entropy.h"

#include "entropy_scores.h"
#include "kernels.h"
#include "lanes.h"
#include "order_keys.h"

HPO_DECLARE_KERNELS(HPO_ISA)

namespace hpo::HPO_ISA {
namespace {

constexpr int64_t kMostWorkers = 64;  // each has its own keys; results do not depend on their number

// ---------------------------------------------------------------------------------------------------- order statistics
//
// The selection works on order_key. A sample of the scores brackets the sought score. A pass over all scores keeps the keys
// inside the bracket, and a search halves the range of these keys. The pass counts the other scores, so a bracket that
// missed is noticed, and a second pass takes every finite score. The sample determines the time, never the result.
//
// If the mask of selected scores is wanted, too, the same pass marks scores as if the threshold were the low end of the
// bracket, and stores the positions of the keys inside it. Only the few scores between that end and the threshold are
// corrected afterwards. If there are too many keys inside, or the bracket missed, select makes the whole mask.

constexpr int64_t kSampled = 8192;  // fewer scores are searched without a sample
constexpr int64_t kLeastSample = 1024, kMostSample = 16384;
constexpr int64_t kShare = 256;  // one score of so many is drawn: more take longer to draw than a narrower bracket saves
constexpr double kDeviations = 3;  // standard deviations on each side of the sample's rank: one bracket in 400 misses

// The keys and counts of one worker for its part of the scores.
struct Worker {
  uint32_t* keys;
  uint32_t* positions;  // of the keys, from the begin of the part; null without a mask of selected scores
  int64_t room;  // the most keys
  int64_t kept;  // the number of keys
  int64_t finite, nan, below;
  bool full;  // there were more keys than room
};

struct Selection {
  Arena arena;
  int64_t most_workers;
  Worker* workers;
  Search* searches;
  uint32_t* words;  // [tokens]; the words of a worker start at the begin of its part
  int64_t bytes;

  Selection(void* base, int64_t tokens)
      : arena(base), most_workers(larger(1, smaller(ceil_divide(tokens, 1 << 14), kMostWorkers))) {
    workers = arena.take<Worker>(most_workers);
    searches = arena.take<Search>(most_workers);
    words = arena.take<uint32_t>(tokens);
    bytes = arena.bytes();
  }
};

struct PassCounts {
  int64_t kept, below;
  bool all_finite;
};

// Outputs of a pass besides the keys.
struct Marks {
  uint8_t* selected;  // 1 for scores from the low end of the range up, 0 below it
  uint32_t* positions;  // of the keys
  uint32_t first;  // position of the first score
};

#if defined(__AVX512F__)
// Keeps those of 64 scores that belong, and their positions, and returns their number. Most often fewer than four belong; they
// are written without a branch on their number.
template <bool kMark>
inline int64_t keep_few(const float* scores, uint64_t belong, uint32_t first, uint32_t* kept, uint32_t* positions) {
  const int64_t count = __builtin_popcountll(belong);
  int64_t written = 0;
  do {
#pragma GCC unroll 4
    for (int k = 0; k < 4; ++k) {
      const uint32_t place = uint32_t(__builtin_ctzll(belong | uint64_t(1) << 63));
      kept[written + k] = uint32_t(to_bits(scores[place]));
      if (kMark) positions[written + k] = first + place;
      belong &= belong - 1;
    }
    written += 4;
  } while (written < count);
  return count;
}
#endif

// Keeps those keys of at most kPart scores that are in the range, and counts the scores below it.
template <bool kMark>
PassCounts keep_scores(const float* scores, int64_t n, KeyRange range, uint32_t* kept, const Marks& marks) {
  PassCounts counts = {0, 0, true};
  int64_t i = 0;
#if defined(__AVX512F__)
  const __m512 low = _mm512_set1_ps(from_order_key(range.low)), end = _mm512_set1_ps(from_order_key(range.end()));
  __m512 zero = {};  // stays 0 until a NaN or an infinity times 0 is added
  for (; i + 64 <= n; i += 64) {
    uint64_t from_low = 0, belong = 0;
#pragma GCC unroll 4
    for (int part = 0; part < 4; ++part) {
      __builtin_prefetch(scores + i + 16 * part + kScoresAhead);
      const __m512 some = _mm512_loadu_ps(scores + i + 16 * part);
      zero = _mm512_fmadd_ps(some, _mm512_setzero_ps(), zero);
      const __mmask16 above = _mm512_cmp_ps_mask(some, low, _CMP_GE_OQ);
      from_low |= uint64_t(above) << 16 * part;
      belong |= uint64_t(_mm512_mask_cmp_ps_mask(above, some, end, _CMP_LE_OQ)) << 16 * part;
    }
    counts.below += 64 - __builtin_popcountll(from_low);
    uint32_t* const positions = kMark ? marks.positions + counts.kept : nullptr;
    counts.kept += keep_few<kMark>(scores + i, belong, marks.first + uint32_t(i), kept + counts.kept, positions);
    if (kMark) _mm512_storeu_si512(marks.selected + i, _mm512_maskz_set1_epi8(from_low, 1));
  }
  counts.all_finite = _mm512_cmp_ps_mask(zero, zero, _CMP_UNORD_Q) == 0;
  for (int64_t k = 0; k < counts.kept; ++k) kept[k] = order_key(from_bits(int32_t(kept[k])));
#endif
  uint32_t keys[kPart];
  int32_t below = 0;
  for (int64_t j = i; j < n; ++j) {
    keys[j - i] = order_key(scores[j]);
    below += keys[j - i] < range.low;
  }
  uint32_t positions[kPart];
  for (int64_t j = i; kMark && j < n; ++j) positions[j - i] = marks.first + uint32_t(j);
  for (int64_t j = i; kMark && j < n; ++j) marks.selected[j] = keys[j - i] >= range.low;
  if (kMark) keep(keys, positions, n - i, range, marks.positions + counts.kept);
  counts.kept += keep(keys, keys, n - i, range, kept + counts.kept);
  counts.below += below;
  counts.all_finite &= all_finite(scores + i, n - i);
  return counts;
}

// Counts the scores [begin, end) and keeps the keys in the range, with their positions if wanted, until there is no room.
void keep_range(const Scores& scores, int64_t begin, int64_t end, KeyRange range, uint8_t* selected, Worker& worker) {
  const auto keep_those_of = worker.positions ? keep_scores<true> : keep_scores<false>;
  worker.kept = worker.finite = worker.nan = worker.below = 0;
  worker.full = false;
  for (int64_t first = begin; first < end; first += kPart) {
    const int64_t n = smaller(kPart, end - first);
    worker.full = worker.kept + n > worker.room;
    if (worker.full) return;
    uint32_t* kept = worker.keys + worker.kept;
    const Marks marks =
        worker.positions ? Marks{selected + first, worker.positions + worker.kept, uint32_t(first - begin)} : Marks{};
    PassCounts counts = {};
    if (scores.are_values(first, n)) counts = keep_those_of(scores.values + first, n, range, kept, marks);
    int32_t left_out = 0, nan = 0;
    if (!counts.all_finite) {
      float score[kPart];
      scores.write(first, n, score);
      for (int64_t i = 0; i < n; ++i) {
        const bool finite = is_finite(score[i]);
        left_out += !finite;
        nan += score[i] != score[i];
        score[i] = finite ? score[i] : INFINITY;  // neither in the range nor below it
      }
      counts = keep_those_of(score, n, range, kept, marks);
      for (int64_t i = 0; worker.positions && i < n; ++i) {
        if (score[i] == INFINITY) marks.selected[i] = scores.given && scores.values[first + i] == INFINITY;
      }
    }
    worker.kept += counts.kept, worker.below += counts.below, worker.nan += nan, worker.finite += n - left_out;
  }
}

// The range that probably contains the sought key. The positions of the sample have no period, which rows might share.
KeyRange bracket(const OrderStatisticArgs& args, const Scores& scores, int threads, uint32_t* words) {
  const KeyRange finite_range = finite_keys();
  if (args.tokens < kSampled) return finite_range;
  const int64_t size = larger(kLeastSample, smaller(args.tokens / kShare, kMostSample));
  for_each_range(size, threads, [&](int64_t first, int64_t end) {
    for (int64_t i = first; i < end; ++i) {
      const uint64_t place = uint64_t(uint32_t(i) * 0x9E3779B9u) * uint64_t(args.tokens) >> 32;
      words[i] = order_key(scores.sample(int64_t(place)));
    }
  });
  int64_t drawn = 0;
  for (int64_t i = 0; i < size; ++i) drawn += finite_range.holds(words[i]);
  if (drawn == 0) return finite_range;

  const int64_t index = order_index(args.numerator, args.denominator, args.rule, drawn);
  const double variance = double(index) * double(drawn - index) / double(drawn);
  const int64_t margin = 2 + int64_t(kDeviations * std::sqrt(variance));
  const int64_t places[] = {index - margin, index + margin};
  uint32_t ends[] = {finite_range.low, finite_range.end()};
  parallel_for(2, threads, [&](int64_t side) {
    if (places[side] < 0 || places[side] >= drawn) return;
    Search search = {words, words + (1 + side) * size, size};
    ends[side] = find_key(&search, 1, finite_range, places[side], 1);
  });
  return {ends[0], ends[1] - ends[0]};
}

// ----------------------------------------------------------------------------------------------------------- selection

// Writes which of at most kPart scores are at or above the threshold (kStrict: above it), and returns whether all are finite.
template <bool kStrict>
bool compare(const float* __restrict score, int64_t n, float threshold, uint8_t* __restrict selected) {
  bool finite = true;
  int64_t i = 0;
#if defined(__AVX512F__)
  __m512 zero = {};  // as in keep_scores
  for (; i + 64 <= n; i += 64) {
    uint64_t above = 0;
#pragma GCC unroll 4
    for (int part = 0; part < 4; ++part) {
      __builtin_prefetch(score + i + 16 * part + kScoresAhead);
      const __m512 some = _mm512_loadu_ps(score + i + 16 * part);
      zero = _mm512_fmadd_ps(some, _mm512_setzero_ps(), zero);
      const __mmask16 chosen = _mm512_cmp_ps_mask(some, _mm512_set1_ps(threshold), kStrict ? _CMP_GT_OQ : _CMP_GE_OQ);
      above |= uint64_t(chosen) << 16 * part;
    }
    _mm512_storeu_si512(selected + i, _mm512_maskz_set1_epi8(above, 1));
  }
  finite = _mm512_cmp_ps_mask(zero, zero, _CMP_UNORD_Q) == 0;
#endif
  int32_t above[kPart];  // compilers vectorise a comparison of floats into words, and only words into bytes
  for (int64_t j = i; j < n; ++j) above[j - i] = kStrict ? score[j] > threshold : score[j] >= threshold;
  for (int64_t j = i; j < n; ++j) selected[j] = uint8_t(above[j - i]);
  return finite & all_finite(score + i, n - i);
}

}  // namespace

void select(const SelectArgs& args, int threads) {
  const Scores scores(args);
  const float threshold = *args.threshold;
  const auto compare_with = args.strict ? compare<true> : compare<false>;
  parallel_for(ceil_divide(args.tokens, kPart), worthwhile(threads, args.tokens), [&](int64_t part) {
    const int64_t first = part * kPart, n = smaller(kPart, args.tokens - first);
    uint8_t* selected = args.selected + first;
    if (scores.are_values(first, n) && (compare_with(scores.values + first, n, threshold, selected) || scores.given)) return;
    float score[kPart];
    scores.write(first, n, score);
    compare_with(score, n, threshold, selected);
  });
}

int64_t order_statistic_workspace(int64_t tokens) { return Selection(nullptr, tokens).bytes; }

void order_statistic(const OrderStatisticArgs& args, int threads) {
  const Scores scores(args);
  const Selection selection(args.workspace, args.tokens);
  const int64_t workers = smaller(worthwhile(threads, args.tokens), selection.most_workers);
  const auto begin = [&](int64_t worker) { return worker * args.tokens / workers; };
  const auto for_each_worker = [&](const auto& body) {
    parallel_for(workers, int(workers), [&](int64_t w) { body(selection.workers[w], w); });
  };

  KeyRange range = bracket(args, scores, worthwhile(threads, args.tokens), selection.words);
  int64_t population, nan, below, kept;
  // Under `mark` a third of the words is for keys, one for positions, and one for the search. Returns whether that was enough.
  const auto keep_all = [&](bool mark) {
    for_each_worker([&](Worker& worker, int64_t w) {
      const int64_t words = begin(w + 1) - begin(w);
      worker.room = mark ? words / 3 : words;
      worker.keys = selection.words + begin(w);
      worker.positions = mark ? worker.keys + worker.room : nullptr;
      keep_range(scores, begin(w), begin(w + 1), range, args.selected, worker);
      selection.searches[w] = {worker.keys, worker.keys + (mark ? 2 * worker.room : 0), worker.kept};
    });
    bool full = false;
    population = nan = below = kept = 0;
    for (int64_t w = 0; w < workers; ++w) {
      const Worker& worker = selection.workers[w];
      population += worker.finite, nan += worker.nan, below += worker.below, kept += worker.kept;
      full |= worker.full;
    }
    return !full;
  };
  // Corrects the marks once the search has found the least selected key.
  const auto correct = [&](uint32_t least) {
    if (least == range.low) return;
    for_each_worker([&](Worker& worker, int64_t w) {
      uint32_t* wrong = worker.keys + 2 * worker.room;
      uint8_t* selected = args.selected + begin(w);
      const int64_t count = keep(worker.keys, worker.positions, worker.kept, {range.low, least - range.low - 1}, wrong);
      for (int64_t i = 0; i < count; ++i) selected[wrong[i]] = 0;
    });
  };
  bool marked = args.selected && args.tokens <= UINT32_MAX && keep_all(true);
  if (!marked) keep_all(false);
  args.counts[0] = population;
  args.counts[1] = nan;
  *args.threshold = NAN;
  marked &= population > 0;  // without a threshold no score is selected, but infinite scores are marked
  if (population > 0) {
    const int64_t index = order_index(args.numerator, args.denominator, args.rule, population);
    if (index < below || index >= below + kept) {
      range = finite_keys();
      keep_all(false);
      marked = false;
    }
    const uint32_t key = find_key(selection.searches, workers, range, index - below, int(workers));
    *args.threshold = from_order_key(key);
    if (marked) correct(key + (args.strict != 0));
  }
  if (args.selected && !marked) select(selection_of(args), threads);
}

}  // namespace hpo::HPO_ISA
