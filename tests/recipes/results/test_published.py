"""configs/published_results.csv, and what is said of a file that is not like it."""

import pytest

from recipes.errors import UserError
from recipes.results.published import COLUMNS, read_published

HEADER = ",".join(COLUMNS)
ROW = "X 1,Qwen,grpo,AIME24,mean@32,30.5,paper Table 1,"


@pytest.fixture
def read(tmp_path):
    def read(*lines: str):
        (tmp_path / "published.csv").write_text("\n".join(lines) + "\n")
        return read_published(tmp_path / "published.csv")

    return read


def test_every_published_number_says_where_it_was_found():
    rows = read_published()
    assert len(rows) == 60 and {row.provenance for row in rows} >= {"secondary", "authors' run log", "paper Table 1", "read off a figure"}
    (ours,) = [row for row in rows if row.paper.startswith("BandPO") and row.method == "band_kl" and row.benchmark.startswith("average")]
    assert ours.value == 22.0 and ours.note == "delta .05; +25.2 % relative" and ours.source == "BandPO 2603.04918, secondary"


def test_a_row_is_read_and_may_lack_a_note(read):
    (one,) = read(HEADER, ROW)
    assert (one.paper, one.base_model, one.value, one.note) == ("X 1", "Qwen", 30.5, "")


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([HEADER.replace("provenance,", "")], "line 1: the columns are paper, .*; they must be paper, .*provenance"),
        ([""], "line 1: the columns are none"),
        ([HEADER, ROW.replace("paper Table 1", " ")], "line 2: provenance is empty. Fill it in, or remove the line"),
        ([HEADER, ROW.replace("30.5", "")], "line 2: value is empty"),
        ([HEADER, ROW.replace("30.5", "thirty")], "line 2: value = 'thirty': must be a number of per cent"),
        ([HEADER, ROW.replace("30.5", "305")], "line 2: value = '305'"),
        ([HEADER, ROW.replace("30.5", "nan")], "line 2: value = 'nan'"),
        ([HEADER, ROW, ROW + "again"], "line 3: X 1 / Qwen / grpo / AIME24 / mean@32 is there twice"),
        ([HEADER, ROW + ",more"], "line 2: has more cells than the 8 columns"),
        ([HEADER, ROW.replace(",paper Table 1,", "")], "line 2: has fewer cells"),
    ],
)
def test_malformed_rows_are_refused_with_their_line(read, lines, message):
    with pytest.raises(UserError, match=message):
        read(*lines)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(UserError, match="none.csv: cannot be read"):
        read_published(tmp_path / "none.csv")
