"""The contenders of train_step.py, a function each: the same model trained on the same examples by other loops.

    python scripts/bench/contenders.py hf_deepspeed_zero3 '{"documents": "equal"}'     (then a number of steps a line)

All start from the same weights, use AdamW in float32 on master weights with bf16 layers (or float32 ones), the same
rates, and gradients clipped at 1. Ours is the product itself, `run_training`, only that its loader hands out the given
examples; those of the others are handed out ready as well.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import numpy as np
import torch
from torch import Tensor
from turns import ROOT, Turns

from ds_encdec.base.types import IGNORE_INDEX, Batch, Example
from ds_encdec.config.schedules import lr_lambda
from ds_encdec.config.schema import FullConfig, load_config
from ds_encdec.config.shares import Budgets, token_budgets
from ds_encdec.data.examples.chunks import Chunker
from ds_encdec.data.loader import collate
from ds_encdec.data.packing import Packer, Waiting
from ds_encdec.engine.deepspeed.json import render_deepspeed_json
from ds_encdec.engine.sharded_engine import parameter_groups
from ds_encdec.model.configuration import Qwen3Seq2SeqConfig
from ds_encdec.model.modeling import Qwen3ForSeq2SeqLM
from ds_encdec.model.weights import random_weights
from ds_encdec.objectives.tokens import packed_forward
from ds_encdec.tokenizer.sentinels import Vocabulary

SENTINELS = 32
MICRO_BATCHES = 4096  # as many as any contender takes; the stream of the web-like documents ends there


@dataclass(frozen=True)
class Job:
    """One comparison. `documents`: `equal`, each example as long as it may be, or `web`, of log-normal lengths.

    A micro-batch is `batch` examples of the greatest lengths, or as many tokens; one micro-batch of each rank a step.
    """

    documents: str = "equal"
    ranks: int = 1
    hidden: int = 256
    layers: int = 4
    vocab: int = 8192
    encoder_length: int = 512
    decoder_length: int = 256
    batch: int = 2
    median_tokens: int = 80
    bf16: bool = True

    def config(self, *changes: str) -> FullConfig:
        """The configuration of our run, of which the others take the sizes, the rates and DeepSpeed's JSON."""
        heads = max(2, self.hidden // 64)
        settings = f"""
            model.architecture.vocab_size={self.vocab} model.architecture.hidden_size={self.hidden}
            model.architecture.intermediate_size={3 * self.hidden} model.architecture.num_hidden_layers={self.layers}
            model.architecture.num_attention_heads={heads} model.architecture.num_key_value_heads={heads // 2}
            model.architecture.head_dim={self.hidden // heads}
            data.max_seq_length={self.encoder_length} data.max_encoder_length={self.encoder_length}
            data.max_decoder_length={self.decoder_length} data.num_lanes={self.ranks}
            data.preprocessing_num_workers=0 data.eval_fraction=0
            training.per_device_train_batch_size={self.batch} training.learning_rate=3e-4
            training.lr_scheduler_type=WarmupLR training.warmup_steps=2 training.weight_decay=0
            training.bf16={str(self.bf16).lower()} training.num_train_steps=1000000 training.save_steps=1000000
            training.eval_samples=0 training.activation_checkpointing=none training.report_to=[]
            infra.device=cpu infra.num_gpus={self.ranks}
        """
        return load_config(ROOT / "ds_configs" / "quickstart.yaml", [*settings.split(), *changes])

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """Sentinels at the end of the vocabulary, the end and padding before them."""
        first = self.vocab - SENTINELS
        return Vocabulary(tuple(range(first, self.vocab)), first - 1, first - 2, (), self.vocab)

    @cached_property
    def budgets(self) -> Budgets:
        """The counts of one micro-batch, divided over the sides as a run divides them, by its data."""
        first = list(islice(self.examples(), 256))
        encoder, decoder = (sum(len(getattr(one, f"{side}_ids")) for one in first) for side in ("encoder", "decoder"))
        return token_budgets(self.config().data, self.batch, encoder / decoder)

    def examples(self) -> Iterator[Example]:
        """The stream of examples, of random ids; the same in every process."""
        draw = np.random.default_rng(0)
        ids = partial(draw.integers, 2, self.vocab - SENTINELS - 2, dtype=np.int32)
        if self.documents == "equal":
            while True:
                yield Example(ids(size=self.encoder_length), ids(size=self.decoder_length), "R1", "")
        chunker = Chunker.from_config(self.config().data, 0, self.vocabulary)
        while True:
            length = max(8, int(self.median_tokens * np.exp(draw.normal())))
            tokens = ids(size=length)
            for chunk in chunker.chunks(length, str(draw.integers(2**60)), 0):
                yield chunker.example(chunk, tokens, "")

    def micro_batches(self) -> Iterator[list[Example]]:
        """The stream packed into micro-batches."""
        packer: Packer[Example] = Packer(self.budgets, pool_examples=64, max_wait_batches=32)
        arrivals = (Waiting(one, len(one.encoder_ids), len(one.decoder_ids)) for one in self.examples())
        while True:
            yield packer.pack(arrivals)

    @cached_property
    def examples_per_batch(self) -> int:
        """Examples in our micro-batch, on average: the others get as many, and so as many tokens."""
        first = list(islice(self.micro_batches(), 50))
        return round(sum(map(len, first)) / len(first))

    def model_config(self) -> Qwen3Seq2SeqConfig:
        """The sizes, as our run has them."""
        architecture = self.config().model.architecture
        assert architecture is not None
        sizes = architecture.model_dump(exclude_none=True) | {"vocab_size": self.vocab}
        known = {name: value for name, value in sizes.items() if name in Qwen3Seq2SeqConfig().to_dict()}
        special = {"pad_token_id": self.vocabulary.pad_id, "eos_token_id": self.vocabulary.eos_id}
        return Qwen3Seq2SeqConfig(**known, **special, decoder_start_token_id=self.vocabulary.pad_id)

    def model(self, dtype: torch.dtype = torch.float32) -> Qwen3ForSeq2SeqLM:
        """The model with the weights that every contender begins with."""
        model = Qwen3ForSeq2SeqLM(self.model_config())
        weights = random_weights(model.config, self.config().training.seed)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(weights(name))
        return model.to(dtype).train()


def tokens_of(examples: Sequence[Example]) -> int:
    return sum(len(one.encoder_ids) + len(one.decoder_ids) for one in examples)


# Ours.


def ours(job: Job, turns: Turns, *changes: str) -> None:
    """`run_training` with another loader."""
    import dataclasses

    from ds_encdec.base.types import Callback, LossSum
    from ds_encdec.data.loader import LaneLoader
    from ds_encdec.engine.sharded_engine import ShardedEngine
    from ds_encdec.training import build

    rank = int(os.environ["RANK"])
    losses: list[tuple[Tensor, int]] = []
    real_losses, real_data = ShardedEngine.losses, build.build_data

    class Given(LaneLoader):
        """Hands out the job's micro-batches of this rank instead of its pipeline's."""

        batches = islice(job.micro_batches(), rank, None, job.ranks)

        def __next__(self) -> list[Batch]:
            return [collate(next(self.batches), job.budgets, job.vocabulary.pad_id)]

    def recorded(engine: ShardedEngine, batches: Sequence[Batch]) -> Iterator[LossSum]:
        for batch, loss in zip(batches, real_losses(engine, batches), strict=True):
            tokens = batch.target_tokens
            losses.append((loss.total.detach() / tokens, batch.encoder_tokens + tokens))
            yield loss

    def build_data(*arguments: Any, **options: Any) -> Any:
        data = real_data(*arguments, **options)
        return dataclasses.replace(data, loader=Given(data.pipeline, rank=rank, world_size=job.ranks, num_workers=0))

    class Told(Callback):
        def after_step(self, *_: Any) -> None:
            turns.after_step(*losses.pop())

    ShardedEngine.losses, build.build_data = recorded, build_data  # type: ignore[method-assign]
    turns.wait()
    build.run_training(job.config(f"infra.output_dir={_shared_folder()}", *changes), callbacks=[Told()])


def _shared_folder() -> Path:
    """A folder that all ranks of a contender find, which have a port in common. The bench removes what it lies in."""
    return Path(tempfile.gettempdir()) / f"run-{os.environ['MASTER_PORT']}"


def bare(job: Job, turns: Turns) -> None:
    """The model's packed form in the shortest loop: fused AdamW on float32 copies of the bf16 weights."""
    model, training = job.model(torch.bfloat16 if job.bf16 else torch.float32), job.config().training
    groups = parameter_groups(model, training.weight_decay)
    pairs = []
    for group in groups:
        masters = [parameter.detach().float() for parameter in group["params"]]
        pairs += zip(group["params"], masters, strict=True)
        group["params"] = masters
    optimizer = torch.optim.AdamW(groups, lr=1.0, fused=True)
    turns.wait()
    for number, examples in enumerate(job.micro_batches()):
        batch = collate(examples, job.budgets, job.vocabulary.pad_id)
        loss = packed_forward(model, batch).total / batch.target_tokens
        loss.backward()
        for parameter, master in pairs:
            assert parameter.grad is not None
            master.grad, parameter.grad = parameter.grad.float(), None
        torch.nn.utils.clip_grad_norm_([master for _, master in pairs], training.max_grad_norm, foreach=True)
        for group in optimizer.param_groups:
            group["lr"] = training.learning_rate * lr_lambda(number, training)
        optimizer.step()
        with torch.no_grad():
            for parameter, master in pairs:
                parameter.copy_(master)
        turns.after_step(loss.detach(), tokens_of(examples))


# Peers. They pad.


def rows(job: Job) -> Any:
    """The stream's examples, in Hugging Face's words."""
    return [{"input_ids": one.encoder_ids, "labels": one.decoder_ids} for one in islice(job.examples(), MICRO_BATCHES)]


def padded(rows: Sequence[dict[str, Any]], pad_id: int) -> dict[str, Tensor]:
    """Rows padded to the longest of each side; a mask only where something is padded."""
    ids, labels = (
        torch.nn.utils.rnn.pad_sequence(
            [torch.from_numpy(row[name]).long() for row in rows], batch_first=True, padding_value=fill
        )
        for name, fill in (("input_ids", pad_id), ("labels", IGNORE_INDEX))
    )
    lengths = torch.tensor([len(row["input_ids"]) for row in rows])
    valid = torch.arange(ids.shape[1]) < lengths[:, None]
    mask = {} if bool(valid.all()) else {"attention_mask": valid.long()}
    return {"input_ids": ids, "labels": labels, **mask}


def real_tokens(batch: dict[str, Tensor]) -> int:
    """Tokens that are no padding."""
    encoder = batch["attention_mask"].sum() if "attention_mask" in batch else batch["input_ids"].numel()
    return int(encoder + (batch["labels"] != IGNORE_INDEX).sum())


def hugging_face(job: Job, turns: Turns, *changes: str, sampling: str = "sequential") -> None:
    """Hugging Face's Trainer with DeepSpeed, by the JSON of our run with these `changes`."""
    import deepspeed
    from transformers import Trainer, TrainerCallback, TrainingArguments

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # compiled for minutes, and unused on one host
    config = job.config(*changes)
    rendered = render_deepspeed_json(config, world_size=job.ranks, gradient_accumulation_steps=1, device="cpu")
    size = job.examples_per_batch
    rendered |= {"train_micro_batch_size_per_gpu": size, "train_batch_size": size * job.ranks}
    seen: list[tuple[Tensor, int]] = []

    class Told(Trainer):
        def training_step(self, model: Any, inputs: Any, *arguments: Any, **options: Any) -> Tensor:
            tokens = real_tokens(inputs)
            loss = super().training_step(model, inputs, *arguments, **options)
            seen.append((loss.detach(), tokens))
            return loss

    class Wait(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            turns.wait()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            turns.after_step(*seen.pop())

    training = config.training
    adam = ("adam_beta1", "adam_beta2", "adam_epsilon")
    same = ("learning_rate", "weight_decay", "max_grad_norm", "warmup_steps", *adam)
    arguments = TrainingArguments(
        **{name: getattr(training, name) for name in same},
        output_dir=str(_shared_folder()),
        per_device_train_batch_size=size,
        max_steps=1_000_000,
        bf16=job.bf16,
        use_cpu=True,
        deepspeed=rendered,
        train_sampling_strategy=sampling,
        logging_steps=10,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    collator = partial(padded, pad_id=job.vocabulary.pad_id)
    Told(job.model(), arguments, collator, rows(job), callbacks=[Wait()]).train()


ZERO1 = ("infra.sharding_stage=zero1", "infra.offload_optimizer=none")
ZERO3 = ("infra.sharding_stage=zero3", "infra.offload_optimizer=cpu")
FSDP2 = ("infra.distributed_type=fsdp", "infra.sharding_stage=zero3", "infra.offload_optimizer=none")

grouped = partial(hugging_face, sampling="group_by_length")
CONTENDERS: dict[str, Callable[[Job, Turns], None]] = {
    "ours_zero3_offload": lambda job, turns: ours(job, turns, *ZERO3),
    "ours_zero1": lambda job, turns: ours(job, turns, *ZERO1),
    "ours_fsdp2": lambda job, turns: ours(job, turns, *FSDP2),
    "hf_zero3_offload": lambda job, turns: hugging_face(job, turns, *ZERO3),
    "hf_zero3_offload_grouped": lambda job, turns: grouped(job, turns, *ZERO3),
    "hf_zero1": lambda job, turns: hugging_face(job, turns, *ZERO1),
    "hf_zero1_grouped": lambda job, turns: grouped(job, turns, *ZERO1),
    "bare_loop": bare,
}


if __name__ == "__main__":
    CONTENDERS[sys.argv[1]](Job(**json.loads(sys.argv[2])), Turns())
