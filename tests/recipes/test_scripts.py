"""The scripts turn their environment into a command that composes and passes all checks; --dry-run starts nothing."""

import os
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from recipes.checks import check
from recipes.dry_run import dry_run
from recipes.errors import UserError

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = {"run_bandpo_qwen7b.sh": "bandpo/band_kl", "run_dppo_qwen8b.sh": "dppo/dense", "run_erc_qwen7b.sh": "erc/erc_dapo"}


def run(script: str, *arguments: str, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess:
    unset = ("NNODES", "NGPUS_PER_NODE", "MODEL", "MODEL_PATH", "RUN_DIR", "PYTHON")
    kept = {key: value for key, value in os.environ.items() if key not in unset}
    return subprocess.run(
        [str(ROOT / "scripts" / script), *arguments], cwd=cwd, env={**kept, **environment}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip


@pytest.fixture
def composed_by(configure, tmp_path):
    """composed_by(script, *overrides, NNODES="2", ...) -> the configuration that the script would start."""
    echo = tmp_path / "echo"
    echo.write_text('#!/bin/bash\nprintf "%q " "$@"\n')
    echo.chmod(0o755)

    def composed_by(script: str, *overrides: str, **environment: str):
        done = run(script, *overrides, cwd=tmp_path, PYTHON=str(echo), **environment)
        module, *arguments = shlex.split(done.stdout)[1:]
        assert (done.returncode, module) == (0, "recipes.train"), done.stderr
        config = configure(*arguments, "dry_run=true")
        check(config)
        return config

    return composed_by


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_starts_its_experiment_on_one_node(composed_by, configure, script):
    config = composed_by(script)
    experiment = configure(f"experiment={SCRIPTS[script]}", "cluster=1x8")
    assert (config.actor_rollout_ref.model, config.method, config.algorithm) == (experiment.actor_rollout_ref.model, experiment.method, experiment.algorithm)
    assert (config.trainer.nnodes, config.trainer.n_gpus_per_node, config.ray_kwargs.ray_init.address) == (1, 8, "local")
    assert config.trainer.logger == ["console", "file", "wandb"]
    assert config.trainer.resume_mode == "auto" and config.run_dir == f"runs/{SCRIPTS[script].replace('/', '-')}"


def test_a_script_takes_nodes_models_and_folders_from_the_environment(composed_by, tmp_path):
    (tmp_path / "models").mkdir()
    config = composed_by("run_bandpo_qwen7b.sh", "trainer.total_epochs=1", NNODES="4", MODEL="qwen2.5-7b-instruct", MODEL_PATH="models", RUN_DIR="here")
    assert (config.chosen.model, config.name) == ("qwen2.5-7b-instruct", "bandpo-band_kl-qwen2.5-7b-instruct")
    assert config.actor_rollout_ref.model.path == str(tmp_path / "models") and config.run_dir == str(tmp_path / "here")
    ray = config.ray_kwargs.ray_init
    assert (config.trainer.nnodes, ray.address, ray.num_gpus, ray.num_cpus, config.trainer.total_epochs) == (4, "auto", None, None, 1)
    assert composed_by("run_dppo_qwen8b.sh", MODEL_PATH="Qwen/Qwen3-8B").actor_rollout_ref.model.path == "Qwen/Qwen3-8B"
    assert composed_by("run_erc_qwen7b.sh", "cluster=1x1").trainer.n_gpus_per_node == 1


def test_a_folder_may_have_any_name_but_an_interpolation(composed_by, tmp_path):
    folder = tmp_path / "it's a,b=c (1) [x] #"
    assert composed_by("run_erc_qwen7b.sh", RUN_DIR=str(folder)).run_dir == str(folder)
    done = run("run_erc_qwen7b.sh", "--dry-run", RUN_DIR="runs/${seed}")
    assert done.returncode == 2 and "RUN_DIR = " in done.stderr and "Choose another path" in done.stderr


def test_a_script_is_found_through_a_link(composed_by, tmp_path):
    link = tmp_path / "run.sh"
    link.symlink_to(ROOT / "scripts" / "run_erc_qwen7b.sh")
    assert composed_by(str(link)).chosen.experiment == "erc/erc_dapo"


def test_a_dry_run_prints_the_command_and_the_configuration_and_starts_nothing(tmp_path):
    done = run("run_bandpo_qwen7b.sh", "--dry-run", f"assets={tmp_path / 'assets'}", RUN_DIR=str(tmp_path / "run"))
    assert done.returncode == 0, done.stderr
    command = done.stdout.splitlines()[0]
    assert command.startswith("# python -m recipes.train experiment=bandpo/band_kl ") and "dry_run=" not in command
    config = yaml.safe_load(done.stdout)
    assert config["actor_rollout_ref"]["actor"]["policy_loss"]["method"]["delta"] == 0.05
    assert config["actor_rollout_ref"]["model"]["path"] == "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("+actor_rollout_ref.rollout.nonsense=1", "nonsense"),
        ("actor_rollout_ref.actor.loss_agg_mode=mean-of-means", "loss_agg_mode: mean-of-means"),
        ("reward=model reward.reward_model.model_path=rm +reward.reward_model.rollout.nonsense=1", "nonsense"),
    ],
)
def test_a_dry_run_says_what_verl_refuses(configure, monkeypatch, override, named):
    monkeypatch.setenv("VERL_ENGINE_VENDOR", "")  # so that it is as before again
    config = configure("experiment=dppo/dense", "cluster=1x8", "name=x", "dry_run=true", *override.split())
    with pytest.raises(UserError, match=f"(?s)^verl refuses the configuration: .*{named}"):
        dry_run(config, ["python"])


def test_a_reward_model_is_taken(configure, monkeypatch, capsys):
    monkeypatch.setenv("VERL_ENGINE_VENDOR", "")  # so that it is as before again
    config = configure("experiment=dppo/dense", "cluster=1x8", "name=x", "dry_run=true", "reward=model", "reward.reward_model.model_path=rm")
    check(config)
    dry_run(config, ["python"])
    reward = yaml.safe_load(capsys.readouterr().out)["reward"]
    assert reward["reward_model"]["enable"] and reward["reward_model"]["rollout"]["name"] == "vllm"
    assert reward["custom_reward_function"]["path"] is None  # else verl would not ask the model
    assert reward["reward_model"]["rollout"]["response_length"] == 8000


def test_a_job_that_slurm_did_not_start_says_so():
    assert "SLURM_JOB_ID is not set: submit this with sbatch" in run("slurm.sh", "bandpo/band_kl", SLURM_SUBMIT_DIR=str(ROOT)).stderr
