"""The modelling code in an export: Python files that `trust_remote_code` runs. Their SHA-256 stand in `config.json`,
where our own loaders compare them (`require_recorded_code`), in `SHA256SUMS`, and in the model card."""

import hashlib
import shutil
from pathlib import Path

from ds_encdec.launch.run_folder import code_facts
from ds_encdec.model import configuration

# Modules copied into the folder. They import each other relatively, and nothing else of ds_encdec.
ENCODER_CODE = ("cross_attention", "configuration", "precision", "attention_kernels", "attention", "encoder")
CODE = (*ENCODER_CODE, "loss_kernel", "loss", "modeling")

Origin = dict[str, str | None]  # of `code_facts`


def write_code(folder: Path, *, encoder_only: bool) -> dict[str, str]:
    """Write the modules and their sums into `folder`; return name → SHA-256 in hex."""
    sums = _sums(encoder_only)
    for name in sums:
        shutil.copyfile(Path(configuration.__file__).with_name(name), folder / name)
    (folder / "SHA256SUMS").write_text(sums_text(encoder_only=encoder_only))
    return sums


def sums_text(*, encoder_only: bool) -> str:
    """Return the lines that `sha256sum -c` reads."""
    return "".join(f"{sha256}  {name}\n" for name, sha256 in _sums(encoder_only).items())


def code_row(trained_by: Origin) -> str:
    """Return the row of the card that names the code that trained a model, and whether its folder has the same."""
    here = "the files here are of that code"
    if trained_by["code"] != (own := code_facts())["code"]:
        here = f"the files here are of other code, which exported it: {_named(own)}"
    return f"{_named(trained_by)}; {here}"


def _named(origin: Origin) -> str:
    return f"commit `{origin['commit'] or 'unknown'}`, SHA-256 `{origin['code']}`"


def _sums(encoder_only: bool) -> dict[str, str]:
    folder = Path(configuration.__file__).parent
    names = [f"{module}.py" for module in (ENCODER_CODE if encoder_only else CODE)]
    return {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in names}
