"""accelerate, and with it transformers and trl, take DistributedDataParallel on CPUs whatever the FSDP plugin says. With
`shard_on_cpus` they do there what they do on accelerators."""

import functools

from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin, PartialState
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils.fsdp_utils import get_fsdp2_grad_scaler


def shard_on_cpus():
    """Of the process; once."""
    initialize = AcceleratorState.__init__

    @functools.wraps(initialize)
    def with_plugin(self, *arguments, fsdp_plugin=None, **more):
        initialize(self, *arguments, fsdp_plugin=fsdp_plugin, **more)
        if fsdp_plugin is not None:
            self.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP
            if self.mixed_precision != "no":
                fsdp_plugin.set_mixed_precision(self.mixed_precision)
            self.fsdp_plugin = fsdp_plugin

    AcceleratorState.__init__ = with_plugin


def forget():
    """accelerate keeps one state per process; each row begins without."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def plugin(**more):
    options = dict(fsdp_version=2, auto_wrap_policy="transformer_based_wrap",
                   transformer_cls_names_to_wrap=["LlamaDecoderLayer"], cpu_ram_efficient_loading=False)
    return FullyShardedDataParallelPlugin(**{**options, **more})


def accelerator(fsdp_plugin, **more):
    forget()
    made = Accelerator(cpu=True, fsdp_plugin=fsdp_plugin, **more)
    if made.mixed_precision == "fp16":  # which accelerate leaves out on CPUs, too
        made.native_amp, made.scaler = True, get_fsdp2_grad_scaler(device="cpu")
    assert made.is_fsdp2
    return made
