"""The CUDA kernels against the memory they read and write: benchmarks/gpu.sh runs this, and it writes results/gpu.csv.

What moves data can be no faster than a copy does; `percent` is that least time's share of the time taken. `launches`
counts kernels of one call, torch's own included; empty where the profiler sees none.
"""

import math
import shutil
import statistics
import subprocess
from functools import partial

import torch
from torch.autograd import DeviceType

from benchmarks.policy_loss import batch, forward_backward, ours
from benchmarks.tables import write
from trustregion import PolicyLoss, TokenBatch
from trustregion.divergences import get_divergence
from trustregion.ops import describe
from trustregion.ops.band_bounds import NATIVE
from trustregion.ops.policy_loss import kernel_parameters
from trustregion.token_stats import token_stats

TOKENS = 16_000_000
ROWS, V = 16_384, 151_936
DELTA = 0.05
METHODS = ("grpo", "band_kl", "dppo_binary_tv", "erc_dapo")


def milliseconds(run, calls: int = 5, repeats: int = 11) -> list[float]:
    """Of one call, several in a row: no launch is waited for."""
    times = []
    for _ in range(repeats + 1):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(calls):
            run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / calls)
    return times[1:]  # the first one warms up


def launches(run) -> int:
    with torch.profiler.profile() as profile:
        run()
        torch.cuda.synchronize()
    names = [event.name for event in profile.events() if event.device_type == DeviceType.CUDA]
    return sum(not name.startswith(("Memcpy", "Memset")) for name in names)


class Table:
    def __init__(self):
        driver = "nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"
        found = subprocess.run(driver, capture_output=True, text=True).stdout if shutil.which(driver[0]) else ""
        self.where = {"device": torch.cuda.get_device_name(), "driver": found.partition("\n")[0],
                      "torch": torch.__version__, "cuda": torch.version.cuda}  # fmt: skip
        self.rows, self.bandwidth = [], None

    def add(self, what: str, shape: str, run, moved: int) -> None:
        """`moved`: bytes that it has to read and write."""
        times = milliseconds(run)
        p20, *_, p80 = statistics.quantiles(times, n=5, method="inclusive")
        median = statistics.median(times)
        rate = moved / median / 1e6
        self.bandwidth = self.bandwidth or rate  # the copy is the first
        times = {"median_ms": round(median, 4), "p20_ms": round(p20, 4), "p80_ms": round(p80, 4)}
        rates = {"gigabytes_per_s": round(rate), "percent": round(100 * rate / self.bandwidth, 1)}
        self.rows.append({"what": what, "shape": shape, **times, **rates, "launches": launches(run) or "", **self.where})
        print(*list(self.rows[-1].values())[:8], sep="\t", flush=True)


def bytes_of(*tensors: torch.Tensor | None) -> int:
    return sum(x.nbytes for x in tensors if x is not None)


def time_copy(table: Table) -> None:
    source = torch.zeros(1 << 30, dtype=torch.uint8, device="cuda")
    table.add("copy", f"{len(source)} bytes", partial(torch.empty_like(source).copy_, source), 2 * source.nbytes)


@torch.no_grad()
def time_bounds(table: Table) -> None:
    x = batch(TOKENS, "cuda")[1]
    for i, kind in enumerate(NATIVE):
        ends = get_divergence(kind()).saturation(DELTA)
        run = partial(torch.ops.trustregion.band_bounds, x, i, DELTA, DELTA, *ends, math.inf)
        table.add(f"band_bounds {kind.__name__}", f"{TOKENS} float32", run, bytes_of(x, *run()))


def time_losses(table: Table) -> None:
    log_prob, log_prob_old, advantages, mask = batch(TOKENS, "cuda")
    given = log_prob, log_prob_old, advantages, mask.bool()
    shape = f"{TOKENS} float32"
    for name in METHODS:
        loss = PolicyLoss.from_preset(name)
        parameters = kernel_parameters(loss.region, loss.surrogate, torch.float32, update=0)
        tensors = *given, None, *((-log_prob, -log_prob_old) if "entropy" in loss.requires else (None, None))
        run = partial(torch.ops.trustregion.policy_loss, *tensors, parameters.choices, parameters.numbers)
        table.add(f"policy_loss {name}", shape, run, bytes_of(*tensors, *run()))
    loss = PolicyLoss.from_preset("band_kl")
    forward = bytes_of(*given, log_prob, log_prob, given[-1])
    table.add("PolicyLoss band_kl", shape, partial(loss, TokenBatch(*given)), forward)
    step = partial(forward_backward, partial(ours, loss, "native"), given)
    table.add("PolicyLoss band_kl, mean, backward", shape, step, forward + 3 * log_prob.nbytes + bytes_of(given[-1]))


def time_statistics(table: Table) -> None:
    free, _ = torch.cuda.mem_get_info()
    rows = min(ROWS, int(free // 2 // (2 * V)))  # half of it: their gradient comes too
    logits = torch.empty(rows, V, dtype=torch.bfloat16, device="cuda").normal_(std=3).requires_grad_()
    ids = torch.randint(V, (rows,), device="cuda")
    shape = f"{rows} x {V} bfloat16"
    with torch.no_grad():
        table.add("token_stats", shape, partial(token_stats, logits, ids), logits.nbytes)
        table.add("token_stats, top-20 cells", shape, partial(token_stats, logits, ids, topk=20), logits.nbytes)
    for name in ("log_prob", "entropy"):
        total = getattr(token_stats(logits, ids), name).sum()
        backward = partial(torch.autograd.grad, total, logits, retain_graph=True)
        table.add(f"token_stats, gradient of {name}", shape, backward, 2 * logits.nbytes)


def main():
    print(describe())
    table = Table()
    time_copy(table)
    time_bounds(table)
    time_losses(table)
    time_statistics(table)
    print(write("gpu", table.rows))


if __name__ == "__main__":
    main()
