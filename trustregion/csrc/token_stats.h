// Arguments of the token statistics, and their CPU and CUDA kernels: pointers, sizes and a stream, no torch.
#pragma once

#include <cstdint>

#include "float_formats.h"

namespace trustregion {

// Where a row starts among up to four leading dimensions of any strides, and the step from logit to logit.
struct Layout {
  static constexpr int kDims = 4;
  int64_t sizes[kDims], strides[kDims], step;

  TR_FUNCTION int64_t offset(int64_t row) const {
    int64_t offset = 0;
    for (int dim = kDims - 1; dim >= 0; --dim) {
      offset += row % sizes[dim] * strides[dim];
      row /= sizes[dim];
    }
    return offset;
  }
};

// X: the logits' format; all arrays without comment are of Compute<X>, [N].
template <class X>
struct Forward {
  using A = Compute<X>;
  int64_t N, V, K;  // rows, vocabulary, named tokens
  bool cells, topk;  // whether there are cells; whether their tokens are those of the K largest logits
  Layout layout;
  const X* logits;
  const int64_t* token_ids;
  const A* temperature;      // null: 1
  const int64_t* given_ids;  // [N, K], null unless cells and not topk
  A *log_prob, *entropy, *largest, *log_norm;
  int32_t* cell_ids;  // [N, K]
  A* cell_log_prob;   // [N, K+2]
};

template <class X>
struct Backward {
  using A = Compute<X>;
  int64_t N, V, K;
  Layout layout, grad_layout;
  const X* logits;
  X* grad_logits;  // may be the logits
  const int64_t* token_ids;
  const A *temperature, *entropy, *largest, *log_norm;
  const int32_t* cell_ids;
  const A* cell_log_prob;
  const A *grad_log_prob, *grad_entropy, *grad_cells;  // null: 0; the last [N, K+2]
};

// Rows [begin, end), in the calling thread.
template <class X>
void forward_cpu(const Forward<X>& args, int64_t begin, int64_t end);
template <class X>
void backward_cpu(const Backward<X>& args, int64_t begin, int64_t end);

// Top-K lists of the CUDA kernels end here.
constexpr int64_t kLargestTopk = 32;

// Asynchronous, on that stream (a cudaStream_t). `workspace` has as many bytes as the first of each pair says, and
// belongs to the call until the stream is done; `processors`: multiprocessors of the device.
template <class X>
int64_t forward_workspace(const Forward<X>& args, int processors);
template <class X>
void forward_cuda(const Forward<X>& args, int processors, void* workspace, void* stream);
template <class X>
int64_t backward_workspace(const Backward<X>& args);
template <class X>
void backward_cuda(const Backward<X>& args, int processors, void* workspace, void* stream);

}  // namespace trustregion
