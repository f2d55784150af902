"""Reads the tested versions of other packages, and lists every place inside deepspeed, torch, transformers, peft and
datasets that this package depends on: private names, and public ones that are replaced, hidden or read undocumented.
The libraries promise none, so an upgrade that renames one is reported at the start of a run, and does not leave a step
unguarded. `replaced` and `write` are the only ways to change one. No unused library is imported."""

from __future__ import annotations

import importlib
import re
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, NamedTuple

from packaging.requirements import Requirement

from ds_encdec.base.types import ConfigError

_PACKAGE = "ds_encdec"


def known_ranges() -> dict[str, Requirement]:
    """Return the requirement for each package by name, including those of extras. A clone's pyproject.toml precedes
    the installed metadata, which may be older. Only a green run of `scripts/dev/newest.sh` raises a range."""
    lines: list[str] = []
    with suppress(OSError, KeyError, tomllib.TOMLDecodeError):  # installed from a wheel
        project = tomllib.loads(Path(__file__).parents[2].joinpath("pyproject.toml").read_text())["project"]
        if project["name"] == _PACKAGE:  # another project's file may lie beside the packages
            lines = sum(project["optional-dependencies"].values(), project["dependencies"])
    lines = lines or requires(_PACKAGE) or []  # a clone need not be installed
    found: dict[str, Requirement] = {}
    for requirement in map(Requirement, lines):
        if requirement.name != _PACKAGE and requirement.specifier:
            found.setdefault(requirement.name, requirement)
    return found


def range_of(name: str) -> str:
    """Return the tested range of one package: `>=5.3,<5.25`."""
    if (requirement := known_ranges().get(name)) is None:
        return "any version"
    return ",".join(sorted(map(str, requirement.specifier), key=lambda bound: bound.startswith("<")))


def outside_tested_ranges() -> list[str]:
    """Return a line for each installed package outside its range: package, version and range."""
    lines = []
    for name, requirement in known_ranges().items():
        with suppress(PackageNotFoundError):
            if not requirement.specifier.contains(found := version(name), prereleases=True):
                lines.append(f"{name} {found} (tested: {range_of(name)})")
    return lines


# The ways to use a place. `read` and `write` are of fields, which may exist on objects alone.
Use = Literal["call", "read", "write", "replace", "override"]


class Place(NamedTuple):
    """A name in a library. `owner`: `module` or `module:Class`. `user`: the file that needs the place."""

    owner: str
    name: str
    use: Use
    user: str

    @property
    def library(self) -> str:
        """The name of the library."""
        return re.split("[.:]", self.owner)[0]

    def is_there(self) -> bool:
        """Import the owner's module, and return whether the place exists. A field that only a built object has counts
        if the source of its class, or module, assigns it."""
        module, _, path = self.owner.partition(":")
        try:
            owner: Any = importlib.import_module(module)
            for part in filter(None, path.split(".")):
                owner = getattr(owner, part)
        except (ImportError, AttributeError):
            return False
        if hasattr(owner, self.name):
            return True
        modules = {one.__module__ for one in owner.__mro__} if isinstance(owner, type) else {module}
        assigned = re.compile(rf"\.{self.name}(: [^=\n]+|, [\w., ]+)? = |^    {self.name}: ", re.MULTILINE)
        return self.use in ("read", "write") and any(assigned.search(_source(one)) for one in modules)


@cache
def _source(module: str) -> str:
    path = getattr(sys.modules[module], "__file__", None)
    return Path(path).read_text(encoding="utf-8") if path and path.endswith(".py") else ""


_GATES = "engine/deepspeed/gates.py"
_TENSORS = "engine/deepspeed/private.py"
_ZERO = "engine/deepspeed/zero.py"
_ENGINE = "deepspeed.runtime.engine:DeepSpeedEngine"
_STAGE3 = "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3"
_STAGE2 = "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer"
_BF16 = "deepspeed.runtime.bf16_optimizer:BF16_Optimizer"
_UNFUSED = "deepspeed.runtime.fp16.unfused_optimizer:FP16_UnfusedOptimizer"
_CUT = "deepspeed.runtime.zero.partition_parameters"
_SWAP = "deepspeed.runtime.swap_tensor.optimizer_utils"
_SCALER = "deepspeed.runtime.fp16.loss_scaler:DynamicLossScaler"
_MODELING = "model/modeling.py"
_BOTH = f"{_STAGE2} {_STAGE3}"

_ROWS: tuple[tuple[str, Use, str, str], ...] = (  # owners and names are separated by blanks
    # The guard of a step, and streams that wait in the host's stead.
    (_BOTH, "replace", _GATES, "unscale_and_clip_grads check_overflow _update_scale"),
    (_BOTH, "replace", _GATES, "independent_gradient_partition_epilogue"),
    (_BOTH, "call", _GATES, "get_param_id loss_scale"),
    (_BOTH, "read", _GATES, "norm_for_param_grads averaged_gradients clip_grad dp_process_group"),
    (_BOTH, "write", _GATES, "overflow"),
    (_STAGE3, "replace", _GATES, "_get_norm_groups"),
    (_STAGE3, "read", _GATES, "fp16_groups fp32_partitioned_groups_flat swap_optimizer reduce_and_partition_stream"),
    ("deepspeed.runtime.zero.stage3", "replace", _GATES, "combine_grad_norm_groups"),
    (_STAGE2, "replace", _GATES, "scaled_global_norm update_offload_overflow_tracker"),
    (_STAGE2, "replace", _GATES, "_wait_for_offload_copies _record_gradient_stream"),
    (_STAGE2, "read", _GATES, "params_in_partition cpu_offload reduction_stream _pending_offload_events"),
    ("deepspeed.runtime.bf16_optimizer", "replace", _GATES, "get_global_norm_of_tensors"),
    ("deepspeed.runtime.fp16.unfused_optimizer", "replace", _GATES, "get_weight_norm"),
    (_UNFUSED, "read", _GATES, "overflow_checker"),
    ("deepspeed.runtime.utils:CheckOverflow", "replace", _GATES, "check has_overflow"),
    (_ENGINE, "replace", _GATES, "clip_fp32_gradients"),
    (_ENGINE, "write", _GATES, "micro_steps global_steps skipped_steps"),
    (_ENGINE, "call", _GATES, "was_step_applied"),
    (f"{_CUT}:NoGatherCoalescedHandle", "replace", _GATES, "wait"),
    ("deepspeed.accelerator:DeepSpeedAccelerator", "replace", _GATES, "synchronize resolves_data_dependency"),
    ("torch", "call", _GATES, "_foreach_norm"),
    # The tensors that a rank holds.
    (_BOTH, "read", _TENSORS, "averaged_gradients loss_scaler"),
    (_STAGE3, "read", _TENSORS, "fp32_partitioned_groups_flat fp16_groups grad_partitions_flat_buffer"),
    (_STAGE3, "call", _TENSORS, "checkpoint_event_prologue checkpoint_event_epilogue"),
    (_STAGE3, "call", _TENSORS, "_reassign_or_swap_out_partitioned_parameters"),
    (_STAGE2, "read", _TENSORS, "single_partition_of_fp32_groups bit16_groups"),
    (_STAGE2, "read", _TENSORS, "all_grad_tensors grads_in_partition accumulated_grads_in_cpu grad_accum"),
    (_BF16, "read", _TENSORS, "fp32_groups_flat_partition bf16_groups fp32_groups_gradients_flat"),
    (f"{_STAGE2} {_BF16}", "call", _TENSORS, "update_lp_params"),
    (_UNFUSED, "read", _TENSORS, "fp32_groups fp16_groups"),
    (_UNFUSED, "call", _TENSORS, "refresh_fp32_params"),
    (_CUT, "read", _TENSORS, "ds_numel ds_tensor ds_shape"),
    (_CUT, "write", _TENSORS, "ds_secondary_tensor"),
    ("deepspeed.utils.mixed_precision_linkage", "read", _TENSORS, "_hp_mapping"),
    ("deepspeed.utils.tensor_fragment:tensor_fragment", "read", _TENSORS, "lp_fragment_address hp_fragment_address"),
    ("deepspeed.utils.tensor_fragment:fragment_address", "read", _TENSORS, "numel start"),
    (_ENGINE, "call", _TENSORS, "_get_zero_frozen_param_attributes _get_param_shape_func zero_optimization_stage"),
    (_ENGINE, "read", _TENSORS, "basic_optimizer global_rank dp_world_size param_names"),
    (_SCALER, "write", _TENSORS, "cur_scale cur_iter last_overflow_iter cur_hysteresis"),
    (_SCALER, "read", _TENSORS, "delayed_shift"),
    # Saves and resumes.
    (_ENGINE, "replace", _ZERO, "_copy_recovery_script zero_nvme_offload_optimizer"),
    (_ENGINE, "call", _ZERO, "zero_optimization_stage"),
    (_ENGINE, "read", _ZERO, "basic_optimizer"),
    (_ENGINE, "write", _ZERO, "checkpoint_engine"),
    (_ENGINE, "write", _ZERO, "param_names micro_steps global_steps skipped_steps global_samples"),
    ("torch.nn.functional", "replace", _ZERO, "linear"),
    ("torch.optim.lr_scheduler:LambdaLR", "write", _ZERO, "last_epoch _step_count _last_lr"),
    # States on a disk.
    (_STAGE3, "read", _TENSORS, "optimizer_swapper"),
    (f"{_SWAP}:OptimizerSwapper", "read", _TENSORS, "swap_params_info swap_folder"),
    (f"{_SWAP}:OptimizerSwapper", "call", _TENSORS, "_get_param_swap_info _io_aligned_numel"),
    (f"{_SWAP}:OptimizerStateSwapInfo", "call", _TENSORS, "numel dtype release_memory"),
    (f"{_SWAP}:OptimizerStateSwapInfo", "read", _TENSORS, "tensors has_state_tensors"),
    (f"{_SWAP}:SwapTensorContext", "read", _TENSORS, "swap_path compute_tensor"),
    # torch.
    ("torch", "call", "engine/fsdp2.py", "_foreach_mul_"),
    ("torch.optim:AdamW", "override", "engine/muon.py", "_init_group"),
    ("torch", "read", "engine/select.py", "_dynamo"),
    ("torch._dynamo.config", "replace", "engine/select.py", "suppress_errors"),
    ("torch", "read", "engine/sharded_engine.py", "_dynamo"),
    ("torch._dynamo.config", "replace", "engine/sharded_engine.py", "recompile_limit"),
    ("torch", "read", "model/activation_checkpointing.py", "_dynamo _inductor"),
    ("torch._dynamo", "call", "model/activation_checkpointing.py", "mark_dynamic"),
    ("torch._dynamo.decorators", "read", "model/activation_checkpointing.py", "_dynamo_dynamic_indices"),
    ("torch.distributed.checkpoint.utils", "call", "checkpoint/saved_state.py", "_ReaderView"),
    ("torch", "read", "checkpoint/saved_state.py", "_C"),
    ("torch.utils.tensorboard.writer:SummaryWriter", "call", "monitor/sinks.py", "_get_file_writer"),
    # transformers, peft, datasets.
    ("transformers.initialization", "call", "engine/sharded_engine.py", "no_init_weights"),
    ("transformers.modeling_utils", "call", "engine/sharded_engine.py", "local_torch_dtype"),
    ("transformers:PreTrainedModel", "override", _MODELING, "_skip_keys_device_placement _tied_weights_keys"),
    ("transformers:PreTrainedModel", "override", "model/encoder.py", "_input_embed_layer _no_split_modules"),
    ("transformers:PreTrainedModel", "override", "model/encoder.py", "_supports_sdpa"),
    ("transformers:GenerationMixin", "override", _MODELING, "_valid_auto_compile_criteria"),
    ("transformers:GenerationMixin", "override", _MODELING, "_update_model_kwargs_for_generation"),
    ("transformers.masking_utils", "replace", _MODELING, "create_masks_for_generate"),
    ("transformers:EncoderDecoderCache", "read", _MODELING, "is_updated cross_attention_cache self_attention_cache"),
    ("transformers.cache_utils:Cache", "read", _MODELING, "layers offloading"),
    ("transformers.cache_utils:CacheLayerMixin", "read", _MODELING, "keys values"),
    ("transformers.utils.chat_template_utils", "call", "data/examples/sft.py", "render_jinja_template"),
    ("torch.nn:Linear", "write", "model/lora.py", "__class__"),
    ("peft.tuners.lora.layer:LoraLayer", "read", "model/lora.py", "lora_A lora_B"),
    ("datasets:DatasetBuilder", "read", "data/sources/tables.py", "hash config"),
    ("datasets:BuilderConfig", "read", "data/sources/tables.py", "data_files"),
)

PLACES = tuple(
    Place(owner, name, use, user)
    for owners, use, user, names in _ROWS
    for owner in owners.split()
    for name in names.split()
)
_BY_NAME = {name: [place for place in PLACES if place.name == name] for name in {place.name for place in PLACES}}
_MISSING = object()
# Owner and name → the original, and its replacements, the last one in force. They leave in any order.
_layers: dict[tuple[int, str], list[list[Any]]] = {}


def check(*libraries: str) -> None:
    """Raise ConfigError if a place of `libraries` is missing whose owner's and user's modules are both imported."""
    for place in PLACES:
        modules = place.owner.partition(":")[0], "ds_encdec." + place.user.removesuffix(".py").replace("/", ".")
        if place.library in libraries and sys.modules.keys() >= {*modules} and not place.is_there():
            raise ConfigError(_lacks(place.library, f"{place.owner} has no {place.name}", place.user))
    _source.cache_clear()


def _lacks(library: str, what: str, user: str) -> str:
    return (
        f"{library} {version(library)}: {what}, which ds_encdec/{user} needs. Install a tested version: "
        f"{library}{range_of(library)}"
    )


def _require(owner: Any, name: str, uses: tuple[Use, ...]) -> None:
    rows = [place for place in _BY_NAME.get(name, []) if place.use in uses]
    if not rows:
        raise LookupError(f"foreign_places.py has no row for {name} with {' or '.join(uses)}")
    if not hasattr(owner, name):
        kind = owner if isinstance(owner, type | ModuleType) else type(owner)
        where = kind.__name__ if isinstance(kind, ModuleType) else f"{kind.__module__}:{kind.__name__}"
        raise ConfigError(_lacks(rows[0].library, f"{where} has no {name}", rows[0].user))


@contextmanager
def replaced(owner: Any, name: str, new: Any) -> Iterator[None]:
    """Replace `owner.name`, of an object, class or module, by `new` inside. Raises ConfigError if it is missing."""
    _require(owner, name, ("replace", "write"))
    key, layer = (id(owner), name), [new]
    layers = _layers.setdefault(key, [[vars(owner).get(name, _MISSING)]])
    layers.append(layer)
    setattr(owner, name, new)
    try:
        yield
    finally:
        layers[:] = [one for one in layers if one is not layer]
        if layers[-1][0] is _MISSING:
            delattr(owner, name)
        else:
            setattr(owner, name, layers[-1][0])
        if len(layers) == 1:
            del _layers[key]


def write(owner: Any, **fields: Any) -> None:
    """Set the `fields` of `owner`. Raises ConfigError if one of them is missing."""
    for name, value in fields.items():
        _require(owner, name, ("write",))
        setattr(owner, name, value)
