"""The base of all sections of a configuration, and that of the data, each with its rules.

Each field is followed by its docstring; the reference in docs/ and the JSON schema for editors are
generated from them. Names follow Hugging Face's and DeepSpeed's own. A configuration is frozen: it is
never changed after loading, and run state lives elsewhere.
"""

import ast
import inspect
import re
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from itertools import pairwise
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    WrapValidator,
    field_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError, ValidationError

from ds_encdec.config.settings import Conflict, Rule, broken, join, unknown_key
from ds_encdec.denoisers import DENOISERS, FEWEST_WEIGHTS
from ds_encdec.objectives import OBJECTIVES, template_parts
from ds_encdec.plugins import is_dotted
from ds_encdec.source_kinds import LOCAL_SOURCES, PYTHON, local_kind

LOCAL_FORMATS = [name for name, kind in LOCAL_SOURCES.items() if kind.reads_files]
"""Data set names that stand for local files."""
_FORMAT_OF = {ending: name for name, kind in LOCAL_SOURCES.items() for ending in kind.endings}
"""Endings of such files, which are no names of data sets."""


class Mark(Enum):
    """A fact about a field that others ask for by `marked`."""

    ORDER = "part of the data's fingerprint: it decides which example comes when"
    TOKENS = "where it differs, the losses of two runs are over different tokens"
    TEXTS = "where it differs, two runs are evaluated on different texts"
    EXAMPLES = "where it differs, two runs are evaluated on different examples of the same texts"
    MIXTURE = "where it differs, the losses of two runs are of different mixtures of denoisers"
    UNTRAINED = "may change in the middle of a phase: it does not decide what the phase learns"
    TUNABLE = (
        "may change in the middle of a phase although it decides what it learns: what one turns after a divergence"
    )


def one_or_many(value: Any) -> Any:
    """A single string stands for a tuple of one; Hugging Face's `none` for the empty one."""
    if isinstance(value, str):
        return () if value == "none" else (value,)
    return value


def words(value: Any) -> Any:
    """The same of words, which may stand between commas, as on command lines: no name of theirs has one."""
    is_list = isinstance(value, str) and "," in value
    return tuple(map(str.strip, value.split(","))) if is_list else one_or_many(value)


def _by_denoiser(value: Any, validate: Callable[[Any], Any]) -> Any:
    """A mapping stands for the list of its weights in the order of `DENOISERS`; what it does not name has weight 0.

    A list may end before the rows that have come since the first ones. A wrong length is a mistake beside those of the
    items. Pydantic would end at the first.
    """
    wrong: list[Any] = []
    if isinstance(value, dict):
        if unknown := [name for name in value if name not in DENOISERS]:
            raise ValueError(f"{unknown[0]}: {unknown_key(str(unknown[0]), DENOISERS)}")
        weights = [value.get(name, 0.0) for name in DENOISERS]
        while len(weights) > FEWEST_WEIGHTS and weights[-1] == 0:
            weights.pop()
        value = tuple(weights)
    elif isinstance(value, tuple) and not FEWEST_WEIGHTS <= len(value) <= len(DENOISERS):
        numbers = dict.fromkeys((FEWEST_WEIGHTS, len(DENOISERS)))
        message = f"must be {' to '.join(map(str, numbers))} weights, of {', '.join(DENOISERS)}"
        wrong.append({"type": PydanticCustomError("length", message), "input": value})
    try:
        read = validate(value)
    except ValidationError as error:
        wrong += error.errors()
    if wrong:
        raise ValidationError.from_exception_data("weights", wrong)
    return read


DataFiles = Annotated[tuple[str, ...], BeforeValidator(one_or_many, json_schema_input_type=str | tuple[str, ...])]
_DEFAULT_WEIGHTS = tuple(float(row.weight) for row in DENOISERS.values())
_WeightList = Annotated[tuple[float, ...], Field(min_length=FEWEST_WEIGHTS, max_length=len(DENOISERS))]
Weights = Annotated[
    tuple[float, ...], WrapValidator(_by_denoiser, json_schema_input_type=_WeightList | dict[str, float])
]


class Section(BaseModel):
    """Base of every section: unknown keys are errors, values are immutable and never converted from other types.

    Its rules are not validators of pydantic's, which end at the first mistake: a report names all.
    """

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        defer_build=True,
        protected_namespaces=(),
    )

    @field_validator("*", mode="before")
    @classmethod
    def _read_plain_types(cls, value: Any) -> Any:
        """YAML has lists, not tuples, and writes large integers as 1e5."""
        if isinstance(value, list):
            return tuple(value)
        return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 2**63 else value

    @classmethod
    def docstrings(cls) -> dict[str, str]:
        """Return what is written below each field, or is its description where a table makes that.

        Pydantic would read the source of every class at every start.
        """
        found = {name: field.description for name, field in cls.model_fields.items() if field.description}
        for base in cls.__mro__[-3::-1]:  # without BaseModel and object
            (tree,) = ast.parse(inspect.getsource(base)).body
            assert isinstance(tree, ast.ClassDef)
            for field, text in pairwise(tree.body):
                match field, text:
                    case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(written))):
                        found[name] = inspect.cleandoc(written)
        return found

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        described = handler(schema)
        properties = handler.resolve_ref_schema(described)["properties"]
        for name, text in cls.docstrings().items():
            properties[name]["description"] = text
        return described

    def _rules(self) -> Iterable[Rule]:
        """Every way in which values of this section that are valid by themselves may contradict each other."""
        return ()

    def conflicts(self, at: str = "") -> Iterator[Conflict]:
        """Yield what breaks a rule of this section, or of one inside of it. `at`: the dotted path of this section."""
        yield from broken(self._rules(), at)
        for name, value in self:
            for index, inner in enumerate(value) if isinstance(value, tuple) else [(None, value)]:
                if isinstance(inner, Section):
                    path = join(at, name)
                    yield from inner.conflicts(path if index is None else join(path, index))


class Source(Section):
    """A source of documents."""

    dataset_name: Annotated[str, Mark.TEXTS] = "HuggingFaceFW/fineweb-edu"
    """Hub id of a data set; or `builtin` (text that every CPython installation has), `builtin_task` (a task to
    fine-tune on, made of it), `random` (random ids, to try a cluster without data), or `text`, `json`, `csv`, `parquet`
    (local files, see `data_files`); or `python:MODULE:FUNCTION`, a reader of your own (docs/library.md)."""
    dataset_config: Annotated[str | None, Mark.TEXTS] = None
    """Configuration (subset) of a Hugging Face data set."""
    dataset_split: Annotated[str, Mark.TEXTS] = "train"
    """Split of a Hugging Face data set."""
    dataset_revision: Annotated[str | None, Mark.TEXTS] = None
    """Branch, tag or commit of a data set on the hub; None: its main branch. A run keeps the commit that it found
    at its first start, so later pushes change nothing."""
    data_files: Annotated[DataFiles | None, Mark.TEXTS] = None
    """Paths of local files, or glob patterns where there is no such file, for `text` (one document per file; files
    above 64 KiB are cut at blank lines into documents of at most that size), `json` (JSON lines, or one array), `csv`
    and `parquet`. `.gz`, `.bz2`, `.xz`, `.lzma`, `.zst` and `.lz4` are unpacked once into the cache folder. For a data
    set of the hub, files of its repository."""
    text_column: Annotated[str, Mark.TEXTS] = "text"
    """Column that holds the text."""

    def _rules(self) -> Iterable[Rule]:
        name, formats, files = self.dataset_name, ", ".join(LOCAL_FORMATS), self.data_files
        kind, meant = local_kind(name), _FORMAT_OF.get(name)
        lacks_files = kind and kind.reads_files and not files
        takes_none = kind and not kind.reads_files and files is not None
        no_reader = name.startswith(PYTHON) and not is_dotted(name.removeprefix(PYTHON))
        yield Rule("dataset_name", "write `python:module:function`", no_reader)
        yield Rule("dataset_name", f"no data set; for local files of this kind write `{meant}`", meant)
        yield Rule("dataset_name data_files", f"{name} needs data_files: paths or patterns of local files", lacks_files)
        yield Rule("dataset_name data_files", f"{name} reads no files; for yours set {formats}", takes_none)


class MixtureSource(Source):
    """One source of a weighted mixture. Fields mean what they mean in `data`."""

    weight: float = Field(gt=0)
    """Relative share of this source in the documents, or in the tokens (`data.mixture_weights_count`)."""
    dataset_name: str
    """See `data.dataset_name`."""


class EvalSet(Section):
    """A set of texts to evaluate on beside the main one. Fields mean what they mean in `data`."""

    eval_files: DataFiles | None = None
    """See `data.eval_files`."""
    eval_dataset_name: str | None = None
    """See `data.eval_dataset_name`."""
    eval_dataset_config: str | None = None
    """See `data.eval_dataset_config`."""
    eval_split: str | None = None
    """See `data.eval_split`."""


class DataConfig(Source):
    """The documents that are read, how they are denoised, and how they are packed."""

    objective: Literal["ul2", "sft"] = "ul2"
    """The objective: `ul2` fills in what denoisers have taken out of a text; `sft` writes the output that goes with an
    input (docs/fine-tuning.md)."""
    mixture: Annotated[tuple[MixtureSource, ...] | None, Mark.TEXTS] = None
    """Weighted mixture of sources; replaces `dataset_name`."""
    mixture_weights_count: Annotated[Literal["documents", "tokens"], Mark.TEXTS] = "documents"
    """The unit of the weights in `mixture`: a source of weight 1 beside one of 3 has a quarter of the documents that
    are read, however long they are, or a quarter of their tokens."""
    on_bad_row: Literal["stop", "skip"] = "stop"
    """A row that cannot be read (not UTF-8, no JSON, cut short, without the column, with more fields than there are
    columns, of a damaged row group): end the run, or pass over it."""
    max_bad_rows: int = Field(default=1000, ge=1)
    """Most rows that `on_bad_row: skip` passes over in one pass over the data, of all lanes together; with more the run
    ends. A damaged row group counts with all its rows."""
    streaming: bool = True
    """Read a Hugging Face data set from the hub as it is needed instead of downloading it first."""
    prepared_dir: Annotated[str | None, Mark.UNTRAINED] = None
    """Folder that `ds-encdec prepare` has filled with the documents' tokens: they are read from there, without the
    sources. None: documents are tokenized when they are used."""
    max_seq_length: Annotated[int, Mark.ORDER, Mark.EXAMPLES] = Field(default=8192, ge=8)
    """Longest raw chunk before denoising, in tokens. Other bounds may be tighter."""
    max_encoder_length: Annotated[int, Mark.ORDER, Mark.EXAMPLES] = Field(default=4096, ge=4)
    """Longest encoder sequence of one example, in tokens."""
    max_decoder_length: Annotated[int, Mark.ORDER, Mark.EXAMPLES] = Field(default=2048, ge=4)
    """Longest decoder sequence of one example, in tokens."""
    ul2_task_weights: Annotated[Weights, Mark.ORDER, Mark.MIXTURE] = Field(
        default=_DEFAULT_WEIGHTS,
        description=f"Sampling weights of the denoisers, per chunk: a list in the order {', '.join(DENOISERS)}, or a "
        "mapping by name, in which those that are left out have weight 0.",
    )
    use_mode_tokens: Annotated[bool, Mark.ORDER, Mark.EXAMPLES] = False
    """Put a token that names the denoiser in front of the encoder sequence."""
    preprocessing_num_workers: Annotated[int, Mark.UNTRAINED] = Field(default=4, ge=0)
    """Worker processes per rank that tokenize and pack; 0 works in the training process. They never change
    what is read: the largest count that divides the rank's lanes is used."""
    shuffle_buffer_size: Annotated[int, Mark.ORDER] = Field(default=10000, ge=1)
    """Documents in one shuffling window of a streamed source. A resume rereads at most one per lane."""
    num_lanes: int | None = Field(default=None, ge=1)
    """Micro-batches of one optimizer step over all ranks, fixed for a run. None: world size × gradient
    accumulation at the first start."""
    max_examples_per_micro_batch: Annotated[int, Mark.ORDER] = Field(default=512, ge=1)
    """Most examples packed into one micro-batch."""
    packing_pool_examples: Annotated[int, Mark.ORDER] = Field(default=64, ge=1)
    """Examples that wait at one time for a micro-batch they fit into, per lane."""
    packing_max_wait_batches: Annotated[int, Mark.ORDER] = Field(default=8, ge=2)
    """Micro-batches after which a waiting example is packed first, whatever the fill."""
    eval_fraction: Annotated[float, Mark.ORDER, Mark.EXAMPLES] = Field(default=0.005, ge=0.0, lt=1.0)
    """Share of the documents held out for evaluation, chosen by a hash of the document's key (`ul2`; `sft` has
    `train_split_ratio`)."""
    input_template: Annotated[str, Mark.EXAMPLES] = "### Instruction:\n{instruction}\n### Input:\n{input}\n"
    """Text that the encoder reads, with the fields of a row as `{name}` (`sft`)."""
    output_template: Annotated[str, Mark.EXAMPLES] = "### Response:\n{output}"
    """Text that the decoder writes, with the fields of a row as `{name}` (`sft`). EOS is put behind it."""
    field_mapping: Annotated[dict[str, str], Mark.EXAMPLES] = Field(default_factory=dict)
    """Columns by the name of the template's field that they fill, where it is another (`sft`). `a.b` is field b of the
    object in column a."""
    converter: Annotated[str | None, Mark.EXAMPLES] = None
    """`module:function` of one's own, from a row as a dict to the dict, or list of dicts, that templates or messages
    are read from (`sft`). It is looked for in the working folder and among installed packages."""
    messages_column: Annotated[str, Mark.EXAMPLES] = "messages"
    """Column of a conversation, a list of objects with `role` and `content`, or ShareGPT's with `from` and `value`
    (`sft`). A row that has it goes through the tokenizer's chat template, and any other through the templates above,
    but for one that lacks their columns and has `conversations`. A turn of the assistant with a `weight` (`train`,
    `trainable`, `training`, `loss`, `loss_scale`) of 0 is read and not learnt. The row's `system` is its first turn."""
    tools_column: Annotated[str, Mark.EXAMPLES] = "tools"
    """Column of the tools that a conversation may use, a list of JSON schemas (`sft`)."""
    weight_column: Annotated[str | None, Mark.EXAMPLES] = "weight"
    """Column that says of a row whether it is learnt: 0 leaves it out, 1 or nothing does not (`sft`). None: no column
    says that; nor does one that a template reads."""
    chat_targets: Annotated[Literal["last", "every"], Mark.EXAMPLES] = "last"
    """Turns of the assistant that are learnt: the last one, or every one, each an example (`sft`)."""
    on_long_row: Annotated[Literal["stop", "skip", "truncate"], Mark.EXAMPLES] = "stop"
    """An input above `max_encoder_length` or an output above `max_decoder_length`: end the run, leave the example out,
    or cut off what is too much (`sft`)."""
    train_split_ratio: Annotated[float, Mark.EXAMPLES] = Field(default=0.9, gt=0.0, le=1.0)
    """Share of the rows to train on, chosen by a hash of the row's key (`sft`)."""
    val_test_split_ratio: Annotated[float, Mark.EXAMPLES] = Field(default=0.5, ge=0.0, le=1.0)
    """Share of the other rows that is the validation split; the rest is the test split (`sft`)."""
    eval_files: Annotated[DataFiles | None, Mark.TEXTS] = None
    """Paths or patterns of local files to evaluate on, of the kind that `eval_dataset_name` or else `dataset_name`
    says. All of them is evaluated on, and nothing is held out for it."""
    eval_dataset_name: Annotated[str | None, Mark.TEXTS] = None
    """Data set to evaluate on, like `dataset_name`; None: the one that is trained on."""
    eval_dataset_config: Annotated[str | None, Mark.TEXTS] = None
    """Configuration (subset) of the data set to evaluate on; None: `dataset_config` where the data set is the same."""
    eval_split: Annotated[str | None, Mark.TEXTS] = None
    """Split to evaluate on (`validation`), where one is named or `eval_dataset_name` is."""
    eval_sets: dict[str, EvalSet] = Field(default_factory=dict)
    """More sets to evaluate on, by their names, each with `eval_files`, `eval_dataset_name`, `eval_dataset_config` or
    `eval_split`. Their figures are `eval/NAME/loss` and so on, of up to `training.eval_samples` examples of each."""
    test_files: Annotated[DataFiles | None, Mark.TEXTS] = None
    """Paths or patterns of local files that are the test split, like `eval_files`."""
    test_split: Annotated[str | None, Mark.TEXTS] = None
    """Split that is the test split, of the data set that `eval_split` is one of."""

    def _rules(self) -> Iterable[Rule]:
        weights, names, is_mixed = self.ul2_task_weights, ", ".join(DENOISERS), self.mixture is not None
        if not is_mixed:
            yield from super()._rules()
        yield Rule("mixture", "a mixture needs at least one source", self.mixture == ())
        counts_tokens = self.mixture_weights_count == "tokens"
        yield Rule(
            "mixture_weights_count mixture", "only a mixture has weights: remove it", counts_tokens and not is_mixed
        )
        for name in Source.model_fields:
            is_set = getattr(self, name) != type(self).model_fields[name].default
            message = f"a mixture replaces {name}: remove it, or make it one of the mixture's sources"
            yield Rule(f"mixture {name}", message, is_mixed and is_set)
        yield from self._objective_rules()
        yield from self._split_rules()
        yield from self._eval_set_rules()
        yield Rule("ul2_task_weights", f"weights of {names} must be >= 0", min(weights) < 0)
        yield Rule("ul2_task_weights", f"at least one of {names} must have a weight > 0", not any(weights))

    @property
    def bad_row_limit(self) -> int:
        """Most rows that cannot be read, or used, before the run ends."""
        return self.max_bad_rows if self.on_bad_row == "skip" else 0

    def own_split(self, split: str) -> MixtureSource | None:
        """The source of the split `validation` or `test`; None where it is a part of what is there to train on."""
        fields = {"validation": (self.eval_files, self.eval_split), "test": (self.test_files, self.test_split)}
        files, part = fields.get(split, (None, None))
        other = self.eval_dataset_name
        is_same = other in (None, self.dataset_name)
        if files is None and part is None and not (other and split == "validation"):
            return None
        return MixtureSource(
            weight=1.0,
            dataset_name=other or self.dataset_name,
            dataset_config=self.eval_dataset_config or (self.dataset_config if is_same else None),
            dataset_split=part or split,
            dataset_revision=self.dataset_revision if is_same else None,
            data_files=files,
            text_column=self.text_column,
        )

    def of_eval_set(self, name: str) -> "DataConfig":
        """This section with the set `name` of `eval_sets` in the place of the main one to evaluate on."""
        return self.model_copy(update={**dict(self.eval_sets[name]), "eval_sets": {}})

    def _eval_set_rules(self) -> Iterable[Rule]:
        for name in self.eval_sets:
            is_name = re.fullmatch(r"[\w-]+", name, re.ASCII) is not None
            yield Rule("eval_sets", f"{name!r}: names are of letters, digits, `_` and `-`", not is_name)
            if not is_name:
                continue
            at = f"eval_sets.{name}"
            alone = self.of_eval_set(name)
            message = "name what is in it: eval_files, eval_dataset_name or eval_split"
            yield Rule(at, message, alone.own_split("validation") is None)
            for rule in alone._split_rules():
                fields = rule.fields.split()
                mine = [f"{at}.{field}" if field in EvalSet.model_fields else field for field in fields]
                yield Rule(" ".join(mine), rule.message, rule.is_broken and "eval_" in rule.fields)

    def _objective_rules(self) -> Iterable[Rule]:
        objective = OBJECTIVES[self.objective]
        kinds = [name for name, kind in LOCAL_SOURCES.items() if kind.has_columns]
        if not objective.takes_records:
            for other, name in ((key, name) for key, row in OBJECTIVES.items() for name in row.own_fields):
                is_set = getattr(self, name) != type(self).model_fields[name].get_default(call_default_factory=True)
                message = f"{self.objective} does not read it: set objective={other}, or remove it"
                yield Rule(f"{name} objective", message, name not in objective.own_fields and is_set)
            return
        mixed = {f"mixture.{i}.dataset_name": one.dataset_name for i, one in enumerate(self.mixture or ())}
        for field, dataset in (mixed or {"dataset_name": self.dataset_name}).items():
            message = f"its rows have no columns: take {', '.join(kinds)}, or a data set of the hub"
            yield Rule(f"objective {field}", message, (kind := local_kind(dataset)) and not kind.has_columns)
        for other in (name for row in OBJECTIVES.values() for name in row.split_fields):
            is_set = getattr(self, other) != type(self).model_fields[other].default
            message = f"{self.objective} does not read it: set {' and '.join(objective.split_fields)}, or remove it"
            yield Rule(f"{other} objective", message, other not in objective.split_fields and is_set)
        known: set[str] = set()
        for name in ("input_template", "output_template"):
            template = getattr(self, name)
            try:
                fields = [field for _, field in template_parts(template) if field is not None]
                known.update(fields)
                yield Rule(name, "must hold a field, `{name}`, that a row fills in", not fields)
            except ValueError as error:
                yield Rule(name, f"is no template ({error})", True)
        for field in sorted(self.field_mapping.keys() - known):
            yield Rule("field_mapping", f"no template has a field {field}: {unknown_key(field, known)}", known)
        if self.converter is not None:
            module, _, function = self.converter.partition(":")
            is_name = all(part.isidentifier() for part in [*module.split("."), function])
            yield Rule("converter", "write `module:function`", not is_name)

    def _split_rules(self) -> Iterable[Rule]:
        name = self.eval_dataset_name
        kind = None if self.mixture and name is None else local_kind(name or self.dataset_name)
        meant = f"{'eval_dataset_name' if name or self.mixture else 'dataset_name'}"
        for files, split in (("eval_files", "eval_split"), ("test_files", "test_split")):
            both = getattr(self, files) is not None and getattr(self, split) is not None
            yield Rule(f"{files} {split}", "files have no splits: remove one of the two", both)
            yield Rule(files, "no file is named: name one, or remove the field", getattr(self, files) == ())
            given = next((field for field in (files, split) if getattr(self, field) is not None), None)
            message = "say with eval_dataset_name what this is of: a mixture is of several"
            yield Rule(f"mixture {given} eval_dataset_name", message, given and self.mixture and name is None)
            reads_files = kind is not None and kind.reads_files
            message = f"set {meant} to the kind of these files: {', '.join(LOCAL_FORMATS)}"
            yield Rule(f"{files} {meant}", message, given == files and not reads_files and not self.mixture)
            yield Rule(f"{split} {meant}", "only data sets of the hub have splits", given == split and kind is not None)
        lacks = name is not None and kind is not None and kind.reads_files and self.eval_files is None
        yield Rule("eval_dataset_name eval_files", f"{name} needs eval_files: paths or patterns of local files", lacks)
        stray = self.eval_dataset_config is not None and name is None and self.eval_split is None
        yield Rule("eval_dataset_config eval_dataset_name", "goes with eval_dataset_name or eval_split", stray)
        no_columns = name is not None and kind is not None and not kind.has_columns
        message = "its rows have no columns"
        yield Rule("objective eval_dataset_name", message, OBJECTIVES[self.objective].takes_records and no_columns)
