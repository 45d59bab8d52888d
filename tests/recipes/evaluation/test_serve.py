"""Around the servers: what they finish is graded and kept, whatever happens to them. Instead of vLLM, programs of a few lines."""

import signal
import sys

import pytest
from rich.console import Console

from recipes.errors import UserError
from recipes.evaluation import serve as module
from recipes.evaluation.benchmarks import Problem
from recipes.evaluation.samples import Samples
from recipes.evaluation.serve import Interrupted, Job, serve
from recipes.processes import ProcessTree

PROBLEMS = {f"arithmetic/{index}": Problem(f"arithmetic/{index}", [], "arithmetic/chain", str(index)) for index in range(3)}
ANSWERS = """
import json, os, signal, sys, time
job = json.load(open(sys.argv[1]))
with open(job["out"], "w") as out:
    for problem, k, seed, longest in job["requests"]:
        row = {"problem": problem, "k": k, "seed": seed, "text": "=" + problem[-1] * (k + 1), "finish": "stop", "tokens": 2}
        print(json.dumps(row), file=out, flush=True)
"""


@pytest.fixture
def run(make_samples, tmp_path, monkeypatch):
    """run(code, servers=1) serves two samples of each problem by servers that answer and then run `code`; returns the samples."""

    def run(code: str = "", servers: int = 1) -> Samples:
        class Tree(ProcessTree):
            def __init__(self, command, env, log):
                super().__init__([sys.executable, "-c", ANSWERS + code, command[-1]], env, log)

            def end(self):
                return super().end(grace_seconds=1.0)

        monkeypatch.setattr(module, "ProcessTree", Tree)
        held = {"arithmetic": make_samples([[True] * 2] * 3)}
        held["arithmetic"].file.write_text("")
        held["arithmetic"].rows, held["arithmetic"].size = {}, 0
        held["arithmetic"].open()
        requests = [(problem, k, 0, 16) for problem in PROBLEMS for k in range(2)]
        jobs = [Job({}, {}, {}, requests[number::servers], {"NUMBER": str(number)}) for number in range(servers)]
        handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
        try:
            serve(jobs, PROBLEMS, held, tmp_path, Console(quiet=True))
        finally:
            run.samples = held["arithmetic"]
            assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == handlers
            assert not list(tmp_path.glob("server-*.json*"))
        return held["arithmetic"]

    return run


@pytest.mark.parametrize("servers", [1, 2])
def test_what_servers_finish_is_graded_and_kept(run, servers):
    samples = run(servers=servers)
    assert len(samples.complete().rows) == 6
    assert {(name, k): (row["answer"], row["correct"]) for (name, k), row in samples.rows.items()} == {
        (name, k): (name[-1] * (k + 1), k == 0) for name in PROBLEMS for k in range(2)
    }
    assert len(samples.file.read_text().splitlines()) == 7  # with the header


@pytest.mark.parametrize(
    ("code", "message"),
    [("print('last words'); sys.exit(3)", "exited with 3.*last words"), ("os.kill(os.getpid(), signal.SIGKILL)", "killed by signal 9")],
)
def test_a_server_that_fails_is_named_and_ends_the_others(run, code, message):
    with pytest.raises(UserError, match=f"(?s)a vLLM server (was )?{message}"):
        run(f"if os.environ['NUMBER'] == '0':\n    time.sleep(1); {code}\ntime.sleep(60)", servers=2)
    assert len(run.samples.rows) == 6


def test_a_signal_ends_the_servers_and_keeps_what_they_finished(run):
    with pytest.raises(Interrupted) as raised:
        run("time.sleep(1); os.kill(os.getppid(), signal.SIGTERM); time.sleep(60)")
    assert raised.value.signum == signal.SIGTERM and len(run.samples.rows) == 6


def test_a_failure_of_grading_ends_the_run(run, monkeypatch):
    def fail(*_args):
        raise ModuleNotFoundError("math-verify")

    monkeypatch.setattr(module, "grade", fail)
    with pytest.raises(ModuleNotFoundError, match="math-verify"):
        run("time.sleep(60)")


def test_half_a_line_of_a_server_that_was_killed_is_no_sample(run):
    with pytest.raises(UserError, match="killed by signal 9"):
        run("""open(job["out"], "a").write('{"problem": "arith'); time.sleep(1); os.kill(os.getpid(), signal.SIGKILL)""")
    assert len(run.samples.rows) == 6
