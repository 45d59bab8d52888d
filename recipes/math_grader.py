"""Whether two mathematical expressions are equal, by math-verify, in a process that can be ended when it takes too long.

math-verify's own time-out is a signal, which Python delivers to a main thread only, and between two of its instructions
only: reward workers call from other threads, and `9^{9^{9^9}}` is one instruction. So this file is also a program that
answers a line of JSON, [answer, truth], with a line, true or false, until its input ends:  python math_grader.py
"""

import atexit
import importlib.util
import json
import queue
import select
import subprocess
import sys
from functools import cache

PROCESSES = 2  # of each worker that gives rewards; they start when they are first needed
MEMORY = 4 << 30  # bytes for each of them
START_SECONDS = 120.0  # sympy is slow to import, on a busy machine


def equal(answer: str, truth: str, seconds: float) -> bool:
    """Whether math-verify finds both equal. What it cannot read, or not within `seconds`, is not.

    Raises:
        ModuleNotFoundError: math-verify is not installed.
    """
    grader = _graders().get()  # each thread one of its own, for as long as it asks
    try:
        return grader.ask([answer, truth], seconds)
    finally:
        _graders().put(grader)


@cache
def _graders() -> queue.LifoQueue:
    if importlib.util.find_spec("math_verify") is None:
        raise ModuleNotFoundError("this reward needs math-verify: pip install 'trustregion[eval]'")
    graders = queue.LifoQueue()
    for _ in range(PROCESSES):
        graders.put(grader := _Grader())
        atexit.register(grader.end)
    return graders


class _Grader:
    def __init__(self):
        self.process: subprocess.Popen | None = None

    def ask(self, question: list[str], seconds: float) -> bool:
        try:
            if self.process is None:
                self.process = subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
                self._line("ready?", START_SECONDS)
            return self._line(question, seconds)
        except (TimeoutError, OSError, ValueError):  # too long, or it died: of memory, or of a bug
            self.end()
            return False

    def _line(self, question, seconds: float) -> bool:
        self.process.stdin.write(json.dumps(question).encode() + b"\n")
        self.process.stdin.flush()
        if not select.select([self.process.stdout], [], [], seconds)[0]:
            raise TimeoutError
        return json.loads(self.process.stdout.readline())

    def end(self):
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
            self.process = None


def _answer_questions():
    from math_verify import parse, verify

    for line in sys.stdin:
        question = json.loads(line)
        right = False
        if question != "ready?":
            answer, truth = (parse(f"\\boxed{{{text}}}", parsing_timeout=None, raise_on_error=False) for text in question)
            right = verify(truth, answer, timeout_seconds=None, raise_on_error=False)
        print(json.dumps(bool(right)), flush=True)


if __name__ == "__main__":
    import logging
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    logging.disable()  # math-verify says of every question that there is no time-out
    _answer_questions()
