"""Programs with parameters that are tensor subclasses of their own, which say how they are gathered
(fsdp_pre_all_gather, fsdp_post_all_gather); as programs/ are."""

from . import gradients, measured, moved, patched, refused, trained
from .table import PROGRAMS

__all__ = ["PROGRAMS", "gradients", "measured", "moved", "patched", "refused", "trained"]
