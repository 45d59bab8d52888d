// Token statistics on the GPU. Forward: blocks scan segments of rows (`scan`), then a warp a row merges what they found
// (`finish`). Backward: a thread a row (`start`), then blocks write segments of gradients (`write`). No float atomics,
// and every merge in a fixed order: the same bits each time.

#include <algorithm>

#include "token_stats_math.h"

#ifndef LAUNCH  // the tests define both for a CPU
#define LAUNCH(kernel, blocks, threads, shared_bytes, stream) \
  kernel<<<unsigned(blocks), threads, shared_bytes, static_cast<cudaStream_t>(stream)>>>
#define DYNAMIC_SHARED(type, name) extern __shared__ type name[]
#endif

namespace trustregion {
namespace {

constexpr int kThreads = 128, kWarps = kThreads / 32;
// Chunks on their way to each thread, as many as its registers hold without spills.
template <class X>
constexpr int kUnroll = sizeof(X) == 8 ? 1 : 4;
constexpr int kWriteUnroll = 2;
constexpr int kLargestSegment = 1 << 17;  // logits; a bit for each has to fit into shared memory, times blocks per SM
constexpr unsigned kAll = 0xffffffffu;
constexpr int kNoId = std::numeric_limits<int>::max();

// 16 bytes of logits, aligned. The first and the last chunk of a row may reach beyond it.
template <class X>
struct Chunk {
  static constexpr int kSize = 16 / sizeof(X);
  X x[kSize];
};

// The part of a row that one block does: `chunks` chunks, the first one's first logit that of id `first`.
struct Segment {
  int begin, end;  // ids
  int first, chunks;
  int64_t step;

  template <class X>
  __device__ Segment(const X* row, int64_t V, int64_t step, int splits, int split) : step(step) {
    constexpr int size = Chunk<X>::kSize;
    const int shift = step == 1 ? int(reinterpret_cast<uintptr_t>(row) / sizeof(X) % size) : 0;
    const int all = int((V + shift + size - 1) / size), each = (all + splits - 1) / splits;
    chunks = min(each, max(all - split * each, 0));
    first = split * each * size - shift;
    begin = max(first, 0);
    end = min(int(V), first + chunks * size);
  }
};

template <class X>
__device__ bool is_vector(const X* row, const Segment& segment, int64_t step, int id) {
  const bool inside = id >= segment.begin && id + Chunk<X>::kSize <= segment.end;
  return inside && step == 1 && reinterpret_cast<uintptr_t>(row + id) % 16 == 0;
}

// -inf outside the segment.
template <class X>
__device__ Chunk<X> load(const X* row, const Segment& segment, int id) {
  Chunk<X> chunk;
  if (is_vector(row, segment, segment.step, id)) {
    const uint4 bytes = *reinterpret_cast<const uint4*>(row + id);
    memcpy(&chunk, &bytes, sizeof bytes);
    return chunk;
  }
#pragma unroll
  for (int i = 0; i < Chunk<X>::kSize; ++i) {
    if (id + i >= segment.begin && id + i < segment.end) {
      chunk.x[i] = row[(id + i) * segment.step];
    } else {
      narrow(-infinity<Compute<X>>, &chunk.x[i]);
    }
  }
  return chunk;
}

// The K <= 32 best logits that a warp has been offered, the i-th in lane i.
template <class C>
struct WarpTopk {
  int K;
  C value = -infinity<C>, worst = -infinity<C>;
  int id = kNoId, worst_id = kNoId;

  // All lanes together, each with a logit; those that belong here are exchanged for those they displace.
  __device__ void offer(C& x, int& x_id) {
    const int lane = threadIdx.x % 32;
    while (const unsigned waiting = __ballot_sync(kAll, better(x, x_id, worst, worst_id))) {
      const int source = __ffs(waiting) - 1;
      const C candidate = __shfl_sync(kAll, x, source);
      const int candidate_id = __shfl_sync(kAll, x_id, source);
      const int position = __popc(__ballot_sync(kAll, better(value, id, candidate, candidate_id)));
      const C above = __shfl_up_sync(kAll, value, 1);
      const int above_id = __shfl_up_sync(kAll, id, 1);
      if (lane == source) {
        x = worst;
        x_id = worst_id;
      }
      if (lane >= position && lane < K) {
        value = lane == position ? candidate : above;
        id = lane == position ? candidate_id : above_id;
      }
      worst = __shfl_sync(kAll, value, K - 1);
      worst_id = __shfl_sync(kAll, id, K - 1);
    }
  }
};

template <class C>
__device__ Sums<C> merged_in_warp(Sums<C> sums, C temperature) {
  for (int distance = 16; distance > 0; distance /= 2) {
    const Sums<C> other{
        __shfl_xor_sync(kAll, sums.largest, distance), __shfl_xor_sync(kAll, sums.ties, distance),
        __shfl_xor_sync(kAll, sums.below, distance), __shfl_xor_sync(kAll, sums.weighted, distance)};
    sums = merged(sums, other, temperature);
  }
  return sums;
}

// What blocks found: of each segment the sums over its tokens, with cells without those named or sampled, and its top-K.
template <class C>
struct Found {
  Sums<C>* sums;  // [N, splits]
  C* values;      // [N, splits, 32]
  int* ids;       // [N, splits, 32]
};

template <class X, bool topk, class C = Compute<X>>
__global__ void __launch_bounds__(kThreads) scan(Forward<X> args, int splits, Found<C> found) {
  const int64_t row = blockIdx.x / splits;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const X* x = args.logits + args.layout.offset(row);
  const C temperature = of_row(args.temperature, row, C(1));
  const Segment segment(x, args.V, args.layout.step, splits, blockIdx.x % splits);
  constexpr int size = Chunk<X>::kSize;

  // One bit a logit: of those that are no part of the rest.
  DYNAMIC_SHARED(uint32_t, apart);
  for (int word = threadIdx.x; word < (segment.chunks * size + 31) / 32; word += kThreads) apart[word] = 0;
  __syncthreads();
  const int64_t given = args.given_ids ? args.K : 0;
  for (int64_t k = threadIdx.x; args.cells && k <= given; k += kThreads) {
    const int64_t id = k < given ? args.given_ids[row * given + k] : args.token_ids[row];
    const int bit = int(id - segment.first);
    if (id >= segment.begin && id < segment.end) atomicOr(&apart[bit / 32], 1u << bit % 32);
  }
  __syncthreads();

  Sums<C> sums;
  WarpTopk<C> best{int(args.K)};
  for (int start = 0; start < segment.chunks; start += kThreads * kUnroll<X>) {
    Chunk<X> chunks[kUnroll<X>];
#pragma unroll
    for (int u = 0; u < kUnroll<X>; ++u)
      chunks[u] = load(x, segment, segment.first + (start + u * kThreads + int(threadIdx.x)) * size);
#pragma unroll
    for (int u = 0; u < kUnroll<X>; ++u) {
      const int chunk = start + u * kThreads + int(threadIdx.x), first = segment.first + chunk * size;
      const uint32_t bits = chunk < segment.chunks ? apart[chunk * size / 32] >> chunk * size % 32 : 0;
      C values[size];
      bool good = false;
#pragma unroll
      for (int i = 0; i < size; ++i) {
        values[i] = bits >> i & 1 ? -infinity<C> : widen(chunks[u].x[i]);
        good = good || values[i] >= best.worst;
      }
      if (topk && __any_sync(kAll, good)) {
#pragma unroll
        for (int i = 0; i < size; ++i) {
          const bool part = first + i >= segment.begin && first + i < segment.end && !(bits >> i & 1);
          int id = part ? first + i : kNoId;
          best.offer(values[i], id);
        }
      }
      add(sums, values, size, temperature);
    }
  }

  __shared__ C of_warps[kWarps][4];
  if (topk) {
    __shared__ C values[kWarps][32];
    __shared__ int ids[kWarps][32];
    values[warp][lane] = best.value;
    ids[warp][lane] = best.id;
    __syncthreads();
    if (warp == 0) {
      for (int other = 1; other < kWarps; ++other) {
        C value = values[other][lane];
        int id = ids[other][lane];
        best.offer(value, id);
        add(sums, &value, 1, temperature);
      }
      found.values[int64_t(blockIdx.x) * 32 + lane] = best.value;
      found.ids[int64_t(blockIdx.x) * 32 + lane] = best.id;
    }
  }
  sums = merged_in_warp(sums, temperature);
  if (lane == 0) {
    of_warps[warp][0] = sums.largest;
    of_warps[warp][1] = sums.ties;
    of_warps[warp][2] = sums.below;
    of_warps[warp][3] = sums.weighted;
  }
  __syncthreads();
  if (threadIdx.x > 0) return;
  for (int other = 1; other < kWarps; ++other) {
    const C* s = of_warps[other];
    sums = merged(sums, Sums<C>{s[0], s[1], s[2], s[3]}, temperature);
  }
  found.sums[blockIdx.x] = sums;
}

// The named tokens and the sampled one, each once.
template <class X, class C>
__device__ void add_apart(Sums<C>& all, const Forward<X>& args, int64_t row, C temperature) {
  const X* x = args.logits + args.layout.offset(row);
  int64_t token = args.token_ids[row];
  for (int64_t k = -1; k < args.K; ++k) {
    const int64_t id = k < 0 ? token : args.topk ? args.cell_ids[row * args.K + k] : args.given_ids[row * args.K + k];
    if (id < 0 || id >= args.V || (k >= 0 && id == token)) continue;
    const C value = logit(x, args.layout, args.V, id);
    add(all, &value, 1, temperature);
  }
}

template <class X, class C = Compute<X>>
__global__ void __launch_bounds__(kThreads) finish(Forward<X> args, int splits, Found<C> found) {
  const int64_t row = int64_t(blockIdx.x) * kWarps + threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  if (row >= args.N) return;
  const C temperature = of_row(args.temperature, row, C(1));

  Sums<C> rest;
  for (int split = lane; split < splits; split += 32) rest = merged(rest, found.sums[row * splits + split], temperature);
  if (args.topk) {
    WarpTopk<C> best{int(args.K)};
    for (int64_t split = row * splits; split < (row + 1) * splits; ++split) {
      C value = found.values[split * 32 + lane];
      int id = found.ids[split * 32 + lane];
      best.offer(value, id);
      add(rest, &value, 1, temperature);
    }
    const int64_t token = args.token_ids[row];
    const bool sampled = lane == 0 && token >= 0;
    C value = sampled ? logit(args.logits + args.layout.offset(row), args.layout, args.V, token) : -infinity<C>;
    int id = sampled ? int(token) : kNoId;
    best.offer(value, id);
    if (sampled && id != token) add(rest, &value, 1, temperature);
    if (lane < args.K) args.cell_ids[row * args.K + lane] = best.id;
  }
  rest = merged_in_warp(rest, temperature);
  __syncwarp();
  if (lane > 0) return;
  Sums<C> all = rest;
  if (args.cells) add_apart(all, args, row, temperature);
  finish_forward(args, row, all, rest);
}

template <class X, class C = Compute<X>>
__global__ void __launch_bounds__(kThreads) start(Backward<X> args, Slope<C>* slopes, C* named) {
  const int64_t row = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (row < args.N) slopes[row] = start_backward(args, row, named + row * (args.K + 1));
}

template <class X, class C = Compute<X>>
__global__ void __launch_bounds__(kThreads) write(Backward<X> args, int splits, const Slope<C>* slopes, const C* named) {
  const int64_t row = blockIdx.x / splits, step = args.grad_layout.step;
  const X* x = args.logits + args.layout.offset(row);
  X* grad = args.grad_logits + args.grad_layout.offset(row);
  const Segment segment(x, args.V, args.layout.step, splits, blockIdx.x % splits);
  const Slope<C> slope = slopes[row];
  constexpr int size = Chunk<X>::kSize;

  for (int start = threadIdx.x; start < segment.chunks; start += kThreads * kWriteUnroll) {
    Chunk<X> chunks[kWriteUnroll];
#pragma unroll
    for (int u = 0; u < kWriteUnroll; ++u)
      if (slope.live) chunks[u] = load(x, segment, segment.first + (start + u * kThreads) * size);
#pragma unroll
    for (int u = 0; u < kWriteUnroll; ++u) {
      const int id = segment.first + (start + u * kThreads) * size;
#pragma unroll
      for (int i = 0; i < size; ++i) {
        const C d = widen(chunks[u].x[i]) - slope.largest;
        narrow(slope.live ? gradient(slope, slope.temperature == 1 ? d : d / slope.temperature) : C(0), &chunks[u].x[i]);
      }
      if (is_vector(grad, segment, step, id)) {
        uint4 bytes;
        memcpy(&bytes, &chunks[u], sizeof bytes);
        *reinterpret_cast<uint4*>(grad + id) = bytes;
      } else {
#pragma unroll
        for (int i = 0; i < size; ++i)
          if (id + i >= segment.begin && id + i < segment.end) grad[(id + i) * step] = chunks[u].x[i];
      }
    }
  }
  if (!slope.live) return;
  __syncthreads();
  for (int64_t k = threadIdx.x; k <= args.K; k += kThreads) {
    if (k < args.K && !args.grad_cells) continue;
    const int64_t id = k < args.K ? args.cell_ids[row * args.K + k] : args.token_ids[row];
    if (id >= segment.begin && id < segment.end) narrow(named[row * (args.K + 1) + k], grad + id * step);
  }
}

// Blocks per row: enough to fill the device with few rows, and for segments to be small enough.
template <class X>
int splits_of(int64_t N, int64_t V, int processors) {
  const int64_t filling = 8 * int64_t(processors) / std::max<int64_t>(N, 1);
  const int64_t worth_it = V / (kThreads * kUnroll<X> * Chunk<X>::kSize);
  const int64_t needed = (V + Chunk<X>::kSize) / kLargestSegment + 1;
  return int(std::max(needed, std::min<int64_t>({filling, worth_it, 32})));
}

int64_t blocks_for(int64_t count, int64_t each) { return (count + each - 1) / each; }

}  // namespace

template <class X>
int64_t forward_workspace(const Forward<X>& args, int processors) {
  const int64_t segments = args.N * splits_of<X>(args.N, args.V, processors);
  return segments * int64_t(sizeof(Sums<Compute<X>>) + (args.topk ? 32 * (sizeof(Compute<X>) + sizeof(int)) : 0));
}

template <class X>
void forward_cuda(const Forward<X>& args, int processors, void* workspace, void* stream) {
  using C = Compute<X>;
  if (args.N == 0) return;
  const int splits = splits_of<X>(args.N, args.V, processors);
  const int64_t segments = args.N * splits, in_segment = args.V / splits + 3 * Chunk<X>::kSize;
  Found<C> found;
  found.sums = static_cast<Sums<C>*>(workspace);
  found.values = reinterpret_cast<C*>(found.sums + segments);
  found.ids = reinterpret_cast<int*>(found.values + segments * 32);
  const auto kernel = args.topk ? scan<X, true, C> : scan<X, false, C>;
  LAUNCH(kernel, segments, kThreads, (in_segment + 31) / 32 * 4, stream)(args, splits, found);
  LAUNCH((finish<X, C>), blocks_for(args.N, kWarps), kThreads, 0, stream)(args, splits, found);
}

template <class X>
int64_t backward_workspace(const Backward<X>& args) {
  return args.N * int64_t(sizeof(Slope<Compute<X>>) + (args.K + 1) * sizeof(Compute<X>));
}

template <class X>
void backward_cuda(const Backward<X>& args, int processors, void* workspace, void* stream) {
  using C = Compute<X>;
  if (args.N == 0) return;
  const int splits = splits_of<X>(args.N, args.V, processors);
  auto* slopes = static_cast<Slope<C>*>(workspace);
  auto* named = reinterpret_cast<C*>(slopes + args.N);
  LAUNCH((start<X, C>), blocks_for(args.N, kThreads), kThreads, 0, stream)(args, slopes, named);
  LAUNCH((write<X, C>), args.N * splits, kThreads, 0, stream)(args, splits, slopes, named);
}

#define INSTANTIATE(X)                                                          \
  template int64_t forward_workspace<X>(const Forward<X>&, int);                \
  template void forward_cuda<X>(const Forward<X>&, int, void*, void*);          \
  template int64_t backward_workspace<X>(const Backward<X>&);                   \
  template void backward_cuda<X>(const Backward<X>&, int, void*, void*);
INSTANTIATE(BFloat16)
INSTANTIATE(Float16)
INSTANTIATE(float)
INSTANTIATE(double)

}  // namespace trustregion
