"""Tokens on the report page: what is counted and shown. And the page in a real browser: it is drawn, asks nobody for
anything, and hostile tokens do nothing."""

import base64
import io
import json
import os
import shutil
import signal
import subprocess
from pathlib import Path

import matplotlib.image
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml

from recipes import token_records
from recipes.report import main
from recipes.token_page import AROUND, token_sections
from recipes.token_records import CAN_BE_NULL, TokenCount, read_records
from trustregion import PolicyLoss, TokenBatch
from trustregion.verl_plugin.token_records import SCHEMA, TokenRecorder

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
HOSTILE = [
    "</pre><script>document.title='hacked'</script>", "<img src=x onerror=\"document.title='hacked'\">",
    "\" onmouseover=\"document.title='hacked'\" x=\"", "' onmouseover='document.title=1", "&lt;b&gt;", "<!--", "\x00",
    "\u202egnorw", "\n", " ", "\ud83d\ude00".encode("utf-16", "surrogatepass").decode("utf-16"), "�",
]  # fmt: skip
WORDS = [*HOSTILE, " the", " so", "Wait", ",", " we", " get", " 7", "=", " therefore", "$x$", " number", "."]


class Tokenizer:
    def decode(self, ids: list[int]) -> str:
        return "".join(WORDS[token_id] for token_id in ids)


def write_run(folder: Path, method: str, seed: int, records: bool = True, length: int = 80):
    """A run of six steps, with records as its worker would have written them in steps 1, 3 and 6 (two updates each)."""
    (folder / "samples").mkdir(parents=True)
    loss, recorder, generator = PolicyLoss.from_preset(method), TokenRecorder(Tokenizer()), torch.Generator().manual_seed(seed)
    with open(folder / "metrics.jsonl", "w") as file:
        for step in range(1, 7):
            data = {"critic/rewards/mean": step / 10, "actor/entropy": 1 - step / 10, "timing_s/step": 2.0, "trust/clip_fraction_up": 0.01 * step}
            file.write(json.dumps({"step": step, "data": data}) + "\n")
    (folder / "config.yaml").write_text(yaml.safe_dump({"run_dir": str(folder), "chosen": {"method": method}, "token_records": {"every": 3 * records}}))
    for step in (1, 3, 6):
        names = [f"{step:08d}-{i:06d}_0_0" for i in range(8)]
        lines = [{"uid": name, "input": f"<b>What is {i}+{seed}?</b>", "output": f"It is {i + seed}.", "score": float(i % 2)} for i, name in enumerate(names)]
        (folder / "samples" / f"{step}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        for update in range(2 * records):
            moved = 0.0 if update == 0 else 0.35  # before the first update the policy is its own anchor
            old = -3 * torch.rand(8, length, generator=generator) ** 2 - 1e-3
            new = (old + moved * torch.randn(8, length, generator=generator)).clamp(max=-1e-4)
            entropy = torch.rand(8, length, generator=generator) + 0.05
            batch = TokenBatch(
                new, old, torch.randn(8, 1, generator=generator).expand(-1, length), torch.ones(8, length),
                entropy=entropy * (1 + moved * 0.1 * torch.randn(8, length, generator=generator)), entropy_old=entropy,
            )  # fmt: skip
            ids = torch.randint(len(WORDS), (8, length), generator=generator)
            chosen = recorder.begin(update, names, ids.unbind(), batch.response_mask.unbind(), step=step, folder=str(folder / "tokens"), sequences=8)
            recorder.record(chosen, loss, batch)
            recorder.end()


# ---- what is counted and shown ---------------------------------------------------------------------------------------
def write_tokens(run: Path, name: str, *tokens: tuple, update: int = 0, sequence: str = "s"):
    """Each token as (string, cause, p_old); appended to what the file has."""
    path = run / "tokens" / f"{name}.parquet"
    path.parent.mkdir(exist_ok=True, parents=True)
    rows = pq.read_table(path).to_pylist() if path.exists() else []
    for position, (token, cause, p_old) in enumerate(tokens):
        fields = {"step": int(name.split("-")[0]), "update": update, "sequence": sequence, "position": position, "token_id": 1, "token": token}
        numbers = {"log_prob_old": np.log(p_old), "log_prob": np.log(p_old), "advantage": 1.0, "entropy_old": None, "entropy": None, "divergence": None}
        rows.append({**fields, **numbers, "active": cause == "", "cause": cause})
    pq.write_table(pa.Table.from_pylist(rows, SCHEMA), path)


def test_counts_by_string_and_cause(tmp_path):
    assert read_records(tmp_path) is None
    write_tokens(tmp_path, "1", ("a", "", 0.5), ("a", "", 0.1), ("b", "region", 0.2))
    write_tokens(tmp_path, "20-0", ("a", "region+entropy", 0.8), ("b", "region", 0.4), ("c", "dual_clip", 1.0))
    write_tokens(tmp_path, "20-1", ("b", "region", 0.6), ("c", "", 1.0), sequence="t")
    write_tokens(tmp_path, "3", ("a", "entropy", 0.2))
    (tmp_path / "tokens" / "4.parquet").write_bytes((tmp_path / "tokens" / "1.parquet").read_bytes()[:-20])
    (tmp_path / "tokens" / "5.parquet.unfinished").write_text("")
    found = read_records(tmp_path)
    assert [*found.files] == [1, 3, 20] and len(found.files[20]) == 2 and [path.name for path in found.damaged] == ["4.parquet"]
    assert found.recorded == 4
    assert (found.count(), found.count("")) == (9, 3) and [found.count(cause) for cause in ("region", "entropy", "dual_clip")] == [4, 2, 1]

    def rounded(counts: list[TokenCount]):
        return [(of.token, of.count, of.seen, round(of.blocked, 6), round(of.p_old, 6)) for of in counts]

    assert rounded(found.most_often("region", 9)) == [("b", 3, 3, 1, 0.4), ("a", 1, 4, 0.5, 0.8)]
    assert rounded(found.most_often("entropy", 9)) == [("a", 2, 4, 0.5, 0.5)]
    assert rounded(found.most_often("dual_clip", 9)) == [("c", 1, 2, 0.5, 1.0)]
    assert rounded(found.most_often("", 1)) == [("a", 2, 4, 0.5, 0.3)]


def test_of_each_cause_the_responses_that_it_blocked_most_are_shown(tmp_path):
    write_tokens(tmp_path, "2", *3 * [("x", "dual_clip", 0.5)], sequence="1-0_0_0")
    for update, blocked in ((0, 0), (1, 3), (2, 1)):
        write_tokens(tmp_path, "10", *[("x", "region" if i < blocked else "", 0.5) for i in range(3)], update=update, sequence="9-1_0_0")
    write_tokens(tmp_path, "10", ("x", "region", 0.5), ("y", "region+entropy", 0.5), update=2, sequence="9-1_1_0")  # of the same prompt
    write_tokens(tmp_path, "10", ("x", "region", 0.5), ("y", "", 0.5), update=2, sequence="9-2_0_0")
    write_tokens(tmp_path, "10", *5 * [("x", "entropy", 0.5)], update=2, sequence="9-3_0_0")
    write_tokens(tmp_path, "20", ("x", "", 0.5))
    found = read_records(tmp_path)

    def shown(cause: str, most: int = 9):
        return [(rows[0]["sequence"], {row["update"] for row in rows}, [row["position"] for row in rows]) for rows in found.responses(cause, most)]

    assert shown("region") == [("9-1_0_0", {1}, [0, 1, 2]), ("9-2_0_0", {2}, [0, 1])] and len(shown("region", 1)) == 1
    assert shown("entropy") == [("9-3_0_0", {2}, [0, 1, 2, 3, 4]), ("9-1_1_0", {2}, [0, 1])]
    assert shown("dual_clip") == [("1-0_0_0", {0}, [0, 1, 2])]  # in the last step where it blocked any


def test_one_run_and_none_recorded(tmp_path):
    write_run(tmp_path / "a", "grpo", seed=0, records=False)
    text = the_page(tmp_path, tmp_path / "a").read_text(encoding="utf-8")
    assert "<h1>a</h1>" in text and "Differences of the configurations" not in text
    assert "No token records: train with <code>token_records.every=10</code>" in text and "<mark" not in text


def test_of_several_runs_those_without_records_are_named(tmp_path):
    for name, records in (("a", True), ("b", False)):
        write_run(tmp_path / name, "grpo", seed=0, records=False)
        if records:
            write_tokens(tmp_path / name, "6", ("x", "", 0.5))
            (tmp_path / name / "tokens" / "3.parquet").write_text("cut short")
    text = "".join(token_sections({name: tmp_path / name for name in ("a", "b")}))
    assert "No token records of b: train with" in text and "No token was blocked." in text
    assert "Not readable, and left out: 3.parquet" in text


@pytest.mark.parametrize("column", SCHEMA.names)
@pytest.mark.parametrize("damage", ["missing", "null", "of another kind"])
def test_files_of_another_kind_are_left_out(tmp_path, column, damage):
    write_tokens(tmp_path, "1", ("a", "region", 0.5))
    write_tokens(tmp_path, "2", ("b", "region", 0.5), ("c", "", 0.5))
    file, nth = tmp_path / "tokens" / "2.parquet", SCHEMA.names.index(column)
    rows = pq.read_table(file)
    other = pa.nulls(2) if damage == "null" else pa.array([[1], [2]])
    pq.write_table(rows.drop([column]) if damage == "missing" else rows.set_column(nth, column, other), file)
    (tmp_path / "tokens" / "3.parquet").mkdir()
    left_out = damage != "null" or column not in CAN_BE_NULL
    found = read_records(tmp_path)
    assert [path.name for path in found.damaged] == ["2.parquet", "3.parquet"][not left_out :]
    assert [row["token"] for row in found.responses("region", 1)[0]] == (["a"] if left_out else ["b", "c"])
    assert "blocked by region" in "".join(token_sections({"a": tmp_path}))


def test_columns_are_the_recorders():
    assert token_records.SCHEMA == SCHEMA


def test_what_has_no_numbers_is_shown_without(tmp_path):
    write_tokens(tmp_path, "1", ("a", "region", 0.5))
    rows = pq.read_table(tmp_path / "tokens" / "1.parquet").to_pylist()
    pq.write_table(pa.Table.from_pylist([{**rows[0], "entropy": 1.0, "log_prob": 1e30, "advantage": float("nan")}], SCHEMA), tmp_path / "tokens" / "1.parquet")
    assert 'title="p_old 0.500\np 1.000\nadvantage +nan\nblocked by region"' in "".join(token_sections({"a": tmp_path}))


def test_a_response_is_shown_with_its_prompt_and_long_stretches_are_cut(tmp_path):
    write_run(tmp_path / "a", "grpo", seed=0, records=False)
    plain, name = [("k", "", 0.5)], "00000006-000003_0_0"
    write_tokens(tmp_path / "a", "6", *(500 * plain), ("\n", "region", 0.25), *(30 * plain), ("", "entropy+dual_clip", 0.5), *(700 * plain), sequence=name)
    text = "".join(token_sections({"a": tmp_path / "a"}))
    assert f"step 6, update 0, {name}: 2 of 1232 tokens blocked, reward 1.0" in text and "&lt;b&gt;What is 3+0?&lt;/b&gt;" in text
    assert f"<span class=cut> … {500 - AROUND} tokens … </span>{AROUND * 'k'}<mark class=\"region\" title=\"p_old 0.250\np 0.250\nadvantage +1.000\nblocked by region\">↵\n</mark>" in text
    assert f"</mark>{30 * 'k'}<mark class=\"entropy dual_clip\"" in text and "blocked by entropy and dual clip\">∅</mark>" in text
    assert f"{AROUND * 'k'}<span class=cut> … {700 - AROUND} tokens … </span></pre>" in text


# ---- in a browser ----------------------------------------------------------------------------------------------------
class Browser:
    """Headless Chromium, spoken to in its DevTools protocol through two pipes: JSON messages that end with a 0 byte."""

    def __init__(self, program: str, profile: Path):
        there, ours_out = os.pipe()
        ours_in, back = os.pipe()
        # As root there is no sandbox, and in containers little of /dev/shm; the rest keeps the browser from its own errands.
        options = ["--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--no-first-run",
                   "--disable-background-networking", "--disable-component-update", f"--user-data-dir={profile}",
                   "--window-size=1250,900", "--remote-debugging-pipe"]  # fmt: skip
        command = ["bash", "-c", f'exec "$@" 3<&{there} 4>&{back}', "bash", program, *options, "about:blank"]
        self._process = subprocess.Popen(
            command, pass_fds=(there, back), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        os.close(there), os.close(back)
        self._out, self._in = os.fdopen(ours_out, "wb", buffering=0), os.fdopen(ours_in, "rb", buffering=0)
        self._last, self._session, self._read, self.events = 0, {}, b"", []
        target = self("Target.createTarget", url="about:blank")["targetId"]
        self._session = {"sessionId": self("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]}
        for domain in ("Page", "Runtime", "Log", "Network"):
            self(f"{domain}.enable")

    def __call__(self, method: str, **parameters) -> dict:
        self._last += 1
        self._out.write(json.dumps({"id": self._last, "method": method, "params": parameters, **self._session}).encode() + b"\0")
        while True:
            message = self._message()
            if message.get("id") == self._last:
                assert "error" not in message, message
                return message["result"]

    def open(self, page: Path):
        self.events.clear()
        self("Page.navigate", url=page.as_uri())
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self._message()
        self.value("new Promise(done => setTimeout(done, 200))")  # for what a page would do after it is loaded

    def value(self, script: str):
        return self("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)["result"].get("value")

    def screenshot(self, path: Path, part: str) -> np.ndarray:
        """Of the page from the element that `part` selects on, as a PNG file, and as colours [height, width, 3]."""
        size = self("Page.getLayoutMetrics")["cssContentSize"]
        top = self.value(f"document.querySelector({part!r}).getBoundingClientRect().top + scrollY")
        clip = {"x": 0, "y": top, "width": size["width"], "height": min(size["height"] - top, 1500), "scale": 1}
        path.write_bytes(base64.b64decode(self("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)["data"]))
        return (255 * matplotlib.image.imread(io.BytesIO(path.read_bytes()), format="png")[..., :3]).round().astype(int)

    def complaints(self) -> list[str]:
        """What the page has asked of others, and what the browser's console had to say."""
        said = []
        for event in self.events:
            about = event["params"]
            if event["method"] == "Network.requestWillBeSent" and not about["request"]["url"].startswith("data:"):
                said.append(f"request: {about['request']['url']}")
            elif event["method"] == "Log.entryAdded":
                said.append(f"console: {about['entry']['text']}")
            elif event["method"] in ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Page.javascriptDialogOpening"):
                said.append(f"script: {about}")
        return said

    def close(self):
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._out.close(), self._in.close()

    def _message(self) -> dict:
        while b"\0" not in self._read:
            self._read += (more := self._in.read(1 << 20))
            assert more, f"the browser has ended ({self._process.wait()})"
        text, _, self._read = self._read.partition(b"\0")
        message = json.loads(text)
        if "method" in message:
            self.events.append(message)
        return message


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        pytest.skip(f"no browser: none of {', '.join(BROWSERS)} is on the path")
    browser = Browser(program, tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


def the_page(tmp_path: Path, *runs: Path) -> Path:
    assert main([*map(str, runs), "--out", str(tmp_path / "page")]) == 0
    return tmp_path / "page" / "index.html"


@pytest.mark.slow
def test_in_a_browser(browser, tmp_path):
    write_run(tmp_path / "a", "band_kl_erc", seed=0)
    write_run(tmp_path / "b", "dppo_binary_tv", seed=1)
    page = the_page(tmp_path, tmp_path / "a", tmp_path / "b")
    browser.open(page)
    assert browser.complaints() == [f"request: {page.as_uri()}"]
    assert browser.value("document.title") == "2 runs" and browser.value("document.scripts.length") == 0
    assert browser.value("document.querySelectorAll('[onmouseover], [onerror], pre img, td img').length") == 0
    pixels = browser.screenshot(tmp_path / "page.png", part="h2:last-of-type")
    assert len(pixels) > 1000 and pixels.std() > 10  # not blank
    colours = set((pixels @ [1 << 16, 1 << 8, 1]).ravel().tolist())
    assert {0xFFDCC2, 0xC4EBDD} <= colours  # of tokens marked by region and by entropy
    # Each is as large as its text, and says why it is marked.
    marks = browser.value("[...document.querySelectorAll('pre mark')].map(m => [m.className, m.title, m.textContent, m.offsetWidth])")
    assert len(marks) > 50 and all(width > 0 for *_, width in marks)
    assert {name for name, *_ in marks} >= {"region", "entropy", "region entropy"}
    assert all(title.startswith("p_old ") and "blocked by " in title for _, title, *_ in marks)
    assert {text for *_, text, _ in marks} >= {HOSTILE[0], HOSTILE[2], "↵\n", "\\u202egnorw", "\\x00"}
    assert browser.value("document.documentElement.scrollWidth <= document.documentElement.clientWidth")  # no sideways scrolling


@pytest.mark.slow
@pytest.mark.parametrize(("broken", "complaint"), [
    ("<img src='http://127.0.0.1:9/x.png'>", "request: http://127.0.0.1:9/x.png"),
    ("<link rel=stylesheet href='style.css'>", "style.css"),
    ("<script>throw Error('oops')</script>", "oops"),
    ("<script>console.log('hello')</script>", "hello"),
    ("<img src='x' onerror='undefined_name()'>", "undefined_name"),
])  # fmt: skip
def test_the_browser_would_complain(browser, tmp_path, broken, complaint):
    page = tmp_path / "index.html"
    page.write_text(f"<!doctype html><title>x</title>{broken}")
    browser.open(page)
    _, *complaints = browser.complaints()
    assert any(complaint in said for said in complaints)
