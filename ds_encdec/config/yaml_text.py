"""YAML in and out: values together with the line each key stands on; on the command line, each setting is a value.

The dialect is YAML 1.2's core where it matters for configurations: `1e-4` is a number (PyYAML's YAML 1.1
reads a string), `no`, `on` and dates are strings, and a key that occurs twice is an error.
"""

import json
import math
import os
import re
import shlex
from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, NoReturn

import yaml

from ds_encdec.config.plain_files import MAX_CONFIG_BYTES, MAX_DEPTH, MAX_NODES, read_given
from ds_encdec.config.settings import COMMAND_LINE, Mention, Problem, Settings, Unreadable, is_name, join, masked, show
from ds_encdec.config.shipped import shipped_instead


def whole_number(digits: str) -> int | Unreadable:
    """The number that decimal `digits` stand for, unless Python might refuse to read so many."""
    return int(digits) if len(digits) < 600 else Unreadable(digits, "must be a number of at most 64 bits")


def real_number(text: str) -> float | Unreadable:
    """The number that `text` stands for, unless it is larger than any float."""
    number = float(text)
    is_meant = math.isfinite(number) or "inf" in text or "nan" in text
    return number if is_meant else Unreadable(text, "must be a finite number: no float is so large")


_PREFIX = "tag:yaml.org,2002:"
_INT = r"[-+]?(?:0|[1-9][0-9_]*)"
_FLOAT = (
    r"[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?|[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+"
    r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
)
_IMPLICIT_TYPES = {
    "bool": (r"true|True|TRUE|false|False|FALSE", [*"tTfF"]),
    "int": (_INT, [*"-+0123456789"]),
    "float": (_FLOAT, [*"-+0123456789."]),
    "merge": (r"<<", ["<"]),
    "null": (r"~|null|Null|NULL|", [*"~nN", ""]),
}
"""The kinds that a plain scalar may be by how it looks, with their patterns and first characters."""
_READERS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "str": (r"(?s:.*)", str),
    "null": (_IMPLICIT_TYPES["null"][0], lambda _: None),
    "bool": (_IMPLICIT_TYPES["bool"][0], lambda text: text.lower() == "true"),
    "int": (_INT, lambda text: whole_number(text.replace("_", ""))),
    "float": (
        f"{_FLOAT}|{_INT}",
        lambda text: real_number(text.replace("_", "").lower().replace(".inf", "inf").replace(".nan", "nan")),
    ),
}
"""The kinds that a scalar may be, also by a tag (`!!float 3`): how it must look, and how it is read."""
_TAGS = {_PREFIX + kind for kind in _READERS}


class _Loader(yaml.SafeLoader):
    """PyYAML's loader with nothing but the types above, which stops where a document becomes too much.

    Nodes are counted with what their aliases stand for, as they will be read: nine lines of nine aliases each, every
    one of the line before, are 387 million values.
    """

    def __init__(self, text: str) -> None:
        self._path: list[str] = []
        self._nodes = self._deepest = 0  # the level that what is being composed reaches
        self._extents: dict[yaml.Node, tuple[int, int]] = {}  # nodes and levels of each finished node
        super().__init__(text)

    @property
    def field(self) -> str:
        """The dotted path of what is being composed."""
        return ".".join(name for name in self._path if name)

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Compose a node as PyYAML does, within the limits. Raises yaml.MarkedYAMLError."""
        event, before, deepest = self.peek_event(), self._nodes, self._deepest
        # A part of a dotted path: the key, or an item's number, or nothing for the whole and for a key itself.
        name = getattr(index, "value", "?") if isinstance(index, yaml.Node) else "" if index is None else str(index)
        self._path.append(name if isinstance(name, str) else "?")
        self._count(1, 1, event)
        node = super().compose_node(parent, index)
        assert node is not None  # there was an event
        if isinstance(event, yaml.AliasEvent):
            if node not in self._extents:
                self._refuse(f"*{event.anchor} stands inside of what it stands for", event)
            nodes, levels = self._extents[node]
            self._count(nodes - 1, levels, event)
        else:
            self._extents[node] = (self._nodes - before, self._deepest - len(self._path) + 1)
        self._path.pop()
        self._deepest = max(deepest, self._deepest)
        return node

    def _count(self, nodes: int, levels: int, event: yaml.Event) -> None:
        self._nodes, self._deepest = self._nodes + nodes, len(self._path) + levels - 1
        if self._nodes > MAX_NODES:
            self._refuse(f"more than {MAX_NODES} keys and values, those behind aliases counted each time", event)
        if self._deepest > MAX_DEPTH:
            self._refuse(f"nested more than {MAX_DEPTH} deep", event)

    def _refuse(self, message: str, event: yaml.Event) -> NoReturn:
        raise yaml.MarkedYAMLError(problem=message, problem_mark=event.start_mark)  # type: ignore[arg-type]


_RARE_BREAKS = re.compile("[\x85\u2028\u2029]")


class _Dumper(yaml.SafeDumper):
    """PyYAML's dumper, which also quotes the strings that our loader would take for something else."""

    def represent_settings_list(self, items: list[Any]) -> yaml.Node:
        """A list of plain values on one line, any other with one item a line."""
        flow = not any(isinstance(item, dict | list) for item in items)
        return self.represent_sequence(_PREFIX + "seq", items, flow_style=flow)

    def represent_text(self, text: str) -> yaml.Node:
        """A string, with YAML's rarer line breaks escaped: PyYAML writes them so that they come back as spaces."""
        style = '"' if _RARE_BREAKS.search(text) else None
        return self.represent_scalar(_PREFIX + "str", text, style=style)


_Loader.yaml_implicit_resolvers = {}
_Dumper.add_representer(list, _Dumper.represent_settings_list)
_Dumper.add_representer(str, _Dumper.represent_text)
for _kind, (_pattern, _first) in _IMPLICIT_TYPES.items():
    for _side in (_Loader, _Dumper):
        _side.add_implicit_resolver(_PREFIX + _kind, re.compile(f"(?:{_pattern})$"), _first)


def read_yaml(path: Path, problems: list[Problem]) -> Settings:
    """The settings in the YAML file `path`. What is wrong with the file is appended to `problems`."""
    text = read_text(path, problems)
    if text is None:
        return Settings()
    try:
        root = _compose(text)
    except UnreadableError as error:
        problems.append(file_problem(path, f"not valid YAML: {error}", error.line, field=error.field))
        return Settings()
    if isinstance(root, yaml.MappingNode):
        reader = _NodeReader(lambda line: f"{path}:{line}", problems)
        values = reader.read(root, "")
        return Settings(values if isinstance(values, dict) else {}, reader.places)
    kind = "a list" if isinstance(root, yaml.SequenceNode) else "a single value"
    message = (
        f"the file holds {kind}; sections with `field: value` lines are needed"
        if root
        else "the file is empty; ds-encdec init writes one"
    )
    problems.append(file_problem(path, message, _line(root) if root else None))
    return Settings()


def apply_overrides(
    settings: Settings,
    arguments: Sequence[str],
    problems: list[Problem],
    read: Callable[[str, Any, list[Problem]], Iterable[tuple[str, Any]]] = lambda name, value, _: [(name, value)],
) -> None:
    """Put the `arguments` of the command line into `settings`, in their order; append to `problems` what is wrong.

    Each is `section.field=value` or `--section.field=value`. A mapping given as a value replaces what stood there as a
    whole. `read` says which settings a name with its value amounts to.
    """
    remaining = list(arguments)
    while remaining:
        argument = remaining.pop(0)
        field = argument.partition("=")[0] or argument  # what stands behind may be a secret
        name, equals, text = argument.removeprefix("--").partition("=")
        parts = name.split(".")
        message = "not a setting; write `section.field=value`"
        spelt = name.replace("-", "_")
        if equals and spelt != name and len(parts) < MAX_DEPTH and all(map(str.isidentifier, spelt.split("."))):
            message = f"not a setting; its words are joined by underscores: {spelt}"
        if not equals and argument.startswith("--") and all(map(str.isidentifier, parts)):
            message = f"not a setting: its value is missing; write `{argument} VALUE`"
        if not equals and os.path.isfile(argument):  # a shell's list of what a pattern matches
            files = [field, *takewhile(os.path.isfile, remaining)]
            del remaining[: len(files) - 1]
            field = f"{argument} and {len(files) - 1:,} more" if files[1:] else argument
            message = "a file, and not a setting: write [FILE,FILE] for several, or the pattern between quotes"
            if argument.endswith((".yaml", ".yml")):
                message = f"a file, and not a setting: a configuration is named by --config {argument}"
        if equals and len(parts) <= MAX_DEPTH and all(part.isidentifier() and is_name(part) for part in parts):
            field, message = name, "no such field: what stands above it is set to a single value"
            try:
                value = _given_value(text, name, problems)
                if all(settings.put(*one, COMMAND_LINE) for one in read(name, value, problems)):
                    continue
            except UnreadableError as error:
                shown = masked(parts[-1], text)
                quoted = json.dumps(text, ensure_ascii=False) if shown == text and len(text) < 200 else '"..."'
                message = (
                    f"{show(shown)} is not a YAML value; quote it, as in {name}={shlex.quote(quoted)}, where it is text"
                    f" ({error})"
                )
        problems.append(Problem((Mention(COMMAND_LINE, field),), message))


def _given_value(text: str, field: str, problems: list[Problem]) -> Any:
    """The value that `text` of the command line stands for, of which nothing is dropped.

    It is one scalar, all of it, unless it begins like a collection, a quote or a tag, which YAML reads. Mistakes inside
    are appended to `problems` as ones of `field`. Raises UnreadableError for what is no YAML, or is read in part.
    """
    body = text.strip()
    if not body.startswith(("[", "{", '"', "'", "!!")):
        if found := re.search(r"(?:^|\s)#", text):
            raise UnreadableError(_DROPPED, text.count("\n", 0, found.start()) + 1, field)
        tag = _loader(text).resolve(yaml.ScalarNode, body, (True, False))
        is_text = tag not in _TAGS - {_PREFIX + "str"} or (text != "" and not body)
        return text if is_text else _scalar(yaml.ScalarNode(tag, body))
    root, end = _compose(text), 0
    for token in yaml.scan(text, Loader=_Loader):
        if "#" in text[end : token.start_mark.index]:
            raise UnreadableError(_DROPPED, token.start_mark.line + 1, field)
        if isinstance(token, yaml.ScalarToken) and token.start_mark.line != token.end_mark.line:
            raise UnreadableError("YAML joins its lines: write a line's end as \\n", token.start_mark.line + 1, field)
        end = max(end, token.end_mark.index)
    if isinstance(root, yaml.CollectionNode) and not root.flow_style:
        raise UnreadableError("YAML takes what stands before the colon for a key", 1, field)
    if isinstance(root, yaml.MappingNode) and any(_is_bare(key, inner) for key, inner in root.value):
        raise UnreadableError("YAML takes what stands between braces for keys, and these have no values", 1, field)
    return parse_value(text, COMMAND_LINE, field, problems)


def _is_bare(key: yaml.Node, value: yaml.Node) -> bool:
    """Return whether a pair of a mapping is `{key}`, or has braces for a key."""
    return not isinstance(key, yaml.ScalarNode) or value.start_mark.index == value.end_mark.index


def read_text(path: Path, problems: list[Problem], named_by: Mention | None = None) -> str | None:
    """The text of a configuration, or None and a problem. `named_by`: the setting that names the file."""
    try:
        return read_given(path, MAX_CONFIG_BYTES)
    except FileNotFoundError:
        looked = "" if path.is_absolute() else f" in {Path.cwd()}"
        message = f"no such file{looked}{shipped_instead(path)}"
    except (OSError, ValueError) as error:
        message = f"cannot be read: {(isinstance(error, OSError) and error.strerror) or error}"
    problem = file_problem(path, message)
    problems.append(Problem((named_by, *problem.mentions), message) if named_by else problem)
    return None


def file_problem(
    path: Path, message: str, line: int | None = None, column: int | None = None, *, field: str = ""
) -> Problem:
    """A problem with a file as such; `line` and `column` count from 1, `field` is the last one that was read."""
    place = ":".join(str(part) for part in (path, line, column) if part is not None)
    return Problem((Mention(place, field),), message)


def parse_value(text: str, place: str = "", field: str = "", problems: list[Problem] | None = None) -> Any:
    """`text` read as one YAML value.

    Mistakes inside it are appended to `problems` as ones of `field` at `place`. Raises UnreadableError (ValueError)
    for what is no YAML.
    """
    root, found = _compose(text), [] if problems is None else problems
    return None if root is None else _NodeReader(lambda _: place, found).read(root, field)


def write_yaml(values: dict[str, Any]) -> str:
    """`values` as YAML that `read_yaml` reads back to the same values."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


class UnreadableError(ValueError):
    """A text is no YAML, or more of it than is read. `line` counts from 1; `field`: the dotted path read last."""

    def __init__(self, message: str, line: int, field: str) -> None:
        super().__init__(message)
        self.line, self.field = line, field


_DROPPED = "YAML takes what stands behind # for a comment"
_IN_OTHER_WORDS = {
    "found character '\\t' that cannot start any token": "found a tab: indent with spaces",
    "expected <block end>, but found '<block mapping start>'": "a line that is indented otherwise than its neighbours",
    "mapping values are not allowed here": "mapping values are not allowed here: indent the line as its neighbours, "
    "and quote a value that holds a colon",
}
"""The commonest complaints of PyYAML, and what to do about each."""


def _compose(text: str) -> yaml.Node | None:
    """The nodes of one YAML document. Raises UnreadableError."""
    loader = _loader(text)
    try:
        return loader.get_single_node()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark or loader.get_mark()
        problem = error.problem or error.context or ""
        raise UnreadableError(_IN_OTHER_WORDS.get(problem, problem), mark.line + 1, loader.field) from error
    except Exception as error:  # PyYAML's scanner raises anything for what it has not foreseen, such as "\\UFFFFFFFF"
        raise UnreadableError(" ".join(str(error).split()), loader.line + 1, loader.field) from error


def _loader(text: str) -> _Loader:
    """A loader of `text`. Raises UnreadableError where it has characters that YAML does not have."""
    try:
        return _Loader(text)
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise UnreadableError(f"the character U+{error.character:04X} is not allowed", line, "") from error


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1


class _NodeReader:
    """Turns YAML nodes into values while it notes the place of every key and finds repeated ones."""

    def __init__(self, place: Callable[[int], str], problems: list[Problem]) -> None:
        self.place, self.problems = place, problems
        self.places: dict[str, str] = {}

    def read(self, node: yaml.Node, path: str) -> Any:
        """The value of `node`, which stands at the dotted `path`."""
        if isinstance(node, yaml.ScalarNode):
            return _scalar(node)
        if node.tag != (_PREFIX + "map" if isinstance(node, yaml.MappingNode) else _PREFIX + "seq"):
            return Unreadable(_written(node.tag), "unknown tag: write plain values")
        if isinstance(node, yaml.SequenceNode):
            return [self._read_item(item, item, join(path, index)) for index, item in enumerate(node.value)]
        assert isinstance(node, yaml.MappingNode)
        first: dict[str, int] = {}
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode) and key.tag != _PREFIX + "merge"):
            if key.value in first:
                self._report(key, join(path, key.value), f"the key is already set in line {first[key.value]}")
            first.setdefault(key.value, _line(key))
        pairs = [(key, value) for key, value in self._merged(node, path) if self._is_name(key, path)]
        return {key.value: self._read_item(key, value, join(path, key.value)) for key, value in pairs}

    def _read_item(self, place: yaml.Node, value: yaml.Node, path: str) -> Any:
        self.places[path] = self.place(_line(place))
        return self.read(value, path)

    def _merged(self, node: yaml.MappingNode, path: str) -> list[tuple[yaml.Node, yaml.Node]]:
        """The pairs of a mapping after those that its `<<` keys bring, of which earlier ones go before later ones."""
        own, brought = [], []
        for key, value in node.value:
            if key.tag != _PREFIX + "merge":
                own.append((key, value))
                continue
            sources = value.value if isinstance(value, yaml.SequenceNode) else [value]
            if all(isinstance(source, yaml.MappingNode) for source in sources):
                brought += [pair for source in reversed(sources) for pair in self._merged(source, path)]
            else:
                self._report(key, join(path, "<<"), "needs a mapping, or a list of mappings")
        return brought + own

    def _is_name(self, key: yaml.Node, path: str) -> bool:
        """Return whether `key` can name a field. Dotted names are for the command line."""
        if isinstance(key, yaml.ScalarNode) and is_name(key.value) and key.tag in _TAGS:
            return True
        name = (key.value or '""') if isinstance(key, yaml.ScalarNode) else "a list or a mapping"
        self._report(key, join(path, name), "not a key: sections are nested, with one `field: value` line each")
        return False

    def _report(self, node: yaml.Node, path: str, message: str) -> None:
        self.problems.append(Problem((Mention(self.place(_line(node)), path),), message))


def _scalar(node: yaml.ScalarNode) -> Any:
    """The value of a node, whose tag may be written (`!!float 3`) or follow from how it looks."""
    kind = node.tag.removeprefix(_PREFIX)
    pattern, read = _READERS[kind] if node.tag in _TAGS else ("", None)
    if read is not None and re.fullmatch(pattern, node.value):
        return read(node.value)
    message = "unknown tag: write a plain value" if read is None else f"this is no {kind}"
    return Unreadable(f"{_written(node.tag)} {node.value}", message)


def _written(tag: str) -> str:
    """A tag as it is written."""
    return "!!" + tag.removeprefix(_PREFIX) if tag.startswith(_PREFIX) else tag
