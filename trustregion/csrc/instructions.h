// Loops for whatever vector instructions this machine has.
#pragma once

namespace trustregion {
namespace {

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)

// All that `run` calls is inlined, and so compiled anew for these instructions: nothing else of the program is.
template <class Run>
__attribute__((flatten, target("avx512f,avx512dq,avx512bw,avx512vl,avx2,fma,prefer-vector-width=512"))) void run_avx512(
    const Run& run) {
  run();
}

template <class Run>
__attribute__((flatten, target("avx2,fma"))) void run_avx2(const Run& run) {
  run();
}

inline bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl");
}
inline bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }

template <class Run>
void run_vectorized(const Run& run) {
  if (has_avx512()) return run_avx512(run);
  if (has_avx2()) return run_avx2(run);
  run();
}

inline const char* cpu_instructions() { return has_avx512() ? "avx512" : has_avx2() ? "avx2" : "default"; }

#else

template <class Run>
void run_vectorized(const Run& run) {
  run();
}

inline const char* cpu_instructions() { return "default"; }

#endif

}  // namespace
}  // namespace trustregion
