"""Has vLLM load a run's model and sample one token, as the run will have it do:  python -m ... one_token REQUEST

REQUEST is a JSON file with `rollout` and `model`, verl's nodes of these names. Prints a line of JSON for
recipes.preflight; fails as vLLM fails.
"""

import json
import sys
import time
from pathlib import Path

from vllm import LLM, SamplingParams

# By the same names in verl's rollout configuration and in vLLM.
SAME = (
    "dtype", "gpu_memory_utilization", "enforce_eager", "max_num_seqs", "enable_chunked_prefill", "enable_prefix_caching",
)  # fmt: skip
OF_SERVERS = ("worker_extension_cls",)  # it takes weights from verl's workers, of which there are none here


def main(path: str):
    request = json.loads(Path(path).read_text())
    rollout, model = request["rollout"], request["model"]
    length = rollout["max_model_len"] or rollout["prompt_length"] + rollout["response_length"]
    own = {key: value for key, value in rollout["engine_kwargs"]["vllm"].items() if value is not None and key not in OF_SERVERS}
    started = time.monotonic()
    engine = LLM(
        model=model["path"],
        tokenizer=model["tokenizer_path"] or model["path"],
        trust_remote_code=model["trust_remote_code"],
        tensor_parallel_size=rollout["tensor_model_parallel_size"],
        max_model_len=length,
        max_num_batched_tokens=max(rollout["max_num_batched_tokens"], length),
        **{key: rollout[key] for key in SAME},
        **own,
    )
    conversation = [{"role": "user", "content": "1"}]
    sampling = SamplingParams(temperature=rollout["temperature"], max_tokens=1, logprobs=0)
    (answer,) = engine.chat(conversation, sampling, chat_template=model["custom_chat_template"], use_tqdm=False)
    (token,) = answer.outputs[0].token_ids
    log_prob = answer.outputs[0].logprobs[0][token].logprob
    fact = f"one token: vLLM sampled {token}, of log-prob {log_prob:.3f}, after {time.monotonic() - started:.0f} s"
    print(f"\n{json.dumps({'facts': [fact]})}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
