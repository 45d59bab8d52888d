"""What a run leaves for people: a short table on the terminal, summary.md and dynamics.png in the run's folder. And

    python -m recipes.report runs/a                           # one run as a page: runs/report/index.html
    python -m recipes.report runs/a runs/b --out /tmp/page    # several beside each other
"""

import argparse
import importlib.metadata
import os
import platform
import shlex
import sys
from datetime import datetime
from pathlib import Path
from statistics import fmean, median

import yaml
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from recipes.errors import UserError
from recipes.run_files import Metrics, read_config, read_metrics, steps_done, token_files, value_at, what_ran

WINDOW = 5  # steps averaged at each end of the run; fewer in a short run, so that the two ends do not overlap

# Label, key, factor. A key without "/" is a column of recipes.progress.
ENDS = (
    ("reward", "reward", 1),
    ("entropy, nats", "entropy", 1),
    ("clipped tokens, %", "clipped", 100),
    ("  at the upper bound, %", "trust/clip_fraction_up", 100),
    ("  at the lower bound, %", "trust/clip_fraction_down", 100),
    ("  by their entropy, %", "trust/blocked_by_entropy", 100),
    ("gradient norm", "actor/grad_norm", 1),
    ("response length, tokens", "response_length/mean", 1),
)
PARTS_OF_A_STEP = (
    ("generation", "timing_s/gen"),
    ("update", "timing_s/update_actor"),
    ("log-probs", "timing_s/old_log_prob"),
    ("sync", "timing_s/update_weights"),
)
DIFFERENCE = "training/rollout_probs_diff"  # |probability by the rollout engine - by the actor| of the sampled tokens
MEMORY = (
    ("peak machine memory", ("actor/perf/cpu_memory_used_gb", "perf/cpu_memory_used_gb")),
    ("peak GPU memory", ("actor/perf/max_memory_allocated_gb", "perf/max_memory_allocated_gb")),
)
SETTING = (
    ("model", "actor_rollout_ref.model.path"),
    ("training data", "data.train_files"),
    ("prompts a step", "data.train_batch_size"),
    ("rollouts a prompt", "actor_rollout_ref.rollout.n"),
    ("prompts a mini-batch", "actor_rollout_ref.actor.ppo_mini_batch_size"),
    ("longest response, tokens", "data.max_response_length"),
    ("sampling temperature", "actor_rollout_ref.rollout.temperature"),
    ("learning rate", "actor_rollout_ref.actor.optim.lr"),
    ("advantages", "algorithm.adv_estimator"),
    ("seed", "seed"),
    ("nodes", "trainer.nnodes"),
    ("workers a node", "trainer.n_gpus_per_node"),
    ("device", "trainer.device"),
)
FILES = ("summary.md", "dynamics.png", "metrics.jsonl", "samples/", "tokens/", "config.yaml", "log.txt", "checkpoints/")


def write_report(run_dir: Path, console: Console, command: list[str]) -> None:
    """Prints the table; writes summary.md and, where matplotlib is installed, dynamics.png into `run_dir`.

    `command` is what the user typed. When no training step was finished, says so and writes nothing.
    """
    metrics, config = read_metrics(run_dir / "metrics.jsonl"), read_config(run_dir / "config.yaml")
    if not metrics.steps:
        console.print("No training step was finished: there is nothing to sum up.")
        return
    title = what_ran(config)
    heading = f"{title}: {steps_done(metrics.steps, config)}"
    header, rows = first_and_last(metrics)
    notes = [*facts(metrics), *token_facts(run_dir, metrics, config)]
    print_tables(console, heading, header, rows, notes)
    try:
        plots = draw(run_dir / "dynamics.png", metrics, title, config)
        text = summary(command, config, heading, header, rows, notes, plots)
        (run_dir / "summary.md").write_text(text, encoding="utf-8")
        problem = None if "dynamics.png" in plots else plots
    except Exception as error:  # a full disk, say; how the run itself ended must still be told after this
        problem = f"The summary could not be written: {error}"
    if problem:
        console.print(Text(problem))
    # Unbroken, so that the path can be copied from a narrow terminal.
    console.print(Text(f"files: {run_dir}/"), soft_wrap=True)
    console.print(Text("       " + "  ".join(name for name in FILES if (run_dir / name).exists())))


def draw(path: Path, metrics: Metrics, title: str, config: dict) -> str:
    """Draws the plots. Returns what the summary says where they belong."""
    try:
        from recipes.plots import draw_dynamics
    except ImportError:
        return "No plots: matplotlib is not installed (pip install 'trustregion[plots]')."
    method = value_at(config, "method")
    fields = "  ".join(f"{k}={v}" for k, v in method.items()) if isinstance(method, dict) else ""
    draw_dynamics(path, metrics, title, fields)
    return f"![Training dynamics]({path.name})"


# ---- the numbers -----------------------------------------------------------------------------------------------------
def number(value: float, sign: str = "") -> str:
    """Three decimals where they say something. An exact 0 is told apart from a small number."""
    if value == 0:
        return "0"
    size = abs(value)
    return format(value, sign + (".1e" if size < 1e-3 or size >= 1e7 else ".3f" if size < 100 else ".1f"))


def first_and_last(metrics: Metrics) -> tuple[list[str], list[list[str]]]:
    """Header and rows of the table: means over the first and over the last steps, and their difference."""
    steps = metrics.steps
    count = min(WINDOW, len(steps) // 2)
    if count:
        which = "step" if count == 1 else f"{count} steps"
        header, windows = ["", f"first {which}", f"last {which}", "change"], (steps[:count], steps[-count:])
    else:
        header, windows = ["", f"step {steps[0]}"], (steps,)
    rows = []
    for label, key, factor in ENDS:
        values = metrics.get(key)
        inside = [[values[step] * factor for step in window if step in values] for window in windows]
        if not any(inside):
            continue
        means = [fmean(found) if found else None for found in inside]
        cells = ["-" if mean is None else number(mean) for mean in means]
        if count:
            cells.append("-" if None in means else number(means[1] - means[0], "+"))
        rows.append([label, *cells])
    return header, rows


def facts(metrics: Metrics) -> list[tuple[str, str]]:
    """What the table has no columns for, as (name, text)."""
    steps, found = metrics.steps, []
    later = set(steps[1:] or steps)
    seconds = metrics.get("seconds")
    if values := [seconds[step] for step in later if step in seconds]:
        text = f"{median(values):.1f}"
        if len(steps) > 1:
            text += ", median after the first"
            text += f", which took {seconds[steps[0]]:.1f}" if steps[0] in seconds else ""
        found.append(("seconds a step", text))
        parts = {name: [v for step, v in metrics.get(key).items() if step in later] for name, key in PARTS_OF_A_STEP}
        if text := ", ".join(f"{name} {median(values):.1f}" for name, values in parts.items() if values):
            found.append(("  of these", text))
    if means := metrics.get(f"{DIFFERENCE}_mean").values():
        text = f"mean {number(fmean(means))}, worst step {number(max(means))}"
        if worst := metrics.get(f"{DIFFERENCE}_max").values():
            text += f", worst token {number(max(worst))}"
        found.append(("|p rollout - p actor|", text))
    for key in sorted(key for key in metrics.series if key.startswith("val-core/")):
        first, *others = [f"{number(value)} at step {step}" for step, value in metrics.series[key].items()]
        found.append(("validation", ", ".join([f"{key.removeprefix('val-core/')}: {first}", *others[-1:]])))
    for name, keys in MEMORY:
        if peak := max(metrics.get(*keys).values(), default=0):  # verl logs 0 for a device that is not there
            found.append((name, f"{peak:.1f} GiB, read once a step"))
    return [*found, *not_finite(metrics, {key for _, key, _ in ENDS})]


def not_finite(metrics: Metrics, keys: set[str]) -> list[tuple[str, str]]:
    """What has no value in some steps, of `keys` and of what the columns are made of."""
    found = []
    for key in sorted({"critic/rewards/mean", "actor/entropy", "trust/clip_fraction", *keys} & metrics.not_finite.keys()):
        at = metrics.not_finite[key]
        where = f"{len(at)} of {len(metrics.steps)} steps, first in step {at[0]}"
        found.append(("not a finite number", f"{key} in {where}; left out"))
    return found


def token_facts(run_dir: Path, metrics: Metrics, config: dict) -> list[tuple[str, str]]:
    """Which of the steps that were to be recorded are."""
    every = value_at(config, "token_records.every")
    if not isinstance(every, int) or every < 1:
        return []
    from trustregion.verl_plugin.token_records import is_due  # which needs pyarrow, that nothing else here does

    due, there = [step for step in metrics.steps if is_due(step, every)], token_files(run_dir)
    missing = [str(step) for step in due if step not in there]
    text = f"of {len(due) - len(missing)} steps, which python -m recipes.report shows"
    text += f"; missing: {', '.join(missing)}, and log.txt says why" if missing else ""
    return [("token records", text)]


# ---- what is shown ---------------------------------------------------------------------------------------------------
def print_tables(console: Console, heading: str, header: list[str], rows: list[list[str]], notes: list[tuple]):
    # Text, not str: square brackets in names must not be read as markup.
    console.print()
    console.print(Text(heading, style="bold"))
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style="bold")
    for name in header:
        table.add_column(Text(name), justify="right" if name else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    if rows:
        console.print(table)
        console.print()
    grid = Table.grid(padding=(0, 2))
    for name, text in notes:
        grid.add_row(Text(name), Text(text))
    console.print(grid)


def summary(command, config, heading, header, rows, notes, plots: str) -> str:
    def line(cells):
        return "| " + " | ".join(str(cell).strip().replace("|", "\\|") for cell in cells) + " |"

    def listed(items):
        return [f"- {name.strip()}: {text}" for name, text in items]

    table = [line(header), line([":--"] + ["--:"] * (len(header) - 1)), *map(line, rows)] if rows else []
    setting = [(name, value) for name, key in SETTING if (value := value_at(config, key)) is not None]
    method = yaml.safe_dump(value_at(config, "method") or {}, sort_keys=False, allow_unicode=True).strip()
    return "\n".join([
        f"# {heading}", "", f"Written {datetime.now().astimezone():%Y-%m-%d %H:%M %z}.", "",
        "```sh", shlex.join(command), "```", "",
        *table, "", *listed(notes), "",
        "Means over the steps that the header names, of one run with one seed: "
        "how far another seed would be from it is not known.", "",
        plots, "",
        "## Method", "", "```yaml", method, "```", "",
        "## Setting", "", *listed(setting), "",
        "All values: [config.yaml](config.yaml). All steps: [metrics.jsonl](metrics.jsonl). "
        "What the processes said: [log.txt](log.txt).", "",
        "## Versions and machine", "", *listed(versions()), *listed(machine(config)), "",
    ])  # fmt: skip


def versions() -> list[tuple[str, str]]:
    found = [("Python", platform.python_version())]
    for package in ("trustregion", "torch", "verl", "vllm", "ray", "transformers"):
        try:
            found.append((package, importlib.metadata.version(package)))
        except importlib.metadata.PackageNotFoundError:
            found.append((package, "not installed"))
    return found


def machine(config: dict) -> list[tuple[str, str]]:
    """The machine that this process runs on; a cluster's other nodes are not looked at."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    found = [("cores that the run may use", str(cores))]
    try:
        cpu = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
        names = [line.partition(":")[2].strip() for line in cpu.splitlines() if line.startswith("model name")]
        found += [("CPU", name) for name in names[:1]]
        found.append(("memory", f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.1f} GiB"))
    except (OSError, ValueError):
        pass  # not Linux
    if value_at(config, "trainer.device") == "cuda":
        import torch

        count = torch.cuda.device_count()
        found.append(("GPUs", f"{count} x {torch.cuda.get_device_name(0)}" if count else "none visible"))
    return found


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m recipes.report", description="Shows a run, or several beside each other, as a page.")
    parser.add_argument("runs", nargs="+", type=Path, help="folders of runs")
    parser.add_argument("--out", type=Path, default=Path("runs/report"), help="where index.html goes (runs/report)")
    chosen = parser.parse_args(arguments)
    try:
        from recipes.comparison import compare

        print(compare(chosen.runs, chosen.out))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except ImportError as error:
        print(f"error: {error.name} is not installed (pip install 'trustregion[plots,verl]')", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
