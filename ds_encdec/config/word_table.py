"""The words of other tools: which field of ours each stands for, or why there is none.

`rewording.py` reads the rows, and docs/coming-from.md is made of them (scripts/config_reference.py). A row is right for
everyone who uses its names, or it says what to decide: a wrong guess is worse than none.
"""

from collections.abc import Iterator

from ds_encdec.config.words import (
    NOTHING,
    Meaning,
    Word,
    deepspeed,
    files,
    fsdp,
    left_out,
    ratio,
    seconds,
    switch,
    targets,
)

BF16: Meaning = {"training.bf16": True, "training.fp16": False}
FP16: Meaning = {"training.bf16": False, "training.fp16": True}
FP32: Meaning = {"training.bf16": False, "training.fp16": False}
LORA: Meaning = {"model.lora": {}}
NO_LORA: Meaning = {"model.lora": None}
NO_EVALUATION: Meaning = {"training.eval_samples": 0}
FULL: Meaning = {"training.activation_checkpointing": "full"}
PLAIN: Meaning = {"training.activation_checkpointing": "none"}
FLASH: Meaning = {"model.use_flash_attention": True}
NO_FLASH: Meaning = {"model.use_flash_attention": False}
PRECISION = {
    **dict.fromkeys(("bf16", "bfloat16", "bf16-mixed", "torch.bfloat16"), BF16),
    **dict.fromkeys(("fp16", "float16", "half", "16-mixed", "torch.float16"), FP16),
    **dict.fromkeys(("no", "fp32", "float32", "torch.float32"), FP32),
    "auto": {},
    "fp8": "there is no FP8: bf16 is what trains here",
}
FREED: Meaning = {"infra.fsdp_sharding_strategy": "FULL_SHARD"}
KEPT: Meaning = {"infra.fsdp_sharding_strategy": "SHARD_GRAD_OP"}
OFFLOAD: dict[str, Meaning] = {"true": "cpu", "false": "none"}
LAUNCHER = "the launcher says where ranks run: deepspeed --hostfile FILE, or torchrun"
SIDES = "an example has two sides: set data.max_encoder_length and data.max_decoder_length, each in tokens"
CADENCE = "cadences are in optimizer steps: set "
PACKED = "examples are packed into full micro-batches and never padded"
PARALLEL = "one model is never cut across GPUs but by sharding: infra.sharding_stage is the one way"

WORDS: tuple[Word, ...] = (
    # How long, how fast.
    Word(
        "max_steps train_steps training.steps total_steps max_train_steps max_iters num_steps",
        "hf axolotl llama titan other",
        "training.num_train_steps",
        values={"-1": {}},
    ),
    Word("epochs num_epochs max_epochs", "axolotl other", "training.num_train_epochs"),
    Word("lr max_lr peak_lr", "titan other", "training.learning_rate"),
    Word("lr_warmup_steps num_warmup_steps warmup_iters", "accelerate other", "training.warmup_steps"),
    Word("training.warmup_steps", "hf", reads=ratio),
    Word("lr_scheduler scheduler scheduler_type lr_schedule", "axolotl accelerate other", "training.lr_scheduler_type"),
    Word(
        "training.lr_scheduler_type",
        "hf",
        values={
            "constant_with_warmup": {"training.lr_scheduler_type": "constant"},
            "cosine_with_min_lr": {"training.lr_scheduler_type": "cosine"},
            "warmup_stable_decay": {"training.lr_scheduler_type": "wsd"},
        },
    ),
    Word(
        "min_lr_rate cosine_min_lr_ratio min_lr_factor lr_scheduler_kwargs.min_lr_rate",
        "hf axolotl titan",
        "training.min_lr_ratio",
    ),
    Word("min_lr lr_scheduler_kwargs.min_lr", "hf other", why="it is a share of the peak: set training.min_lr_ratio"),
    Word("lr_scheduler_kwargs", "hf", why="schedules have fields: training.min_lr_ratio, training.wsd_decay_fraction"),
    Word(
        "decay_type",
        "titan",
        values={name: {"training.lr_scheduler_type": name} for name in ("cosine", "linear")},
        why="set training.lr_scheduler_type",
    ),
    Word("decay_ratio", "titan", why="set training.lr_scheduler_type=wsd and training.wsd_decay_fraction"),
    Word(
        "optim optimizer optimizer.name optimizer_type",
        "hf axolotl titan other",
        values=dict.fromkeys(("adamw", "adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused"), NOTHING),
        why="AdamW is the only optimizer: remove it",
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
    left_out("use_cache torch_empty_cache_steps skip_memory_metrics", "hf", "nothing of it is needed"),
    # Machines.
    Word("use_cpu no_cuda", "hf accelerate", values=switch({"infra.device": "cpu"}, {})),
    Word("num_processes ngpu world_size nproc_per_node n_gpus devices", "accelerate other", "infra.num_gpus"),
    Word(
        "infra.distributed_type",
        "accelerate",
        values={
            "fsdp": {"infra.distributed_type": "fsdp"},
            "deepspeed": {"infra.distributed_type": "deepspeed"},
            "multi_gpu": {"infra.distributed_type": "ddp"},
            "multi_cpu": {"infra.distributed_type": "ddp", "infra.device": "cpu"},
            "no": {"infra.num_gpus": 1},
        },
    ),
    Word("accelerator", "other", values={"cpu": {"infra.device": "cpu"}, "gpu": {}, "cuda": {}, "auto": {}}),
    Word("strategy", "other", why="set infra.distributed_type and infra.sharding_stage"),
    Word("deepspeed deepspeed_config_file deepspeed_path", "hf axolotl llama accelerate", reads=deepspeed),
    Word(
        "infra.sharding_stage",
        "other",
        values={str(stage): {"infra.sharding_stage": f"zero{stage}"} for stage in range(4)},
    ),
    Word("zero_stage stage_of_zero", "accelerate other", "infra.sharding_stage"),
    *(
        Word(f"infra.{name}", "other", values={text: {f"infra.{name}": meant} for text, meant in OFFLOAD.items()})
        for name in ("offload_optimizer", "offload_params")
    ),
    Word("offload_optimizer_device", "accelerate", "infra.offload_optimizer"),
    Word("offload_param_device offload_param", "accelerate", "infra.offload_params"),
    Word("offload_optimizer_nvme_path offload_param_nvme_path", "accelerate", "infra.nvme_path"),
    left_out("zero3_init_flag zero3_save_16bit_model", "accelerate", "models are built in shards, exports are whole"),
    Word("fsdp", "hf axolotl", reads=fsdp, values=switch({"infra.distributed_type": "fsdp"}, {})),
    Word("fsdp_offload_params fsdp_config.offload_params cpu_offload", "accelerate", "infra.fsdp_cpu_offload"),
    Word(
        "infra.fsdp_sharding_strategy",
        "accelerate",
        values={
            str(number): {"infra.fsdp_sharding_strategy": name}
            for number, name in enumerate(("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD"), start=1)
        },
    ),
    Word(
        "fsdp_reshard_after_forward reshard_after_forward",
        "accelerate titan",
        values=switch(FREED, KEPT)
        | {"full_shard": FREED, "shard_grad_op": KEPT, "always": FREED, "never": KEPT, "default": NOTHING},
        why="set infra.sharding_stage: zero3 (free parameters after the forward pass) or zero2",
    ),
    left_out(
        "fsdp_auto_wrap_policy fsdp_transformer_layer_cls_to_wrap fsdp_backward_prefetch fsdp_forward_prefetch "
        "fsdp_backward_prefetch_policy fsdp_use_orig_params fsdp_sync_module_states fsdp_cpu_ram_efficient_loading "
        "fsdp_state_dict_type fsdp_version fsdp_limit_all_gathers fsdp_min_num_params state_dict_type "
        "final_state_dict_type auto_wrap_policy transformer_layer_cls_to_wrap cpu_ram_efficient_loading version",
        "accelerate hf axolotl",
        "FSDP2 shards layer by layer, and checkpoints have one form",
    ),
    left_out(
        "compute_environment machine_rank num_machines main_process_ip main_process_port main_training_function "
        "rdzv_backend same_network tpu_env tpu_use_cluster tpu_use_sudo enable_cpu_affinity local_rank gpu_ids "
        "deepspeed_multinode_launcher deepspeed_hostfile",
        "accelerate hf axolotl",
        LAUNCHER,
    ),
    left_out("backend ddp_backend ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers", "hf", "chosen"),
    Word(
        "ddp_timeout",
        "hf llama",
        reads=seconds,
        why="set infra.distributed_timeout_minutes",
    ),
    Word(
        "tensor_parallel_degree tensor_parallel_size pipeline_parallel_degree context_parallel_degree "
        "sequence_parallel_degree context_parallel_size pipeline_parallel_size expert_parallel_degree",
        "titan axolotl other",
        values={"1": {}},
        why=PARALLEL,
    ),
    Word(
        "data_parallel_shard_degree data_parallel_replicate_degree",
        "titan",
        values={"-1": {}, "1": {}},
        why="set infra.sharding_stage, and for a hybrid infra.hybrid_shard_size",
    ),
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
    Word("checkpoint.interval save_interval checkpointing_steps", "titan accelerate other", "training.save_steps"),
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
    Word("push_to_hub", "hf", values={"false": {}}, why="it is a step of its own: `ds-encdec push-to-hub`"),
    left_out(
        "hub_model_id hub_token hub_strategy hub_private_repo hub_always_push hub_revision",
        "hf axolotl",
        "nothing is pushed in a run: `ds-encdec push-to-hub` takes the name, and HF_TOKEN the token",
    ),
    # Models.
    Word(
        "base_model model_id hf_model_id pretrained_model_name_or_path model_name hf_assets_path",
        "axolotl titan other",
        "model.model_name_or_path",
    ),
    Word("tokenizer_name tokenizer_path tokenizer", "hf titan other", "model.tokenizer_name_or_path"),
    left_out("base_model_config model_type tokenizer_type tokenizer_use_fast config_name", "axolotl", "Qwen3 is read"),
    left_out("trust_remote_code", "hf axolotl llama", "no code of a model's folder is run"),
    Word(
        "model.name model.flavor",
        "titan",
        why="name a checkpoint (model.model_name_or_path) or model.architecture's sizes",
    ),
    Word(
        "finetuning_type adapter",
        "llama axolotl",
        values={
            "full": NO_LORA,
            "none": NO_LORA,
            "lora": LORA,
            "qlora": {"model.lora.quantize": "nf4"},
            "freeze": "set training.freeze: patterns of the parameters that are not trained",
        },
        why="set model.lora, or leave it out to train all weights",
    ),
    Word("use_lora use_peft model.lora", "other", values=switch(LORA, NO_LORA)),
    Word("full_ft", "other", values=switch(NO_LORA, LORA)),
    Word("lora_r lora_rank lora.rank model.lora.rank model.lora.lora_rank", "axolotl llama other", "model.lora.r"),
    Word("lora.alpha model.lora.alpha", "other", "model.lora.lora_alpha"),
    Word("lora.dropout model.lora.dropout", "other", "model.lora.lora_dropout"),
    Word("lora_target lora_target_modules lora.targets model.lora.targets", "llama axolotl", reads=targets),
    Word("lora_target_linear", "axolotl", values={"true": LORA}, why="set model.lora.target_modules"),
    Word(
        "lora_modules_to_save modules_to_save",
        "axolotl hf",
        why="nothing but adapters is trained beside LoRA: remove it",
    ),
    Word(
        "load_in_4bit quantization_bit",
        "axolotl llama",
        values={"true": {"model.lora.quantize": "nf4"}, "4": {"model.lora.quantize": "nf4"}, "false": {}},
        why="4 bits are what there is: model.lora.quantize=nf4",
    ),
    Word("load_in_8bit", "axolotl", values={"false": {}}, why="4 bits are what there is: model.lora.quantize=nf4"),
    Word("lora_model_dir adapter_name_or_path", "axolotl llama", why="merge it first, and name the merged model"),
    # Data.
    Word(
        "stage",
        "llama",
        values={"pt": {"data.objective": "ul2"}, "sft": {"data.objective": "sft"}},
        why="there are two objectives: data.objective=ul2 and sft",
    ),
    Word("dataset_config_name", "hf", "data.dataset_config"),
    Word(
        "train_file train_files path_train",
        "hf other",
        reads=files("data.data_files"),
        why="set data.data_files, and data.dataset_name to what they are: json, text, csv or parquet",
    ),
    Word("validation_file path_eval", "hf other", reads=files("data.eval_files"), why="set data.eval_files"),
    Word("test_file", "hf", reads=files("data.test_files"), why="set data.test_files"),
    Word("eval_dataset", "llama other", "data.eval_dataset_name"),
    Word(
        "dataset datasets dataset_dir dataset_path test_datasets",
        "axolotl llama titan",
        why="set data.dataset_name: a name on the hub, or json with data.data_files; several are data.mixture",
    ),
    Word(
        "val_set_size val_size",
        "axolotl llama",
        values=dict.fromkeys(("0", "0.0"), NO_EVALUATION),
        why="set data.eval_fraction (ul2), or data.train_split_ratio and data.val_test_split_ratio (sft)",
    ),
    Word("dataset_text_field text_column_name", "hf", "data.text_column"),
    Word("num_proc dataset_processes dataset_num_proc", "axolotl hf other", "data.preprocessing_num_workers"),
    left_out(
        "dataloader_num_workers dataloader_pin_memory dataloader_prefetch_factor dataloader_persistent_workers "
        "dataloader_drop_last remove_unused_columns dataloader_multiprocessing_context dataloader_in_order",
        "hf axolotl llama",
        "data.preprocessing_num_workers make the batches, ahead of time",
    ),
    Word("dataset_prepared_path tokenized_path", "axolotl llama", why="`ds-encdec prepare` fills data.prepared_dir"),
    Word(
        "max_samples max_train_samples", "hf llama", why="all rows are read: cut the file, or stop by num_train_steps"
    ),
    Word(
        "template chat_template",
        "llama axolotl",
        why="conversations (data.messages_column) go through the tokenizer's own template, others through "
        "data.input_template and data.output_template",
    ),
    Word("train_on_inputs train_on_prompt", "axolotl llama", values={"false": {}}, why="losses are of outputs alone"),
    Word("special_tokens", "axolotl", why="sentinels are the tokens that are added: model.num_sentinel_tokens"),
    Word(
        "do_train",
        "hf llama",
        values={"true": {}},
        why="`ds-encdec train` trains: remove it, or call `ds-encdec evaluate` alone",
    ),
    left_out("do_predict", "hf llama", "`ds-encdec evaluate` predicts"),
    left_out("gc_freq gc_debug print_args enable_profiling profile_freq", "titan", "a run measures itself"),
    left_out("debug strict", "axolotl accelerate", "nothing of it is needed"),
    Word("data_seed", "hf", why="everything random follows from training.seed"),
    Word("eval_on_start", "hf", values={"false": {}}, why=CADENCE + "training.eval_steps"),
    Word("optim_args optim_target_modules", "hf", why="AdamW is the only optimizer: remove it"),
    Word("parallelism_config", "hf", why=PARALLEL),
    left_out("accelerator_config", "hf", "every rank makes its own micro-batches, all of one size"),
    Word("trackio_space_id trackio_bucket_id trackio_static_space_id", "hf", why="set training.report_to"),
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


def by_name() -> Iterator[tuple[str, Word]]:
    """Yield each name with its row."""
    for row in WORDS:
        for name in row.names.split():
            yield name, row
