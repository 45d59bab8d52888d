"""trustregion inside verl: the only package here that imports verl, Ray or vLLM.

`plugin` is what verl loads in each of its processes (entry-point group `verl.plugins`): it registers the policy loss
`trust_region` and the CPU platform. Everything else is chosen by configuration (see configs/train.yaml):

=================  =====================================================================================
module             seam of verl
=================  =====================================================================================
`policy_loss`      `register_policy_loss`: the one registered loss
`config`           `actor_rollout_ref.actor.policy_loss._target_`: its hyper-parameters
`worker`           `ActorRolloutRefWorker` subclass: exact metrics, gloo process group on CPU
`engine`           `EngineRegistry`: FSDP2 on CPU
`trainer`          `register_trainer`: repeatable runs, dead rollout servers are noticed
`replay_buffer`    what the trainer samples from: in a fixed order, polled often
`agent_loop`       one sampling seed a request
`task_runner`      `run_ppo(task_runner_class=...)`: the process that holds the trainer
`vllm_extension`   `worker_extension_cls`: weight sync into vLLM on CPU
`replacements`     the functions of verl and vLLM that are replaced, each with its reason
=================  =====================================================================================
"""
