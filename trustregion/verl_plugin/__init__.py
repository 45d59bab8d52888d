"""trustregion inside verl: the only package here that imports verl, Ray or vLLM.

`plugin` is what verl loads in each of its processes (entry-point group `verl.plugins`): it registers the policy loss
`trust_region` and the CPU platform. Everything else is chosen by configuration (see configs/train.yaml):

=================  =====================================================================================
module             seam of verl
=================  =====================================================================================
`policy_loss`      `register_policy_loss`: the one registered loss
`config`           `actor_rollout_ref.actor.policy_loss._target_`: its hyper-parameters
`worker`           `ActorRolloutRefWorker` subclass: our loss function, gloo process group on CPU
`worker_loss`      `set_loss_fn`: what surrounds the policy loss in a worker; `positive_nll` is a term of it
`token_records`    what the policy loss saw of some tokens, as files; begun and ended around each update by the engine
`engine`           `EngineRegistry`: verl's FSDP engines with `full_vocabulary` in front, FSDP2 on CPU
`trainer`          `register_trainer`: the anchor's statistics, schedules, repeatable runs, dead servers are noticed
`replay_buffer`    what the trainer samples from: in a fixed order, polled often
`agent_loop`       one sampling seed a request, and the most likely tokens on demand
`rollout_server`   `RolloutReplicaRegistry`: vLLM's server that returns them; `rollout_cells` makes cells of them
`task_runner`      `run_ppo(task_runner_class=...)`: the process that holds the trainer
`vllm_extension`   `worker_extension_cls`: weight sync into vLLM on CPU
`replacements`     the functions of verl and vLLM that are replaced, each with its reason
=================  =====================================================================================
"""
