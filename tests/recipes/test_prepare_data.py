"""Data sets are read from files as from the hub, checked, converted to verl's layout, and made whole or not at all."""

import hashlib
import json

import pandas as pd
import pyarrow.parquet as parquet
import pytest
import yaml

from recipes import prepare_data
from recipes.data_check import check_prompts
from recipes.errors import UserError
from recipes.prepare_data import AFTER, BEFORE, PROMPTS, WHAT, WHERE, main, prepare, prepare_all
from recipes.rewards import compute_score
from trustregion.presets import configs_folder

KNOWN = yaml.safe_load((configs_folder() / "datasets.yaml").read_text())
AIME = [{"problem": f"What is {n}+1?", "answer": n + 1} for n in range(30)]


@pytest.fixture
def source(tmp_path):
    """source(rows, "x.parquet") -> the file, written in the format of its name."""

    def source(rows: list[dict], name: str = "x.parquet"):
        path, frame = tmp_path / name, pd.DataFrame(rows)
        if path.suffix == ".parquet":
            frame.to_parquet(path)
        elif path.suffix == ".csv":
            frame.to_csv(path, index=False)
        else:
            frame.to_json(path, orient="records", lines=path.suffix == ".jsonl")
        return path

    return source


def rows_of(folder) -> list[dict]:
    return parquet.read_table(folder / "data.parquet").to_pylist()


@pytest.mark.parametrize("name", ["x.parquet", "x.jsonl", "x.json", "x.csv"])
def test_rows_come_in_verls_layout_whatever_the_format(source, tmp_path, name):
    folder = prepare("aime24", tmp_path / "assets", source=str(source(AIME, name)))
    assert check_prompts(folder / "data.parquet") == 30
    assert rows_of(folder)[2] == {
        "data_source": "math/aime24",
        "prompt": [{"role": "user", "content": BEFORE + "What is 2+1?" + AFTER}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "3"},
        "extra_info": {"split": "train", "index": 2},
    }
    origin = json.loads((folder / "origin.json").read_text())
    assert (origin["rows_read"], origin["rows"], origin["split"]) == (30, 30, "train") and origin["from"].endswith(name)
    again = prepare("aime24", tmp_path / "assets", source=str(tmp_path / name))
    assert again == folder and (folder / "data.parquet").stat().st_ino == (again / "data.parquet").stat().st_ino


def test_the_same_rows_have_the_same_hash(source, tmp_path):
    for nth, name in enumerate(("x.parquet", "x.jsonl")):
        prepare("aime24", tmp_path / str(nth), source=str(source(AIME, name)))
    changed = [*AIME[:-1], {"problem": AIME[-1]["problem"], "answer": 0}]
    prepare("aime24", tmp_path / "2", source=str(source(changed)))
    hashes = [json.loads((tmp_path / str(nth) / "aime24" / "origin.json").read_text())["sha256_of_rows"] for nth in range(3)]
    assert hashes[0] == hashes[1] != hashes[2]


def test_gsm8k_answers_are_the_numbers_that_its_reward_looks_for(source, tmp_path):
    raw = [{"question": "Two and two?", "answer": "2+2=<<2+2=4>>4\n#### 4"}, {"question": "Many?", "answer": "so\n#### 1,234"}]
    folder = prepare("gsm8k", tmp_path, source=str(source(raw)), rows=2)
    assert [row["reward_model"]["ground_truth"] for row in rows_of(folder)] == ["4", "1234"]
    row = rows_of(folder)[1]
    assert row["prompt"][0]["content"].endswith('after "####".')
    assert compute_score(row["data_source"], "#### 1,234", row["reward_model"]["ground_truth"], {}) == 1.0  # verl's rule


def test_levels_are_chosen_and_rows_that_are_there_twice_dropped(source, tmp_path):
    raw = [{"problem": f"p{n % 9}", "answer": "1", "level": level} for n, level in enumerate([1, 2, 3, 4, 5, 3, 4, 5, 3, 3, 3, 3])]
    raw += [{"problem": "text", "answer": "1", "level": 5}]
    folder = prepare("math_l3_5", tmp_path, source=str(source(raw)), rows=13)
    assert [row["extra_info"]["index"] for row in rows_of(folder)] == [2, 3, 4, 5, 6, 7, 8, 9, 10, 12]  # 11 asks what 2 asks
    as_text = [{**row, "level": f"Level {row['level']}"} for row in raw]
    assert rows_of(prepare("math_l3_5", tmp_path / "text", source=str(source(as_text)), rows=13)) == rows_of(folder)


def test_nested_columns_and_questions_that_have_the_prompt_already(source, tmp_path):
    raw = [{"prompt": [{"role": "user", "content": "6*7?"}], "reward_model": {"ground_truth": "$42$", "style": "rule"}}]
    (row,) = rows_of(prepare("math_sub_30k", tmp_path, source=str(source(raw, "x.json")), sha256=None))
    assert (row["prompt"][0]["content"], row["reward_model"]["ground_truth"]) == ("6*7?", "42")
    raw = [{"prompt": PROMPTS["answer_line"]("6*7?"), "solution": "42"}]
    (row,) = rows_of(prepare("dapo_math_17k", tmp_path, source=str(source(raw)), rows=1))
    assert row["prompt"][0]["content"] == BEFORE + "6*7?" + AFTER


def test_the_folder_of_a_download_is_read_like_the_hub(tmp_path):
    copy = tmp_path / "copy" / "main"
    copy.mkdir(parents=True)
    for split, rows in (("train", 3), ("test", 2)):
        pd.DataFrame([{"question": f"{split} {n}", "answer": f"#### {n}"} for n in range(rows)]).to_parquet(copy / f"{split}-00000-of-00001.parquet")
    (tmp_path / "copy" / "README.md").write_text(
        "---\nconfigs:\n- config_name: main\n  data_files:\n  - split: train\n    path: main/train-*\n  - split: test\n    path: main/test-*\n---\n"
    )
    assert len(rows_of(prepare("gsm8k_test", tmp_path / "assets", source=str(tmp_path / "copy"), rows=2))) == 2


def complaint(*args, **kwargs) -> str:
    with pytest.raises(UserError) as raised:
        prepare(*args, **kwargs)
    return str(raised.value)


def test_what_is_not_what_it_should_be_is_refused_and_nothing_made(source, tmp_path):
    assets, short = tmp_path / "assets", str(source(AIME[:-1]))
    assert "dataset=aime24: has 29 rows, and should have 30" in complaint("aime24", assets, source=short)
    path = source([{"prompt": [{"content": "?"}], "reward_model": {"ground_truth": "1"}}], "train_math_30K.json")
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    said = complaint("math_sub_30k", assets, source=str(path))
    assert f"has the SHA-256 {found}, and should have a498327e7c42" in said and f"set sha256={found}" in said
    assert "has the SHA-256" in complaint("math_sub_30k", assets, source=str(path.parent))  # the file in the folder
    assert "answer=answer: row 0 has none; it has problem" in complaint("aime24", assets, source=str(source([{"problem": "?"}] * 30)))
    assert "no such file or folder" in complaint("aime24", assets, source=str(tmp_path / "none"))
    (tmp_path / "x.parquet").write_bytes(b"PAR1 no")
    assert "dataset=aime24: cannot be read from" in complaint("aime24", assets, source=short)
    (tmp_path / "x.zip").write_bytes(b"")
    assert "must end in one of .parquet" in complaint("aime24", assets, source=str(tmp_path / "x.zip"))
    assert "Did you mean 'aime24'" in complaint("aime4", assets)
    assert "Did you mean 'source'" in complaint("aime24", assets, sourc="x")
    assert "prompt=haiku: no such prompt" in complaint("aime24", assets, prompt="haiku")
    assert not list(assets.glob("*/data.parquet"))


def test_what_is_chosen_is_made_anew_where_it_differs(source, tmp_path):
    raw = [{"problem": f"p{n}", "answer": n, "other": -n, "level": 3 + n % 2} for n in range(30)]
    one, two = str(source(raw)), str(source(raw[:20], "y.parquet"))

    def made(**changes) -> tuple[int, str]:
        rows = rows_of(prepare("math_l3_5", tmp_path / "assets", **changes))
        return len(rows), rows[-1]["reward_model"]["ground_truth"]

    assert made(source=one, rows=30) == made(source=one) == made() == (30, "29")
    assert made(source=two, rows=None) == made() == (20, "19")
    assert made(source=two, rows=20, answer="other") == (20, "-19")
    assert made(source=one, rows=30, levels=[3]) == (15, "28")
    with open(tmp_path / "assets" / "math_l3_5" / "data.parquet", "w"):  # damaged: made again as it was made
        pass
    assert made(levels=[3]) == (15, "28")


def test_levels_that_no_row_has(source, tmp_path):
    raw = source([{"problem": f"p{n}", "answer": n, "level": f"Level {n % 2}"} for n in range(30)])
    said = complaint("aime24", tmp_path / "assets", source=str(raw), levels=[9])
    assert "dataset=aime24: none of its 30 rows is left by levels=[9]; they have 0, 1. Choose some of these" in said
    assert not (tmp_path / "assets" / "aime24").exists()
    assert "they have no level" in complaint("aime24", tmp_path / "assets", source=str(source(AIME)), levels=[9])


def test_without_a_network_the_remedy_is_named(monkeypatch, tmp_path):
    import datasets

    def offline(*args, **kwargs):
        raise ConnectionError("Couldn't reach 'math-ai/amc23' on the Hub")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    said = complaint("amc23", tmp_path)
    assert "cannot be read from the hub (ConnectionError: Couldn't reach" in said and "copy math-ai/amc23 and give source=" in said


def test_the_hub_is_asked_for_what_the_list_says(monkeypatch, tmp_path):
    import datasets

    asked = []

    def hub(*args, **kwargs):
        asked.append((args, kwargs))
        return datasets.Dataset.from_list(AIME)

    monkeypatch.setattr(datasets, "load_dataset", hub)
    prepare_all(tmp_path, ["aime24", "hmmt25"])
    prepare_all(tmp_path, ["aime24"])  # is there
    assert asked == [
        (("HuggingFaceH4/aime_2024", None), {"split": "train", "revision": None}),
        (("MathArena/hmmt_feb_2025", None), {"split": "train", "revision": None}),
    ]


def test_the_command(source, tmp_path, capsys):
    path = source(AIME)
    assert main(["dataset=aime24", f"source={path}", f"folder={tmp_path}"]) == 0
    assert "aime24/data.parquet: 30 rows of" in capsys.readouterr().out
    assert main(["dataset=aime25", f"source={path}", f"folder={tmp_path}", "rows=29"]) == 2
    assert "error: dataset=aime25: has 30 rows" in capsys.readouterr().err
    assert main([]) == 2 and "dataset=...: missing" in capsys.readouterr().err
    (tmp_path / "aime24" / "asset.json").unlink()
    assert main(["dataset=aime24", f"source={path}", f"folder={tmp_path}"]) == 2
    assert "choose another folder=..." in capsys.readouterr().err


@pytest.mark.parametrize(
    "argument, said",
    [
        ("dataset=5", "dataset=5: no such data set"),
        ("dataset=[[1]]", "dataset=[1]: no such data set"),
        ("dataset=[a", "dataset=[a: cannot be read (while parsing"),
        ("prompt=[1]", "prompt=[1]: must be text (quote"),
        ("levels=3", "levels=3: must be a list of whole numbers, or null for all"),
        ("levels=[a]", "levels=['a']: must be a list of whole numbers"),
        ("question=5", "question=5: must be text (quote what looks like a number: question='\"...\"')"),
        ("revision=5", "revision=5: must be text or null (quote"),
        ("rows=many", "rows=many: must be a whole number >= 1, or null"),
        ("name=x", "name=x: no such key"),
        ("folder=null", "folder=None: must be text"),
        ("folder=/proc/none", "Choose a writable folder=..."),
    ],
)
def test_what_the_command_cannot_take(tmp_path, capsys, argument, said):
    assert main(["dataset=aime24", f"folder={tmp_path}", "source=none", argument]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("name", KNOWN)
def test_every_entry_of_the_list_is_complete(name):
    entry = KNOWN[name]
    assert {"hub", "split", "rows", "question", "answer", "prompt"} <= entry.keys() <= {*WHERE, *WHAT}
    assert entry["prompt"] in PROMPTS and ("sha256" in entry) == ("file" in entry)


@pytest.mark.parametrize("group", [path for path in (configs_folder() / "data").glob("*.yaml") if "prepare_data" in path.read_text()], ids=lambda path: path.stem)
def test_data_groups_ask_for_the_files_that_they_name(group):
    group = yaml.safe_load(group.read_text())
    assert group["prepare"]["_target_"] == f"{prepare_data.__name__}.prepare_all"
    named = [file.removeprefix("${assets}/").removesuffix("/data.parquet") for file in (*group["train_files"], *group["val_files"])]
    assert named == group["prepare"]["datasets"] and set(named) <= KNOWN.keys()
