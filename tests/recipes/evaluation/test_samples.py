"""Samples on disk: kept line by line, gone on with after a kill, and never mixed up."""

import json

import pytest

from recipes.errors import UserError
from recipes.evaluation.samples import read, read_folder, resume, sample_seed

VERDICTS = [[True, False], [False, False], [True, True]]


def complaint(call, *arguments) -> str:
    with pytest.raises(UserError) as raised:
        call(*arguments)
    return str(raised.value)


def test_what_is_written_is_read_again(make_samples):
    samples = make_samples(VERDICTS)
    found = read(samples.file)
    assert found.header == samples.header and found.rows == samples.rows
    assert found.complete() is found and found.missing(["arithmetic/0", "arithmetic/2"]) == []


def test_seeds_differ_by_run_problem_and_sample_and_are_always_the_same():
    seeds = {sample_seed(seed, f"aime24/{problem}", k) for seed in range(3) for problem in range(30) for k in range(32)}
    assert len(seeds) == 3 * 30 * 32 and all(0 <= seed < 2**56 for seed in seeds)
    assert sample_seed(0, "aime24/0", 0) == 12582367387640489


@pytest.mark.parametrize("cut", [1, 20, 120])
def test_a_line_cut_in_half_by_a_kill_is_made_again(make_samples, cut):
    samples = make_samples(VERDICTS)
    samples.file.write_bytes(samples.file.read_bytes()[:-cut])
    found = resume(samples.file, samples.header)
    assert found.missing([f"arithmetic/{index}" for index in range(3)]) == [("arithmetic/2", 1)]
    found.open().add(samples.rows["arithmetic/2", 1])
    assert read(samples.file).rows == samples.rows


def test_a_file_without_a_whole_header_is_begun_anew(make_samples):
    samples = make_samples(VERDICTS)
    samples.file.write_bytes(b'{"bench')
    resume(samples.file, samples.header).open()
    assert read(samples.file).header == samples.header


@pytest.mark.parametrize(
    ("key", "value"),
    [("model_sha256", "another"), ("benchmark_sha256", "another"), ("n", 3), ("seed", 1), ("problems", 9), ("sampling", {"temperature": 0.6})],
)
def test_samples_of_another_evaluation_are_not_gone_on_with(make_samples, key, value):
    samples = make_samples(VERDICTS)
    said = complaint(resume, samples.file, samples.header | {key: value})
    assert f"{key} = {samples.header[key]} there, {value} now" in said and "Choose another name=" in said


def test_a_model_that_has_moved_is_the_same(make_samples):
    samples = make_samples(VERDICTS)
    assert resume(samples.file, samples.header | {"model": "elsewhere"}).rows == samples.rows


def test_files_that_were_put_together_are_found_out(make_samples, edit):
    samples = make_samples(VERDICTS)
    edit(samples, 3, seed=1)
    assert "line 3: is a sample of another benchmark or seed" in complaint(read, samples.file)
    edit(samples, 3, seed=sample_seed(0, "arithmetic/0", 1), problem="aime24/0")
    assert "line 3: is a sample of another benchmark or seed" in complaint(read, samples.file)
    samples = make_samples(VERDICTS, "b")
    lines = samples.file.read_text().splitlines()
    samples.file.write_text("\n".join([*lines, lines[-1], ""]))
    assert "line 8: sample 1 of arithmetic/2 is there twice" in complaint(read, samples.file)
    samples.file.write_text("\n".join([*lines, lines[0], ""]))
    assert "line 8: is no sample (lacks problem, k" in complaint(read, samples.file)
    samples.file.write_text("\n".join([lines[0], "{", ""]))
    assert "line 2: is no sample" in complaint(read, samples.file)
    samples.file.write_text("\n".join([*lines[1:], ""]))
    assert "line 1: is no header (lacks benchmark," in complaint(read, samples.file)


@pytest.mark.parametrize(
    ("number", "changes", "message"),
    [
        (1, {"problems": None}, "line 1: is no header (problems = None, which must be of type int)"),
        (1, {"n": 2.0}, "line 1: is no header (n = 2.0, which"),
        (1, {"problems": -1}, "line 1: is no header (problems = -1, which must be 1 or more)"),
        (1, {"sampling": [1]}, "line 1: is no header (sampling = [1], which"),
        (5, {"problem": 3}, "line 5: is no sample (problem = 3, which must be of type str)"),
        (5, {"k": "1"}, "line 5: is no sample (k = '1', which"),
        (5, {"text": None}, "line 5: is no sample (text = None, which"),
        (5, {"tokens": float("nan")}, "line 5: is no sample (tokens = nan, which"),
        (5, {"answer": 7}, "line 5: is no sample (answer = 7, which"),
        (5, {"correct": 7}, "line 5: is no sample (correct = 7, which must be of type bool)"),
        (7, {"problem": "arithmetic/3", "seed": sample_seed(0, "arithmetic/3", 1)}, "line 7: arithmetic/3 is none of the 3 problems"),
        (7, {"problem": "arithmetic/-1", "seed": sample_seed(0, "arithmetic/-1", 1)}, "line 7: arithmetic/-1 is none of the 3 problems"),
        (7, {"problem": "arithmetic/01", "seed": sample_seed(0, "arithmetic/01", 1)}, "line 7: arithmetic/01 is none of the 3 problems"),
    ],
)
def test_values_of_another_kind_are_named(make_samples, edit, number, changes, message):
    samples = make_samples(VERDICTS)
    edit(samples, number, **changes)
    assert f"{samples.file}, {message}" in complaint(read, samples.file)


def test_lines_without_end_of_nesting_are_no_samples(make_samples):
    samples = make_samples(VERDICTS)
    samples.file.write_text(json.dumps(samples.header) + "\n" + "[" * 200_000 + "\n")
    assert "line 2: is no sample (maximum recursion depth" in complaint(read, samples.file)


def test_a_folder_without_samples_or_with_too_few_is_refused(make_samples, tmp_path):
    assert f"compare={tmp_path / 'none'}: has no samples" in complaint(read_folder, tmp_path / "none", "compare")
    samples = make_samples(VERDICTS)
    assert list(read_folder(tmp_path / "a", "compare")) == ["arithmetic"]
    samples.file.write_bytes(b"\n".join(samples.file.read_bytes().splitlines()[:-1]) + b"\n")
    assert "has 5 of 6 samples. Start the evaluation that made it again" in complaint(read_folder, tmp_path / "a", "compare")
    samples.file.write_text(json.dumps(samples.header) + "\n")
    assert "has 0 of 6 samples" in complaint(read_folder, tmp_path / "a", "compare")


def test_a_folder_of_two_models_is_refused(make_samples, tmp_path):
    make_samples(VERDICTS)
    make_samples(VERDICTS, benchmark="calculate", model_sha256="another")
    assert "samples of different models or settings" in complaint(read_folder, tmp_path / "a", "from_samples")


def test_benchmarks_have_a_max_tokens_of_their_own(make_samples, tmp_path):
    sampling = make_samples(VERDICTS).header["sampling"]
    make_samples(VERDICTS, benchmark="gsm8k", sampling={**sampling, "max_tokens": 1024})
    assert [*read_folder(tmp_path / "a", "from_samples")] == ["arithmetic", "gsm8k"]
    make_samples(VERDICTS, benchmark="calculate", sampling={**sampling, "top_p": 0.5})
    assert "samples of different models or settings" in complaint(read_folder, tmp_path / "a", "from_samples")


def test_two_files_of_one_benchmark_are_refused(make_samples, tmp_path):
    samples = make_samples(VERDICTS)
    samples.file.with_name("copy.jsonl").write_bytes(samples.file.read_bytes())
    assert "arithmetic.jsonl and copy.jsonl are both samples of arithmetic. Remove one." in complaint(read_folder, tmp_path / "a", "compare")


def test_an_empty_file_is_no_samples(make_samples, tmp_path):
    make_samples(VERDICTS).file.write_bytes(b"")
    assert "has no samples (looked for" in complaint(read_folder, tmp_path / "a", "from_samples")
