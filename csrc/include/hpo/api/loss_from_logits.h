// loss_from_logits and scale, on CUDA alone.
#pragma once
#include "hierarchy.h"
#include "logprobs.h"

extern "C" {
// values[count] *= *factor, each float32, bfloat16 or float16; they are not touched where it is 1.
int hpo_scale(void* values, int64_t count, hpo::LogitType type, const float* factor, int64_t context);
// Both directions of token_logprobs in one launch, with d loss / d logp of a gate on tokens between them. Row r of
// the logits predicts token r + 1; log-probabilities and entropies go to `logits.given`, by token, the gradient to
// `logits.grad`. Of `args` the log-probabilities and outputs do not count. hierarchy: of depth 0, where a term is present, else
// null. blocks: the result of hpo_loss_from_logits_blocks.
int hpo_loss_from_logits(const hpo::LogprobsBackwardArgs* logits, const hpo::PolicyLossArgs* args,
                         const hpo::GateStructure* structure, const hpo::GateNumbers* numbers, const hpo::Hierarchy* hierarchy,
                         int64_t blocks, int64_t context);
// The number of rows that may be read at once, so that the cache of the current device keeps them for the gradient; 0: so few
// that most of the device would stand idle, and one launch for each direction is the quicker way.
int64_t hpo_loss_from_logits_blocks(const hpo::LogprobsArgs* logits);
}
