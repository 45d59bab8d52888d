"""The clusters and the hub's models: what a choice sets."""

import pytest
import yaml

from recipes.checks import check
from recipes.train import choices_of
from trustregion.presets import configs_folder

CLUSTERS = {
    "cpu": (1, 1), "cpu_2x1": (2, 1), "cpu_separate": (1, 1), "gpu": (1, 1),
    "1x1": (1, 1), "1x8": (1, 8), "2x8": (2, 8), "4x8": (4, 8), "8x8": (8, 8),
}  # fmt: skip


def test_all_clusters_are_here():
    assert choices_of("cluster") == sorted(CLUSTERS)


@pytest.mark.slow
@pytest.mark.parametrize("cluster", ["cpu", "cpu_2x1", "gpu", "1x1", "1x8", "8x8"])
def test_a_cluster_has_as_many_nodes_and_gpus_as_its_name_says(configure, cluster):
    config = configure(f"cluster={cluster}", "model=qwen3-8b", "data.train_files=a", "data.val_files=a", "name=x", "dry_run=true")
    check(config)
    nodes, workers = CLUSTERS[cluster]
    assert (config.trainer.nnodes, config.trainer.n_gpus_per_node) == (nodes, workers)
    ray, model = config.ray_kwargs.ray_init, config.actor_rollout_ref.model
    assert (ray.address, ray.num_gpus) == (("local", workers) if nodes == 1 else ("auto", None))  # Ray refuses both together
    assert model.override_config.attn_implementation == ("sdpa" if cluster.startswith("cpu") else "flash_attention_2")


@pytest.mark.parametrize("nodes", [2, 4])
def test_the_clusters_between_differ_in_their_nodes(nodes):
    read = {n: yaml.safe_load((configs_folder() / "cluster" / f"{n}x8.yaml").read_text()) for n in (nodes, 8)}
    assert read[nodes].pop("cluster") == {"nodes": nodes} and read[8].pop("cluster") == {"nodes": 8}
    assert read[nodes] == read[8]


@pytest.mark.slow
def test_micro_batches_hold_one_whole_sequence(configure):
    for length, tokens in ((4096, 16384), (32768, 32768 + 1024)):
        config = configure("cluster=1x8", "model=folder", f"data.max_response_length={length}")
        assert config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu == tokens
        assert config.actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu == tokens


@pytest.mark.parametrize("model", [name for name in choices_of("model") if name not in ("tiny", "smollm2_135m", "folder")])
def test_models_are_named_as_on_the_hub(model):
    config = yaml.safe_load((configs_folder() / "model" / f"{model}.yaml").read_text())
    assert config["defaults"] == ["_hub"]
    named = config["model"]["path"].partition("/")[2].lower()
    assert named.removeprefix("deepseek-") == model
