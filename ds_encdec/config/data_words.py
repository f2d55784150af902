"""The words of other tools for models and data (`word_table.py` has all)."""

from ds_encdec.config.words import Meaning, Word, files, left_out, switch, targets

LORA: Meaning = {"model.lora": {}}
NO_LORA: Meaning = {"model.lora": None}

DATA_WORDS: tuple[Word, ...] = (
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
        "model.name model.flavor hf_config",
        "titan other",
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
    Word(
        "no_merge",
        "other",
        values=switch({"training.export_at_end": False}, {}),
        why="true: no merged model is written at the end (`ds-encdec export --adapter` writes adapters)",
    ),
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
        why="for other endings set data.data_files, and data.dataset_name to what they are: json, text, csv or parquet",
    ),
    Word(
        "validation_file path_eval", "hf other", reads=files("data.eval_files"), why="for several set data.eval_files"
    ),
    Word("test_file", "hf", reads=files("data.test_files"), why="for several set data.test_files"),
    Word("eval_dataset", "llama other", "data.eval_dataset_name"),
    Word(
        "dataset datasets dataset_dir dataset_path test_datasets",
        "axolotl llama titan",
        why="set data.dataset_name: a name on the hub, or json with data.data_files; several are data.mixture",
    ),
    Word(
        "val_set_size val_size validation_split_percentage",
        "axolotl llama hf",
        values={text: {"training.eval_samples": 0} for text in ("0", "0.0")},
        why="set data.eval_fraction (ul2), or data.train_split_ratio and data.val_test_split_ratio (sft)",
    ),
    Word(
        "cache_dir",
        "hf",
        why="variables say it: HF_HOME is the folder of downloads, XDG_CACHE_HOME that of copies made here",
    ),
    Word("num_workers", "other", "data.preprocessing_num_workers"),
    Word("dataset_text_field text_column_name", "hf", "data.text_column"),
    Word("num_proc dataset_processes dataset_num_proc", "axolotl hf other", "data.preprocessing_num_workers"),
    left_out("remove_unused_columns", "hf", "only the columns that the templates or data.text_column name are read"),
    left_out(
        "dataloader_num_workers dataloader_pin_memory dataloader_prefetch_factor dataloader_persistent_workers "
        "dataloader_drop_last dataloader_multiprocessing_context dataloader_in_order",
        "hf axolotl llama",
        "data.preprocessing_num_workers processes make the batches, ahead of time",
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
)
