"""Which tokens were blocked, and why, as a part of the page: responses with the blocked tokens marked, and tables."""

import math
from pathlib import Path

from recipes.page import Html, escape, table
from recipes.report import number
from recipes.run_files import read_samples
from recipes.token_records import CAUSES, Records, TokenCount, read_records

SAID = {"region": "region", "entropy": "entropy", "dual_clip": "dual clip"}
ROWS, RESPONSES = 12, 2  # of each table; by each cause
LONGEST = 24  # characters of a token in a table
AROUND = 60  # kept tokens shown on either side of a blocked one
EVERY = 10  # what is recommended where there are no records
CSS = """mark{color:inherit;border-radius:3px;padding:1px 1px;cursor:help;border-bottom:2px solid;box-shadow:inset -1px 0 #fff}
mark.region{background:#ffdcc2;border-color:#d55e00}mark.entropy{background:#c4ebdd;border-color:#009e73;border-bottom-style:dashed}
mark.dual_clip{background:#f3d6e6;border-color:#cc79a7;border-bottom-style:dotted}
mark.region.entropy{background:linear-gradient(#ffdcc2 50%,#c4ebdd 50%)}
mark.entropy.dual_clip{background:linear-gradient(#c4ebdd 50%,#f3d6e6 50%)}.cut{color:#888;font-style:italic}"""


def token_sections(runs: dict[str, Path]) -> list[str]:
    """For the page of runs, their folders by label."""
    found = {label: read_records(folder) for label, folder in runs.items()}
    without = [label for label, records in found.items() if records is None]
    parts = ["<h2>Tokens</h2>"]
    if without:
        of = f" of {', '.join(without)}" if len(runs) > 1 else ""
        parts.append(f"<p class=faint>No token records{escape(of)}: train with <code>token_records.every={EVERY}</code> to see here which tokens were blocked, and why.</p>")
    recorded = {label: records for label, records in found.items() if records is not None}
    if not recorded:
        return parts
    header = ["", "steps", "responses", "tokens", "blocked, %", *(f"by {SAID[cause]}, %" for cause in CAUSES)]
    parts.append(table(header, [[label, *_summary(records)] for label, records in recorded.items()]))
    legend = " ".join(f'<mark class="{cause}">{said}</mark>' for cause, said in SAID.items())
    parts.append(f"<p>Of the recorded tokens, marked where they were left without gradient: {legend}. Point at one for its numbers.</p>")
    for label, records in recorded.items():
        parts += [f"<h3>{escape(label)}</h3>", *_of_run(runs[label], records)]
    return parts


def _of_run(folder: Path, records: Records) -> list[str]:
    parts = []
    if records.damaged:
        parts.append(f"<p class=faint>Not readable, and left out: {escape(', '.join(path.name for path in records.damaged))}</p>")
    causes = [cause for cause in CAUSES if records.count(cause)]
    if not causes:
        parts.append("<p>No token was blocked.</p>")
    for cause in causes:
        parts.append(f"<h4>Blocked by {SAID[cause]}</h4>")
        parts += [_response(folder, rows) for rows in records.responses(cause, RESPONSES)]
    tables = [(f"most often blocked: {SAID[cause]}", "blocked", records.most_often(cause, ROWS)) for cause in causes]
    tables.append(("most often kept", "kept", records.most_often("", ROWS)))
    return [*parts, f"<div class=beside>{''.join(_counts(*one) for one in tables if one[-1])}</div>"]


def _summary(records: Records) -> list[str]:
    steps, tokens = [*records.files], records.count()
    listed = ", ".join(map(str, steps)) if len(steps) <= 4 else f"{len(steps)}, from {steps[0]} to {steps[-1]}"
    blocked = [tokens - records.count(""), *map(records.count, CAUSES)]
    return [listed, str(records.recorded), str(tokens), *(number(100 * n / tokens) if tokens else "-" for n in blocked)]


def _counts(caption: str, what: str, counts: list[TokenCount]) -> Html:
    rows = [
        [Html(f"<code>{escape(_short(of.token))}</code>"), str(of.count), str(of.seen), f"{100 * of.blocked:.1f}", number(of.p_old)]
        for of in counts
    ]
    return table(["token", what, "seen", "share blocked, %", "mean p_old"], rows, caption)


def _short(token: str) -> str:
    """In quotes, with what cannot be seen as escapes."""
    text = repr(token)
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"


def _response(folder: Path, rows: list[dict]) -> str:
    """One response: kept tokens as they are, blocked ones marked; long stretches without one are cut."""
    first, blocked = rows[0], sum(not row["active"] for row in rows)
    sample = read_samples(folder / "samples" / f"{first['step']}.jsonl").get(first["sequence"])
    about = f"step {first['step']}, update {first['update']}, {first['sequence']}: {blocked} of {len(rows)} tokens blocked"
    about += f", reward {sample['score']}" if sample else ""
    prompt = f"<pre class=faint>{escape(sample['input'])}</pre>" if sample else ""
    parts, kept = [], []
    for row in rows:
        if row["active"]:
            kept.append(row["token"])
        else:
            parts += [_cut(kept, after=bool(parts), before=True), _mark(row)]
            kept = []
    parts.append(_cut(kept, after=True, before=False))
    return f"<p>{escape(about)}</p>{prompt}<pre>{''.join(parts)}</pre>"


def _cut(kept: list[str], after: bool, before: bool) -> str:
    """Kept tokens `after` a blocked one, `before` one, or between two."""
    first, last = AROUND * after, AROUND * before
    if len(kept) <= 2 * AROUND:
        return escape("".join(kept))
    left_out = len(kept) - first - last
    ends = "".join(kept[:first]), "".join(kept[len(kept) - last :])
    return f"{escape(ends[0])}<span class=cut> … {left_out} tokens … </span>{escape(ends[1])}"


def _mark(row: dict) -> str:
    p_old, p = (math.exp(min(row[name], 0.0)) for name in ("log_prob_old", "log_prob"))
    facts = [f"p_old {number(p_old)}", f"p {number(p)}", f"advantage {number(row['advantage'], '+')}"]
    if None not in (row["entropy"], row["entropy_old"]):
        facts.append(f"entropy {number(row['entropy_old'])} to {number(row['entropy'])}")
    if row["divergence"] is not None:
        facts.append(f"divergence {number(row['divergence'])}")
    causes = row["cause"].split("+")
    facts.append("blocked by " + " and ".join(SAID.get(cause, cause) for cause in causes))
    text = row["token"].replace("\n", "↵\n") or "∅"  # else nothing would be seen
    return f'<mark class="{escape(" ".join(causes))}" title="{escape(chr(10).join(facts))}">{escape(text)}</mark>'
