"""When verl's trainer saves: whole checkpoints, the last of them kept, and models that Hugging Face can load."""

import json
import shutil
from pathlib import Path
from statistics import fmean

from omegaconf import open_dict
from safetensors import safe_open
from verl.utils.debug import marked_timer

from trustregion.verl_plugin import checkpoints

MODEL_FACTS = "trained.json"  # in a model's folder: the step, and its score in validation


class CheckpointNotWritten(RuntimeError):
    """A checkpoint could not be written. Says why, and how much room there is."""


class WholeCheckpoints:
    """Mixin in front of one of verl's trainers.

    A checkpoint counts once its manifest is there, which is written when all else of its step is on disk: the row of
    metrics and the samples too. So a run that goes on from it has lost nothing.
    """

    def __init__(self, config):
        with open_dict(config):  # verl would remove the last checkpoint before the next counts, so we do it
            self._keep, config.trainer.max_actor_ckpt_to_keep = config.trainer.max_actor_ckpt_to_keep, None
            config.trainer.max_critic_ckpt_to_keep = None
        self._root = Path(config.trainer.default_local_dir).absolute()
        self._unsealed = None
        super().__init__(config)

    def _save_checkpoint(self):
        folder = self._root / f"global_step_{self.global_steps}"
        try:
            if folder.exists():  # damaged, or of a part of the run that has been given up
                shutil.rmtree(folder)
            super()._save_checkpoint()
        except Exception as error:
            raise self._not_written(folder, error) from error
        self._unsealed = folder

    def _not_written(self, folder: Path, error: Exception) -> CheckpointNotWritten:
        shutil.rmtree(folder, ignore_errors=True)  # which makes room for what is still to be written
        reason = str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__
        return CheckpointNotWritten(f"{folder} could not be written ({reason}). {_room(self._root)}")

    def on_step_begin(self):
        self._seal()
        super().on_step_begin()

    def _shutdown_dump_executor(self):  # verl's last act, after the last row
        super()._shutdown_dump_executor()
        self._seal()
        if self.config.trainer.save_freq > 0 and not self.config.trainer.get("val_only", False):
            self._save_model("final", self.global_steps - 1)

    def _seal(self):
        if self._unsealed is None:
            return
        for dump in self._dump_futures:
            dump.result()
        with marked_timer("seal_checkpoint", self.timing_raw):
            try:
                checkpoints.seal(self._unsealed)
            except OSError as error:
                raise self._not_written(self._unsealed, error) from error
        self._unsealed = None
        if self._keep:
            checkpoints.keep_newest(self._root, self._keep)

    def _validate(self):
        metrics = super()._validate()
        scores = [value for key, value in metrics.items() if key.startswith("val-core/")]
        if scores and self.config.trainer.save_freq > 0:
            score, best = fmean(scores), self._root / "best" / MODEL_FACTS
            if not best.exists() or score > json.loads(best.read_text())["score"]:
                self._save_model("best", self.global_steps, score)
        return metrics

    def _save_model(self, name: str, step: int, score: float | None = None):
        """Writes the actor's weights as safetensors, with config and tokenizer, over the folder `name`."""
        folder, written = self._root / name, self._root / f".{name}"
        shutil.rmtree(written, ignore_errors=True)
        try:
            self.actor_rollout_wg.save_model_folder(str(written))
            _correct_dtype(written / "huggingface")
            (written / "huggingface" / MODEL_FACTS).write_text(json.dumps({"step": step, "score": score}))
            if folder.exists():
                folder.rename(written / "before")
            (written / "huggingface").rename(folder)
        except Exception as error:
            raise self._not_written(written, error) from error
        shutil.rmtree(written)


def _correct_dtype(folder: Path):
    """verl's config.json says bfloat16 whatever the weights are, and transformers would load them as that."""
    with safe_open(next(folder.glob("*.safetensors")), framework="pt") as weights:
        dtype = weights.get_tensor(next(iter(weights.keys()))).dtype
    config = json.loads((folder / "config.json").read_text())
    config["dtype"] = str(dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(config, indent=2))


def _room(folder: Path) -> str:
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    return (
        f"{free / 2**30:.2f} GiB are free there. Free some, keep fewer checkpoints (trainer.max_actor_ckpt_to_keep=1), "
        "or put them elsewhere (trainer.default_local_dir=...); earlier checkpoints are as they were."
    )
