"""A configuration that cannot work is refused before anything starts; each problem is named with its key and value."""

import re

import pytest
from omegaconf import OmegaConf

from recipes.checks import check
from recipes.errors import UserError
from recipes.train import GROUPS, check_choices, compose
from trustregion.presets import preset_names, read_preset


@pytest.fixture
def problems_of(configure):
    """problems_of("seed=abc", ...) -> the message."""

    def problems_of(*overrides: str) -> str:
        with pytest.raises(UserError) as raised:
            check(configure("name=x", *overrides))
        return str(raised.value)

    return problems_of


def test_the_shared_compositions_are_what_hydra_composes(configure):
    overrides = ["name=x", "model=smollm2_135m", "cluster.workers=2", "+method.detla=0.1", "trainer.logger=[file]", "data.train_files=a"]
    shared = configure(*overrides)
    configure("method=dppo_binary_tv")
    assert OmegaConf.to_container(shared, resolve=True) == OmegaConf.to_container(compose(overrides), resolve=True)
    assert shared.chosen == {"method": "band_kl", "model": "smollm2_135m", "experiment": None}


@pytest.mark.parametrize("group", [group for group in GROUPS if group not in ("experiment", "sweep")])
@pytest.mark.parametrize("override", ["{}=null", "~{}", "{}=[]", "{}=[a,b]", "{}=3"])
def test_each_group_has_one_choice(group, override):
    argument = override.format(group)
    known = {"method": "band_kl", "model": "tiny", "data": "arithmetic", "reward": "by_source", "cluster": "cpu"}[group]
    with pytest.raises(UserError, match=rf"^{re.escape(argument)}: {group} must be one of .*\b{known}\b"):
        check_choices(["seed=1", argument])


def test_a_choice_that_does_not_exist_is_answered_with_the_nearest_that_does():
    with pytest.raises(UserError, match=r"^method=band_lk: no such method. Did you mean 'band_kl'\? Allowed: band_alpha, "):
        check_choices(["method=band_lk"])
    with pytest.raises(UserError, match=r"no such experiment. Did you mean 'bandpo/band_kl'\? Allowed: bandpo/band_chi2, "):
        check_choices(["experiment=bandpo/band_lk"])
    with pytest.raises(UserError, match=r"^method=grpo,band_lk: no such method. Did you mean 'band_kl'\?"):
        check_choices(["-m", "method=grpo,band_lk"])


def test_parts_of_choices_are_none():
    with pytest.raises(UserError, match="no such cluster"):
        check_choices(["cluster=_cuda"])
    with pytest.raises(UserError, match="no such experiment"):
        check_choices(["experiment=bandpo/_base"])


def test_what_is_no_choice_of_a_group_is_left_to_hydra():
    check_choices(["experiment=null", "sweep=null", "--cfg", "job", "-m", "method=grpo,band_kl", "method.delta=null", "data=", "seed=[1,", "data.train_files=[a,b]"])


@pytest.mark.parametrize("method", preset_names())
def test_every_method_passes(configure, method):
    config = configure("name=x")
    config.method = read_preset(method)
    check(config)
    assert config.algorithm.rollout_correction.bypass_mode == method.startswith("dppo")
    assert config.actor_rollout_ref.actor.policy_loss.method == config.method


@pytest.mark.parametrize("choice", ["model=smollm2_135m", "method=dppo_binary_tv"])
def test_what_hydra_composes_passes(configure, choice):
    check(configure("name=x", choice))


# Each of these is wrong by itself; those of a group are wrong together, and check() lists all of them.
WRONG = {
    "counts": {
        "data.train_batch_size=many": "data.train_batch_size = 'many': must be a whole number >= 1",
        "data.train_max_samples=0": "data.train_max_samples = 0: must be a whole number >= 1",
        "actor_rollout_ref.rollout.n=0": "actor_rollout_ref.rollout.n = 0: must be a whole number >= 1",
        "actor_rollout_ref.rollout.val_kwargs.n=0": "actor_rollout_ref.rollout.val_kwargs.n = 0: must be a whole number >= 1",
        "data.val_batch_size=-1": "data.val_batch_size = -1: must be a whole number >= 1",
        "actor_rollout_ref.actor.ppo_mini_batch_size=1.5": "ppo_mini_batch_size = 1.5: must be a whole number >= 1",
        "trainer.nnodes=true": "trainer.nnodes = True: must be a whole number >= 1",
        "trainer.total_epochs=0.5": "trainer.total_epochs = 0.5: must be a whole number >= 1",
        "trainer.total_training_steps=-1": "trainer.total_training_steps = -1",
    },
    "first": {
        "cluster.workers=oops": "cluster.workers = 'oops'",
        "data.max_prompt_length=abc": "data.max_prompt_length = 'abc'",
        "data.max_response_length=null": "data.max_response_length = None",
    },
    "run": {
        "seed=abc": "seed = 'abc'",
        "name=../escape": "so no path",
        "dry_run=maybe": "dry_run = 'maybe': must be true or false",
        "trust_checkpoint=1": "trust_checkpoint = 1: must be true or false",
        "restart_without_checkpoint=null": "restart_without_checkpoint = None: must be true or false",
        "token_records.every=1.5": "token_records.every = 1.5: must be a whole number of steps >= 1, or 0 for no records",
        "token_records.sequences=0": "token_records.sequences = 0: must be a whole number >= 1",
        "max_restarts=-1": "max_restarts = -1: must be a whole number >= 0",
        "runs=null": "runs = None",
        "assets=7": "assets = 7",
        "model.path=[a]": "model.path = ['a']: must be the folder of a model",
        "data.train_files=7": "data.train_files = 7: must be a parquet file or a list",
        "data.val_files=[a,null]": "data.val_files = ['a', None]: must be a parquet file or a list",
        "data.prompt_key=null": "data.prompt_key = None: must be the column with the chat messages",
    },
    "checkpoints": {
        "trainer.resume_mode=newest": "trainer.resume_mode = 'newest': must be one of auto, disable, resume_path",
        "trainer.max_actor_ckpt_to_keep=0": "trainer.max_actor_ckpt_to_keep = 0: must be a whole number >= 1",
        "trainer.max_critic_ckpt_to_keep=2": "trainer.max_critic_ckpt_to_keep = 2: checkpoints are kept whole",
        "trainer.save_freq=abc": "trainer.save_freq = 'abc': must be a whole number of steps, or -1 for never",
        "trainer.test_freq=true": "trainer.test_freq = True: must be a whole number of steps, or -1 for never",
        "trainer.default_local_dir=null": "trainer.default_local_dir = None: must be the folder for checkpoints",
        "+trainer.remove_previous_ckpt_in_save=true": "remove_previous_ckpt_in_save = True: removes a checkpoint before",
    },
    "trainer": {
        "method.delta=oops": "method.delta = 'oops'",
        "trainer.use_v1=false": "legacy trainer",
        "trainer.v1.trainer_mode=colocate_async": "'colocate_async': must be one of 'trust_region_sync', ",
        "trainer.v1.sampler.custom_sampler.path=mine.py": "custom_sampler = mine.py",
        "trainer.logger=[file,wandbb]": "trainer.logger = ['file', 'wandbb']: must be a list of verl's trackers, which are clearml,",
        "actor_rollout_ref.actor.optim.lr=-1e-5": "actor_rollout_ref.actor.optim.lr = -1e-05: must be a number >= 0",
        "algorithm.rollout_correction.bypass_mode=true": "contradicts method.anchor = 'old'",
    },
    "loss": {
        "actor_rollout_ref.actor.policy_loss._target_=verl.workers.config.PolicyLossConfig": "policy_loss._target_ = 'verl.workers",
        "actor_rollout_ref.actor.policy_loss.loss_mode=vanilla": "policy_loss.loss_mode = 'vanilla'",
        "actor_rollout_ref.actor.policy_loss.method={region: ratio_interval}": "policy_loss.method = {'region': 'ratio_interval'}",
    },
    "device": {
        "algorithm.adv_estimator=gae": "flash attention",
        "actor_rollout_ref.actor.strategy=fsdp": "only 'fsdp2' works",
        "actor_rollout_ref.rollout.name=sglang": "actor_rollout_ref.rollout.name = 'sglang': only 'vllm'",
        "actor_rollout_ref.rollout.temperature=0": "rollout.temperature = 0: must be a number > 0",
        "actor_rollout_ref.rollout.gpu_memory_utilization=7": "rollout.gpu_memory_utilization = 7: must be a number > 0 and <= 1",
        "actor_rollout_ref.rollout.top_p=5": "rollout.top_p = 5: must be a number > 0 and <= 1",
        "actor_rollout_ref.rollout.val_kwargs.top_p=0": "rollout.val_kwargs.top_p = 0: must be a number > 0 and <= 1",
        "actor_rollout_ref.rollout.val_kwargs.temperature=-1": "rollout.val_kwargs.temperature = -1: must be a number >= 0",
        "cluster.env=null": "cluster.env = None: must be a mapping of environment variables",
        "trainer.n_gpus_per_node=2": "trainer.n_gpus_per_node = 2: contradicts cluster.workers = 1",
    },
    "batch": {
        "data.train_batch_size=10": "data.train_batch_size = 10: must be a multiple of",
        "cluster.workers=3": "do not divide over 3 workers",
        "critic.enable=true": "flash attention",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=3": "tensor_model_parallel_size = 3: on a CPU",
    },
    "others of the same keys": {
        "seed=-1": "seed = -1",
        "+method.detla=0.1": "Did you mean 'delta'",
        "trainer.logger=console": "trainer.logger = 'console': lacks file",
        "actor_rollout_ref.actor.optim.lr=nan": "optim.lr = nan",
        "actor_rollout_ref.rollout.temperature=hot": "rollout.temperature = 'hot'",
        "data.train_max_samples=a": "data.train_max_samples = 'a'",
    },
    "and others": {
        "seed=true": "seed = True",
        "method.anchor=rolout": "anchor = 'rolout'",
        "trainer.logger=null": "trainer.logger = None: must be a list",
        "cluster.device=tpu": "cluster.device = 'tpu'",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=0": "tensor_model_parallel_size = 0: must be a whole number",
    },
}


@pytest.mark.parametrize("group", WRONG)
def test_all_wrong_values_are_named_at_once(problems_of, group):
    said = problems_of(*WRONG[group])
    assert [expected for expected in WRONG[group].values() if expected not in said] == [], said
    assert len(said.splitlines()) == len(WRONG[group]), said


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("model=smollm2_135m actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=7", "ppo_micro_batch_size_per_gpu = 7: does not divide"),
        ("cluster.workers=4 cluster.device=cuda actor_rollout_ref.rollout.tensor_model_parallel_size=3", "size = 3: must divide"),
        ("cluster.workers=0", "cluster.workers = 0"),
        ("trainer=null", "cannot be resolved"),
        ("trainer.resume_mode=resume_path", "trainer.resume_from_path = None: must be the folder of a checkpoint"),
        ("trainer.resume_from_path=runs/a/checkpoints/global_step_2", "and null otherwise"),
        ("method=erc_dapo actor_rollout_ref.model.use_fused_kernels=true", "use_fused_kernels = True: the method needs"),
        ("method=dppo_topk_tv actor_rollout_ref.rollout.engine_kwargs.vllm.max_logprobs=5", "max_logprobs = 5: method.anchor = 'rollout'"),
        ("method=dppo_topk_tv actor_rollout_ref.rollout.agent.default_agent_loop=tool_agent", "default_agent_loop = 'tool_agent': method.anchor"),
        ("actor_rollout_ref.actor.ulysses_sequence_parallel_size=2 cluster.workers=2", "ulysses_sequence_parallel_size = 2: workers share"),
        ("method=dppo_topk_tv distillation.enabled=true", "distillation.enabled = True: the method needs"),
        ("method=dppo_topk_tv trainer.v1.trainer_mode=trust_region_colocate_async", "interrupts responses"),
        ("cluster=cpu_separate method=dppo_topk_tv", "interrupts responses"),
        ("cluster=cpu_separate trainer.v1.separate_async.parameter_sync_step=3", "parameter_sync_step = 3: must be data.train_batch_size = 16"),
        ("trainer.v1.trainer_mode=trust_region_separate_async", "checkpoint_engine.backend = 'naive': trainer.v1"),
        ("trainer.v1.trainer_mode=trust_region_separate_async", "rollout.nnodes = 0: trainer.v1.trainer_mode"),
        ("method=erc_dapo method.anchor=rollout", "anchor = 'rollout': an entropy band needs the anchor's entropy"),
        ("method=dppo_topk_kl algorithm.rollout_correction.rollout_is=token", "would count the difference twice"),
        ("method=dppo_binary_tv algorithm.rollout_correction.rollout_rs=token_k1", "rollout_rs = 'token_k1': verl rejects no"),
        ("trainer.nnodes=2", "trainer.nnodes = 2: a Ray cluster of this machine alone has one node"),
        ("actor_rollout_ref.actor.ppo_max_token_len_per_gpu=31", "ppo_max_token_len_per_gpu = 31: must hold one sequence"),
        ("actor_rollout_ref.actor.ppo_max_token_len_per_gpu=null", "ppo_max_token_len_per_gpu = None: must hold one sequence"),
        ("reward=function", "reward.custom_reward_function.path = '': must be the Python file"),
        ("reward=function reward.custom_reward_function.path=7", "reward.custom_reward_function.path = 7: must be the Python file"),
        ("reward.custom_reward_function.name=null", "reward.custom_reward_function.name = None: must be the name of a function in"),
        ("+reward.custom_reward_function.reward_kwargs=5", "reward_kwargs = 5: must be a mapping of the function's further arguments"),
        ("+reward.custom_reward_function.reward_kwargs=null", "reward_kwargs = None: must be a mapping of the function's"),
        ("trainer.save_freq=true", "trainer.save_freq = True: must be a whole number of steps"),
        ("trainer.test_freq=abc", "trainer.test_freq = 'abc': must be a whole number of steps"),
        ("reward=model", "reward.reward_model.model_path = None: must be the folder"),
        ("reward=model reward.reward_model.model_path=rm algorithm.filter_groups.enable=true", "filter_groups.enable = True: groups are"),
    ],
)
def test_wrong_values_are_named(problems_of, override, expected):
    assert expected in problems_of(*override.split())


def test_importance_weights_go_with_the_recomputed_anchor(configure):
    check(configure("name=x", "algorithm.rollout_correction.rollout_is=token"))


def test_the_separate_trainers_cluster_is_consistent(configure):
    check(config := configure("name=x", "cluster=cpu_separate", "method=erc_dapo"))
    assert config.ray_kwargs.ray_init.num_gpus == 2 and config.trainer.v1.separate_async.parameter_sync_step == 4


def test_vllm_is_allowed_as_many_log_probs_as_the_method_asks_for(configure):
    for override, expected in (("method=band_kl", 20), ("method=dppo_topk_tv", 20), ("method=dppo_topk_tv method.K=64", 64)):
        config = configure("name=x", *override.split())
        assert config.actor_rollout_ref.rollout.engine_kwargs.vllm.max_logprobs == expected


def test_a_gpu_that_is_not_there(problems_of):
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is one")
    assert "sees no CUDA device" in problems_of("cluster=gpu")


def test_a_dry_run_does_not_look_for_gpus(configure):
    check(configure("name=x", "cluster=gpu", "dry_run=true"))


@pytest.mark.parametrize(("value", "found"), [("10", "10"), ("null", "None")])
def test_token_records_has_keys_of_its_own(problems_of, value, found):
    assert f"token_records = {found}: has keys of its own. Set token_records.every and" in problems_of(f"token_records={value}")


@pytest.mark.parametrize("every", ["true", "false", "-1", "often"])
def test_how_often_tokens_are_recorded_is_a_number(problems_of, every):
    assert "token_records.every = " in problems_of(f"token_records.every={every}")
