"""Whether a reward function can be used: called once for each row, as verl would, before a run is started for it.

Also a program, so that the user's own file runs in a process of its own: reads the pickled arguments of problem_of from one
file, and writes its answer to another as JSON:  python -m recipes.try_reward ARGUMENTS ANSWER

Whatever else the user's file does, print or exit, is no answer.
"""

import asyncio
import importlib
import importlib.util
import inspect
import json
import math
import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path


def problem_of(path: str, name: str, kwargs: dict, rows: list[dict]) -> str | None:
    """What is wrong with the function `name` of `path` (a file, or pkg://module) at `rows` of verl's data, or None.

    It is given an empty response, which any model can make, and the right answer.
    """
    try:
        module = _load(path)
    except BaseException as error:  # SystemExit too
        return f"cannot be loaded ({_said(error)})"
    function = getattr(module, name, None)
    if not callable(function):
        return f"has no function {name} (reward.custom_reward_function.name)"
    for row in rows:
        truth = row["reward_model"]["ground_truth"]
        for response in ("", str(truth)):
            at = f"at data_source = {row['data_source']!r}, ground_truth = {truth!r} and the response {response!r}"
            extra = {**(row.get("extra_info") or {}), "num_turns": 2, "rollout_reward_scores": {}}
            try:
                arguments = {"data_source": row["data_source"], "solution_str": response, "ground_truth": truth, "extra_info": extra}
                result = _call(function, **{**arguments, **kwargs})
            except BaseException as error:
                return f"{name} raises {_said(error)} {at}"
            if wrong := wrong_result(result):
                return f"{name} returns {wrong} {at}; it must be a finite number, or a dictionary with one as `score`"
    return None


def wrong_result(result) -> str | None:
    """What of a reward function's result is not a finite number, or None."""
    if isinstance(result, dict):
        if "score" not in result:
            return f"a dictionary without `score` (it has {', '.join(map(str, result)) or 'nothing'})"
        return wrong_result(result["score"])
    try:
        fine = not isinstance(result, str | bytes) and math.isfinite(float(result))
    except (TypeError, ValueError):
        fine = False
    return None if fine else repr(result)[:80]


def _load(path: str):
    if path.startswith("pkg://"):
        return importlib.import_module(path.removeprefix("pkg://"))
    spec = importlib.util.spec_from_file_location("reward_function", Path(path.removeprefix("file://")))
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _call(function: Callable, **arguments):
    result = function(**arguments)
    return asyncio.run(result) if inspect.iscoroutine(result) else result


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error) or 'no word').splitlines()[0]}"


def main(arguments: Path, answer: Path):
    part = answer.with_suffix(".part")
    part.write_text(json.dumps(problem_of(*pickle.loads(arguments.read_bytes()))), encoding="utf-8")
    os.replace(part, answer)  # there, it is whole


if __name__ == "__main__":
    files = [Path(name) for name in sys.argv[1:]]
    del sys.argv[1:]  # the user's file may look at them
    main(*files)
