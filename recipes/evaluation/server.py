"""The process that generates:  python -m recipes.evaluation.server JOB.json

Started by recipes.evaluation.generate. JOB.json has the arguments of vllm.LLM (`engine`), those that all requests share
(`sampling`), token ids by prompt (`prompts`) and `requests`, each [prompt, k, seed, max_tokens]. Each response is appended to
the file `out` when it is finished.
"""

import json
import sys
from pathlib import Path

from recipes.processes import die_with_parent


def main(job: dict):
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import RequestOutputKind

    engine = LLM(**job["engine"]).llm_engine  # LLM.generate would return nothing before all is finished
    waiting = {}
    for number, (prompt, k, seed, max_tokens) in enumerate(job["requests"]):
        sampling = SamplingParams(seed=seed, max_tokens=max_tokens, output_kind=RequestOutputKind.FINAL_ONLY, **job["sampling"])
        engine.add_request(str(number), {"prompt_token_ids": job["prompts"][prompt]}, sampling)
        waiting[str(number)] = (prompt, k, seed)
    with open(job["out"], "w", encoding="utf-8") as out:
        while engine.has_unfinished_requests():
            for request in engine.step():
                prompt, k, seed = waiting.pop(request.request_id)
                (made,) = request.outputs
                sample = {"problem": prompt, "k": k, "seed": seed, "text": made.text}
                sample |= {"finish": made.finish_reason, "tokens": len(made.token_ids)}
                out.write(json.dumps(sample) + "\n")
            out.flush()


if __name__ == "__main__":
    die_with_parent()
    main(json.loads(Path(sys.argv[1]).read_bytes()))
