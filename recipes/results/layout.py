"""Tables as Markdown, LaTeX and CSV. The same numbers give the same bytes."""

import csv
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes.report import number

TEX = {**{c: f"\\{c}" for c in "&%$#_{}"}, "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "\\": r"\textbackslash{}"}
TEX |= {"±": r"$\pm$", "−": "$-$", "<": "$<$", ">": "$>$", "|": "$|$"}


@dataclass(frozen=True)
class Table:
    """What is shown: cells as text, `**bold**` where they are to stand out. The first `left` columns are names."""

    title: str
    header: list[str]
    rows: list[list[str]]
    left: int = 1


def plus_minus(mean: float | None, half: float | None, sign: str = "") -> str:
    """"0.412 ± 0.031": two digits of the half-width, and the mean to the same place. Without one, the mean alone."""
    if mean is None:
        return "-"
    if not half:
        return number(mean, sign)
    if not math.isfinite(half):
        return f"{number(mean, sign)} ± {half}"
    first = f"{half:.1e}"
    decimals = max(0, 1 - int(first.partition("e")[2]))
    if decimals > 6:
        return f"{number(mean, sign)} ± {number(half)}"
    return f"{mean:{sign}.{decimals}f} ± {half:.{decimals}f}"


def markdown(table: Table) -> str:
    def line(cells):
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    rule = [":--"] * table.left + ["--:"] * (len(table.header) - table.left)
    return "\n".join([f"## {table.title}", "", line(table.header), line(rule), *map(line, table.rows)])


def latex(table: Table) -> str:
    columns = "l" * table.left + "r" * (len(table.header) - table.left)
    head, *body = (" & ".join(map(_tex, cells)) + r" \\" for cells in (table.header, *table.rows))
    begin = [f"% {table.title}", rf"\begin{{tabular}}{{{columns}}}", r"\toprule", head, r"\midrule"]
    return "\n".join([*begin, *body, r"\bottomrule", r"\end{tabular}"])


def _tex(text: str) -> str:
    for mark, command in (("**", "textbf"), ("`", "texttt")):
        if text.startswith(mark) and text.endswith(mark) and len(text) > 2 * len(mark):
            return rf"\{command}{{{_tex(text[len(mark) : -len(mark)])}}}"
    return "".join(TEX.get(c, c) for c in text)


def write_csv(path: Path, rows: list[dict[str, Any]]):
    """Numbers with six significant digits; what is None is left empty."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(rows[0])
        writer.writerows([f"{value:.6g}" if isinstance(value, float) else value for value in row.values()] for row in rows)


def write_tables(out: Path, title: str, lead: list[str], tables: list[Table], notes: list[str], rows: list[dict[str, Any]]):
    """out/table.md, .tex (needs the package booktabs) and .csv, of `rows`: one a number."""
    out.mkdir(parents=True, exist_ok=True)
    parts = [f"# {title}", *lead, *map(markdown, tables), *notes]
    (out / "table.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    (out / "table.tex").write_text("\n\n".join([f"% {title}", *map(latex, tables)]) + "\n", encoding="utf-8")
    write_csv(out / "table.csv", rows)
