"""Studies and papers' runs that no one has trained: folders as runs leave them, of numbers made by a rule."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml

from recipes.launcher import FINISHED
from recipes.results.study import studies
from recipes.sweep_records import JobRecord
from trustregion import explain, load_preset
from trustregion.metrics import BUCKET_NAMES
from trustregion.presets import preset_names, read_preset

STEPS = 12
METHODS = dict.fromkeys(method for method, _ in studies()["tiny_study"])


def config_of(method: str, seed: int, changes: dict | None = None) -> dict:
    found = {
        "chosen": {"method": method, "model": "tiny", "experiment": None},
        "seed": seed,
        "method": read_preset(method),
        "data": {"train_batch_size": 16, "max_response_length": 16},
        "actor_rollout_ref": {
            "actor": {"ppo_mini_batch_size": 1, "optim": {"lr": 2e-4}},
            "rollout": {"n": 8, "temperature": 1.0, "val_kwargs": {"n": 2}},
        },
        "trainer": {"total_training_steps": STEPS},
    }
    for key, value in (changes or {}).items():
        *path, last = key.split("__")
        inside = found
        for part in path:
            inside = inside[part]
        inside[last] = value
    return found


def metrics_of(method: str, seed: int, steps: int = STEPS) -> list[dict]:
    """Rewards rise by .02 a step for grpo, and .01 faster for each method after it; clip_higher by seed, too."""
    nth, rng, rows = [*METHODS].index(method), np.random.default_rng(1000 * seed), []
    for step in range(1, steps + 1):
        data = {"critic/rewards/mean": 0.3 + 0.1 * seed + (0.02 + 0.01 * nth) * step + (0.01 * seed * step if method == "clip_higher" else 0)}
        data |= {"actor/entropy": (0.3 - 0.02 * step) * (1 + 0.1 * rng.random()) + 0.01 * nth, "actor/grad_norm": 1 + rng.random()}
        data |= {"timing_s/step": 5.0, "trust/log_ratio_abs_mean": 0.01 * (nth + 1), "trust/divergence_mean": 0.001 * (nth + 1)}
        data |= {"trust/clip_fraction": 0.02 + 0.001 * nth, "trust/blocked_by_region": 0.02, "trust/blocked_by_dual_clip": 0.0005 * nth}
        if "beta_low" in read_preset(method):
            data["trust/blocked_by_entropy"] = 0.15 + 0.01 * rng.random()
        data |= {f"trust/clip_fraction_up/{bucket}": (0.2 - 0.02 * nth) / (i + 1) * (1 + 0.3 * rng.random()) for i, bucket in enumerate(BUCKET_NAMES)}
        rows.append({"step": step, "data": data})
    return rows


def tokens_of(method: str, seed: int, count: int = 3000) -> pd.DataFrame:
    """Recorded tokens whose log-ratios are normal, blocked as the method's interval and band have it."""
    rng, preset = np.random.default_rng(seed), read_preset(method) if method in preset_names() else {}
    p = 1 / (1 + np.exp(-rng.normal(1.5, 3, count)))
    p_new = 1 / (1 + np.exp(-(np.log(p / (1 - p)) + rng.normal(0, 0.25, count))))
    sign = rng.choice([-1.0, 1.0], count)
    ball = load_preset(method, **({"partition": "binary", "K": None} if preset.get("partition") == "topk" else {}))
    rows = explain.explain(ball, np.clip(p, 1e-6, 1 - 1e-6).tolist()) if "beta_low" not in preset else [None] * count
    entropy_old, entropy = -np.log(p) * p + 0.05, -np.log(p_new) * p_new + 0.05
    causes = []
    for i, row in enumerate(rows):
        ratio, mine = p_new[i] / p[i], []
        low, high = (row.lower, row.upper) if row else (0.8, 1.28)
        mine += ["region"] if (sign[i] > 0 and ratio > high) or (sign[i] < 0 and ratio < low) else []
        mine += ["entropy"] if "beta_low" in preset and abs(entropy[i] / entropy_old[i] - 1) > preset["beta_low"] else []
        causes.append("+".join(mine))
    nothing = np.full(count, np.nan)
    return pd.DataFrame({
        "step": np.arange(count) // 600 + 1, "update": np.arange(count) // 40 % 15, "sequence": np.arange(count) // 5 % 8,
        "position": np.arange(count) % 5, "token_id": 7, "token": "7", "log_prob_old": np.log(p), "log_prob": np.log(p_new),
        "advantage": sign, "entropy_old": entropy_old if "beta_low" in preset else nothing,
        "entropy": entropy if "beta_low" in preset else nothing, "divergence": 0.01, "active": [not cause for cause in causes],
        "cause": causes,
    }).astype({"log_prob_old": "float32", "log_prob": "float32"})  # fmt: skip


def write_run(folder: Path, method: str, seed: int, steps: int = STEPS, tokens: bool = True):
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in metrics_of(method, seed, steps)))
    (folder / "validation").mkdir()
    rng = np.random.default_rng([seed, [*METHODS].index(method)])
    lines = [{"input": f"{problem}+1=", "output": "", "score": float(rng.random() < 0.05 * problem)} for problem in range(20) for _ in range(2)]
    (folder / "validation" / f"{steps}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if tokens:
        (folder / "tokens").mkdir()
        found = tokens_of(method, seed)
        for step, rows in found.groupby("step"):
            rows.to_parquet(folder / "tokens" / f"{step}.parquet", index=False)


@pytest.fixture
def make_study(tmp_path):
    """make_study(methods=..., seeds=...) -> a sweep's folder with finished jobs of sweep=tiny_study; `change` has, by
    (method, seed), changes of the configuration ("data__train_batch_size": 8)."""

    def make_study(methods=("grpo", "clip_higher", "band_kl"), seeds=(0, 1, 2), change=None, tokens=False) -> Path:
        sweep = tmp_path / "runs" / "tiny_study-tiny"
        for method in methods:
            for seed in seeds:
                record = JobRecord(sweep, f"method={method}+seed={seed}")
                config = config_of(method, seed, (change or {}).get((method, seed)))
                record.write(status="finished", error="", config=config, varied={"method": method, "seed": seed})
                write_run(record.folder, method, seed, tokens=tokens)
        return sweep

    return make_study


@pytest.fixture
def make_arm(tmp_path):
    """make_arm("bandpo/grpo", seed=0, correct={"amc23": [[True, ...], ...]}) -> the folder of a finished run with samples."""
    from recipes.evaluation.samples import Samples, sample_seed

    def make_arm(experiment: str, seed: int = 0, correct: dict | None = None, model="r1-distill-qwen-7b", name=None, finished=True, **header) -> Path:
        paper, _, arm = experiment.partition("/")
        folder = tmp_path / "runs" / paper / (name or f"{arm}-{seed}")
        config = config_of("grpo", seed, {"chosen__experiment": experiment, "chosen__model": model})
        write_run(folder, "grpo", seed, tokens=False)
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
        if finished:
            (folder / FINISHED).write_text("{}")
        for benchmark, verdicts in (correct or {}).items():
            known = {"benchmark": benchmark, "benchmark_sha256": "b" * 64, "problems": len(verdicts), "n": len(verdicts[0]), "seed": 0}
            known |= {"model": str(folder), "model_sha256": folder.name, "sampling": {"temperature": 1.0, "top_p": 1.0}, **header}
            samples = Samples(folder / "eval" / "samples" / f"{benchmark}.jsonl", known).open()
            for problem, mine in enumerate(verdicts):
                for k, right in enumerate(mine):
                    row = {"problem": f"{benchmark}/{problem}", "k": k, "seed": sample_seed(0, f"{benchmark}/{problem}", k), "text": "", "finish": "stop"}
                    samples.add(row | {"tokens": 3, "source": "math/x", "truth": "7", "answer": "7" if right else "6", "correct": right})
        return folder

    return make_arm
