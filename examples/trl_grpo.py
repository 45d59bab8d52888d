"""The loss in TRL's GRPOTrainer: one method overridden. Trains the tiny model, which adds carelessly, on a CPU.

    PYTHONPATH=.venv/trl python examples/trl_grpo.py          # TRL 1.16, as `make setup` installs it

The integration is the three lines marked below: hand over TRL's tensors, log, average. The rest is TRL as always.
"""

import random

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback
from trl import GRPOConfig, GRPOTrainer

from recipes.assets.tiny_model import prepare
from trustregion import PolicyLoss, TokenBatch


class TrustRegionGRPOTrainer(GRPOTrainer):
    """TRL's trainer with our loss, averaged like `loss_type="grpo"`: over the tokens of a response, then over responses.

    What TRL can add to its own loss (a KL term, an entropy bonus, sequence-level ratios) is not in it.
    """

    policy_loss = PolicyLoss.from_preset("band_kl")

    def _compute_loss(self, model, inputs):
        completion_mask = inputs["completion_mask"]
        mask = completion_mask * inputs.get("tool_mask", 1)
        tokens = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        attention_mask = torch.cat([inputs["prompt_mask"], completion_mask], dim=1)
        log_prob, *_ = self._get_per_token_logps_and_entropies(model, tokens, attention_mask, mask.shape[1])
        log_prob_old = inputs.get("old_per_token_logps", log_prob)  # TRL leaves it out where the two are the same
        advantages = inputs["advantages"].unsqueeze(1).expand_as(log_prob)
        weights = inputs.get("importance_sampling_ratio")  # trainer against vLLM, where TRL generates with it
        mode, accumulated = ("train", self.current_gradient_accumulation_steps) if self.model.training else ("eval", 1)

        # The three lines.
        out = self.policy_loss(TokenBatch(log_prob, log_prob_old, advantages, mask, weights=weights))
        self._metrics[mode]["clip_fraction"].append(out.metrics.summarize()["trust/clip_fraction"])
        return (out.token_loss.sum(1) / mask.sum(1).clamp(min=1)).mean() / accumulated


def sums(count):
    """Questions such as `3+4+5=`. Demonstrations have taught the model to answer `7+5=12`, more or less."""
    rng = random.Random(0)
    terms = [[rng.randrange(10) for _ in range(3)] for _ in range(count)]
    return Dataset.from_list(
        [{"prompt": [{"role": "user", "content": "+".join(map(str, t)) + "="}], "answer": str(sum(t))} for t in terms]
    )


def is_right(completions, answer, **_):
    return [float(c[0]["content"].rpartition("=")[2] == a) for c, a in zip(completions, answer, strict=True)]


def make_trainer(folder, cls=TrustRegionGRPOTrainer, reward=is_right, **settings):
    config = {
        "output_dir": "runs/trl",
        "max_steps": 60,
        "per_device_train_batch_size": 128,  # 16 prompts, 8 responses each
        "num_generations": 8,
        "num_iterations": 2,  # updates on the same responses: at the second, ratios are not 1
        "max_completion_length": 16,
        "learning_rate": 5e-4,
        "logging_steps": 2,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "bf16": False,
    }
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    return cls(model, reward, GRPOConfig(**{**config, **settings}), sums(480), processing_class=tokenizer)


if __name__ == "__main__":
    trainer = make_trainer(prepare("assets/tiny-0"), disable_tqdm=True)
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    print("update  reward  clipped")
    for row in trainer.state.log_history[:-1]:
        print(f"{row['step']:6d}  {row['reward']:6.3f}  {row['clip_fraction']:7.2%}")
