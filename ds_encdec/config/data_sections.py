"""The sections about data: its sources, the examples made of it, and their packing."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from ds_encdec.config.section_base import ADDRESS, Mark, Section, Texts
from ds_encdec.config.settings import unknown_key
from ds_encdec.registry.denoisers import DENOISERS
from ds_encdec.registry.source_kinds import LOCAL_SOURCES

MAX_ROW_BYTES = 1 << 26  # some hundred novels

# Names of data sets that stand for local files.
LOCAL_FORMATS = [name for name, kind in LOCAL_SOURCES.items() if kind.reads_files]


def _by_denoiser(value: Any) -> Any:
    """Read a mapping as the list of its weights in the order of `DENOISERS`; names that are left out get weight 0."""
    if not isinstance(value, dict):
        return value
    if unknown := [name for name in value if name not in DENOISERS]:
        raise ValueError(f"{unknown[0]}: {unknown_key(str(unknown[0]), DENOISERS)}")
    return tuple(value.get(name, 0.0) for name in DENOISERS)


_WeightList = Annotated[tuple[float, ...], Field(min_length=len(DENOISERS), max_length=len(DENOISERS))]
Weights = Annotated[
    tuple[float, ...], BeforeValidator(_by_denoiser, json_schema_input_type=_WeightList | dict[str, float])
]


class Source(Section):
    """A source of documents."""

    dataset_name: Annotated[str, Mark.TEXTS, ADDRESS] = "HuggingFaceFW/fineweb-edu"
    """Hub id of a data set; `builtin` (text that every CPython installation has), `builtin_task` (a task made of it),
    `builtin_pairs` (preferences of its answers), `builtin_functions` (descriptions and code), `random` (random ids);
    `text`, `json`, `csv` or `parquet` (local files, see `data_files`); `python:MODULE:FUNCTION`, your own reader
    (docs/library.md)."""
    dataset_config: Annotated[str | None, Mark.TEXTS] = None
    """Configuration (subset) of a Hugging Face data set."""
    dataset_split: Annotated[str, Mark.TEXTS] = "train"
    """Split of a Hugging Face data set."""
    dataset_revision: Annotated[str | None, Mark.TEXTS] = None
    """Branch, tag or commit of a data set on the hub; None: its main branch. A run keeps the commit of its first
    start."""
    data_files: Annotated[Texts | None, Mark.TEXTS] = None
    """Paths or glob patterns of local files: `text` (a document per file; files above 64 KiB are cut at blank lines),
    `json` (JSON lines, or one array), `csv`, `parquet`. Compressed ones (`.gz`, `.bz2`, `.xz`, `.lzma`, `.zst`, `.lz4`)
    are unpacked once into the cache folder. For a data set of the hub, files of its repository."""
    text_column: Annotated[str, Mark.TEXTS] = "text"
    """Column that holds the text."""

    @property
    def hub_name(self) -> str:
        """Return `DATASET@REVISION`, the key of a commit."""
        return f"{self.dataset_name}@{self.dataset_revision or 'main'}"


class MixtureSource(Source):
    """One source of a weighted mixture. Fields mean what they mean in `data`."""

    weight: float = Field(gt=0)
    """Share of this source, relative to the others, in the unit of `data.mixture_weights_count`."""
    dataset_name: str
    """See `data.dataset_name`."""


class EvalSet(Section):
    """A set of texts to evaluate on beside the main one. Fields mean what they mean in `data`."""

    eval_files: Texts | None = None
    """See `data.eval_files`."""
    eval_dataset_name: str | None = None
    """See `data.eval_dataset_name`."""
    eval_dataset_config: str | None = None
    """See `data.eval_dataset_config`."""
    eval_split: str | None = None
    """See `data.eval_split`."""


class DataConfig(Source):
    """The documents that are read, how they are denoised, and how they are packed."""

    objective: Literal["ul2", "sft", "dpo", "contrastive", "mntp"] = "ul2"
    """`ul2` fills in what denoisers have taken out of a text; `sft` writes the output that goes with an input
    (docs/fine-tuning.md); `dpo` prefers one answer to another (docs/preferences.md). Of an encoder
    alone: `contrastive` embeds texts, `mntp` predicts masked tokens (docs/embeddings.md)."""
    mixture: Annotated[tuple[MixtureSource, ...] | None, Mark.TEXTS] = None
    """Weighted mixture of sources; replaces `dataset_name`."""
    mixture_weights_count: Annotated[Literal["documents", "tokens"], Mark.TEXTS] = "documents"
    """Unit of the weights in `mixture`."""
    on_bad_row: Literal["stop", "skip"] = "stop"
    """End the run at a row that cannot be read (no UTF-8, no JSON, cut short, another number of fields), or skip it."""
    max_bad_rows: int = Field(default=1000, ge=1)
    """Most rows that `on_bad_row: skip` skips in one pass over the data, of all lanes together; a damaged row group
    counts with all its rows."""
    max_row_bytes: int = Field(default=MAX_ROW_BYTES, ge=1024)
    """Most bytes of a row of JSON, CSV or parquet; a longer one is a bad row, and is not read into memory. A JSON array
    may have 16 times as many."""
    streaming: bool = True
    """Read a data set of the hub as it is needed instead of downloading it first."""
    prepared_dir: Annotated[str | None, Mark.UNTRAINED] = None
    """Folder that `ds-encdec prepare` has filled with token ids, which replace the sources. None: documents are
    tokenized when they are used."""
    max_seq_length: Annotated[int, Mark.ORDER, Mark.EXAMPLES] = Field(default=8192, ge=8)
    """Longest raw chunk before denoising, in tokens. Other bounds may be tighter."""
    max_encoder_length: Annotated[int, Mark.ORDER, Mark.EXAMPLES] = Field(default=4096, ge=4)
    """Longest encoder sequence of one example, in tokens."""
    max_decoder_length: Annotated[int, Mark.ORDER, Mark.EXAMPLES] = Field(default=2048, ge=4)
    """Longest decoder sequence of one example, in tokens."""
    ul2_task_weights: Annotated[Weights, Mark.ORDER, Mark.MIXTURE] = Field(
        default=tuple(float(row.weight) for row in DENOISERS.values()),
        description=f"Sampling weights of the denoisers, per chunk: a list in the order {', '.join(DENOISERS)}, or a "
        "mapping by name, in which those that are left out have weight 0.",
    )
    use_mode_tokens: Annotated[bool, Mark.ORDER, Mark.EXAMPLES] = False
    """Put a token that names the denoiser in front of the encoder sequence."""
    preprocessing_num_workers: Annotated[int, Mark.UNTRAINED] = Field(default=4, ge=0)
    """Worker processes per rank that tokenize and pack; 0 works in the training process. The largest count that divides
    the rank's lanes is used, and never changes what is read."""
    shuffle_buffer_size: Annotated[int, Mark.ORDER] = Field(default=10000, ge=1)
    """Documents in one shuffling window of a streamed source. A resume rereads at most one per lane."""
    num_lanes: int | None = Field(default=None, ge=1)
    """Micro-batches of a step over all ranks, fixed for a run. None: ranks × gradient accumulation at the first
    start."""
    max_examples_per_micro_batch: Annotated[int, Mark.ORDER] = Field(default=512, ge=1)
    """Most examples packed into one micro-batch."""
    packing_pool_examples: Annotated[int, Mark.ORDER] = Field(default=64, ge=1)
    """Examples per lane that wait at one time for a micro-batch they fit into."""
    packing_max_wait_batches: Annotated[int, Mark.ORDER] = Field(default=8, ge=2)
    """Micro-batches after which a waiting example is packed first."""
    eval_fraction: Annotated[float, Mark.ORDER, Mark.EXAMPLES] = Field(default=0.005, ge=0.0, lt=1.0)
    """Share of the documents held out for evaluation, chosen by a hash (`ul2`; `sft` has `train_split_ratio`)."""
    input_template: Annotated[str, Mark.EXAMPLES] = "### Instruction:\n{instruction}\n### Input:\n{input}\n"
    """Text that the encoder reads, with a row's fields as `{name}` (`sft`)."""
    output_template: Annotated[str, Mark.EXAMPLES] = "### Response:\n{output}"
    """Text that the decoder writes, with a row's fields as `{name}`, before EOS (`sft`)."""
    field_mapping: Annotated[dict[str, str], Mark.EXAMPLES] = Field(default_factory=dict)
    """Columns by the template's field that they fill, where names differ (`sft`); `a.b` is field b of column a."""
    converter: Annotated[str | None, Mark.EXAMPLES] = None
    """Your own `module:function`, from a row as a dict to the dict, or list of dicts, that templates or messages are
    read from (`sft`)."""
    messages_column: Annotated[str, Mark.EXAMPLES] = "messages"
    """Column of a conversation: a list of objects with `role` and `content`, or ShareGPT's `from` and `value` (`sft`).
    A row that has it goes through the tokenizer's chat template (docs/fine-tuning.md). A turn of the assistant with a
    `weight` (`train`, `trainable`, `training`, `loss`, `loss_scale`) of 0 is not learnt. A column `system` is the first
    turn."""
    tools_column: Annotated[str, Mark.EXAMPLES] = "tools"
    """Column of the tools that a conversation may use: a list of JSON schemas (`sft`)."""
    weight_column: Annotated[str | None, Mark.EXAMPLES] = "weight"
    """Column whose 0 leaves a row out; 1 or nothing keeps it (`sft`). None: every row is learnt. A column that a
    template reads does not count."""
    chat_targets: Annotated[Literal["last", "every"], Mark.EXAMPLES] = "last"
    """Turns of the assistant that are learnt, each as an example: the last one, or every one (`sft`)."""
    on_long_row: Annotated[Literal["stop", "skip", "truncate"], Mark.EXAMPLES] = "stop"
    """End the run at an input or output above its maximum, leave the example out, or cut it (`sft`)."""
    query_prefix: Annotated[str, Mark.EXAMPLES] = ""
    """Text before each query (`contrastive`), which the export has as the prompt `query`."""
    document_prefix: Annotated[str, Mark.EXAMPLES] = ""
    """Text before each positive and negative (`contrastive`), which the export has as the prompt `document`."""
    num_negatives: Annotated[int, Mark.ORDER, Mark.EXAMPLES] = Field(default=0, ge=0, le=64)
    """Negatives of its own that each query has, the first ones of its row (`contrastive`); the texts of all other
    queries of a step are negatives in any case."""
    mask_share: Annotated[float, Mark.ORDER, Mark.EXAMPLES] = Field(default=0.2, gt=0.0, lt=1.0)
    """Share of a text's tokens that are masked and predicted (`mntp`)."""
    train_split_ratio: Annotated[float, Mark.EXAMPLES] = Field(default=0.9, gt=0.0, le=1.0)
    """Share of the rows to train on, chosen by a hash (`sft`)."""
    val_test_split_ratio: Annotated[float, Mark.EXAMPLES] = Field(default=0.5, ge=0.0, le=1.0)
    """Share of the other rows that is the validation split; the rest is the test split (`sft`)."""
    eval_files: Annotated[Texts | None, Mark.TEXTS] = None
    """Paths or patterns of local files to evaluate on, of the kind `eval_dataset_name` or else `dataset_name`; nothing
    is then held out."""
    eval_dataset_name: Annotated[str | None, Mark.TEXTS, ADDRESS] = None
    """Data set to evaluate on, like `dataset_name`; None: the one that is trained on."""
    eval_dataset_config: Annotated[str | None, Mark.TEXTS] = None
    """Configuration (subset) of the data set to evaluate on; None: `dataset_config` where the data set is the same."""
    eval_split: Annotated[str | None, Mark.TEXTS] = None
    """Split to evaluate on; `validation` where only `eval_dataset_name` is set."""
    eval_sets: dict[str, EvalSet] = Field(default_factory=dict)
    """More sets to evaluate on, by their names, up to `training.eval_samples` examples of each. Their figures are
    `eval/NAME/loss` and so on."""
    test_files: Annotated[Texts | None, Mark.TEXTS] = None
    """Paths or patterns of local files that are the test split."""
    test_split: Annotated[str | None, Mark.TEXTS] = None
    """Split that is the test split, of the data set to evaluate on."""

    @property
    def bad_row_limit(self) -> int:
        """Return the most rows that may be unreadable or unusable before the run ends."""
        return self.max_bad_rows if self.on_bad_row == "skip" else 0

    def sources_by_path(self) -> dict[str, Source]:
        """Return the sources that are trained on, by the dotted path of each one's section."""
        if self.mixture is None:
            return {"data": self}
        return {f"data.mixture.{number}": source for number, source in enumerate(self.mixture)}

    def own_split(self, split: str) -> MixtureSource | None:
        """Return the source of the split `validation` or `test`, or None if it is held out of the training data."""
        files, part = {
            "validation": (self.eval_files, self.eval_split),
            "test": (self.test_files, self.test_split),
        }.get(split, (None, None))
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
        """Return a copy of this section that evaluates on the set `name` of `eval_sets` only."""
        return self.model_copy(update={**dict(self.eval_sets[name]), "eval_sets": {}})
