"""What a run will take of memory and disk, from shapes alone: no weights are loaded. Estimates, to be read as such."""

import json
import math
import shutil
from dataclasses import dataclass, field
from pathlib import Path

from omegaconf import DictConfig
from safetensors import safe_open

GiB = 2**30
FLOAT, HALF, ADAM = 4, 2, 8  # bytes of a parameter: as FSDP keeps it, as vLLM does, and of Adam's two moments
CLOSE = 0.9  # from this part on, a warning


@dataclass
class Findings:
    """What was found: what keeps a run from succeeding, what may, and what is only worth knowing."""

    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    facts: list[str] = field(default_factory=list)

    def __iadd__(self, other: "Findings"):
        self.problems += other.problems
        self.warnings += other.warnings
        self.facts += other.facts
        return self


def count_parameters(folder: Path) -> int | None:
    """The number of parameters in a folder's safetensors, by their headers; None where there are none."""
    total = 0
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="np") as weights:
            total += sum(math.prod(weights.get_slice(name).get_shape()) for name in weights.keys())  # noqa: SIM118
    return total or None


def disk(config: DictConfig, parameters: int) -> Findings:
    """Checkpoints, those kept and the one being written, against the free space where they go."""
    trainer, found = config.trainer, Findings()
    if not isinstance(trainer.save_freq, int) or trainer.save_freq <= 0:
        return found
    contents, trained = config.actor_rollout_ref.actor.checkpoint.save_contents, _trained(config, parameters)
    one = ("model" in contents) * FLOAT * parameters + ("optimizer" in contents) * ADAM * trained
    one += ("hf_model" in contents) * FLOAT * parameters
    most = trainer.max_actor_ckpt_to_keep
    if most is None:
        steps = trainer.total_training_steps
        kept = math.ceil(steps / trainer.save_freq) if steps else 2
        text = f"{kept} checkpoints" if steps else "2 checkpoints, of an unknown number"
    else:
        kept = most + 1
        text = f"{kept} checkpoints, the one being written among them"
    folder = Path(trainer.default_local_dir).absolute()
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    said = f"{text} of {one / GiB:.1f} GiB each (trainer.save_freq = {trainer.save_freq}, trainer.max_actor_ckpt_to_keep = {most}); {free / GiB:.1f} GiB are free in {folder}"
    if kept * one > free:
        found.problems.append(f"trainer.default_local_dir = {trainer.default_local_dir}: too little space for {said}. Lower trainer.max_actor_ckpt_to_keep, or choose another run_dir=...")
    elif kept * one > CLOSE * free:
        found.warnings.append(f"disk: hardly room for {said}")
    found.facts.append(f"disk: {said}")
    return found


def memory(config: DictConfig, model: dict, parameters: int, total: int) -> Findings:
    """The largest amounts that a GPU of `total` bytes has to hold, in the update and in the rollout.

    `model` is what config.json has, `parameters` their number.
    """
    everything, found = config.actor_rollout_ref, Findings()
    actor, rollout = everything.actor, everything.rollout
    workers = config.trainer.nnodes * config.trainer.n_gpus_per_node
    shards = workers if actor.fsdp_config.fsdp_size == -1 else actor.fsdp_config.fsdp_size
    trained = _trained(config, parameters)
    weights, adam = FLOAT * parameters / shards, ADAM * trained / shards
    states = weights + adam + FLOAT * trained / shards  # and gradients
    tokens = _tokens(config)
    text = model.get("text_config") or model
    layers, width, inner, vocabulary = (text.get(key) or 0 for key in ("num_hidden_layers", "hidden_size", "intermediate_size", "vocab_size"))
    layer = (8 * width + 3 * inner) * tokens * HALF  # one layer's activations
    activations = layer + layers * width * tokens * HALF if everything.model.enable_gradient_checkpointing else layers * layer
    # Logits, their gradient, and a probability for each where the entropy is wanted.
    logits = 0 if everything.model.use_fused_kernels else 3 * HALF * vocabulary * tokens
    served = rollout.gpu_memory_utilization * total if everything.hybrid_engine else 0
    update = states + activations + logits + (0 if rollout.free_cache_engine else served)
    kept = (0 if actor.fsdp_config.param_offload else weights) + (0 if actor.fsdp_config.optimizer_offload else adam)

    gib = {key: f"{value / GiB:.1f}" for key, value in locals().items() if isinstance(value, int | float)}
    phases = {
        "update": (update, f"{gib['states']} weights, gradients and Adam + {gib['activations']} activations + {gib['logits']} logits of {tokens} tokens"
                   + ("" if rollout.free_cache_engine else f" + {gib['served']} vLLM")),
        "rollout": (served + kept, f"{gib['served']} vLLM + {gib['kept']} that the trainer keeps"),
    }  # fmt: skip
    remedies = {
        "update": "Take more GPUs, lower cluster.tokens (or ppo_micro_batch_size_per_gpu), or a smaller model.",
        "rollout": "Lower actor_rollout_ref.rollout.gpu_memory_utilization, or set actor_rollout_ref.actor.fsdp_config.param_offload=true and optimizer_offload=true.",
    }
    certain = {"update": states, "rollout": served + kept}
    for phase, (bytes_, parts) in phases.items():
        said = f"memory of a GPU in the {phase}: about {parts} = {bytes_ / GiB:.1f} of {gib['total']} GiB"
        if certain[phase] > total:
            found.problems.append(f"{said}. {remedies[phase]}")
        elif bytes_ > CLOSE * total:
            found.warnings.append(f"{said}. {remedies[phase]}")
        found.facts.append(said)
    parallel = rollout.tensor_model_parallel_size
    if served and HALF * parameters / parallel > served:
        found.problems.append(
            f"actor_rollout_ref.rollout.gpu_memory_utilization = {rollout.gpu_memory_utilization}: of {gib['total']} GiB leaves vLLM "
            f"{gib['served']}, less than the weights ({HALF * parameters / parallel / GiB:.1f} with tensor_model_parallel_size = "
            f"{parallel}). Raise one of the two."
        )
    return found


def _trained(config: DictConfig, parameters: int) -> int:
    return 0 if config.actor_rollout_ref.model.get("lora_rank") else parameters  # adapters are small beside the rest


def _tokens(config: DictConfig) -> int:
    """Of a micro-batch in the update, on each GPU."""
    actor, data = config.actor_rollout_ref.actor, config.data
    if actor.use_dynamic_bsz:
        return actor.ppo_max_token_len_per_gpu
    return actor.ppo_micro_batch_size_per_gpu * (data.max_prompt_length + data.max_response_length) // actor.ulysses_sequence_parallel_size


def read_model(path: str) -> tuple[dict, int] | None:
    """(config.json, number of parameters) of a model folder; None where it is not here or has other kinds of weights."""
    folder = Path(path).expanduser()
    if not (folder / "config.json").is_file() or (parameters := count_parameters(folder)) is None:
        return None
    return json.loads((folder / "config.json").read_bytes()), parameters
