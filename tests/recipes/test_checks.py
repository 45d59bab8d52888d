"""Bad input: a clear error before Ray starts, a non-zero exit, nothing lost."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from recipes.checks import check, check_files
from recipes.errors import UserError
from recipes.launcher import NewRows, how_to_go_on, lock_machine, make_run_dir
from recipes.train import compose

ROOT = Path(__file__).resolve().parents[2]
ROW = {
    "data_source": "arithmetic",
    "prompt": [{"role": "user", "content": "1+1="}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "2"},
    "extra_info": {"split": "train", "index": 0},
}


def problems_of(*overrides: str) -> str:
    with pytest.raises(UserError) as raised:
        check(compose(["name=x", *overrides]))
    return str(raised.value)


def command(*overrides: str, cwd: Path = ROOT, timeout: float = 60) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "recipes.train", *overrides],
        cwd=cwd, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=timeout,
    )


@pytest.mark.parametrize("method", ["grpo", "clip_higher", "band_kl", "band_tv", "band_chi2", "dppo_binary_tv", "dppo_binary_kl"])
def test_every_method_composes_and_passes(method):
    config = compose(["name=x", f"method={method}"])
    check(config)
    assert config.algorithm.rollout_correction.bypass_mode == method.startswith("dppo")
    assert config.actor_rollout_ref.actor.policy_loss.method == config.method


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("method.delta=0", "method.delta = 0"),
        ("method.delta=-0.1", "method.delta = -0.1"),
        ("method.delta=nan", "method.delta = nan"),
        ("method.delta=oops", "method.delta = 'oops'"),
        ("method.delta=true", "method.delta = True"),
        ("+method.detla=0.1", "Did you mean 'delta'"),
        ("method.anchor=rolout", "anchor = 'rolout'"),
        ("data.train_batch_size=10", "data.train_batch_size = 10: must be a multiple of"),
        ("data.train_batch_size=0", "data.train_batch_size = 0: must be a whole number >= 1"),
        ("data.train_batch_size=many", "data.train_batch_size = 'many'"),
        ("model=smollm2_135m actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=7", "ppo_micro_batch_size_per_gpu = 7: does not divide"),
        ("cluster.workers=3", "do not divide over 3 workers"),
        ("cluster.workers=0", "cluster.workers = 0"),
        ("cluster.workers=oops", "cluster.workers = 'oops'"),
        ("trainer.total_training_steps=-1", "trainer.total_training_steps = -1"),
        ("seed=abc", "seed = 'abc'"),
        ("seed=-1", "seed = -1"),
        ("name=../escape", "so no path"),
        ("runs=null", "runs = None"),
        ("trainer=null", "cannot be resolved"),
        ("trainer.v1.sampler.custom_sampler.path=mine.py", "custom_sampler = mine.py"),
        ("critic.enable=true", "flash attention"),
        ("cluster.device=tpu", "cluster.device = 'tpu'"),
        ("trainer.use_v1=false", "legacy trainer"),
        ("trainer.v1.trainer_mode=colocate_async", "'colocate_async': only 'trust_region_sync'"),
        ("actor_rollout_ref.actor.policy_loss.loss_mode=vanilla", "loss_mode = 'vanilla'"),
        ("algorithm.rollout_correction.bypass_mode=true", "contradicts method.anchor = 'old'"),
        ("algorithm.adv_estimator=gae", "flash attention"),
        ("actor_rollout_ref.actor.strategy=fsdp", "only 'fsdp2' works"),
    ],
)
def test_wrong_values_are_named(override, expected):
    assert expected in problems_of(*override.split())


def test_all_problems_are_listed_at_once():
    found = problems_of("method.delta=0", "data.train_batch_size=10", "trainer.use_v1=false")
    assert all(part in found for part in ("method.delta", "train_batch_size", "use_v1"))


def test_a_gpu_that_is_not_there():
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is one")
    assert "sees no CUDA device" in problems_of("cluster=gpu")


def config_with_files(tmp_path, **files):
    model = tmp_path / "model"
    shutil.copytree(tiny_model(), model)
    pd.DataFrame([ROW]).to_parquet(tmp_path / "good.parquet")
    chosen = {"train": tmp_path / "good.parquet", "val": tmp_path / "good.parquet", "model": model, **files}
    return compose(
        [
            "name=x",
            f"data.train_files={chosen['train']}",
            f"data.val_files={chosen['val']}",
            f"actor_rollout_ref.model.path={chosen['model']}",
        ]
    )


def tiny_model() -> Path:
    from hydra.utils import instantiate

    return Path(instantiate(compose(["name=x", f"assets={ROOT / 'assets'}"]).model.prepare))


@pytest.mark.slow
def test_files_are_checked(tmp_path):
    check_files(config_with_files(tmp_path))
    bad = tmp_path / "bad.parquet"
    bad.write_bytes((tmp_path / "good.parquet").read_bytes()[:-20])
    other = tmp_path / "other.parquet"
    pd.DataFrame([{"question": "1+1", "answer": "2"}]).to_parquet(other)
    for files, expected in [
        ({"train": tmp_path / "none.parquet"}, ("data.train_files", "no such file")),
        ({"val": bad}, ("data.val_files", "not a readable parquet file")),
        ({"train": other}, ("data.train_files", "data_source, prompt, reward_model", "question, answer")),
    ]:
        shutil.rmtree(tmp_path / "model", ignore_errors=True)
        with pytest.raises(UserError) as raised:
            check_files(config_with_files(tmp_path, **files))
        assert all(part in str(raised.value) for part in expected), raised.value
    shutil.rmtree(tmp_path / "model")
    config = config_with_files(tmp_path)
    (tmp_path / "model" / "tokenizer.json").unlink()
    with pytest.raises(UserError, match="has no tokenizer"):
        check_files(config)


@pytest.mark.slow
@pytest.mark.parametrize("group", ["method", "model", "data", "cluster"])
def test_unknown_choices_are_answered_with_those_that_exist(group):
    done = command(f"{group}=nonsense")
    assert done.returncode != 0
    known = {"method": "band_kl", "model": "tiny", "data": "arithmetic", "cluster": "cpu"}[group]
    assert "nonsense" in done.stderr and known in done.stderr and "Traceback" not in done.stderr


@pytest.mark.slow
def test_the_command_ends_with_2_and_leaves_no_run_folder(tmp_path):
    done = command("method.delta=oops", "name=x", f"runs={tmp_path / 'runs'}")
    assert done.returncode == 2 and not (tmp_path / "runs").exists()
    assert done.stderr.startswith("error: method.delta = 'oops'") and "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_clashing_plugin_ends_the_run_before_ray(tmp_path):
    (tmp_path / "clash_later.py").write_text(
        "from verl.trainer.ppo.core_algos import register_policy_loss\n"
        "@register_policy_loss('trust_region')\n"
        "def theirs(*args, **kwargs): ...\n"
    )
    package = tmp_path / "clash_later-1.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: clash-later\nVersion: 1\n")
    (package / "entry_points.txt").write_text("[verl.plugins]\nzz = clash_later\n")
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    done = subprocess.run(
        [sys.executable, "-m", "recipes.train", f"runs={tmp_path / 'runs'}", "name=x"],
        cwd=ROOT, env=env, capture_output=True, text=True, timeout=120,
    )
    assert done.returncode == 2, done.stdout + done.stderr
    assert "clash_later.theirs" in done.stderr
    assert "Started a local Ray instance" not in (tmp_path / "runs" / "x" / "log.txt").read_text()


def test_a_run_never_writes_over_another(tmp_path):
    config = compose(["name=x", f"runs={tmp_path}"])
    make_run_dir(config)
    with pytest.raises(UserError, match="never writes over another"):
        make_run_dir(compose(["name=x", f"runs={tmp_path}"]))


def test_a_second_local_cluster_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("recipes.launcher.LOCK", tmp_path / "lock")
    config = compose(["name=x"])
    with lock_machine(config), pytest.raises(UserError, match="another run has a local Ray cluster"):
        lock_machine(config)
    with lock_machine(config):
        lock_machine(compose(["name=x", "ray_kwargs.ray_init.address=auto"])).close()


def test_rows_are_read_as_they_come_and_whole(tmp_path):
    path = tmp_path / "metrics.jsonl"
    rows = NewRows(path)
    assert rows() == []
    line = json.dumps({"step": 1, "data": {}})
    path.write_text(line + "\n" + line[:5])
    assert rows() == [{"step": 1, "data": {}}] and rows() == []
    with path.open("a") as file:
        file.write(line[5:] + "\n")
    assert len(rows()) == 1


def test_how_to_go_on_names_the_newest_checkpoint(tmp_path):
    typed = ["python", "-m", "recipes.train", "method=grpo", "name=x", "trainer.logger=[console,file]"]
    config = compose(["name=x", f"runs={tmp_path}"])
    again = "To start again:\n  python -m recipes.train method=grpo 'trainer.logger=[console,file]'"
    assert again in how_to_go_on(config, typed, 3)
    for step in (2, 10, 12):  # verl names a checkpoint in the file when it is whole: 12 is not
        (tmp_path / "x" / "checkpoints" / f"global_step_{step}").mkdir(parents=True)
    (tmp_path / "x" / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("10")
    text = how_to_go_on(config, typed, 12)
    assert "checkpoint of step 10" in text and "/global_step_10" in text and "name=x" not in text
