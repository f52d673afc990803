"""Programs that take the sharded module to other libraries, as programs/ are; in runs of their own, for these take
seconds to import or to compile."""

from . import compiled, inductor, loaders, models, pipelines
from .table import PROGRAMS

# What the programs import when they run, and torch with them.
IMPORTS = ("transformers.models.llama.modeling_llama", "peft", "torch._dynamo.backends.common", "torch._inductor.pattern_matcher")
__all__ = ["IMPORTS", "PROGRAMS", "compiled", "inductor", "loaders", "models", "pipelines"]
