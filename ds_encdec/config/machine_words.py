"""The words of other tools for the machines of a run, and how it is spread over them (`word_table.py` has all)."""

from ds_encdec.config.words import FSDP_STRATEGIES, NOTHING, Meaning, Word, deepspeed, fsdp, left_out, seconds, switch

FREED: Meaning = {"infra.sharding_stage": "zero3"}
KEPT: Meaning = {"infra.sharding_stage": "zero2"}
OFFLOAD: dict[str, Meaning] = {"true": "cpu", "false": "none"}
LAUNCHER = "the launcher says where ranks run: deepspeed --hostfile FILE, or torchrun"
PARALLEL = "one model is never cut across GPUs but by sharding: infra.sharding_stage is the one way"

MACHINE_WORDS: tuple[Word, ...] = (
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
    Word(
        "fsdp_config",
        "hf accelerate axolotl",
        why="as a mapping at a file's top level it is read: put its entries there, or set "
        "infra.distributed_type=fsdp and infra.sharding_stage",
    ),
    Word(
        "fsdp_config.xla fsdp_config.xla_fsdp_v2 fsdp_config.xla_fsdp_grad_ckpt",
        "hf",
        values={"false": {}},
        why="nothing here runs on TPUs: remove it",
    ),
    Word(
        "fsdp_cpu_offload fsdp_offload_params fsdp_config.offload_params cpu_offload",
        "accelerate other",
        "infra.offload_optimizer",
        values=switch(
            {"infra.offload_optimizer": "cpu"}, {"infra.offload_optimizer": "none", "infra.offload_params": "none"}
        ),
    ),
    Word(
        "fsdp_sharding_strategy",
        "accelerate other",
        values={
            name: {"infra.sharding_stage": stage}
            for number, (word, stage) in enumerate(FSDP_STRATEGIES.items(), start=1)
            for name in (word.lower(), str(number))
        },
        why="set infra.sharding_stage: zero3, zero2, zero0 or zero3_hybrid",
    ),
    Word("fsdp_activation_checkpointing", "accelerate other", "training.activation_checkpointing"),
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
        "final_state_dict_type auto_wrap_policy transformer_layer_cls_to_wrap cpu_ram_efficient_loading version "
        "fsdp_config.min_num_params fsdp_config.limit_all_gathers fsdp_config.forward_prefetch "
        "fsdp_config.sync_module_states fsdp_config.use_orig_params fsdp_config.backward_prefetch "
        "fsdp_config.xla_fsdp_settings fsdp_ignored_modules fsdp_ignored_params",
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
    left_out("backend ddp_backend dist", "hf other", "NCCL between GPUs, gloo between CPUs"),
    left_out(
        "ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers",
        "hf",
        "the engine sums the gradients of all trained parameters in buckets of its own",
    ),
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
    Word("parallelism_config", "hf", why=PARALLEL),
    left_out("accelerator_config", "hf", "every rank makes its own micro-batches, all of one size"),
)
