"""What statistics of tokens cost, in time and in memory, from bfloat16 logits:

    python -m benchmarks.token_stats --device cpu

and writes benchmarks/results/token_stats_<device>.csv, one row a task, size and way. The ways are ours, with kernels and
in pure torch; verl's own functions where verl is installed, as they are and through torch.compile; and the usual way in
float32: log_softmax and gather, logsumexp(x) - sum(p x), and for cells a top-K and a second logsumexp. All in one
process, in turns, so that all meet the same load of the machine.
"""

import argparse
import functools
import gc
import importlib.metadata
import os
import re
import statistics
import time
from pathlib import Path

import torch

from benchmarks.tables import measure, processor, write
from trustregion import ops
from trustregion.token_stats import token_stats

K = 20


def ours(mode, logits, token_ids, entropy, cells):
    with ops.using(mode):
        stats = token_stats(logits, token_ids, topk=K if cells else 0)
    return stats.log_prob, stats.entropy if entropy else None, stats.cell_log_prob


def verl(compiled, logits, token_ids, entropy, cells):
    from verl.utils.torch_functional import entropy_from_logits, logprobs_from_logits

    if compiled:
        entropy_from_logits, logprobs_from_logits = map(_compiled, (entropy_from_logits, logprobs_from_logits))
    log_prob = logprobs_from_logits(logits, token_ids)
    with torch.set_grad_enabled(torch.is_grad_enabled() and entropy == "grad"):
        return log_prob, entropy_from_logits(logits) if entropy else None, None


_compiled = functools.lru_cache(functools.partial(torch.compile, dynamic=False))


def usual(logits, token_ids, entropy, cells):
    logits = logits.float()
    log_p = logits.log_softmax(-1)
    sampled = token_ids[:, None]
    log_prob, H, cell_log_prob = log_p.gather(-1, sampled), None, None
    if entropy:
        with torch.set_grad_enabled(torch.is_grad_enabled() and entropy == "grad"):
            H = logits.logsumexp(-1) - (logits.softmax(-1) * logits).sum(-1)
    if cells:
        ids = logits.topk(K).indices
        unnamed = log_p.scatter(-1, ids, -torch.inf).scatter(-1, sampled, -torch.inf)
        among = (ids == sampled).any(-1, keepdim=True)
        token = log_prob.masked_fill(among, -torch.inf)
        cell_log_prob = torch.cat([log_p.gather(-1, ids), token, unnamed.logsumexp(-1, keepdim=True)], -1)
    return log_prob[:, 0], H, cell_log_prob


WAYS = {
    "native": functools.partial(ours, "native"),
    "torch": functools.partial(ours, "torch"),
    "verl": functools.partial(verl, False),
    "verl, compiled": functools.partial(verl, True),
    "usual": usual,
}


def step(way, logits, token_ids, backward, entropy, cells=False):
    if not backward:
        with torch.no_grad():
            return way(logits, token_ids, entropy, cells)
    log_prob, H, _ = way(logits, token_ids, entropy, cells)
    loss = log_prob.sum() + H.sum() if entropy == "grad" else log_prob.sum()
    return torch.autograd.grad(loss, logits)


TASKS = {
    "log_prob, entropy": {"backward": False, "entropy": "value"},
    "log_prob, entropy, top-20 cells": {"backward": False, "entropy": "value", "cells": True},
    "log_prob and its gradient": {"backward": True, "entropy": None},
    "log_prob and its gradient, entropy": {"backward": True, "entropy": "value"},
    "log_prob, entropy and their gradient": {"backward": True, "entropy": "grad"},
}


def peak_memory(run, device: str) -> int | None:
    """Bytes that a run needs at most beyond what there was, its results included; None where nothing tells."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        return torch.cuda.max_memory_allocated() - before
    try:
        peaks = []
        for _ in range(2):  # what another way has left behind may be freed during the first
            gc.collect()
            Path("/proc/self/clear_refs").write_text("5")  # starts a new peak
            before = _status("VmHWM")
            run()
            peaks.append(_status("VmHWM") - before)
        return max(peaks)
    except OSError:
        return None


def _status(name: str) -> int:
    return 1024 * int(re.search(rf"{name}:\s*(\d+)", Path("/proc/self/status").read_text())[1])


def versions() -> dict[str, str]:
    def version(package):
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return ""

    return {"torch": torch.__version__, "verl": version("verl"), "kernels": ops.describe()}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--rows", type=int, nargs="+", default=[2048])
    parser.add_argument("--vocabularies", type=int, nargs="+", default=[151_936])
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=TASKS)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    # Of one thread, the processor time is the wall time of an idle machine, or close, on a busy one too.
    clock = time.process_time if args.device == "cpu" and args.threads == 1 else time.perf_counter
    machine = {
        "clock": clock.__name__,
        "device": torch.cuda.get_device_name() if args.device == "cuda" else processor(),
        "threads": args.threads,
    } | versions()
    ways = {name: WAYS[name] for name in args.ways if machine["verl"] or not name.startswith("verl")}
    if not ops.native(args.device):
        ways.pop("native", None)

    table = []
    for rows, V in ((rows, V) for rows in args.rows for V in args.vocabularies):
        torch.manual_seed(0)
        logits = torch.empty(rows, V, dtype=torch.bfloat16, device=args.device)
        for row in logits:  # one by one: no float32 copy of all of them raises the peak
            row.copy_(3 * torch.randn(V, device=args.device))
        logits.requires_grad_()
        token_ids = torch.randint(V, (rows,), device=args.device)
        for task in args.tasks:
            able = {name: way for name, way in ways.items() if not (TASKS[task].get("cells") and name.startswith("verl"))}
            runs = {name: functools.partial(step, way, logits, token_ids, **TASKS[task]) for name, way in able.items()}
            for way, times in measure(runs, clock, args.device, args.repeats).items():
                p20, *_, p80 = statistics.quantiles(times, n=5, method="inclusive")
                milliseconds = {"median_ms": statistics.median(times), "p20_ms": p20, "p80_ms": p80}
                peak = peak_memory(runs[way], args.device)
                table.append(
                    {"task": task, "vocabulary": V, "rows": rows, "way": way}
                    | {name: round(value, 2) for name, value in milliseconds.items()}
                    | {"peak_over_logits": "" if peak is None else round(peak / logits.nbytes, 4)}
                    | {"load": round(os.getloadavg()[0], 1)}
                    | machine
                )
                print(table[-1], flush=True)

    write(f"token_stats_{args.device}", table)


if __name__ == "__main__":
    main()
