"""Find the configurations, DeepSpeed JSONs and host files of the package by name, from any folder. They are in the
repository's `ds_configs/` and `hostfiles/`; the package has links to both, which a wheel replaces by copies."""

import argparse
import os
import re
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path

from ds_encdec.base.arguments import Arguments, value
from ds_encdec.base.types import ConfigError

_PACKAGE = Path(__file__).resolve().parents[1]
_FOLDERS = ("ds_configs", "hostfiles")
_ENDINGS = ("", ".yaml", ".json")
# The line that names the schema for editors, which is only beside the repository's files.
_MODELINE = re.compile("# yaml-language-server: .*\n")
INIT: Arguments = {
    "name": value("of a configuration, DeepSpeed JSON or host file (default: list them)", nargs="?"),
    "--out": value("file to write; must not exist (default: its own name, in this folder)", Path, metavar="FILE"),
}


def find_shipped(path: str | Path | None) -> Path | None:
    """Return `path`, or if there is no such file, the shipped one: `ds_configs/quickstart.yaml` or `quickstart`."""
    if path is None:
        return None
    # os.path's functions return False for names that no file can have, and keep `~NAME` of an unknown user.
    path = Path(os.path.expanduser(path))
    if path.is_absolute() or (os.path.exists(path) and not os.path.isdir(path)):
        return path
    *folder, name = path.parts or ("",)
    found = (_PACKAGE / one / f"{name}{ending}" for one in _FOLDERS if folder in ([], [one]) for ending in _ENDINGS)
    return next((file.resolve() for file in found if os.path.isfile(file)), path)


def shipped_files() -> Iterator[Path]:
    """Yield every shipped file."""
    for name in _FOLDERS:
        yield from (file for file in sorted((_PACKAGE / name).glob("*")) if file.is_file())


def similar_shipped(path: Path) -> str:
    """Return the end of a sentence that names the shipped file which `path` may mean, or nothing."""
    names = [name for file in shipped_files() for name in (_name(file), file.name)]
    return next((f"; did you mean {name}?" for name in get_close_matches(path.name, names, 1, 0.7)), "")


def run_init(options: argparse.Namespace, _: Sequence[str]) -> None:
    """Run `ds-encdec init`: write a shipped file, with comments that name the copy, and the program as a module; or
    list them. Raises ConfigError if there is no such file, or a file would be replaced."""
    if options.name is None:
        width = max(len(_name(file)) for file in shipped_files())
        print("\n".join(f"{_name(file):{width}}  {_purpose(file)}" for file in shipped_files()))
        return
    wanted = Path(options.name)
    source = next((file for file in shipped_files() if wanted.name in (file.name, _name(file))), None)
    if source is None:
        raise ConfigError(f"there is no shipped file {wanted}; `ds-encdec init` lists them{similar_shipped(wanted)}")
    out = options.out or Path(source.name)
    text = (
        _MODELINE.sub("", source.read_text(encoding="utf-8"))
        .replace(f"{source.parent.name}/{source.name}", str(out))
        .replace(" ds_encdec/train.py", " --module ds_encdec.train")  # works without a clone, too
    )
    try:
        with out.open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise ConfigError(f"{out} cannot be written ({error.strerror}). Name another file with --out") from error
    print(f"wrote {out}" + f"; edit it, then: ds-encdec validate {out}" * (out.suffix == ".yaml"))


def _name(file: Path) -> str:
    return file.stem if file.suffix == ".yaml" else file.name


def _purpose(file: Path) -> str:
    if file.suffix == ".json":
        return "a DeepSpeed JSON, for --deepspeed_config"
    first_lines = _MODELINE.sub("", file.read_text(encoding="utf-8")).splitlines()[:4]
    return re.split(r"[.:](?:\s|$)", " ".join(line.removeprefix("#").strip() for line in first_lines))[0]
