"""What the documents say can be looked up: files, links, commands and fields that they name exist."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import BaseModel

from ds_encdec import cli
from ds_encdec.config.schema import FullConfig

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
FOLDERS = "ds_encdec|docs|ds_configs|hostfiles|scripts|tests"
FILE = re.compile(rf"(?<![\w/.-])(?:{FOLDERS})/[\w./-]*\w\.(?:py|md|sh|yaml|json)\b")


@pytest.fixture(params=PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def page(request: pytest.FixtureRequest) -> Path:
    return request.param


def prose(page: Path) -> str:
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        name, _, anchor = target.partition("#")
        if "://" not in target:
            found = page.parent / name if name else page
            assert found.exists(), target
            assert not anchor or anchor in anchors(found), target


def test_named_files_exist(page: Path) -> None:
    if page.name == "CHANGELOG.md":  # it also names what is gone
        return
    missing = {name for name in FILE.findall(page.read_text()) if not (ROOT / name).exists()}
    assert missing == set()


def test_documents_that_the_source_names_exist() -> None:
    folders = [ROOT / name for name in ("ds_encdec", "scripts", "tests", "ds_configs")]
    sources = [path for folder in folders for path in folder.rglob("*")]
    texts = {path: path.read_text() for path in sources if path.suffix in (".py", ".sh", ".yaml")}
    named = re.compile(r"\bdocs/[\w-]+\.md")
    missing = {(path.name, name) for path, text in texts.items() for name in named.findall(text)}
    assert {(path, name) for path, name in missing if not (ROOT / name).exists()} == set()


def test_every_page_is_in_the_list_of_pages() -> None:
    listed = (ROOT / "docs" / "README.md").read_text()
    unlisted = {page.name for page in PAGES if page.parent == ROOT / "docs" and f"]({page.name})" not in listed}
    assert unlisted == {"README.md"}


def test_commands_are_verbs_of_the_program(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    verbs = set(re.findall(r"^ {4}([a-z][a-z-]+)\b", capsys.readouterr().out, re.MULTILINE))
    assert set(re.findall(r"\bds-encdec ([a-z][a-z-]+)(?=[ `])", page.read_text())) <= verbs


SOURCE = "".join(path.read_text() for path in sorted((ROOT / "ds_encdec").rglob("*.py")))
METRIC = re.compile(r"`((?:train|eval|perf|mem|health|ckpt|data)/[\w/]*\w)`")


def test_metrics_are_those_of_the_program(page: Path) -> None:
    """By their whole names, or by the part that a name is put together with (`f"mem/{name}_bytes"`)."""
    named = {re.sub(r"_(?:R1|S|SFT)$", "", name) for name in METRIC.findall(page.read_text())} - {"data/sources"}
    parts = {name: {name, last := name.rpartition("/")[2], last.removesuffix("_bytes")} for name in named}
    assert {name for name in named if not any(f'"{part}"' in SOURCE for part in parts[name])} == set()


def fields(section: type[BaseModel], path: str = "") -> Iterator[str]:
    for name, field in section.model_fields.items():
        yield (inner := f"{path}.{name}" if path else name)
        for part in (field.annotation, *getattr(field.annotation, "__args__", ())):
            if isinstance(part, type) and issubclass(part, BaseModel):
                yield from fields(part, inner)


def test_fields_are_in_the_schema(page: Path) -> None:
    if page.name == "CHANGELOG.md":
        return
    sections = "|".join(FullConfig.model_fields)
    named = re.findall(rf"(?<![\w./-])((?:{sections})(?:\.[a-zP_]\w*)+)\b(?![</.(*\w])", page.read_text())
    files = {name for name in named if name.endswith((".json", ".jsonl", ".md", ".py"))}
    free = {name for name in named if name.startswith(("infra.deepspeed_extra.", "data.field_mapping."))}
    assert {name.replace(".P.", ".full.") for name in {*named} - files - free} <= set(fields(FullConfig))
