"""What training has cost elsewhere: how well a model predicts a text that has nothing to do with the training task."""

import hashlib
import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

from omegaconf import DictConfig

from recipes.errors import UserError
from recipes.evaluation.models import Model, find
from recipes.model_check import longest_sequence

TEXT = Path(__file__).parents[1] / "assets" / "retention.txt"
WINDOW = 2048  # tokens


@dataclass(frozen=True)
class Fit:
    """`nats` over all `tokens` but the first; `bytes` of the text in UTF-8."""

    model: str
    nats: float
    tokens: int
    bytes: int

    @property
    def perplexity(self) -> float:
        """A token. Comparable between models with the same tokenizer."""
        each = self.nats / self.tokens
        return math.inf if each > 709 else math.exp(each)  # a broken model's can be too large for a number

    @property
    def bits_per_byte(self) -> float:
        """Comparable between any two models."""
        return self.nats / math.log(2) / self.bytes


def retention(model: Model, config: DictConfig, file: Path) -> dict[str, Fit]:
    """How well `model` and retention.base predict the text; kept in `file`, so that it is measured once.

    Raises:
        UserError: no base or no text like this, or a text without a word.
    """
    base = find(config.retention.base, config, "retention.base")
    path = Path(config.retention.text or TEXT)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UserError(f"retention.text={path}: not a readable text in UTF-8 ({error})") from error
    recipe = {"text_sha256": hashlib.sha256(text.encode()).hexdigest(), "model": model.sha256, "base": base.sha256}
    kept = _kept(file)
    if kept.get("recipe") != recipe:
        fits = {name: asdict(fit(which, text, config.device)) for name, which in (("model", model), ("base", base))}
        kept = {"recipe": recipe, **fits}
        file.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    return read(file)


def read(file: Path) -> dict[str, Fit]:
    """`model` and `base` as retention() kept them; empty when it did not."""
    return {name: Fit(**kept[name]) for name in ("model", "base")} if (kept := _kept(file)) else {}


def _kept(file: Path) -> dict:
    if not file.exists():
        return {}
    try:
        kept = json.loads(file.read_text(encoding="utf-8"))
        fits = [Fit(**kept[name]) for name in ("model", "base")]
        if any(count <= 0 for fit in fits for count in (fit.nats, fit.tokens, fit.bytes)):
            raise ValueError("counts must be above 0")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{file}: is damaged ({error}). Remove it; retention.base=... measures anew.") from error
    return kept


def fit(model: Model, text: str, device: str | None = None) -> Fit:
    """How well `model` predicts `text`, in windows of up to 2048 tokens of which each begins with the last of the one before:
    all tokens but the first are predicted, once."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from recipes.assets.quiet import no_progress_bars

    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    ids = AutoTokenizer.from_pretrained(model.folder, local_files_only=True)(text, add_special_tokens=False, verbose=False).input_ids
    if len(ids) < 2:
        raise UserError(f"retention.text: has {len(ids)} tokens, and needs two or more")
    options = {"dtype": torch.float32} if device == "cpu" else {"dtype": "auto", "device_map": "auto"}
    with no_progress_bars():
        network = AutoModelForCausalLM.from_pretrained(model.folder, **options).eval()
    window, nats = min(WINDOW, longest_sequence(model.config) or WINDOW), 0.0
    with torch.inference_mode():
        for start in range(0, len(ids) - 1, window - 1):
            part = torch.tensor(ids[start : start + window], device=network.device)
            logits = network(part[None]).logits[0, :-1].float()
            nats += torch.nn.functional.cross_entropy(logits, part[1:].to(logits.device), reduction="sum").item()
    return Fit(model.name, nats, len(ids) - 1, len(text.encode()))
