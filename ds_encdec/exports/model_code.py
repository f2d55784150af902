"""The modelling code in an export: Python files that `trust_remote_code` runs. Their SHA-256 stand in `config.json`,
where our own loaders compare them (`require_recorded_code`), and in `SHA256SUMS`."""

import hashlib
from pathlib import Path

from ds_encdec.launch.run_folder import code_facts
from ds_encdec.model import configuration

# Modules copied into the folder. They import each other relatively, and nothing else of ds_encdec.
ENCODER_CODE = ("cross_attention", "configuration", "precision", "attention_kernels", "attention", "encoder")
CODE = (*ENCODER_CODE, "loss_kernel", "loss", "modeling")

Origin = dict[str, str | None]  # of `code_facts`


def write_code(folder: Path, *, encoder_only: bool) -> dict[str, str]:
    """Write the modules and their sums into `folder`; return name → SHA-256 in hex."""
    sums = {}
    for name in (f"{module}.py" for module in (ENCODER_CODE if encoder_only else CODE)):
        code = Path(configuration.__file__).with_name(name).read_bytes()
        (folder / name).write_bytes(code)
        sums[name] = hashlib.sha256(code).hexdigest()
    (folder / "SHA256SUMS").write_text("".join(f"{sha256}  {name}\n" for name, sha256 in sums.items()))
    return sums


def code_row(trained_by: Origin) -> str:
    """Return the row of the card that names the code that trained a model, and whether its folder has the same."""
    here = "the files here are of that code"
    if trained_by["code"] != (own := code_facts())["code"]:
        here = f"the files here are of other code, which exported it: {_named(own)}"
    return f"{_named(trained_by)}; {here}"


def _named(origin: Origin) -> str:
    return f"commit `{origin['commit'] or 'unknown'}`, SHA-256 `{origin['code']}`"
