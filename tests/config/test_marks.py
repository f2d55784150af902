"""The marks on the fields: what follows from them is written out once more, since checkpoints rely on it."""

from __future__ import annotations

from typing import get_args

from ds_encdec.config.schema import Mark, marked
from ds_encdec.config.sections import fields

DATA = "max_seq_length max_encoder_length max_decoder_length ul2_task_weights use_mode_tokens shuffle_buffer_size "
DATA += "max_examples_per_micro_batch packing_pool_examples packing_max_wait_batches eval_fraction"
EXAMPLES = "eval_fraction max_seq_length max_encoder_length max_decoder_length use_mode_tokens "
EXAMPLES += "input_template output_template field_mapping converter messages_column tools_column weight_column "
EXAMPLES += "chat_targets on_long_row train_split_ratio val_test_split_ratio"
UNTRAINED = "gradient_accumulation_steps per_device_eval_batch_size eval_steps eval_samples save_steps "
UNTRAINED += "eval_generate_samples generation_max_new_tokens generation_num_beams save_strategy "
UNTRAINED += "load_best_model_at_end export_at_end callbacks "
UNTRAINED += "save_interval_hours save_total_limit save_on_best async_save average_checkpoints logging_steps report_to "
UNTRAINED += "activation_checkpointing activation_checkpointing_every_n activation_offload torch_compile"
TUNABLE = (
    "learning_rate weight_decay max_grad_norm lr_scheduler_type warmup_steps warmup_ratio warmup_type min_lr_ratio "
)
TUNABLE += "lr_scheduler_power lr_scheduler_timescale wsd_decay_fraction "
TUNABLE += "max_consecutive_skipped_steps early_stopping_patience early_stopping_threshold "
TUNABLE += "metric_for_best_model greater_is_better "
TUNABLE += "residual_dropout attention_dropout loss label_smoothing z_loss"
SOURCE = "dataset_name dataset_config dataset_split dataset_revision data_files text_column mixture "
SOURCE += "mixture_weights_count eval_files eval_dataset_name eval_dataset_config eval_split test_files test_split"


def test_the_fields_that_order_the_data_are_those_of_the_fingerprints_there_are() -> None:
    """A field more, or less, and no checkpoint made before could be resumed."""
    assert marked(Mark.ORDER) == [f"data.{name}" for name in DATA.split()]


def test_a_comparison_knows_what_losses_depend_on() -> None:
    tokens = {"model.tokenizer_name_or_path", "model.num_sentinel_tokens", "model.architecture.vocab_size"}
    assert set(marked(Mark.TOKENS)) == tokens
    assert set(marked(Mark.TEXTS)) == {f"data.{name}" for name in SOURCE.split()}
    examples = {"training.eval_samples", *(f"data.{name}" for name in EXAMPLES.split())}
    assert (set(marked(Mark.EXAMPLES)), marked(Mark.MIXTURE)) == (examples, ["data.ul2_task_weights"])


def test_what_may_change_in_the_middle_of_a_phase() -> None:
    elsewhere = {
        "data.preprocessing_num_workers",
        "data.prepared_dir",
        "model.loss_chunk_tokens",
        "model.use_flash_attention",
    }
    assert set(marked(Mark.UNTRAINED)) == elsewhere | {f"training.{name}" for name in UNTRAINED.split()}
    assert set(marked(Mark.TUNABLE)) == {f"training.{name}" for name in TUNABLE.split()}


def test_marks_change_neither_types_nor_the_json_schema() -> None:
    for path, info in fields().items():
        assert Mark not in {type(part) for part in get_args(info.annotation)}, path
