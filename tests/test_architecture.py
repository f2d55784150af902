"""The shape of the package, read from its source: who may import whom, and what nobody may import early."""

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "ds_encdec"

PAGE = (PACKAGE.parent / "docs/architecture.md").read_text()
# From the bottom to the top, a line for the folders that stand side by side. A folder imports folders of earlier lines
# only, wherever the import stands: an import inside a function, or for the type checker, counts like any other.
ORDER = [re.findall(r"\w+", line) for line in PAGE.partition("```\n")[2].partition("```")[0].splitlines()]
LEVEL = {folder: level for level, folders in enumerate(ORDER) for folder in folders}

# Heavy or foreign packages and the only places that may know them.
CONFINED = {
    "deepspeed": ("engine/", "launch/process_group.py"),
    "wandb": ("monitor/sinks.py",),
}

MODULES = {
    ".".join(["ds_encdec", *path.relative_to(PACKAGE).with_suffix("").parts]).removesuffix(".__init__"): path
    for path in PACKAGE.rglob("*.py")
}


def imports(module: str) -> Iterator[str]:
    path = MODULES[module]
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package.split(".")[: len(package.split(".")) + 1 - node.level]) if node.level else ""
            source = ".".join(part for part in (base, node.module) if part)
            yield from (name if (name := f"{source}.{alias.name}") in MODULES else source for alias in node.names)


def room_of(module: str) -> str:
    return module.split(".")[1]


def test_the_page_lists_every_folder_and_every_entry() -> None:
    assert LEVEL.keys() == {room_of(module) for module in MODULES if module != "ds_encdec"}


@pytest.mark.parametrize("module", sorted(MODULES))
def test_a_folder_imports_only_folders_before_it(module: str) -> None:
    if module == "ds_encdec":
        return
    room = room_of(module)
    for imported in imports(module):
        if imported.startswith("ds_encdec.") and room_of(imported) != room:
            assert LEVEL[room_of(imported)] < LEVEL[room], f"{module} imports {imported}, which does not come before it"


def test_no_module_imports_itself_through_others() -> None:
    graph = {module: {*imports(module)} & MODULES.keys() for module in MODULES if module != "ds_encdec"}
    try:
        assert {*TopologicalSorter(graph).static_order()} - {"ds_encdec"} == graph.keys()
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


@pytest.mark.parametrize("package", CONFINED)
def test_confined_packages(package: str) -> None:
    for module, path in MODULES.items():
        if package in {name.split(".")[0] for name in imports(module)}:
            where = path.relative_to(PACKAGE).as_posix()
            assert where.startswith(CONFINED[package]), f"{where} imports {package}"


MISTAKES = """
generate --model . --text hi --top-p 0.9: 2
generate --model . --text hi --stream --num-beams 2: 2
generate --model nowhere --text hi: 5
evaluate --model nowhere: 5
evaluate --model MODEL --config nowhere.yaml: 2
evaluate --model MODEL --task sts rows.jsonl: 5
evaluate --model ENCODER --task retrieval nowhere.jsonl: 4
inspect-data trainning.x=1: 2
export nowhere tests --adapter: 5
export nowhere out --adapter --encoder-only: 2
init-model --from ./nowhere --out out: 5
init-model --from Qwen/Qwen3-0.6B --out out model.decoder_layers=29: 2
sanity-check --model nowhere: 5
report nowhere: 2
prepare nowhere.yaml: 2
train trainning.x=1: 2
plan: 0
phases --dry-run: 0
validate nowhere.yaml: 2
estimate-memory --config nowhere.yaml: 2
verify nowhere: 5
"""  # command lines without what they need, and the exit codes that say so


def test_help_and_mistakes_do_not_pay_for_torch(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "t5", "is_encoder_decoder": true}')
    (tmp_path / "encoder").mkdir()
    (tmp_path / "encoder" / "config.json").write_text('{"model_type": "qwen3_seq2seq_encoder"}')
    lines = MISTAKES.replace("MODEL", str(tmp_path)).replace("ENCODER", f"{tmp_path}/encoder").strip().splitlines()
    cases = dict(line.rsplit(": ", 1) for line in lines)
    code = (
        "import contextlib, json, os, sys; from ds_encdec.cli import main\n"
        "for case in sys.argv[1:]:\n"
        "    with contextlib.redirect_stdout(sys.stderr): code = main(case.split())\n"
        "    heavy = {'torch', 'transformers', 'deepspeed', 'datasets'} & set(sys.modules)\n"
        "    print(json.dumps([case, str(code), *heavy]))"
    )
    command = [sys.executable, "-c", code, *cases]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=PACKAGE.parent)
    assert list(map(json.loads, result.stdout.splitlines())) == [list(case) for case in cases.items()], result.stderr
