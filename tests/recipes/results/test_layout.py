"""How numbers are written."""

import csv

import pytest

from recipes.results.layout import Table, latex, markdown, plus_minus, write_csv


@pytest.mark.parametrize(
    ("mean", "half", "sign", "text"),
    [
        (0.41234, 0.0312, "", "0.412 ± 0.031"),
        (22.934, 0.712, "", "22.93 ± 0.71"),
        (48.3, 16.2, "", "48 ± 16"),
        (1234.5, 321.0, "", "1234 ± 321"),
        (0.0123, 0.0996, "+", "+0.01 ± 0.10"),
        (-0.5, 0.25, "+", "-0.50 ± 0.25"),
        (0.3, 1e-9, "", "0.300 ± 1.0e-09"),
        (0.3, 0.0, "", "0.300"),
        (1e299, float("inf"), "", "1.0e+299 ± inf"),
        (0.3, None, "+", "+0.300"),
        (0.0, 0.0, "", "0"),
        (None, None, "", "-"),
    ],
)
def test_the_half_width_decides_the_digits(mean, half, sign, text):
    assert plus_minus(mean, half, sign) == text


TABLE = Table("A & B", ["method", "a|b", "50 %"], [["`band_kl`", "**1 ± 2**", "< 3"], ["none", "", "#4"]])


def test_markdown_and_latex_say_the_same():
    assert markdown(TABLE).splitlines() == [
        "## A & B", "", "| method | a\\|b | 50 % |", "| :-- | --: | --: |", "| `band_kl` | **1 ± 2** | < 3 |", "| none |  | #4 |",
    ]  # fmt: skip
    assert latex(TABLE).splitlines() == [
        "% A & B", r"\begin{tabular}{lrr}", r"\toprule", r"method & a$|$b & 50 \% \\", r"\midrule",
        r"\texttt{band\_kl} & \textbf{1 $\pm$ 2} & $<$ 3 \\", r"none &  & \#4 \\", r"\bottomrule", r"\end{tabular}",
    ]  # fmt: skip


def test_a_csv_has_six_digits_and_leaves_empty_what_there_is_not(tmp_path):
    write_csv(tmp_path / "x.csv", [{"a": 1 / 3, "b": None, "c": "x, y", "d": 3}])
    assert (tmp_path / "x.csv").read_bytes() == b'a,b,c,d\n0.333333,,"x, y",3\n'
    assert [*csv.DictReader((tmp_path / "x.csv").open())] == [{"a": "0.333333", "b": "", "c": "x, y", "d": "3"}]
