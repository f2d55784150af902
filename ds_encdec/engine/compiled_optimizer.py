"""DeepSpeed's own Adam is C++ or CUDA, which torch compiles when it is first needed on a machine."""

from __future__ import annotations

from ds_encdec.config.schema import FullConfig
from ds_encdec.engines import EngineName


def compile_optimizer(engine: EngineName, config: FullConfig) -> None:
    """Have the optimizer that `engine` will load compiled, if that is needed: minutes, once on a machine.

    The other ranks of a node wait for the one that compiles. Comes after `init_process_group`, which says where to.
    """
    if engine != "deepspeed" or config.training.torch_adam:
        return
    from deepspeed.ops.op_builder import CPUAdamBuilder, FusedAdamBuilder

    builder = FusedAdamBuilder if config.infra.offload_optimizer == "none" else CPUAdamBuilder
    builder().load()
