"""What we rely on in verl and vLLM beyond their documented interfaces. After an upgrade, this says by name what is gone."""

import ast
import importlib
import inspect
from pathlib import Path

import pytest

pytest.importorskip("verl")
pytestmark = pytest.mark.slow  # imports vLLM

FSDP = "verl.workers.engine.fsdp.transformer_impl"
TRAINER = "verl.trainer.ppo.v1.trainer_base"
SERVER = "verl.workers.rollout.vllm_rollout.vllm_async_server"

# What we override or call, and the parameters that we name or pass on by position.
SIGNATURES = {
    f"{FSDP}:FSDPEngineWithLMHead.prepare_model_outputs": "self output output_args micro_batch logits_processor_func",
    f"{FSDP}:FSDPEngineWithLMHead.forward_step": "self micro_batch loss_function forward_only",
    f"{FSDP}:FSDPEngine.train_batch": "self data loss_function",
    f"{FSDP}:FSDPEngine._build_fsdp_module": "self module",
    f"{FSDP}:FSDPEngine._gather_and_unpad_packed": "self tensor pad_size",
    f"{FSDP}:FSDPEngine.get_data_parallel_group": "self",
    f"{FSDP}:FSDPEngine.get_data_parallel_rank": "self",
    f"{FSDP}:FSDPEngine.get_data_parallel_size": "self",
    f"{FSDP}:FSDPEngine.is_mp_src_rank_with_outputs": "self",
    "transfer_queue:kv_batch_put": "keys partition_id fields",
    "verl.utils.ulysses:get_ulysses_sequence_parallel_rank": "group",
    "verl.utils.ulysses:get_ulysses_sequence_parallel_world_size": "group",
    "verl.workers.utils.padding:no_padding_2_padding": "tensor data",
    "verl.utils.distributed:initialize_global_process_group_ray": "timeout_second backend",
    "verl.workers.engine_workers:TrainingWorker.set_loss_fn": "self loss_fn",
    "verl.workers.engine_workers:ActorRolloutRefWorker.init_model": "self",
    f"{TRAINER}:PPOTrainer._compute_old_log_prob": "self batch metrics",
    f"{TRAINER}:PPOTrainer._update_actor": "self batch metrics",
    f"{TRAINER}:PPOTrainer._next_train_batch": "self num_prompts",
    f"{TRAINER}:PPOTrainer._build_replay_buffer": "self",
    f"{TRAINER}:PPOTrainer._init_resource_pool_mgr": "self",
    f"{TRAINER}:PPOTrainer._save_checkpoint": "self",
    f"{TRAINER}:PPOTrainer._load_checkpoint": "self",
    f"{TRAINER}:PPOTrainer.on_init_end": "self",
    f"{TRAINER}:PPOTrainer.on_step_end": "self",
    "verl.trainer.ppo.v1.replay_buffer:ReplayBuffer._select_prompt_uids": "self partition_id sampleable_keys batch_size",
    "verl.trainer.ppo.v1.replay_buffer:ReplayBuffer._materialize_batch": "self partition_id selected_prompt_uids partition_snapshot",
    "verl.trainer.ppo.v1.replay_buffer:ReplayBuffer._wait_for_next_poll": "self partition_id last_debug_time",
    "verl.trainer.ppo.v1.replay_buffer:ReplayBuffer._evict_terminal_groups": "self global_steps partition_id eviction_reasons",
    "verl.trainer.ppo.v1.replay_buffer:ReplayBufferAsync.sample": "self global_steps partition_id batch_size",
    f"{SERVER}:vLLMHttpServer.run_server": "self args",
    f"{SERVER}:vLLMHttpServer.generate": "self prompt_ids sampling_params request_id",
    "verl.experimental.agent_loop.single_turn_agent_loop:SingleTurnAgentLoop.run": "self sampling_params",
    "verl.experimental.agent_loop.agent_loop:AgentLoopOutput.as_dict": "self",
    "verl.trainer.ppo.core_algos:agg_loss": "loss_mat loss_mask loss_agg_mode dp_size batch_num_tokens global_batch_size loss_scale_factor",
    "vllm.v1.engine.async_llm:AsyncLLM.generate": "self prompt sampling_params request_id",
}  # fmt: skip

# Keys and attributes that appear in no signature: the function whose text must still have them.
WORDS = {
    f"{FSDP}:FSDPEngineWithLMHead.prepare_model_inputs": "input_ids_rmpad_rolled temperature_rmpad pad_size temperature temperature_is_one",
    f"{FSDP}:FSDPEngineWithLMHead.prepare_model_outputs": "log_probs entropy calculate_entropy use_fused_kernels distillation_use_topk calculate_sum_pi_squared use_remove_padding",
    f"{FSDP}:FSDPEngine._init_device_mesh": "use_ulysses_sp engine_config",
    f"{TRAINER}:PPOTrainer._compute_old_log_prob": "bypass_mode rollout_log_probs old_log_probs entropy",
    f"{TRAINER}:PPOTrainer._step_once": "_compute_old_log_prob _update_actor extra_info",
    "verl.workers.engine_workers:ActorRolloutRefWorker.init_model": "actor_worker_cls ref_worker_cls loss_fn",
    "verl.workers.config.model:HFModelConfig": "tokenizer",
    f"{SERVER}:vLLMHttpServer.generate": "logprobs extra_fields",
    f"{SERVER}:vLLMReplica.__init__": "server_class",
}  # fmt: skip


def find(place: str):
    module, _, path = place.partition(":")
    found = importlib.import_module(module)
    for name in path.split("."):
        found = getattr(found, name)
    return found


@pytest.mark.parametrize("place", SIGNATURES)
def test_is_there_and_takes_what_we_pass(place):
    parameters = list(inspect.signature(find(place)).parameters)
    expected = SIGNATURES[place].split()
    assert [name for name in parameters if name in expected] == expected


@pytest.mark.parametrize("place", WORDS)
def test_still_has_the_keys_we_read(place):
    text = inspect.getsource(find(place))
    assert [word for word in WORDS[place].split() if word not in text] == []


def test_every_module_of_verl_and_vllm_that_the_plugin_imports_is_there():
    import trustregion.verl_plugin as plugin

    for path in Path(plugin.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module.split(".")[0] in ("verl", "vllm", "transfer_queue"):
                module = importlib.import_module(node.module)
                missing = [alias.name for alias in node.names if not hasattr(module, alias.name)]
                assert not missing or all(importlib.import_module(f"{node.module}.{name}") for name in missing)
