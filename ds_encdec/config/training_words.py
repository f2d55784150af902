"""The words of other tools for how a run trains, evaluates and saves (`word_table.py` has all)."""

from ds_encdec.config.words import NOTHING, Meaning, Word, left_out, own_optimizer, ratio, switch

BF16: Meaning = {"training.bf16": True, "training.fp16": False}
FP16: Meaning = {"training.bf16": False, "training.fp16": True}
FP32: Meaning = {"training.bf16": False, "training.fp16": False}
NO_EVALUATION: Meaning = {"training.eval_samples": 0}
FULL: Meaning = {"training.activation_checkpointing": "full"}
PLAIN: Meaning = {"training.activation_checkpointing": "none"}
FLASH: Meaning = {"model.use_flash_attention": True}
NO_FLASH: Meaning = {"model.use_flash_attention": False}
NO_FP8 = "there is no FP8: bf16 is what trains here"
PRECISION = {
    **dict.fromkeys(("bf16", "bfloat16", "bf16-mixed", "torch.bfloat16"), BF16),
    **dict.fromkeys(("fp16", "float16", "half", "16-mixed", "torch.float16"), FP16),
    **dict.fromkeys(("no", "fp32", "float32", "torch.float32"), FP32),
    "auto": {},
    "fp8": NO_FP8,
}
OPTIMIZERS: dict[str, Meaning] = {
    name: {"training.optimizer": name.partition("_")[0]}
    for name in ("adamw", "adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused", "muon")
}
SIDES = "an example has two sides: set data.max_encoder_length and data.max_decoder_length, each in tokens"
CADENCE = "cadences are in optimizer steps: set "
PACKED = "examples are packed into full micro-batches and never padded"

TRAINING_WORDS: tuple[Word, ...] = (
    # How long, how fast.
    Word(
        "max_steps train_steps training.steps total_steps max_train_steps max_iters num_steps total_iterations",
        "hf axolotl llama titan other",
        "training.num_train_steps",
        values={"-1": {}},
    ),
    Word("epochs num_epochs max_epochs", "axolotl other", "training.num_train_epochs"),
    Word("lr max_lr peak_lr", "titan other", "training.learning_rate"),
    Word(
        "lr_warmup_steps num_warmup_steps warmup_iters warmup_iterations", "accelerate other", "training.warmup_steps"
    ),
    Word("training.warmup_steps", "hf", reads=ratio),
    Word("lr_scheduler scheduler scheduler_type lr_schedule", "axolotl accelerate other", "training.lr_scheduler_type"),
    Word(
        "training.lr_scheduler_type",
        "hf",
        values={
            "constant_with_warmup": {"training.lr_scheduler_type": "constant"},
            "cosine_with_min_lr": {"training.lr_scheduler_type": "cosine"},
            "warmup_stable_decay": {"training.lr_scheduler_type": "wsd"},
            "polynomial_decay": {"training.lr_scheduler_type": "polynomial"},
            "inverse_square_root": {"training.lr_scheduler_type": "inverse_sqrt"},
            "cosine_with_restarts": "a schedule goes down once, and none starts again: set cosine",
        },
    ),
    Word(
        "min_lr_rate cosine_min_lr_ratio min_lr_factor lr_scheduler_kwargs.min_lr_rate",
        "hf axolotl titan",
        "training.min_lr_ratio",
    ),
    Word(
        "min_lr lr_scheduler_kwargs.min_lr lr_end",
        "hf other",
        why="it is a share of the peak: set training.min_lr_ratio",
    ),
    Word(
        "num_cycles lr_num_cycles",
        "hf accelerate",
        values={"0.5": {}},
        why="a schedule goes down once, and none starts again: remove it",
    ),
    Word("lr_power lr_scheduler_kwargs.power", "hf accelerate", "training.lr_scheduler_power"),
    Word("lr_scheduler_kwargs.timescale", "hf", "training.lr_scheduler_timescale"),
    Word(
        "lr_scheduler_kwargs",
        "hf",
        why="schedules have fields: training.min_lr_ratio, lr_scheduler_power, lr_scheduler_timescale",
    ),
    Word(
        "decay_type",
        "titan",
        values={name: {"training.lr_scheduler_type": name} for name in ("cosine", "linear")},
        why="set training.lr_scheduler_type",
    ),
    Word("decay_ratio", "titan", why="set training.lr_scheduler_type=wsd and training.wsd_decay_fraction"),
    Word(
        "optim optimizer.name optimizer_type",
        "hf axolotl titan other",
        values=OPTIMIZERS,
        reads=own_optimizer,
        why="AdamW, Muon and your own, `module:name`, are the optimizers: set training.optimizer",
    ),
    Word(
        "training.optimizer",
        "hf",
        values=OPTIMIZERS,
        reads=own_optimizer,
        why="AdamW, Muon and your own are the optimizers: adamw, muon or `module:name`",
    ),
    Word("beta1", "titan other", "training.adam_beta1"),
    Word("beta2", "titan other", "training.adam_beta2"),
    Word("eps epsilon adam_eps", "titan other", "training.adam_epsilon"),
    Word("betas adam_betas", "other", why="they are two fields: training.adam_beta1 and training.adam_beta2"),
    Word("wd", "other", "training.weight_decay"),
    Word(
        "gradient_clipping grad_clip gradient_clip_val max_norm clip_grad_norm",
        "accelerate titan other",
        "training.max_grad_norm",
    ),
    Word("label_smoothing_factor", "hf", "training.label_smoothing"),
    Word("neftune_noise_alpha", "hf axolotl llama", why="there is no noise on embeddings: remove it"),
    # Batches.
    Word(
        "micro_batch_size local_batch_size per_gpu_train_batch_size per_device_batch_size",
        "axolotl titan other",
        "training.per_device_train_batch_size",
    ),
    Word("eval_batch_size", "axolotl other", "training.per_device_eval_batch_size"),
    Word(
        "batch_size train_batch_size",
        "other",
        why="say of what: training.per_device_train_batch_size (one rank's micro-batch) or training.global_batch_size",
    ),
    Word("total_batch_size effective_batch_size", "other", "training.global_batch_size"),
    Word("accumulate_grad_batches grad_accum_steps", "other", "training.gradient_accumulation_steps"),
    Word("auto_find_batch_size", "hf", values=switch({"training.per_device_train_batch_size": "auto"}, {})),
    Word("max_source_length max_input_length", "hf", "data.max_encoder_length"),
    Word("max_target_length max_output_length", "hf", "data.max_decoder_length"),
    Word(
        "sequence_len cutoff_len seq_len max_seq_len max_length block_size model_max_length context_length",
        "hf axolotl llama titan other",
        why=SIDES,
    ),
    left_out("sample_packing eval_sample_packing packing pad_to_sequence_len multipack", "axolotl llama", PACKED),
    left_out("group_by_length length_column_name pad_to_multiple_of", "hf axolotl", PACKED),
    # Precision, memory, speed.
    Word(
        "mixed_precision torch_dtype precision dtype mixed_precision_param",
        "hf accelerate titan other",
        values=PRECISION,
        why="set training.bf16 or training.fp16",
    ),
    Word("fp8 fp8_config use_fp8", "accelerate axolotl other", values={"false": {}}, why=NO_FP8),
    Word("training.bf16", "axolotl", values={"auto": {}, "full": BF16}),
    Word("training.fp16", "axolotl", values={"auto": {}}),
    left_out("tf32 downcast_bf16 mixed_precision_reduce", "hf accelerate titan", "PyTorch's own default holds"),
    left_out("bf16_full_eval fp16_full_eval", "hf", "evaluations compute in the precision of training"),
    Word(
        "gradient_checkpointing activation_checkpoint.mode use_gradient_checkpointing",
        "hf axolotl llama titan",
        values=switch(FULL, PLAIN)
        | {
            "full": FULL,
            "selective": {"training.activation_checkpointing": "selective"},
            "offload": {"training.activation_checkpointing": "full", "training.activation_offload": True},
        },
        why="set training.activation_checkpointing: none, full, every_n or selective",
    ),
    Word("training.activation_checkpointing", "hf", values=switch(FULL, PLAIN)),
    left_out(
        "gradient_checkpointing_kwargs activation_checkpointing_kwargs activation_checkpoint.selective_ac_option",
        "hf axolotl titan",
        "PyTorch's non-reentrant form is used",
    ),
    Word("compile.enable", "titan", "training.torch_compile"),
    left_out("torch_compile_backend torch_compile_mode", "hf", "inductor compiles layers as they are"),
    Word(
        "attn_implementation flash_attn",
        "hf llama",
        values=dict.fromkeys(("flash_attention_2", "flash_attention_3", "fa2", "fa3"), FLASH)
        | dict.fromkeys(("sdpa", "eager", "disabled"), NO_FLASH)
        | {"auto": NOTHING},
        why="set model.use_flash_attention",
    ),
    Word("flash_attention", "axolotl", "model.use_flash_attention"),
    left_out("xformers_attention sdp_attention use_liger_kernel liger_kernel_config", "hf axolotl", "kernels are ours"),
    left_out("torch_adam", "other", "torch's fused AdamW is what steps, under every engine"),
    left_out("use_cache torch_empty_cache_steps skip_memory_metrics", "hf", "nothing of it is needed"),
    # Evaluating, saving, logging.
    Word(
        "eval_strategy evaluation_strategy do_eval",
        "hf axolotl llama",
        values={"steps": {}, "true": {}, "no": NO_EVALUATION, "false": NO_EVALUATION},
        why=CADENCE + "training.eval_steps (training.eval_samples=0: no evaluation)",
    ),
    Word("evals_per_epoch", "axolotl", why=CADENCE + "training.eval_steps"),
    Word("eval_delay", "hf", values={"0": {}}, why=CADENCE + "training.eval_steps"),
    Word("max_eval_samples eval_max_samples", "hf", "training.eval_samples"),
    Word(
        "training.save_strategy",
        "hf",
        values={"epoch": CADENCE + "training.save_steps", "no": "a run always saves: set a great training.save_steps"},
    ),
    Word("saves_per_epoch", "axolotl", why=CADENCE + "training.save_steps"),
    Word(
        "checkpoint.interval save_interval checkpointing_steps chkpt_saving_iterations",
        "titan accelerate other",
        "training.save_steps",
    ),
    Word("checkpoint.enable", "titan", values={"true": {}}, why="a run always saves: set a great training.save_steps"),
    Word(
        "checkpoint.async_mode",
        "titan",
        values={"disabled": {"training.async_save": False}},
        why="set training.async_save",
    ),
    left_out(
        "checkpoint.folder checkpoint.directory checkpoint.prefix checkpoint.timestamp save_tb_folder job.description",
        "titan other",
        "a run's folder is infra.output_dir, and checkpoints in it are checkpoints/step-N",
    ),
    Word("keep_latest_k checkpoints_total_limit", "titan accelerate", "training.save_total_limit"),
    Word("eval_interval validation.freq", "titan other", "training.eval_steps"),
    Word(
        "val_check_interval",
        "other",
        why="it counts micro-batches, or is a share of an epoch: set training.eval_steps, in optimizer steps",
    ),
    Word("log_interval log_freq log_every_n_steps", "titan other", "training.logging_steps"),
    Word(
        "logging_strategy",
        "hf",
        values={"steps": {}},
        why=CADENCE + "training.logging_steps",
    ),
    left_out("logging_first_step", "hf", "lines come every training.logging_steps"),
    left_out(
        "log_level log_level_replica log_on_each_node logging_nan_inf_filter",
        "hf",
        "rank 0 tells what there is",
    ),
    left_out("plot_loss disable_tqdm include_num_input_tokens_seen", "hf llama", "`ds-encdec report` draws the curves"),
    Word("training.report_to", "hf", values={"all": {"training.report_to": ["wandb", "tensorboard"]}}),
    Word("run_name wandb_name", "hf axolotl", "infra.wandb_run_name"),
    Word("project", "hf", "infra.wandb_project"),
    Word("enable_tensorboard use_tensorboard", "titan", why="set training.report_to: [wandb, tensorboard]"),
    Word("enable_wandb use_wandb", "titan", why="set training.report_to: [wandb, tensorboard]"),
    left_out("wandb_watch wandb_log_model", "axolotl", "W&B is told metrics and the configuration"),
    Word(
        "predict_with_generate", "hf llama", values={"false": {}}, why="say of how many: training.eval_generate_samples"
    ),
    Word("generation_max_length max_new_tokens", "hf llama", "training.generation_max_new_tokens"),
    Word("num_beams", "hf", "training.generation_num_beams"),
    Word(
        "resume_from_checkpoint resume_from auto_resume_from_checkpoints",
        "hf axolotl llama",
        values={"false": {}},
        why="a start says it, not the configuration: --resume auto, or --resume PATH",
    ),
    Word("dump_folder out_dir save_dir project_dir", "titan other", "infra.output_dir"),
    left_out("overwrite_output_dir overwrite_cache", "hf llama", "a run never writes into another's folder"),
    left_out(
        "save_safetensors save_only_model save_on_each_node last_save_model_only",
        "hf llama titan",
        "checkpoints hold what a resume needs; the model alone is in export/final",
    ),
    Word("push_to_hub", "hf", values={"false": {}}, why="it is a step of its own: `hf upload`"),
    left_out(
        "hub_model_id hub_token hub_strategy hub_private_repo hub_always_push hub_revision",
        "hf axolotl",
        "nothing is pushed in a run: `hf upload` takes the name",
    ),
    left_out("gc_freq gc_debug print_args enable_profiling profile_freq", "titan", "a run measures itself"),
    left_out("debug strict", "axolotl accelerate", "nothing of it is needed"),
    Word("data_seed", "hf", why="everything random follows from training.seed"),
    Word("eval_on_start", "hf", values={"false": {}}, why=CADENCE + "training.eval_steps"),
    Word("optim_args optim_target_modules", "hf", why="optimizers have fields of `training`: remove it"),
    # "trackio" is what transformers 5.3 writes where nothing was given.
    Word("trackio_space_id", "hf", values={"trackio": {}}, why="set training.report_to"),
    Word("trackio_bucket_id trackio_static_space_id", "hf", why="set training.report_to"),
    Word("generation_config", "hf", why="set training.generation_max_new_tokens and training.generation_num_beams"),
    left_out(
        "average_tokens_across_devices prediction_loss_only eval_do_concat_batches eval_use_gather_object "
        "eval_accumulation_steps batch_eval_metrics include_for_metrics label_names ddp_static_graph "
        "enable_jit_checkpoint restore_callback_states_from_checkpoint sortish_sampler train_sampling_strategy",
        "hf",
        "losses are means over the tokens of all ranks, and data has one order",
    ),
    left_out("full_determinism ignore_data_skip", "hf", "runs are deterministic, and resume where they were"),
)
