// CUDA kernels of the operators in policy_loss.h and mathematics.h: a thread a token, in strides of the whole grid.
#include "cuda.h"

namespace trustregion {
namespace {

constexpr int THREADS = 256, WARP = 32;

template <class T>
__device__ T value_at(const Column& column, int64_t i) {
  T value = 0;
  if (column.repeat != 1) i /= column.repeat;
  with_reader<T>(column, [&](auto at) { value = at(i); });
  return value;
}

// As many blocks as the current device runs at once, and no more than there are tokens for.
template <class Kernel>
cudaError_t filling_grid(Kernel kernel, int64_t tokens, int* blocks) {
  int device = 0, processors = 0, each = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  if (error == cudaSuccess) error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&each, kernel, THREADS, 0);
  int64_t needed = (tokens + THREADS - 1) / THREADS, fitting = int64_t(processors) * each;
  *blocks = static_cast<int>(needed < fitting ? needed : fitting);
  return error;
}

template <Divergence f, class T>
__global__ void __launch_bounds__(THREADS, 2)
band_bounds_kernel(Column log_prob_old, Radii<T> radii, T* lower, T* upper, int64_t tokens) {
  int64_t stride = int64_t(gridDim.x) * THREADS;
  for (int64_t i = int64_t(blockIdx.x) * THREADS + threadIdx.x; i < tokens; i += stride) {
    Interval<T> bounds = interval<f>(value_at<T>(log_prob_old, i), radii);
    lower[i] = bounds.lower, upper[i] = bounds.upper;
  }
}

// One for each lane that is `on`, into the lanes' bins: one atomic for lanes that share a bin, which most do.
__device__ void count(unsigned* bins, int bin, bool on) {
  unsigned peers = __match_any_sync(0xffffffffu, on ? bin : -1);
  if (on && __ffs(peers) - 1 == int(threadIdx.x % WARP)) atomicAdd(bins + bin, __popc(peers));
}

template <class X, class Combine>
__device__ X over_block(X x, X* scratch, Combine combine) {
  for (int offset = WARP / 2; offset > 0; offset /= 2) x = combine(x, __shfl_down_sync(0xffffffffu, x, offset));
  __syncthreads();
  if (threadIdx.x % WARP == 0) scratch[threadIdx.x / WARP] = x;
  __syncthreads();
  for (int warp = 1; warp < THREADS / WARP; ++warp) x = threadIdx.x == 0 ? combine(x, scratch[warp]) : x;
  return x;
}

template <class T>
struct Token {
  bool live;
  T log_prob, log_prob_old, advantage, weight, entropy_ratio;
};

// `batch.prepare`: counts what is invalid, and makes an ordinary token without advantage of that and of what is not live.
template <class T>
__device__ Token<T> prepare(const TokenColumns& columns, int64_t i, unsigned* invalid, unsigned* dropped) {
  Token<T> token{false, T(-1), T(-1), T(0), T(1), T(1)};
  if (value_at<T>(columns.mask, i) == 0) return token;
  bool valid = true;
  auto check = [&](int which, bool holds) {
    if (!holds) atomicAdd(invalid + which, 1u);
    valid = valid && holds;
  };
  auto log_prob = [&](const Column& column, int which) {
    T x = value_at<T>(column, i);
    check(which, is_finite(x) && x <= T(TOLERANCE));
    return at_most(x, T(0));
  };
  auto entropy = [&](const Column& column, int which) {
    T x = value_at<T>(column, i);
    check(which, is_finite(x) && x >= T(-TOLERANCE));
    return at_least(x, T(0));
  };
  Token<T> given{true, log_prob(columns.log_prob, 0), log_prob(columns.log_prob_old, 1), value_at<T>(columns.advantages, i),
                 T(1), T(1)};
  check(2, is_finite(given.advantage));
  if (columns.weights.data) {
    given.weight = value_at<T>(columns.weights, i);
    check(3, is_finite(given.weight));
  }
  if (columns.entropy.data) {
    T now = entropy(columns.entropy, 4), old = entropy(columns.entropy_old, 5);
    given.entropy_ratio = now == 0 && old == 0 ? T(1) : now / old;
  }
  if (!valid) atomicAdd(dropped, 1u);
  return valid ? given : token;
}

template <Divergence f, class T>
__device__ Interval<T> bounds_of(T log_p, T log_ratio, T distance, const LossParameters<T>& loss) {
  switch (loss.region) {
    case Region::ratio_interval: return simple_interval<Region::ratio_interval>(log_p, loss);
    case Region::dcpo: return simple_interval<Region::dcpo>(log_p, loss);
    case Region::ball:
      if (loss.surrogate != Surrogate::mask && may_be_outside(log_ratio, distance, loss)) {
        return relaxed(interval<f>(log_p, loss.radii), loss);
      }
    default: return {-infinity<T>, infinity<T>};
  }
}

template <class T>
__device__ TokenLoss<T> loss_of(const Token<T>& t, T log_ratio, T distance, Interval<T> bounds, const LossParameters<T>& loss) {
  switch (loss.surrogate) {
    case Surrogate::clip:
      return token_loss<Surrogate::clip>(t.log_prob, log_ratio, t.advantage, distance, bounds, t.entropy_ratio, loss);
    case Surrogate::mask:
      return token_loss<Surrogate::mask>(t.log_prob, log_ratio, t.advantage, distance, bounds, t.entropy_ratio, loss);
    case Surrogate::preserve:
      return token_loss<Surrogate::preserve>(t.log_prob, log_ratio, t.advantage, distance, bounds, t.entropy_ratio, loss);
    default:
      return token_loss<Surrogate::cispo>(t.log_prob, log_ratio, t.advantage, distance, bounds, t.entropy_ratio, loss);
  }
}

template <Divergence f, class T>
__global__ void __launch_bounds__(THREADS, 2)
policy_loss_kernel(TokenColumns columns, LossParameters<T> loss, T* losses, T* factors, bool* active, double* partial,
                   int64_t tokens) {
  // Counts are exact in any order; sums are not, and stay with their thread until the block adds them up.
  __shared__ unsigned counts[STATISTICS];
  __shared__ double scratch[THREADS / WARP];
  for (int i = threadIdx.x; i < STATISTICS; i += THREADS) counts[i] = 0;
  __syncthreads();
  constexpr int SUMS[] = {LOG_RATIO, LOG_RATIO_ABS, RATIO, DIVERGENCE, ENTROPY_RATIO, ENTROPY_LOST_PROB, ENTROPY_GAINED_PROB};
  double sums[7] = {}, largest_ratio = 0, largest_distance = 0;

  int64_t stride = int64_t(gridDim.x) * THREADS;
  for (int64_t start = int64_t(blockIdx.x) * THREADS; start < tokens; start += stride) {
    int64_t i = start + threadIdx.x;
    Token<T> t{false, T(-1), T(-1), T(0), T(1), T(1)};
    if (i < tokens) t = prepare<T>(columns, i, counts + INVALID, counts + DROPPED_TOKENS);
    T log_ratio = t.log_prob - t.log_prob_old;
    Exp<T> prob_old = exp_all(t.log_prob_old);
    T distance = binary_divergence<f>(t.log_prob, t.log_prob_old, prob_old);
    TokenLoss<T> result = loss_of(t, log_ratio, distance, bounds_of<f>(t.log_prob_old, log_ratio, distance, loss), loss);
    if (i < tokens) {
      losses[i] = t.live ? result.loss * t.weight : T(0);
      factors[i] = t.live ? result.factor * t.weight : T(0);
      active[i] = t.live && (result.bits & (ACTIVE | BLOCKED)) == ACTIVE;
    }

    bool is_active = result.bits & ACTIVE, up = result.bits & UP, down = result.bits & DOWN, outward = up || down;
    bool blocked = result.bits & BLOCKED;
    bool capped = loss.region == Region::ball ? t.log_prob_old <= loss.capped_at : (result.bits & CAPPED) != 0;
    bool saturated = t.log_prob_old <= loss.low_saturates_at || t.log_prob_old >= loss.high_saturates_at;
    double measured = double(at_most(distance, T(1e30))), entropy_ratio = double(t.entropy_ratio);
    bool looks = t.live && columns.entropy.data, lost = looks && blocked && entropy_ratio < 1;
    bool gained = looks && blocked && entropy_ratio > 1;
    int bucket = probability_bucket(prob_old.value);
    auto tally = [&](int which, bool holds) {
      unsigned lanes = __ballot_sync(0xffffffffu, holds && t.live);
      if (lanes && threadIdx.x % WARP == 0) atomicAdd(counts + which, __popc(lanes));
    };
    tally(TOKENS, true), tally(CLIPPED, outward || blocked || !is_active), tally(CLIPPED_UP, up), tally(CLIPPED_DOWN, down);
    tally(BLOCKED_BY_REGION, outward && !is_active), tally(BLOCKED_BY_DUAL_CLIP, !is_active && !outward && !blocked);
    tally(CAPPED_TOKENS, capped), tally(SATURATED, saturated), tally(BLOCKED_BY_ENTROPY, blocked);
    tally(ENTROPY_LOOKED_AT, looks), tally(ENTROPY_LOST, lost), tally(ENTROPY_GAINED, gained);
    count(counts + DIVERGENCE_COUNTS, divergence_bin(log10(measured)), t.live);
    count(counts + TOKENS_BY_BUCKET, bucket, t.live);
    count(counts + UP_BY_BUCKET, bucket, t.live && up), count(counts + DOWN_BY_BUCKET, bucket, t.live && down);
    if (columns.entropy.data) count(counts + ENTROPY_COUNTS, entropy_bin(log(entropy_ratio)), looks);
    if (t.live) {
      double probability = double(prob_old.value), magnitude = fabs(double(log_ratio));
      double add[] = {double(log_ratio), magnitude, double(result.ratio), measured,
                      looks ? fmin(entropy_ratio, 100.0) : 0, lost ? probability : 0, gained ? probability : 0};
      for (int k = 0; k < 7; ++k) sums[k] += add[k];
      largest_ratio = fmax(largest_ratio, magnitude), largest_distance = fmax(largest_distance, measured);
    }
  }

  auto plus = [](double a, double b) { return a + b; };
  auto larger = [](double a, double b) { return fmax(a, b); };
  double* mine = partial + int64_t(blockIdx.x) * STATISTICS;
  __syncthreads();
  for (int i = threadIdx.x; i < STATISTICS; i += THREADS) mine[i] = counts[i];
  __syncthreads();
  for (int k = 0; k < 7; ++k) {
    double total = over_block(sums[k], scratch, plus);
    if (threadIdx.x == 0) mine[SUMS[k]] = total;
  }
  largest_ratio = over_block(largest_ratio, scratch, larger);
  largest_distance = over_block(largest_distance, scratch, larger);
  if (threadIdx.x == 0) mine[LOG_RATIO_ABS_MAX] = largest_ratio, mine[DIVERGENCE_MAX] = largest_distance;
}

__global__ void add_blocks(const double* partial, double* statistics, int blocks) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= STATISTICS) return;
  double total = 0;
  for (int block = 0; block < blocks; ++block) {
    double x = partial[int64_t(block) * STATISTICS + i];
    total = i >= LOG_RATIO_ABS_MAX ? fmax(total, x) : total + x;
  }
  statistics[i] = total;
}

template <class Function>
cudaError_t with_divergence(Divergence f, Function function) {
  switch (f) {
    case Divergence::kl: return function(std::integral_constant<Divergence, Divergence::kl>());
    case Divergence::reverse_kl: return function(std::integral_constant<Divergence, Divergence::reverse_kl>());
    case Divergence::tv: return function(std::integral_constant<Divergence, Divergence::tv>());
    default: return function(std::integral_constant<Divergence, Divergence::chi2>());
  }
}

}  // namespace

template <class T>
cudaError_t launch_band_bounds(Divergence f, const Column& log_prob_old, const Radii<T>& radii, T* lower, T* upper,
                               int64_t tokens, cudaStream_t stream) {
  if (tokens == 0) return cudaSuccess;
  return with_divergence(f, [&](auto f_constant) {
    auto kernel = band_bounds_kernel<f_constant.value, T>;
    int blocks = 0;
    cudaError_t error = filling_grid(kernel, tokens, &blocks);
    if (error != cudaSuccess) return error;
    kernel<<<blocks, THREADS, 0, stream>>>(log_prob_old, radii, lower, upper, tokens);
    return cudaGetLastError();
  });
}

template <class T>
cudaError_t policy_loss_blocks(Divergence f, int64_t tokens, int* blocks) {
  return with_divergence(
      f, [&](auto f_constant) { return filling_grid(policy_loss_kernel<f_constant.value, T>, tokens, blocks); });
}

template <class T>
cudaError_t launch_policy_loss(const TokenColumns& columns, const LossParameters<T>& loss, T* losses, T* factors,
                               bool* active, double* partial, double* statistics, int64_t tokens, int blocks,
                               cudaStream_t stream) {
  if (tokens > 0) {
    cudaError_t error = with_divergence(loss.divergence, [&](auto f_constant) {
      policy_loss_kernel<f_constant.value, T>
          <<<blocks, THREADS, 0, stream>>>(columns, loss, losses, factors, active, partial, tokens);
      return cudaGetLastError();
    });
    if (error != cudaSuccess) return error;
  }
  add_blocks<<<(STATISTICS + THREADS - 1) / THREADS, THREADS, 0, stream>>>(partial, statistics, tokens > 0 ? blocks : 0);
  return cudaGetLastError();
}

#define TR_INSTANTIATE(T)                                                                                              \
  template cudaError_t launch_band_bounds(Divergence, const Column&, const Radii<T>&, T*, T*, int64_t, cudaStream_t);  \
  template cudaError_t policy_loss_blocks<T>(Divergence, int64_t, int*);                                               \
  template cudaError_t launch_policy_loss(const TokenColumns&, const LossParameters<T>&, T*, T*, bool*, double*,       \
                                          double*, int64_t, int, cudaStream_t);
TR_INSTANTIATE(float)
TR_INSTANTIATE(double)

}  // namespace trustregion
