"""What an evaluation lacks, as jobs for vLLM servers."""

import os
from pathlib import Path

import torch
from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from recipes.errors import UserError
from recipes.evaluation.benchmarks import Benchmark, Problem
from recipes.evaluation.models import Model
from recipes.evaluation.samples import Samples, sample_seed
from recipes.evaluation.serve import Job, serve
from recipes.model_check import check_chat, longest_sequence
from trustregion.presets import configs_folder

ON_CPU = {
    "dtype": "float32",
    "enforce_eager": True,
    "enable_chunked_prefill": False,  # vLLM's CPU sampler refuses seeded requests with it
    "distributed_executor_backend": "uni",  # the model in the server's own process
}


def generate(model: Model, benchmarks: list[Benchmark], held: dict[str, Samples], config: DictConfig, folder: Path, console: Console):
    """Adds to `held`, by benchmark, the samples that it lacks, and to its files as they come.

    Raises:
        UserError: the model cannot take the prompts, there are too few GPUs, or a server failed.
        Interrupted: by SIGINT, SIGTERM or SIGHUP.
    """
    problems = {problem.id: problem for benchmark in benchmarks for problem in benchmark.problems}
    requests = []
    for benchmark in benchmarks:
        samples = held[benchmark.name].open()
        longest = samples.header["sampling"]["max_tokens"]
        for problem, k in samples.missing([problem.id for problem in benchmark.problems]):
            requests.append((problem, k, sample_seed(config.seed, problem, k), longest))
    if not requests:
        console.print("All samples are there already.")
        return
    prompts = _tokens(model, [problems[name] for name in dict.fromkeys(request[0] for request in requests)], config)
    positions = max(len(prompts[problem]) + longest for problem, _, _, longest in requests)
    most = longest_sequence(model.config)
    if most is not None and positions > most:
        raise UserError(
            f"max_tokens = {config.max_tokens}: prompt and response have up to {positions} tokens, and model={model.name} has positions "
            f"for {most} (max_position_embeddings). Set max_tokens to {most - max(map(len, prompts.values()))} or less."
        )
    places = _places(config)
    engine = {"model": str(model.folder), "max_model_len": positions, "seed": 0, **OmegaConf.to_container(config.engine)}
    if places[0]["CUDA_VISIBLE_DEVICES"] == "":
        del engine["gpu_memory_utilization"]
        engine |= {**ON_CPU, "max_num_batched_tokens": max(2048, positions)}
    sampling = {"temperature": config.temperature, "top_p": config.top_p}
    shares = [(requests[number :: len(places)], place) for number, place in enumerate(places)]
    jobs = [Job(engine, sampling, {request[0]: prompts[request[0]] for request in share}, share, place) for share, place in shares if share]
    serve(jobs, problems, held, folder, console)


def _tokens(model: Model, problems: list[Problem], config: DictConfig) -> dict[str, list[int]]:
    """Each problem as the model is asked it."""
    from transformers import AutoTokenizer

    check_chat(model.folder, f"model={model.name}, in", config.chat_template, template_key="chat_template")
    tokenizer = AutoTokenizer.from_pretrained(model.folder, local_files_only=True)
    options = {"chat_template": config.chat_template, "add_generation_prompt": True, "return_dict": False, **config.chat_template_kwargs}
    return {problem.id: list(tokenizer.apply_chat_template(problem.messages, **options)) for problem in problems}


def _places(config: DictConfig) -> list[dict[str, str]]:
    """The environment of each server: its devices, and what vLLM needs where there are none."""
    count, each, found = config.servers, config.engine.tensor_parallel_size, torch.cuda.device_count()
    always = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}  # the engine in the server's own process: one to end, a fixed order
    if config.device == "cpu" or (config.device is None and not found):
        if each != 1:
            raise UserError(f"engine.tensor_parallel_size = {each}: on a CPU a server is one process, so 1")
        cluster = OmegaConf.load(configs_folder() / "cluster" / "cpu.yaml").cluster
        return [{**cluster.env, **always, "CUDA_VISIBLE_DEVICES": ""}] * count
    if found < count * each:
        raise UserError(
            f"servers = {count} with engine.tensor_parallel_size = {each}: need {count * each} GPUs, and torch {torch.__version__} "
            f"sees {found}. Lower one of the two, or set device=cpu."
        )
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(found)))).split(",")
    return [{**always, "CUDA_VISIBLE_DEVICES": ",".join(visible[number * each : (number + 1) * each])} for number in range(count)]
