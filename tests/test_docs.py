"""The documentation says what the code does: links, presets, metrics, messages and printed examples."""

import ast
import dataclasses
import importlib.util
import re
import shlex
from pathlib import Path

import pytest
import torch
import yaml

from trustregion import PolicyLoss, TokenBatch, explain, preset_names, token_stats
from trustregion.metrics import BUCKET_NAMES
from trustregion.presets import read_preset
from trustregion.regions import REGIONS
from trustregion.surrogates import SURROGATES

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
METHODS = sorted((DOCS / "methods").glob("*.md"))
ELSEWHERE = [ROOT / "examples" / "README.md", ROOT / "tests" / "golden" / "README.md"]
PAGES = [*ROOT.glob("*.md"), *sorted(DOCS.rglob("*.md")), *ELSEWHERE]
TEMPLATE = ["In short", "Equation", "When to use it", "How to run it", "What it logs", "Implementation", "Results"]


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def read(page: Path | str) -> str:
    return (DOCS / page).read_text(encoding="utf-8")


def without_code(page: Path) -> str:
    return re.sub(r"^```.*?^```|^ {4}.*?$", "", read(page), flags=re.DOTALL | re.MULTILINE)


def rows_of(text: str) -> list[list[str]]:
    """The cells of all table rows, headings included."""
    lines = [line.strip() for line in text.splitlines() if line.strip().startswith("|")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


# ---- links -----------------------------------------------------------------------------------------------------------
def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", without_code(page), re.MULTILINE)
    return {re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", heading.lower())) for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_resolve(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(page)):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        linked = page.parent / path if path else page
        assert linked.exists(), f"{target}: no such file"
        assert linked.resolve().is_relative_to(ROOT), f"{target}: leaves the repository"
        assert not anchor or anchor in anchors(linked), f"{target}: no such heading"


def test_every_page_is_in_the_navigation_of_the_site():
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    listed = set(re.findall(r"[\w/]+\.md", text[text.index("\nnav:") :]))
    assert {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")} <= listed, "add it to nav in mkdocs.yml"


# ---- presets ---------------------------------------------------------------------------------------------------------
def preset_row(name: str) -> list[str]:
    fields = read_preset(name)
    regions = fields["region"] if isinstance(fields["region"], list) else [fields["region"]]

    def spell(kind: str, types: dict[str, type]) -> str:
        values = {field.name: fields[field.name] for field in dataclasses.fields(types[kind]) if field.name in fields}
        said = [f"{key} {value}" if isinstance(value, str) else f"{key} {value:g}" for key, value in values.items()]
        return f"`{kind}`: {', '.join(said)}" if said else f"`{kind}`"

    parts = ["; ".join(spell(region, REGIONS) for region in regions), spell(fields["surrogate"], SURROGATES)]
    return [f"`{name}`", *parts, f"`{fields['anchor']}`"]


def test_the_table_of_presets_is_configs_method():
    text = read("unified_view.md")
    table = rows_of(text[text.index("## All presets") : text.index("## From the ball")])[2:]
    expected = [preset_row(name) for name in preset_names()]
    assert table == expected, "\n".join(f"| {' | '.join(row)} |" for row in expected)


def test_the_tables_of_regions_and_surrogates_name_all():
    text = read("unified_view.md")
    named = {match for row in rows_of(text) for match in re.findall(r"^`(\w+)`", row[0])}
    assert REGIONS.keys() | SURROGATES.keys() <= named


def presets_of(page: Path) -> set[str]:
    return set(re.findall(r"(?<![\w.])method=(\w+)", read(page)))


def test_every_preset_is_run_on_a_page_of_a_method():
    assert set().union(*map(presets_of, METHODS)) == set(preset_names())


@pytest.mark.parametrize("page", METHODS, ids=name_of)
def test_method_pages_follow_the_template(page):
    assert re.findall(r"^## (.*)$", read(page), re.MULTILINE) == TEMPLATE


# ---- metrics ---------------------------------------------------------------------------------------------------------
def emitted_by(name: str, **overrides) -> set[str]:
    """The metrics that a preset reports, of a batch of random tokens."""
    torch.manual_seed(0)
    logits, ids = torch.randn(2, 5, 40), torch.randint(40, (2, 5))
    old, ones = token_stats(logits, ids, topk=20), torch.ones(2, 5)
    new = token_stats(logits + 0.3 * torch.randn(2, 5, 40), ids, cell_ids=old.cell_ids)
    batch = TokenBatch(
        new.log_prob, old.log_prob, ones, ones, entropy=new.entropy, entropy_old=old.entropy,
        cell_log_prob=new.cell_log_prob, cell_log_prob_old=old.cell_log_prob,
    )  # fmt: skip
    return set(PolicyLoss.from_preset(name, **overrides)(batch).metrics.summarize())


def documented_metrics() -> set[str]:
    found = {name for row in rows_of(read("metrics.md")) for name in re.findall(r"`(trust/[^`]+)`", row[0])}
    return {name.replace("<bucket>", bucket) for name in found for bucket in BUCKET_NAMES}


def test_the_glossary_has_every_metric_of_the_loss_and_no_other():
    emitted = set().union(*(emitted_by(name) for name in preset_names()), emitted_by("grpo", on_invalid="drop"))
    assert documented_metrics() - {"trust/<field>"} == emitted


def test_a_scheduled_field_is_logged_as_the_glossary_says():
    from trustregion import load_preset
    from trustregion.verl_plugin.schedule import TrainerSchedule

    schedule = TrainerSchedule(load_preset("band_kl", schedule={"delta": {"type": "linear", "end": 0.01, "steps": 9}}))
    schedule.values(1)
    assert "trust/<field>" in documented_metrics() and schedule.observe({}) == {"trust/delta": 0.05}


@pytest.mark.parametrize("page", [*METHODS, DOCS / "tuning.md", DOCS / "troubleshooting.md"], ids=name_of)
def test_pages_name_metrics_that_are_logged(page):
    named = set(re.findall(r"`(trust/[^`]+)`", read(page))) - {"trust/delta"}
    assert named <= documented_metrics()
    if page in METHODS:
        assert named and named <= set().union(*map(emitted_by, presets_of(page)))


VERLS = r"(?:actor|critic|training|validation|rollout_corr|response_length|timing_s|perf)/[\w/]+"
OURS = {"actor/positive_nll", "training/rollout_failure/prompts", "validation/rollout_failure/prompts"}


def verls_metrics() -> set[str]:
    return {name for row in rows_of(read("metrics.md")) for name in re.findall(f"`({VERLS})`", row[0])}


def test_the_glossary_has_every_metric_of_verl_that_recipes_and_pages_use():
    for page in [*METHODS, DOCS / "tuning.md", DOCS / "troubleshooting.md"]:
        assert set(re.findall(f"`({VERLS})`", read(page))) <= verls_metrics(), page.name
    older = {"perf/cpu_memory_used_gb", "perf/max_memory_allocated_gb"}  # names of other versions of verl
    for file in ("report", "plots", "progress"):
        used = set(re.findall(f'"({VERLS})', (ROOT / "recipes" / f"{file}.py").read_text(encoding="utf-8"))) - older
        assert {name for name in used if not any(known.startswith(name) for known in verls_metrics())} == set(), file


def test_verl_has_the_metrics_of_the_glossary():
    """Its names are put together in many places: that their last parts are there is what its sources can tell."""
    verl = Path(importlib.util.find_spec("verl").submodule_search_locations[0])
    sources = "\n".join(file.read_text(encoding="utf-8") for file in verl.rglob("*.py"))
    for name in verls_metrics() - OURS:
        part = name.removesuffix("/mean").removesuffix("/max").removesuffix("/min").rpartition("/")[2]
        assert re.search(rf"[\"'/]{part}[\"'/]", sources), name


# ---- messages --------------------------------------------------------------------------------------------------------
def texts_of_the_code() -> list[str]:
    """Every string of the package, the recipes and the scripts; what an f-string fills in is a line break."""
    texts = [file.read_text(encoding="utf-8") for file in (ROOT / "scripts").glob("*.sh")]
    for file in [*(ROOT / "trustregion").rglob("*.py"), *(ROOT / "recipes").rglob("*.py")]:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                texts.append("".join(part.value if isinstance(part, ast.Constant) else "\n" for part in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    return texts


def test_the_messages_explained_are_those_of_the_code():
    sections = read("troubleshooting.md").split("\n## ")
    ours = [text for text in sections if not text.startswith(("The numbers look wrong", "Messages of other programs"))]
    assert len(ours) == len(sections) - 2
    messages = [cell[1:-1] for text in ours for cell, *_ in rows_of(text) if re.fullmatch("`[^`]+`", cell)]
    assert len(messages) > 40
    texts = texts_of_the_code()
    for message in messages:
        wanted = re.compile(".*".join(map(re.escape, message.split("..."))), re.DOTALL)
        assert any(map(wanted.search, texts)), message


# ---- printed examples ------------------------------------------------------------------------------------------------
EXAMPLE = re.compile(r"^    \$ (python -m trustregion\.explain .*)\n((?:    .*\n|\n(?=    ))+)", re.MULTILINE)
EXAMPLES = [example for page in PAGES for example in EXAMPLE.findall(read(page))]


@pytest.mark.parametrize(("command", "output"), EXAMPLES, ids=[command for command, _ in EXAMPLES])
def test_what_explain_prints(command, output, capsys):
    assert explain.main(shlex.split(command)[3:]) == 0
    assert capsys.readouterr().out == re.sub(r"^ {4}", "", output, flags=re.MULTILINE)


def test_there_are_such_examples():
    assert len(EXAMPLES) >= 2


# ---- modules and files -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_programs_and_scripts_exist(page):
    for module in re.findall(r"python -m ((?:recipes|trustregion|benchmarks)[\w.]*\w)", read(page)):
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), module
    for script in re.findall(r"scripts/\w+\.sh", read(page)):
        assert (ROOT / script).exists(), script


def test_the_citation_has_what_the_format_asks_for():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert {"cff-version", "message", "title", "authors"} <= cited.keys()
    assert f'version="{cited["version"]}"' in (ROOT / "setup.py").read_text(encoding="utf-8")
