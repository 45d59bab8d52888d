"""A tokenizer of 261 tokens that can write any text: one token a byte, and five that mark the turns of a chat."""

from tokenizers.pre_tokenizers import ByteLevel
from transformers import Qwen2Tokenizer

PAD, END = "<|endoftext|>", "<|end|>"
ROLES = ("<|system|>", "<|user|>", "<|assistant|>")
# One token opens a turn, one ends it: prompts stay a dozen tokens long.
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def tiny_tokenizer(max_length: int) -> Qwen2Tokenizer:
    """A byte-level BPE without merges, of the class that transformers chooses for Qwen models, so that it reloads as it is.

    Args:
        max_length: longest text the model takes, tokens.
    """
    tokens = [PAD, END, *ROLES, *sorted(ByteLevel.alphabet())]
    return Qwen2Tokenizer(
        vocab={token: index for index, token in enumerate(tokens)},
        merges=[],
        pad_token=PAD,
        eos_token=END,
        extra_special_tokens=list(ROLES),
        chat_template=CHAT_TEMPLATE,
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )
