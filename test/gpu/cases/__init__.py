"""Cases for a GPU: sharded models train as the plain model does on the same data, in several worlds (worlds.py)."""

from . import around, controls, fake, graphs, memory, streams, training
from .common import CASES, Place, Skip

__all__ = ["CASES", "Place", "Skip", "around", "controls", "fake", "graphs", "memory", "streams", "training"]
