"""The CUDA kernels of token statistics, compiled for this CPU and run on it."""

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from .random_rows import random_ids, random_logits

CSRC = Path(__file__).parents[2] / "trustregion" / "csrc"
FORMATS = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
I64, I8, POINTER = ctypes.c_int64, ctypes.c_bool, ctypes.c_void_p


class Layout(ctypes.Structure):  # this and the next two as in csrc/token_stats.h
    _fields_ = [("sizes", I64 * 4), ("strides", I64 * 4), ("step", I64)]


class Forward(ctypes.Structure):
    _fields_ = [("N", I64), ("V", I64), ("K", I64), ("cells", I8), ("topk", I8), ("layout", Layout)] + [
        (name, POINTER)
        for name in ("logits", "token_ids", "temperature", "given_ids", "log_prob", "entropy", "largest", "log_norm",
                     "cell_ids", "cell_log_prob")
    ]  # fmt: skip


class Backward(ctypes.Structure):
    _fields_ = [("N", I64), ("V", I64), ("K", I64), ("layout", Layout), ("grad_layout", Layout)] + [
        (name, POINTER)
        for name in ("logits", "grad_logits", "token_ids", "temperature", "entropy", "largest", "log_norm", "cell_ids",
                     "cell_log_prob", "grad_log_prob", "grad_entropy", "grad_cells")
    ]  # fmt: skip


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    if shutil.which("g++") is None:
        pytest.skip("no g++")
    file = tmp_path_factory.mktemp("kernels") / "kernels.so"
    sources = [Path(__file__).with_name("token_stats_on_cpu.cpp"), CSRC / "token_stats_cpu.cpp"]
    flags = ["-std=c++20", "-O1", "-shared", "-fPIC", "-fopenmp-simd", "-fsanitize=bounds,signed-integer-overflow,alignment",
             "-fno-sanitize-recover=all"]  # fmt: skip
    subprocess.run(["g++", *flags, *map(str, sources), "-o", str(file)], check=True)
    return ctypes.CDLL(str(file))


def layout_of(x):
    """Of logits [A, B, V]."""
    return Layout((1, 1, *x.shape[:2]), (0, 0, *x.stride()[:2]), x.stride(2))


def at(x):
    return None if x is None or x.numel() == 0 else x.data_ptr()


def run(library, gpu, logits, tokens, temperature, topk, ids, weights, inplace):
    """All results and the gradient, by the CPU's kernels or by the GPU's."""
    V, N, dtype = logits.shape[-1], tokens.numel(), torch.float64 if logits.dtype == torch.float64 else torch.float32
    cells = topk > 0 or ids is not None
    K = topk if ids is None else ids.shape[-1]
    log_prob, entropy, largest, log_norm = torch.full((4, N), 77.0, dtype=dtype)
    cell_ids, masses = torch.full((N, K), -7, dtype=torch.int32), torch.full((N, K + 2), 77.0, dtype=dtype)
    shared = [layout_of(logits), at(logits)]
    forward = Forward(N, V, K, cells, topk > 0, *shared, *map(at, (tokens, temperature, ids, log_prob, entropy, largest,
                      log_norm, cell_ids, masses)))  # fmt: skip
    library.run(False, FORMATS.index(logits.dtype), gpu, ctypes.byref(forward))

    grad_log_prob, grad_entropy, grad_cells = weights
    grad_cells = grad_cells[:, : K + 2].contiguous() if cells else None
    grad_logits = logits if inplace else torch.full_like(logits, 99.0, memory_format=torch.contiguous_format)
    backward = Backward(N, V, K, layout_of(logits), layout_of(grad_logits), *map(at, (logits, grad_logits, tokens,
                        temperature, entropy, largest, log_norm, cell_ids, masses, grad_log_prob, grad_entropy,
                        grad_cells)))  # fmt: skip
    library.run(True, FORMATS.index(logits.dtype), gpu, ctypes.byref(backward))
    return log_prob, entropy, cell_ids, masses if cells else None, grad_logits


def assert_same(library, logits, tokens, temperature=None, topk=0, ids=None, inplace=False):
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    N, K = tokens.numel(), max(topk, 0 if ids is None else ids.shape[-1])
    generator = torch.Generator().manual_seed(6)
    weights = [torch.randn(shape, generator=generator, dtype=dtype) for shape in (N, N, (N, K + 2))]
    for weight in weights:
        weight[N // 2 : N // 2 + 1] = 0  # a row without a gradient
    copies = [logits.clone() if inplace else logits for _ in range(2)]
    ours, theirs = (run(library, gpu, x, tokens, temperature, topk, ids, weights, inplace)
                    for gpu, x in zip((True, False), copies, strict=True))  # fmt: skip
    bar = 1e-12 if dtype == torch.float64 else 2e-6
    rounding = torch.finfo(logits.dtype).eps if logits.dtype in FORMATS[:2] else 10 * bar
    for name, a, b in zip(("log_prob", "entropy", "cell_ids", "cells", "gradient"), ours, theirs, strict=True):
        if a is not None:
            rtol, atol = (rounding, 2e-7) if name == "gradient" else (bar, bar)
            torch.testing.assert_close(a, b, rtol=rtol, atol=atol, equal_nan=True, msg=lambda m, name=name: f"{name}: {m}")
    if logits.dtype == torch.float32 and not inplace:  # the CPU kernels are tested against torch elsewhere; this is not
        x = logits / (1.0 if temperature is None else temperature.view(*logits.shape[:2], 1))
        expected = x.log_softmax(-1).gather(-1, tokens.clamp(min=0).view(*logits.shape[:2], 1)).flatten()
        expected[tokens < 0] = 0.0
        torch.testing.assert_close(ours[0], expected, rtol=1e-5, atol=1e-5, equal_nan=True)


def distinct_ids(N, V, K):
    return torch.stack([torch.randperm(V, generator=torch.Generator().manual_seed(i))[:K] for i in range(N)])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", FORMATS)
def test_gpu_kernels_run_on_a_cpu_equal_the_cpu_kernels(library, dtype):
    """Sizes around those of chunks, warps and segments; rows that start anywhere in 16 bytes; splits of few rows."""
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    for V in (1, 2, 7, 8, 33, 1025, 5000):
        for rows in ((1, 1), (2, 3)):
            logits, tokens = random_logits(*rows, V, dtype=dtype), random_ids(rows[0] * rows[1], V=V)
            tokens[-1:] = -100 if len(tokens) > 1 else tokens[-1:]
            temperature = torch.linspace(0.5, 2, len(tokens)).to(compute)
            assert_same(library, logits, tokens)
            assert_same(library, logits, tokens, temperature, ids=distinct_ids(len(tokens), V, min(V, 4)), inplace=True)
            for K in (1, 20, 32):
                if K < V:
                    assert_same(library, logits, tokens, temperature, topk=K)
    V = 700
    whole = random_logits(2, 3, V + 9, dtype=dtype)
    for shift in (0, 1, 3):
        assert_same(library, whole[:, :, shift : shift + V], random_ids(6, V=V), topk=5)
        assert_same(library, whole[:, :, shift : shift + V], random_ids(6, V=V), ids=distinct_ids(6, V, 40))
    columns = random_logits(V, 3, 2, dtype=dtype).permute(2, 1, 0)
    assert_same(library, columns, random_ids(6, V=V), topk=5)
    assert_same(library, columns, random_ids(6, V=V), ids=distinct_ids(6, V, 3))
    assert_same(library, whole[:, :0], random_ids(0, V=V), topk=5)


@pytest.mark.slow
def test_gpu_kernels_on_ties_and_hostile_rows(library):
    V = 3000
    logits, tokens = random_logits(3, 3, V, dtype=torch.float32), random_ids(9, V=V)
    rows = logits.view(9, V)
    rows[0, 5], rows[1, 2999], rows[2], rows[3, : V - 3] = torch.nan, torch.inf, -torch.inf, -torch.inf
    rows[4] = rows[4].round()  # hundreds of ties
    rows[5] = torch.linspace(-9, 9, V)  # all that come later are better
    rows[6, int(tokens[6])] = 50.0
    rows[7, int(tokens[7])] = torch.nan
    for K in (1, 7, 32):
        assert_same(library, logits, tokens, topk=K)
        assert_same(library, logits, tokens, ids=distinct_ids(9, V, K))
    assert_same(library, random_logits(1, 1, 140_000, dtype=torch.bfloat16), torch.tensor([139_999]), topk=3)  # segments
