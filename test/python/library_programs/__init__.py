"""Programs that take the sharded module to other libraries, as programs/ are; in runs of their own, for these take
seconds to import or to compile."""

from . import compiled, inductor, loaders, models, pipelines
from .table import PROGRAMS

__all__ = ["PROGRAMS", "compiled", "inductor", "loaders", "models", "pipelines"]
