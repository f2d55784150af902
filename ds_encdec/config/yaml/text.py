"""Read and write YAML, with the line of each key, and read settings of the command line. The dialect is YAML 1.2's
core: `1e-4` is a number (for PyYAML a string), `no`, `on` and dates are strings, and a repeated key is an error."""

import json
import os
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from ds_encdec.config.settings import COMMAND_LINE, Mention, Problem, Settings, join, masked, show
from ds_encdec.config.shipped import similar_shipped
from ds_encdec.config.yaml.plain_files import MAX_DEPTH, MAX_NODES, read_config

_PREFIX = "tag:yaml.org,2002:"
_MERGE = _PREFIX + "merge"
# Kinds of plain scalars other than text: pattern and reader.
_PLAIN: dict[str, tuple[str, Callable[[str], Any]]] = {
    "bool": ("true|True|TRUE|false|False|FALSE", lambda text: {"true": True, "false": False}[text.lower()]),
    "int": (r"[-+]?(?:0|[1-9][0-9_]*)", lambda text: int(text.replace("_", ""))),
    "float": (
        r"[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?|[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        lambda text: float(re.sub(r"\.(?=inf|nan)", "", text.replace("_", "").lower())),
    ),
    "null": ("~|null|Null|NULL|", lambda text: None),
}
_READERS: dict[str, Callable[[str], Any]] = {
    _PREFIX + "str": str,
    **{_PREFIX + kind: read for kind, (_, read) in _PLAIN.items()},
}


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012  only the kinds above


class _Dumper(yaml.SafeDumper):
    """PyYAML's dumper, which also quotes strings that the loader would read as another kind. Lists of plain values
    stand on one line. YAML's rarer line breaks are escaped: PyYAML writes them so that they are read back as spaces."""


_Dumper.add_representer(
    list,
    lambda dumper, items: dumper.represent_sequence(
        _PREFIX + "seq", items, flow_style=not any(isinstance(item, dict | list) for item in items)
    ),
)
_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar(
        _PREFIX + "str", text, style='"' if re.search("[\x85\u2028\u2029]", text) else None
    ),
)
for _side in (_Loader, _Dumper):
    _side.add_implicit_resolver(_MERGE, re.compile("<<$"), None)
    for _kind, (_pattern, _) in _PLAIN.items():
        _side.add_implicit_resolver(_PREFIX + _kind, re.compile(f"(?:{_pattern})$"), None)


def read_yaml(path: Path, problems: list[Problem]) -> Settings:
    """Return the settings in the YAML file `path`, and append its problems to `problems`."""
    if (text := read_text(path, problems)) is None:
        return Settings()
    reader = NodeReader(lambda mark: f"{path}:{mark.line + 1}", problems)
    try:
        root = compose(text)
        if root is not None and isinstance(values := reader.read(root, ""), dict):
            return Settings(values, reader.places)
        line = 1 if root is None else _line(root)
        problem = file_problem(path, "no sections with `field: value` lines; ds-encdec init writes some", line)
    except UnreadableError as error:
        problem = file_problem(path, f"not valid YAML: {error}", error.line, field=error.field)
    problems.append(problem)
    return Settings()


def read_settings(arguments: Sequence[str], problems: list[Problem]) -> Iterator[tuple[str, Any]]:
    """Yield the name and value of each argument `[--]section.field=value`; append a problem for any other."""
    for argument in arguments:
        name, equals, text = argument.removeprefix("--").partition("=")
        if equals and all(map(str.isidentifier, name.split("."))) and name.count(".") < MAX_DEPTH:
            try:
                yield name, _given_value(text, name, problems)
                continue
            except UnreadableError as error:
                shown = masked(name.rpartition(".")[2], text)
                quoted = json.dumps(text, ensure_ascii=False) if shown == text and len(text) < 200 else '"..."'
                message = f"{show(shown)} is not a YAML value ({error}); as text it is {name}={shlex.quote(quoted)}"
        elif not equals and os.path.isfile(argument):
            message = "a file, and not a setting: `--config FILE` names a configuration, [FILE,FILE] several of data"
        elif not equals and argument.startswith("--"):
            message = f"not a setting: its value is missing; write `{argument} VALUE`"
        else:
            message = "not a setting; write `section.field=value`, with underscores between words"
        # Only the name is shown: the value may be a secret.
        problems.append(Problem((Mention(COMMAND_LINE, argument.partition("=")[0] or argument),), message))


def _given_value(text: str, field: str, problems: list[Problem]) -> Any:
    """Return the value of `text` on the command line: one number, word or text, unless it begins like a list, a mapping
    or a quoted text, which YAML reads. Mistakes inside are appended to `problems` under `field`. Raises
    UnreadableError if YAML does not read all of it, since nothing may be dropped."""
    body = text.strip()
    if not body.startswith(("[", "{", '"', "'")):
        kind = next((kind for kind, (pattern, _) in _PLAIN.items() if re.fullmatch(pattern, body)), None)
        return text if kind is None or (text and not body) else _read(_PREFIX + kind, body, 1, field)
    root = compose(body)
    if root is None or not getattr(root, "flow_style", True) or root.end_mark.index != len(body) or "\n" in body:
        raise UnreadableError("YAML reads a part of it: write it on one line, a line's end in quotes as \\n", 1, field)
    return parse_value(body, COMMAND_LINE, field, problems)


def read_text(path: Path, problems: list[Problem], named_by: Mention | None = None) -> str | None:
    """Return the text of a configuration, or append a problem. `named_by` is the setting that names the file."""
    try:
        return read_config(path)
    except FileNotFoundError:
        message = f"no such file{'' if path.is_absolute() else f' in {Path.cwd()}'}{similar_shipped(path)}"
    except (OSError, ValueError) as error:
        message = f"cannot be read: {(isinstance(error, OSError) and error.strerror) or error}"
    problems.append(Problem((*([named_by] if named_by else ()), Mention(str(path), "")), message))
    return None


def file_problem(
    path: Path, message: str, line: int | None = None, column: int | None = None, *, field: str = ""
) -> Problem:
    """Return a problem with a file; `line` and `column` count from 1, `field` is the one being read."""
    place = ":".join(str(part) for part in (path, line, column) if part is not None)
    return Problem((Mention(place, field),), message)


def parse_value(text: str, place: str = "", field: str = "", problems: list[Problem] | None = None) -> Any:
    """Parse `text` as one YAML value, and append mistakes inside it to `problems` under `field` at `place`. Raises
    UnreadableError (ValueError) if it is not YAML."""
    root, found = compose(text), [] if problems is None else problems
    return None if root is None else NodeReader(lambda _: place, found).read(root, field)


def write_yaml(values: dict[str, Any]) -> str:
    """Return `values` as YAML that `read_yaml` reads back to the same values."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


class UnreadableError(ValueError):
    """A text is not YAML, or exceeds a limit. `line` counts from 1; `field` is the dotted path being read."""

    def __init__(self, message: str, line: int, field: str = "") -> None:
        super().__init__(message)
        self.line, self.field = line, field


# Common complaints of PyYAML, with the fix for each.
_IN_OTHER_WORDS = {
    "found character '\\t' that cannot start any token": "found a tab: indent with spaces",
    "expected <block end>, but found '<block mapping start>'": "a line that is indented otherwise than its neighbours",
    "mapping values are not allowed here": "indent the line as its neighbours, and quote a value that holds a colon",
}


def compose(text: str) -> yaml.Node | None:
    """Parse one YAML document into nodes. Raises UnreadableError."""
    loader = None
    try:
        loader = _Loader(text)
        return loader.get_single_node()
    except yaml.reader.ReaderError as error:
        raise UnreadableError(
            f"the character U+{error.character:04X} is not allowed", text.count("\n", 0, error.position) + 1
        ) from error
    except yaml.MarkedYAMLError as error:
        mark, problem = error.problem_mark or error.context_mark, error.problem or error.context or ""
        raise UnreadableError(_IN_OTHER_WORDS.get(problem, problem), mark.line + 1 if mark else 1) from error
    except Exception as error:  # PyYAML's scanner raises any error for unforeseen input, such as "\\UFFFFFFFF"
        message = "nested too deep" if isinstance(error, RecursionError) else " ".join(str(error).split())
        raise UnreadableError(message, loader.line + 1 if loader else 1) from error


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1


def _read(tag: str, text: str, line: int, field: str) -> Any:
    try:
        return _READERS[tag](text)
    except (KeyError, ValueError):  # such as a number with more digits than Python reads
        raise UnreadableError(f"{show(text)} cannot be read", line, field) from None


class NodeReader:
    """Turns YAML nodes into values, records the place of every key, and reports repeated keys. Values behind aliases
    count each time: nine lines of nine aliases, each of the line before, are 387 million values."""

    def __init__(self, place: Callable[[yaml.Mark], str], problems: list[Problem]) -> None:
        self.place, self.problems = place, problems
        self.places: dict[str, str] = {}
        self._values = self._depth = 0

    def read(self, node: yaml.Node, path: str) -> Any:
        """Return the value of `node`, which stands at the dotted `path`. Raises UnreadableError."""
        self._values, self._depth = self._values + 1, self._depth + 1
        if self._depth > MAX_DEPTH:
            raise UnreadableError(f"nested more than {MAX_DEPTH} deep", _line(node), path)
        if self._values > MAX_NODES:
            raise UnreadableError(f"more than {MAX_NODES} values, aliases counted each time", _line(node), path)
        if isinstance(node, yaml.ScalarNode) and node.tag in _READERS:
            value = _read(node.tag, node.value, _line(node), path)
        elif isinstance(node, yaml.SequenceNode) and node.tag == _PREFIX + "seq":
            value = [self._read_item(item, item, join(path, index)) for index, item in enumerate(node.value)]
        elif isinstance(node, yaml.MappingNode) and node.tag == _PREFIX + "map":
            value = self._read_mapping(node, path)
        else:
            raise UnreadableError(f"unknown tag {node.tag.replace(_PREFIX, '!!')}: use plain values", _line(node), path)
        self._depth -= 1
        return value

    def _read_mapping(self, node: yaml.MappingNode, path: str) -> dict[str, Any]:
        values, lines = dict[str, Any](), dict[str, int]()
        # The mapping's own keys come last: they replace those of its `<<` keys.
        for key, value in sorted(node.value, key=lambda pair: pair[0].tag != _MERGE):
            name = key.value if isinstance(key, yaml.ScalarNode) else "a list or a mapping"
            at, message = join(path, name or '""'), ""
            if key.tag == _MERGE:
                for source in reversed(value.value if isinstance(value, yaml.SequenceNode) else [value]):
                    if isinstance(read := self.read(source, path), dict):
                        values |= read
                    else:
                        message = "needs a mapping, or a list of mappings"
            elif not isinstance(key, yaml.ScalarNode) or not name or "." in name:
                message = "not a key: sections are nested, with one `field: value` line each"
            else:
                message = f"the key is already set in line {lines[name]}" if name in lines else ""
                lines.setdefault(name, _line(key))
                values[name] = self._read_item(key, value, at)
            if message:
                self.problems.append(Problem((Mention(self.place(key.start_mark), at),), message))
        return values

    def _read_item(self, place: yaml.Node, value: yaml.Node, path: str) -> Any:
        self.places[path] = self.place(place.start_mark)
        return self.read(value, path)
