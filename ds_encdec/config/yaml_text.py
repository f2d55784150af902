"""YAML in and out: values together with the line each key stands on.

The dialect is YAML 1.2's core where it matters for configurations: `1e-4` is a number (PyYAML's YAML 1.1
reads a string), `no`, `on` and dates are strings, and a key that occurs twice is an error.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from ds_encdec.config.report import Mention, Problem
from ds_encdec.config.settings import Settings, join

_IMPLICIT_TYPES = (
    ("tag:yaml.org,2002:bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("tag:yaml.org,2002:int", r"[-+]?(?:0|[1-9][0-9_]*)", "-+0123456789"),
    (
        "tag:yaml.org,2002:float",
        r"[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?|[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        "-+0123456789.",
    ),
    ("tag:yaml.org,2002:merge", r"<<", "<"),
    ("tag:yaml.org,2002:null", r"~|null|Null|NULL|", "~nN\0"),
)


class _Loader(yaml.SafeLoader):
    """PyYAML's loader with nothing but the types above."""


_RARE_BREAKS = re.compile("[\x85\u2028\u2029]")


class _Dumper(yaml.SafeDumper):
    """PyYAML's dumper, which also quotes the strings that our loader would take for something else."""

    def represent_settings_list(self, items: list[Any]) -> yaml.Node:
        """A list of plain values on one line, any other with one item a line."""
        flow = not any(isinstance(item, dict | list) for item in items)
        return self.represent_sequence("tag:yaml.org,2002:seq", items, flow_style=flow)

    def represent_text(self, text: str) -> yaml.Node:
        """A string, with YAML's rarer line breaks escaped: PyYAML writes them so that they come back as spaces."""
        style = '"' if _RARE_BREAKS.search(text) else None
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Loader.yaml_implicit_resolvers = {}
_Dumper.add_representer(list, _Dumper.represent_settings_list)
_Dumper.add_representer(str, _Dumper.represent_text)
for _tag, _pattern, _first in _IMPLICIT_TYPES:
    for _side in (_Loader, _Dumper):
        _side.add_implicit_resolver(_tag, re.compile(f"(?:{_pattern})$"), ["" if c == "\0" else c for c in _first])


def read_yaml(path: Path, problems: list[Problem]) -> Settings:
    """The settings in the YAML file `path`. What is wrong with the file is appended to `problems`."""
    text = read_text(path, problems)
    if text is None:
        return Settings()
    try:
        loader = _Loader(text)
        root = loader.get_single_node()
        if root is None:
            problems.append(file_problem(path, "the file is empty"))
            return Settings()
        if not isinstance(root, yaml.MappingNode):
            kind = "a list" if isinstance(root, yaml.SequenceNode) else "a single value"
            message = f"the file holds {kind}; sections with `field: value` lines are needed"
            problems.append(file_problem(path, message, _line(root)))
            return Settings()
        reader = _NodeReader(loader, path, problems)
        return Settings(reader.read(root, ""), reader.places)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        message = f"not valid YAML: {error.problem or error.context}"
        problems.append(file_problem(path, message, mark.line + 1 if mark else None))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        problems.append(file_problem(path, f"not valid YAML: {' '.join(str(error).split())}"))
    return Settings()


def read_text(path: Path, problems: list[Problem]) -> str | None:
    """The text of `path`, or None and a problem."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        problems.append(file_problem(path, "no such file"))
    except UnicodeDecodeError:
        problems.append(file_problem(path, "not a text file in UTF-8"))
    except OSError as error:
        problems.append(file_problem(path, f"cannot be read: {error.strerror}"))
    return None


def file_problem(path: Path, message: str, line: int | None = None, column: int | None = None) -> Problem:
    """A problem with a file as such; `line` and `column` count from 1."""
    place = ":".join(str(part) for part in (path, line, column) if part is not None)
    return Problem((Mention("", place),), message)


def parse_value(text: str) -> Any:
    """`text` read as one YAML value. Raises yaml.YAMLError."""
    return _Loader(text).get_single_data()


def write_yaml(values: dict[str, Any]) -> str:
    """`values` as YAML that `read_yaml` reads back to the same values."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


def key_positions(text: str) -> dict[str, tuple[int, int]]:
    """Line and column, from 1, of the keys in a JSON text by dotted path; nothing for the rare JSON that is no YAML."""
    # Tabs between tokens are what YAML does not take; inside its strings JSON has no raw ones.
    positions: dict[str, tuple[int, int]] = {}
    try:
        _collect_positions(_Loader(text.replace("\t", " ")).get_single_node(), "", positions)
    except yaml.YAMLError:
        return {}
    return positions


def _collect_positions(node: yaml.Node | None, path: str, positions: dict[str, tuple[int, int]]) -> None:
    if isinstance(node, yaml.MappingNode):
        for key_node, value_node in node.value:
            child = join(path, key_node.value)
            positions[child] = (_line(key_node), int(key_node.start_mark.column) + 1)
            _collect_positions(value_node, child, positions)


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1


class _NodeReader:
    """Turns YAML nodes into values while it notes the place of every key and finds repeated ones."""

    def __init__(self, loader: _Loader, path: Path, problems: list[Problem]) -> None:
        self.loader, self.path, self.problems = loader, path, problems
        self.places: dict[str, str] = {}

    def read(self, node: yaml.Node, path: str) -> Any:
        """The value of `node`, which stands at the dotted `path`."""
        if isinstance(node, yaml.MappingNode):
            self._find_repeated_keys(node, path)
            self.loader.flatten_mapping(node)
            pairs = [(key, value) for key, value in node.value if self._is_name(key, path)]
            return {str(key.value): self._read_item(key, value, join(path, key.value)) for key, value in pairs}
        if isinstance(node, yaml.SequenceNode):
            return [self._read_item(item, item, join(path, index)) for index, item in enumerate(node.value)]
        return self.loader.construct_object(node)

    def _read_item(self, place: yaml.Node, value: yaml.Node, path: str) -> Any:
        self.places[path] = f"{self.path}:{_line(place)}"
        return self.read(value, path)

    def _is_name(self, key: yaml.Node, path: str) -> bool:
        """Whether `key` can name a field. Dotted names are for the command line."""
        if isinstance(key, yaml.ScalarNode) and "." not in key.value:
            return True
        name = key.value if isinstance(key, yaml.ScalarNode) else "a list or a mapping"
        message = "not a key: sections are nested, with one `field: value` line each"
        self.problems.append(Problem((Mention(f"{self.path}:{_line(key)}", join(path, name)),), message))
        return False

    def _find_repeated_keys(self, node: yaml.MappingNode, path: str) -> None:
        first: dict[str, int] = {}
        for key, _ in node.value:
            if key.tag == "tag:yaml.org,2002:merge" or not isinstance(key, yaml.ScalarNode):
                continue
            if key.value in first:
                mention = Mention(f"{self.path}:{_line(key)}", join(path, key.value))
                self.problems.append(Problem((mention,), f"the key is already set in line {first[key.value]}"))
            first.setdefault(key.value, _line(key))
