// Runs CUDA kernels on a CPU, to test them where there is no GPU: each thread of a block is a fibre, which runs until it
// has to wait for others at a barrier or in a warp's exchange. Blocks run one after another. Everything is as
// deterministic as a real GPU is not, so races go unnoticed; indices, reductions and reads beyond an array do not.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <vector>

#define __host__
#define __device__
#define __global__
#define __launch_bounds__(threads)
#define __shared__ static
#define LAUNCH(kernel, blocks, threads, shared_bytes, stream) cuda_on_cpu::launcher(kernel, blocks, threads, shared_bytes)
#define DYNAMIC_SHARED(type, name) type* name = reinterpret_cast<type*>(cuda_on_cpu::dynamic_shared.data())

struct uint4 {
  uint32_t x, y, z, w;
};
struct Index {
  unsigned x;
};
inline Index threadIdx, blockIdx;  // of the fibre that runs
using std::max;
using std::min;

namespace cuda_on_cpu {

struct Barrier {
  int alive = 0, arrived = 0;
  unsigned generation = 0;
  void open_if_complete() {
    if (arrived < alive || arrived == 0) return;
    arrived = 0;
    ++generation;
  }
};

struct Warp {
  Barrier barrier;
  uint64_t values[32];
  bool present[32];
};

struct Fibre {
  ucontext_t start;
  jmp_buf context;  // swapcontext() makes a system call each time
  std::vector<char> stack = std::vector<char>(1 << 16);
  bool started, done;
};

inline std::vector<char> dynamic_shared;
inline std::vector<Fibre> fibres;
inline std::vector<Warp> warps;
inline Barrier block;
inline jmp_buf scheduler;
inline std::function<void()> body;

inline void wait(Barrier& barrier) {
  const unsigned generation = barrier.generation;
  ++barrier.arrived;
  barrier.open_if_complete();
  while (barrier.generation == generation)
    if (_setjmp(fibres[threadIdx.x].context) == 0) _longjmp(scheduler, 1);
}

inline void leave(Barrier& barrier) {
  --barrier.alive;
  barrier.open_if_complete();
}

inline void run_fibre() {
  body();
  Warp& warp = warps[threadIdx.x / 32];
  warp.present[threadIdx.x % 32] = false;
  leave(warp.barrier);
  leave(block);
  fibres[threadIdx.x].done = true;
  _longjmp(scheduler, 1);
}

inline void resume(Fibre& fibre) {
  if (_setjmp(scheduler) != 0) return;
  if (fibre.started) _longjmp(fibre.context, 1);
  fibre.started = true;
  setcontext(&fibre.start);
}

inline void run_block(unsigned index, unsigned threads, size_t shared_bytes) {
  blockIdx.x = index;
  dynamic_shared.assign(shared_bytes, char(0xcd));  // nobody may count on zeros
  warps.assign((threads + 31) / 32, Warp{});
  block = Barrier{int(threads)};
  if (fibres.size() < threads) fibres = std::vector<Fibre>(threads);
  for (unsigned thread = 0; thread < threads; ++thread) {
    Fibre& fibre = fibres[thread];
    ++warps[thread / 32].barrier.alive;
    warps[thread / 32].present[thread % 32] = true;
    getcontext(&fibre.start);
    fibre.start.uc_stack.ss_sp = fibre.stack.data();
    fibre.start.uc_stack.ss_size = fibre.stack.size();
    fibre.started = fibre.done = false;
    makecontext(&fibre.start, run_fibre, 0);
  }
  for (unsigned left = threads; left > 0;) {
    left = 0;
    for (unsigned thread = 0; thread < threads; ++thread) {
      if (fibres[thread].done) continue;
      threadIdx.x = thread;
      resume(fibres[thread]);
      left += !fibres[thread].done;
    }
  }
}

template <class... Parameters>
auto launcher(void (*kernel)(Parameters...), int64_t blocks, unsigned threads, size_t shared_bytes) {
  return [=](Parameters... arguments) {
    body = [=] { kernel(arguments...); };
    for (int64_t index = 0; index < blocks; ++index) run_block(unsigned(index), threads, shared_bytes);
  };
}

// What lane `source` passes, to every lane.
template <class T>
T exchange(T value, unsigned source) {
  Warp& warp = warps[threadIdx.x / 32];
  std::memcpy(&warp.values[threadIdx.x % 32], &value, sizeof value);
  wait(warp.barrier);
  std::memcpy(&value, &warp.values[source], sizeof value);
  wait(warp.barrier);  // nobody overwrites what another has still to read
  return value;
}

}  // namespace cuda_on_cpu

inline void __syncthreads() { cuda_on_cpu::wait(cuda_on_cpu::block); }
inline void __syncwarp() { cuda_on_cpu::wait(cuda_on_cpu::warps[threadIdx.x / 32].barrier); }

template <class T>
T __shfl_sync(unsigned, T value, int source) {
  return cuda_on_cpu::exchange(value, source % 32);
}
template <class T>
T __shfl_xor_sync(unsigned, T value, int mask) {
  return cuda_on_cpu::exchange(value, threadIdx.x % 32 ^ mask);
}
template <class T>
T __shfl_up_sync(unsigned, T value, unsigned distance) {
  const unsigned lane = threadIdx.x % 32;
  return cuda_on_cpu::exchange(value, lane < distance ? lane : lane - distance);
}
inline unsigned __ballot_sync(unsigned, bool predicate) {
  cuda_on_cpu::Warp& warp = cuda_on_cpu::warps[threadIdx.x / 32];
  warp.values[threadIdx.x % 32] = predicate;
  cuda_on_cpu::wait(warp.barrier);
  unsigned ballot = 0;
  for (unsigned lane = 0; lane < 32; ++lane) ballot |= unsigned(warp.present[lane] && warp.values[lane] == 1) << lane;
  cuda_on_cpu::wait(warp.barrier);
  return ballot;
}
inline bool __any_sync(unsigned mask, bool predicate) { return __ballot_sync(mask, predicate) != 0; }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(unsigned x) { return __builtin_ffs(int(x)); }
inline uint32_t atomicOr(uint32_t* address, uint32_t bits) {
  const uint32_t before = *address;
  *address |= bits;
  return before;
}
