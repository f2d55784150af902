"""Rules about contradictions in a configuration. Each names all fields that it reads: reports give their places."""

import re
from collections.abc import Iterator
from itertools import chain

from ds_encdec.base.plugins import PYTHON, is_dotted
from ds_encdec.config.data_sections import LOCAL_FORMATS, DataConfig, Source
from ds_encdec.config.engine_rules import LACKS, infra_rules
from ds_encdec.config.objective_rules import objective_rules
from ds_encdec.config.sections import Sections
from ds_encdec.config.settings import Conflict, conflicts_in, unknown_key
from ds_encdec.config.training_rules import training_rules
from ds_encdec.registry.denoisers import DENOISERS
from ds_encdec.registry.engines import ENGINES, EngineName, EngineSpec
from ds_encdec.registry.objectives import OBJECTIVES, PREFERENCE_COLUMNS, TEXT_COLUMNS, template_parts
from ds_encdec.registry.source_kinds import LOCAL_SOURCES, local_kind

# Ids of a byte-level tokenizer before the first merge: 256 bytes, padding, end of sequence.
SMALLEST_VOCABULARY = 258
# Formats by the endings of local files, which are not names of data sets.
_FORMAT_OF = {ending: name for name, kind in LOCAL_SOURCES.items() for ending in kind.endings}


def find_conflicts(config: Sections) -> list[Conflict]:
    """Return all contradictions in `config`."""
    found = [*_model(config), *_data(config.data), *objective_rules(config)]
    found += [*training_rules(config), *infra_rules(config)]
    lacks = [
        engine_conflicts(config, row.name)
        for row in ENGINES.values()
        if config.infra.distributed_type in (*row.distributed_types, "auto")
    ]
    return found + (list(chain(*lacks)) if all(lacks) else [])


def _model(config: Sections) -> Iterator[Conflict]:
    model, shape, lora, data = config.model, config.model.architecture, config.model.lora, config.data
    named, tokenizer = model.model_name_or_path is not None, model.tokenizer_name_or_path
    targets, conflict = lora.target_modules if lora else ("",), conflicts_in("model")
    if named == (shape is not None):
        yield conflict(
            "model_name_or_path architecture",
            "give one of the two: a checkpoint to start from, or the sizes of a new model",
        )
    if shape and tokenizer is None:
        yield conflict("tokenizer_name_or_path", "a model from scratch has no tokenizer: name one, or `builtin`")
    if not shape and tokenizer == "builtin":
        yield conflict(
            "tokenizer_name_or_path model_name_or_path",
            "builtin goes with an architecture: a pretrained model needs the tokenizer it was trained with",
        )
    if not targets:
        yield conflict("model.lora.target_modules", "at least one is needed, or nothing is trained")
    if len({*targets}) < len(targets):
        yield conflict("model.lora.target_modules", "a name stands there twice")
    if shape is None:
        return
    conflict = conflicts_in("model.architecture")
    if shape.num_attention_heads % shape.num_key_value_heads:
        yield conflict(
            "num_attention_heads num_key_value_heads",
            "every key/value head must serve equally many query heads: one must divide the other",
        )
    if shape.head_dim % 2:
        yield conflict("head_dim", "must be even: rotary embeddings turn pairs of dimensions")
    needed = SMALLEST_VOCABULARY + model.num_sentinel_tokens + len(DENOISERS) * data.use_mode_tokens
    if shape.vocab_size < needed:
        yield conflict(
            "vocab_size model.num_sentinel_tokens data.use_mode_tokens",
            f"must be >= {needed}: bytes, special tokens, sentinels and mode tokens each take a row",
        )
    sides = ("encoder",) if OBJECTIVES[data.objective].encoder_only else ("encoder", "decoder")
    for name in (f"data.max_{side}_length" for side in sides):
        if getattr(data, name.removeprefix("data.")) > shape.max_position_embeddings:
            yield conflict(f"{name} max_position_embeddings", "an example may be longer than the model is declared for")


def _data(data: DataConfig) -> Iterator[Conflict]:
    names, weights, conflict = ", ".join(DENOISERS), data.ul2_task_weights, conflicts_in("data")
    for at, source in data.sources_by_path().items():
        yield from _source(source, at)
    if data.mixture == ():
        yield conflict("mixture", "a mixture needs at least one source")
    if data.mixture_weights_count == "tokens" and data.mixture is None:
        yield conflict("mixture_weights_count mixture", "only a mixture has weights: remove it")
    for name in data.changed(*Source.model_fields) if data.mixture is not None else ():
        yield conflict(f"mixture {name}", f"a mixture replaces {name}: remove it, or make it one of its sources")
    if len(weights) != len(DENOISERS):
        yield conflict("ul2_task_weights", f"must be {len(DENOISERS)} weights, of {names}")
    if min(weights, default=0) < 0:
        yield conflict("ul2_task_weights", f"weights of {names} must be >= 0")
    if not any(weights):
        yield conflict("ul2_task_weights", f"at least one of {names} must have a weight > 0")
    yield from _fields_not_read(data)
    if OBJECTIVES[data.objective].takes_records:
        yield from _records(data)
    yield from _evaluation(data, "data")
    yield from _split(data, "test_files", "test_split", "data")
    for name in data.eval_sets:
        alone, path = data.of_eval_set(name), f"data.eval_sets.{name}"
        if re.fullmatch(r"[\w-]+", name, re.ASCII) is None:
            yield conflict("eval_sets", f"{name!r}: names are of letters, digits, `_` and `-`")
            continue
        if alone.own_split("validation") is None:
            yield conflict(path, "name its texts: eval_files, eval_dataset_name or eval_split")
        yield from _evaluation(alone, path)


def _source(source: Source, at: str) -> Iterator[Conflict]:
    name, kind, files = source.dataset_name, local_kind(source.dataset_name), source.data_files
    reads_files, conflict = kind is not None and kind.reads_files, conflicts_in(at)
    if name.startswith(PYTHON) and not is_dotted(name.removeprefix(PYTHON)):
        yield conflict("dataset_name", "write `python:module:function`")
    if name in _FORMAT_OF:
        yield conflict("dataset_name", f"no data set; for local files of this kind write `{_FORMAT_OF[name]}`")
    if reads_files and not files:
        yield conflict("dataset_name data_files", f"{name} needs data_files, paths or patterns of files")
    if kind and not reads_files and files is not None:
        yield conflict("dataset_name data_files", f"{name} reads no files; for yours set {', '.join(LOCAL_FORMATS)}")


def _fields_not_read(data: DataConfig) -> Iterator[Conflict]:
    objective, conflict = OBJECTIVES[data.objective], conflicts_in("data")
    readers: dict[str, list[str]] = {}  # of each field that not all objectives read
    for other, row in OBJECTIVES.items():
        for name in row.own_fields:
            readers.setdefault(name, []).append(other)
    splits = {name for row in OBJECTIVES.values() for name in row.split_fields}
    for name in data.changed(*(name for name in readers if name not in objective.own_fields)):
        # A configuration of rows may keep the settings of the texts that it was trained on before.
        if name in splits or not (objective.takes_records and "ul2" in readers[name]):
            instead = objective.split_fields if name in splits and objective.takes_records else ()
            fix = " and ".join(instead) or f"objective={' or '.join(readers[name])}"
            yield conflict(f"{name} objective", f"{data.objective} does not read it: set {fix}, or remove it")


def _records(data: DataConfig) -> Iterator[Conflict]:
    with_columns = ", ".join(name for name, kind in LOCAL_SOURCES.items() if kind.has_columns)
    conflict = conflicts_in("data")
    for at, source in data.sources_by_path().items():
        if (kind := local_kind(source.dataset_name)) and not kind.has_columns:
            fix = f"take {with_columns}, or a data set of the hub"
            yield conflict(f"objective {at}.dataset_name", f"its rows have no columns: {fix}")
    known: set[str] = set()
    has_templates = "input_template" in OBJECTIVES[data.objective].own_fields
    for name in ("input_template", "output_template") if has_templates else ():
        try:
            fields = {field for _, field in template_parts(getattr(data, name)) if field is not None}
        except ValueError as error:
            yield conflict(name, f"is no template ({error})")
            continue
        known |= fields
        if not fields:
            yield conflict(name, "must hold a field, `{name}`, that a row fills in")
        elif data.objective == "dpo" and name == "output_template" and "output" not in fields:
            yield conflict(name, "must hold `{output}`, which is the chosen answer, and then the rejected one")
    if data.objective == "dpo":
        known = known - {"output"} | {*PREFERENCE_COLUMNS}
    known = known if has_templates else {*TEXT_COLUMNS}
    for field in sorted(data.field_mapping.keys() - known) if known else ():
        yield conflict("field_mapping", f"no template has a field {field}: {unknown_key(field, known)}")
    if data.converter is not None and not is_dotted(data.converter):
        yield conflict("converter", "write `module:function`")


def _split(data: DataConfig, files: str, split: str, section: str) -> Iterator[Conflict]:
    name, paths, conflict = data.eval_dataset_name, getattr(data, files), conflicts_in(section)
    is_files, is_split = paths is not None, getattr(data, split) is not None
    kind = None if data.mixture and name is None else local_kind(name or data.dataset_name)
    field = "eval_dataset_name" if name or data.mixture else "data.dataset_name"
    if is_files and is_split:
        yield conflict(f"{files} {split}", "files have no splits: remove one of the two")
    if paths == ():
        yield conflict(files, "no file is named: name one, or remove the field")
    if (is_files or is_split) and data.mixture and name is None:
        yield conflict(
            f"data.mixture {files if is_files else split} eval_dataset_name",
            "a mixture has several data sets: set eval_dataset_name to one of them, or to another",
        )
    if is_files and not (kind and kind.reads_files) and not data.mixture:
        yield conflict(f"{files} {field}", f"set {field} to the kind of these files: {', '.join(LOCAL_FORMATS)}")
    if is_split and not is_files and kind is not None:
        yield conflict(f"{split} {field}", "only data sets of the hub have splits")


def _evaluation(data: DataConfig, section: str) -> Iterator[Conflict]:
    name, conflict = data.eval_dataset_name, conflicts_in(section)
    kind = local_kind(name) if name is not None else None
    yield from _split(data, "eval_files", "eval_split", section)
    if kind and kind.reads_files and data.eval_files is None:
        yield conflict("eval_dataset_name eval_files", f"{name} needs eval_files, paths or patterns of files")
    if data.eval_dataset_config is not None and name is None and data.eval_split is None:
        yield conflict("eval_dataset_config eval_dataset_name", "goes with eval_dataset_name or eval_split")
    if kind and not kind.has_columns and OBJECTIVES[data.objective].takes_records:
        yield conflict("data.objective eval_dataset_name", "its rows have no columns")


def engine_conflicts(config: Sections, engine: EngineName) -> list[Conflict]:
    """Return the requests of `config` that `engine` cannot fulfil."""
    return list(LACKS[engine](config))


def engine_candidates(config: Sections) -> list[EngineSpec]:
    """Return the engines that `infra.distributed_type` allows, the preferred one first; never empty. `auto` allows
    those that can run `config`; the rules refuse a configuration that no engine can run."""
    rows = list(ENGINES.values())
    named = [row for row in rows if config.infra.distributed_type in row.distributed_types]
    return named or [row for row in rows if not engine_conflicts(config, row.name)] or rows[-1:]
