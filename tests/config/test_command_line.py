"""`--word value` is a setting in every verb that takes settings, whatever stands around it."""

from __future__ import annotations

from pathlib import Path

import pytest

from ds_encdec import cli, estimate_memory
from ds_encdec.base.arguments import Parser, add
from ds_encdec.base.types import ConfigError
from ds_encdec.config.command_line import read_arguments
from ds_encdec.config.schema import load_config
from ds_encdec.config.words.rewording import given_fields

NEEDED = {"evaluate": ["--model", "folder"]}
WITH_SETTINGS = sorted(name for name, row in cli.VERBS.items() if row.takes_settings)


@pytest.mark.parametrize("verb", WITH_SETTINGS)
def test_every_verb_reads_words(verb: str) -> None:
    takes_file = "config" in cli.VERBS[verb].arguments
    words = ["--max_steps", "10", "--hf_model_id", "a/b", "--full_ft", *["a/x=1.yaml"][: 1 * takes_file]]
    words += ["--no_merge", "--output_dir=X", "lr=1e-4", "--verbose", "--training.bf16", "training.seed=3", "--fp16"]
    given = [verb, *NEEDED.get(verb, ()), *words]
    options, settings = cli.read_verb(given)
    assert getattr(options, "config", None) == (Path("a/x=1.yaml") if takes_file else None)
    assert options.verbose
    read = "--max_steps=10 --hf_model_id=a/b --full_ft=true --no_merge=true --output_dir=X lr=1e-4"
    assert settings == [*read.split(), "--training.bf16=true", "training.seed=3", "--fp16=true"]
    assert given_fields(settings) >= {"training.num_train_steps", "model.lora", "training.export_at_end"}
    if takes_file:
        with pytest.raises(ConfigError, match="both name a configuration"):
            cli.read_verb([verb, "quickstart", "--config", "b.yaml"])


def test_a_switch_takes_a_value_but_no_configuration() -> None:
    parser = Parser()
    add(parser, estimate_memory.ARGUMENTS)
    given = "--bf16 false --fp16 quickstart --torch_compile auto --gpus 4 --host_memory 1TB"
    options, settings = read_arguments(parser, estimate_memory.ARGUMENTS, given.split())
    assert settings == ["--bf16=false", "--fp16=true", "--torch_compile=auto"]
    assert (options.config, options.gpus, options.host_memory) == (Path("quickstart"), 4, "1TB")


def test_of_pythons_callers_too() -> None:
    overrides = ["--max_steps", "-1", "--training.seed", "5", "--full_ft", "--lr_scheduler", "constant"]
    config = load_config(None, overrides)
    assert (config.training.seed, config.training.lr_scheduler_type, config.model.lora) == (5, "constant", None)
