"""What statistics of tokens cost, from bfloat16 logits, next to the usual way in float32:

    python -m benchmarks.token_stats --device cpu

and writes benchmarks/results/token_stats_<device>.csv, one row a task, vocabulary and way. The usual way is log_softmax
and gather for log-probs, logsumexp(x) - sum(p x) for entropies, and for cells a top-K and a second logsumexp.
"""

import argparse
import csv
import functools
import platform
import statistics
import time
from pathlib import Path

import torch

from trustregion.token_stats import token_stats

RESULTS = Path(__file__).parent / "results"
K = 20


def ours(logits, token_ids, entropy, cells):
    stats = token_stats(logits, token_ids, topk=K if cells else 0)
    return stats.log_prob, stats.entropy if entropy else None, stats.cell_log_prob


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


def measure(runs: dict, clock, device: str, repeats: int) -> dict[str, list[float]]:
    """Milliseconds. In turns, so that all meet the same load of the machine."""
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    times = {name: [] for name in runs}
    for repeat in range(-1, repeats):  # the first one warms up
        for name, run in runs.items():
            synchronize()
            start = clock()
            run()
            synchronize()
            if repeat >= 0:
                times[name].append(1e3 * (clock() - start))
    return times


def processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if platform.system() == "Linux" else []
    models = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.machine())


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--vocabularies", type=int, nargs="+", default=[32_768, 152_064])
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    # Of one thread, the processor time is the wall time of an idle machine, or close, on a busy one too.
    clock = time.process_time if args.device == "cpu" and args.threads == 1 else time.perf_counter
    device_name = torch.cuda.get_device_name() if args.device == "cuda" else processor()

    table = []
    for V in args.vocabularies:
        torch.manual_seed(0)
        logits = (3 * torch.randn(args.rows, V, device=args.device)).bfloat16().requires_grad_()
        token_ids = torch.randint(V, (args.rows,), device=args.device)
        for task, arguments in TASKS.items():
            runs = {way.__name__: functools.partial(step, way, logits, token_ids, **arguments) for way in (ours, usual)}
            for way, times in measure(runs, clock, args.device, args.repeats).items():
                p20, *_, p80 = statistics.quantiles(times, n=5, method="inclusive")
                milliseconds = {"median_ms": statistics.median(times), "p20_ms": p20, "p80_ms": p80}
                table.append(
                    {"task": task, "vocabulary": V, "rows": args.rows, "way": way}
                    | {name: round(value, 2) for name, value in milliseconds.items()}
                    | {
                        "clock": clock.__name__,
                        "device": device_name,
                        "threads": args.threads,
                        "torch": torch.__version__,
                    }
                )
                print(table[-1], flush=True)

    RESULTS.mkdir(exist_ok=True)
    with (RESULTS / f"token_stats_{args.device}.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(table[0]))
        writer.writeheader()
        writer.writerows(table)


if __name__ == "__main__":
    main()
