// loss_from_logits: for each row of logits its log-probability and entropy, the derivative of the loss in this
// log-probability under a gate on tokens, and the gradient of the row's logits, in one launch. The definition is
// hpo_core/reference/logprobs.py followed by hpo_core/reference/gates.py.
//
// A block takes a row at a time and reads it twice: the second time from the L2 cache, since so few blocks work at once that it
// holds their rows. The second reading and the gradient are marked for the cache to forget first. Each step is loaded
// while the one before it is computed. A block has as many threads as one of token_logprobs, whose order of additions it keeps.
#include "gates_ratio.cuh"
#include "hierarchy_tokens.cuh"
#include "logits_rows.cuh"

namespace hpo {
namespace {

constexpr int kBlocksTogether = 2;  // on a multiprocessor

struct Call {
  LogprobsBackwardArgs logits;
  TokenCall tokens;
};

// The token that a row of logits predicts: its inputs beside its log-probability.
struct PredictedToken {
  int row;  // -1: the token is in none
  RowTerms terms;
  Inputs<1> inputs;
};

// A whole warp calls this, before a barrier.
__device__ __forceinline__ void read_predicted(const Gate& gate, int64_t token, PredictedToken& predicted) {
  const Pack pack = gate.pack();
  int row = -1;
  if (token < pack.tokens && pack.rows > 0) {
    bool ascending = true;
    row = find_row(pack, token, ascending);
    const Range range = row_range(pack.cu_seqlens, row, pack.tokens);
    if (!ascending || token < range.begin || range.end <= token) row = find_owner(pack, token);
  }
  if (lane() != 0) return;
  predicted.row = row;
  if (row < 0) return;
  predicted.terms = gate.row_terms(row);
  Inputs<1> inputs = {};
  inputs.vector = {token, 0, 1, false};
  if (gate.args.old_logp) read<false>(gate.args.old_logp, inputs.vector, inputs.old_logp);
  read_constants<false, true, true>(gate.args, inputs);
  predicted.inputs = inputs;
}

// d loss / d logp of a token, as the sweeps of policy_loss compute it.
template <bool TERMS>
__device__ __forceinline__ float token_gradient(const TokenCall& call, const PredictedToken& predicted, float logp,
                                                HPO_SHARED_POINTER(int) events) {
  if (predicted.row < 0) return 0.0f;
  Inputs<1> inputs = predicted.inputs;
  inputs.logp[0] = logp;
  if (!call.gate.args.old_logp) inputs.old_logp[0] = logp;
  const RowTerms row = predicted.terms;
  Shares<1> shares = {};  // another launch counts loss and metrics
  TileTotals tile(events);
  Totals totals = {};
  if constexpr (TERMS) {
    const auto put_flow = [](const Token&, const GatedToken&, const PolicyTerm&) {};
    return sweep_token_of_leaf<false, true, kExtras, kTermGate>(call, LeafGate{}, 0.0f, predicted.row, row, inputs, 0, put_flow,
                                                                shares, tile, totals);
  } else {
    return sweep_token<false, true, kExtras>(call.gate, row, inputs, 0, shares, tile, totals);
  }
}

template <class Type, bool TERMS>
__global__ void __launch_bounds__(kThreads, kBlocksTogether) differentiate_loss(const Call call) {
  HPO_SHARED(Row, row, );
  HPO_SHARED(PredictedToken, predicted, );
  HPO_SHARED(int, events, [kMetrics]);  // not read
  HPO_SHARED(GradientRow, gradient, );
  const LogprobsArgs& args = call.logits.given;
#pragma unroll 1
  for (int64_t index = blockIdx.x; index < args.rows; index += gridDim.x) {
    const int64_t token = index + 1;  // the row predicts this token; the last row predicts none
    if (threadIdx.x == 0) row = get_row<Type>(args, index);
    if (warp_in_block() == 1 && !is_ignored(args, index)) read_predicted(call.tokens.gate, token, predicted);
    __syncthreads();
    RowResult result = row.is_ignored ? RowResult{} : undefined_result();
    if (row.is_read) {
      const RowSums sums = sum_row<Type, 3, false, true>(args, row);
      if (threadIdx.x == 0) result = result_of(sums, row.exponent, row.logit, true);
    }
    if (threadIdx.x == 0) {
      const int64_t place = token < args.rows ? token : 0;
      args.logp[place] = result.logp;
      args.entropy[place] = result.entropy;
      const float of_logp = row.is_ignored ? 0.0f : token_gradient<TERMS>(call.tokens, predicted, result.logp, events);
      gradient = gradient_row<Type>(call.logits, index, row, RowUpstream(result, of_logp));
    }
    __syncthreads();
    differentiate_row<Type, false, Cached::evicted_first, true>(call.logits, gradient);
  }
}

// ---------------------------------------------------------------------------------------------------------------- launch

struct Device {
  int processors, cache;  // cache: bytes of the L2
};

Device current_device() {
  static thread_local std::map<int, Device> devices;
  int index = 0;
  cudaGetDevice(&index);
  Device& device = devices[index];
  if (device.processors == 0) {
    cudaDeviceGetAttribute(&device.processors, cudaDevAttrMultiProcessorCount, index);
    cudaDeviceGetAttribute(&device.cache, cudaDevAttrL2CacheSize, index);
  }
  return device;
}

template <class Type>
void launch(const Call& call, int64_t blocks, cudaStream_t stream) {
  const dim3 grid = dim3(unsigned(blocks));
  if (call.tokens.hierarchy.term.present) {
    HPO_LAUNCH((differentiate_loss<Type, true>), grid, dim3(kThreads), 0, stream, call);
  } else {
    HPO_LAUNCH((differentiate_loss<Type, false>), grid, dim3(kThreads), 0, stream, call);
  }
}

}  // namespace
}  // namespace hpo

extern "C" int64_t hpo_loss_from_logits_blocks(const hpo::LogprobsArgs* logits) {
  using namespace hpo;
  const Device device = current_device();
  const int64_t bytes = logits->columns * (logits->type == LogitType::float32 ? 4 : 2);
  // A row is in the cache for half of its time on average, and the cache also holds gradients: a quarter is left to these.
  const int64_t kept = device.cache / 4 * 3 / std::max(bytes, int64_t(1));
  const int64_t blocks = std::min(logits->rows, int64_t(device.processors) * kBlocksTogether);
  // With fewer blocks memory idles: on an H200, 126 of them take 1.3 times as long as a forward and a backward.
  return kept < blocks ? 0 : blocks;
}

extern "C" int hpo_loss_from_logits(const hpo::LogprobsBackwardArgs* logits, const hpo::PolicyLossArgs* args,
                                    const hpo::GateStructure* structure, const hpo::GateNumbers* numbers,
                                    const hpo::Hierarchy* hierarchy, int64_t blocks, int64_t context) {
  using namespace hpo;
  const cudaStream_t stream = reinterpret_cast<cudaStream_t>(context);
  PolicyLossArgs read = *args;
  read.logp = read.entropy = nullptr;
  read.grad = read.token_loss = nullptr;
  const Call call = {*logits, TokenCall(read, *structure, *numbers, hierarchy ? *hierarchy : Hierarchy{})};
  if (blocks == 0) return 0;
  with_type(logits->given.type, [&](auto type) { launch<decltype(type)>(call, blocks, stream); });
  return int(cudaGetLastError());
}
