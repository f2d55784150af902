"""Train encoder-decoder language models from decoder checkpoints with DeepSpeed and UL2. The names here are the
library's interface (docs/library.md). They are imported on first use, so that `--help` does not wait for torch."""

import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ds_encdec.base.types import Callback as Callback
    from ds_encdec.config.schema import FullConfig as FullConfig
    from ds_encdec.config.schema import load_config as load_config
    from ds_encdec.exports.hugging_face import export_checkpoint as export
    from ds_encdec.memory.question import estimate_run as estimate
    from ds_encdec.model.modeling import Qwen3ForSeq2SeqLM as Qwen3ForSeq2SeqLM
    from ds_encdec.monitor.sinks import Sink as Sink
    from ds_encdec.training.build import run_training as run_training

    __version__: str

# True while Python looks for a module of this package to run, as for `python -m ds_encdec.train`.
_is_program = sys.argv[:1] == ["-m"] and any(word.partition(".")[0] == __name__ for word in sys.orig_argv)
if _is_program and not sys.flags.safe_path and sys.path[:1] == [os.getcwd()]:
    sys.path.append(sys.path.pop(0))  # where the user's own `datasets.py` hides no library

_HOMES = {
    "Callback": "ds_encdec.base.types:Callback",
    "FullConfig": "ds_encdec.config.schema:FullConfig",
    "Qwen3ForSeq2SeqLM": "ds_encdec.model.modeling:Qwen3ForSeq2SeqLM",
    "Sink": "ds_encdec.monitor.sinks:Sink",
    "estimate": "ds_encdec.memory.question:estimate_run",
    "export": "ds_encdec.exports.hugging_face:export_checkpoint",
    "load_config": "ds_encdec.config.schema:load_config",
    "run_training": "ds_encdec.training.build:run_training",
}

__all__ = ["Callback", "FullConfig", "Qwen3ForSeq2SeqLM", "Sink", "estimate", "export", "load_config", "run_training"]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version(__name__)
        except PackageNotFoundError:  # a copy that was never installed
            return "0+unknown"
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import pkgutil

    return pkgutil.resolve_name(_HOMES[name])
