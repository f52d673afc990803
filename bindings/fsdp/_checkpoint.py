"""Checkpoints that any world size and any tool can read."""

import json
import os
from dataclasses import dataclass
from typing import Any, Callable, Literal, TypedDict

import torch
import torch.distributed as dist
import torch.nn as nn
from typing_extensions import Unpack

from . import _C, _checks
from ._checkpoint_optimizer import OPTIMIZER_FILE, OptimizerLoad, optimizer_parts
from ._checkpoint_parts import model_section
from ._meshes import communicator_of
from ._names import named_tensors

EXTRA_FILE = "extra.json"
Path = str | os.PathLike[str]


class SaveCheckpointOptions(TypedDict, total=False):
    """Keyword arguments of `save_checkpoint` and `CheckpointSaver.start_save`."""

    #: The model's floating-point tensors are saved in this dtype; None: in their own.
    dtype: torch.dtype | None
    #: A section's tensors are split over files of at most this many bytes (4 GiB); a larger tensor has its own file.
    max_file_bytes: int
    #: Keeps this many checkpoints of a series, folders whose names differ in the number at their end alone, such as
    #: step-100: the one just saved, and of the others those with the largest numbers. 0: all.
    keep_last: int
    #: Whether torch's default random generators are saved, each rank's own (True).
    rng_state: bool
    #: All ranks that hold something; None: the default group, or this process alone if there is none. A saver's is its
    #: own.
    process_group: dist.ProcessGroup | None


class LoadCheckpointOptions(TypedDict, total=False):
    """Keyword arguments of `load_checkpoint`."""

    #: False: load what fits and return the rest (True: names, sizes and dtypes have to fit).
    strict: bool
    #: Tensors of another dtype are converted; False: they do not fit.
    convert_dtypes: bool
    #: "while_loading": no byte is used unchecked, but what came before a damaged block is loaded. "before_loading":
    #: everything is read twice, so that nothing is changed if a block is damaged. Or "never".
    verify: Literal["while_loading", "before_loading", "never"]
    #: "all_ranks": each reads what it needs. "first_rank": it alone sees the files, and sends them on in pieces.
    readers: Literal["all_ranks", "first_rank"]
    #: Of buffers on a rank, 4 MiB at least (256 MiB).
    max_extra_bytes: int
    #: The name that the model has for what the checkpoint calls `name`; "" leaves it out. Or a dict: a name that begins
    #: with a key gets its value instead, the longest key winning.
    rename: Callable[[str], str] | dict[str, str] | None
    #: Files that are symbolic links are read, of which Hugging Face's cache is made.
    follow_symlinks: bool
    #: Whether torch's default random generators get their state back, which they can at an equal world size (True).
    rng_state: bool
    #: As for saving.
    process_group: dist.ProcessGroup | None


@dataclass(frozen=True)
class LoadedCheckpoint:
    """What `load_checkpoint` found beside the tensors. The lists are empty where `strict` was set."""

    missing: list[str]  # asked for, not in the checkpoint; each with its name in quotes
    unexpected: list[str]  # in the checkpoint, asked for by no rank
    wrong: list[str]  # other sizes or dtypes, with both
    extra: Any  # None: there was none
    world_size: int  # of the ranks that saved it; 0: not known
    restored_rng_state: bool


def save_checkpoint(
    path: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    extra: Any = None,
    **options: Unpack[SaveCheckpointOptions],
) -> None:
    """Saves parameters, persistent buffers, the optimizer's state by parameter name, random generators and `extra` to
    the folder `path`: whole tensors in ordinary .safetensors files with the index that Hugging Face's tools expect.
    Every rank writes its own elements; nothing is gathered. A collective call.

    model: of this package, of torch's FSDP2, of other DTensors, or plain, in any mixture; plain tensors are saved from
    the first rank. optimizer: any of torch.optim's kind, over the parameters or over `local_shards`. extra: anything
    that JSON has; the first rank's is saved. options: see SaveCheckpointOptions.

    A checkpoint that is there stays whole until the new one is on the disk. An error on one rank is raised on all:
    ValueError for what cannot be saved, CheckpointError for what cannot be written.
    """
    given = _save_options(options, "save_checkpoint")
    world = _world(given.pop("process_group"))
    _C.save_checkpoint(world, os.fspath(path), lambda: _parts(model, optimizer, extra, given), given)


def load_checkpoint(
    path: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    **options: Unpack[LoadCheckpointOptions],
) -> LoadedCheckpoint:
    """Loads what `save_checkpoint` has saved, in Python or C++, from any number of ranks, or the model alone from any
    .safetensors file or folder with an index. Every rank reads its own elements. A collective call.

    Names, sizes and dtypes of everything are compared first: what does not fit is raised as one ValueError, with
    nothing changed, unless `strict` is off. A damaged or unreadable file is a CheckpointError on all ranks, with
    tensors partly loaded, see `verify`. A parameter without state in the checkpoint has none afterwards. The optimizer's options come
    from the checkpoint. options: see LoadCheckpointOptions.
    """
    given = _load_options(options)
    reader = _C.open_checkpoint(_world(given.pop("process_group")), os.fspath(path), given)
    loading = []

    def collect():
        sections = {"model": model_section(model)}
        if optimizer is None:
            return sections, {"missing": [], "unexpected": [], "wrong": []}
        loading.append(OptimizerLoad(named_tensors(model), optimizer, reader, given))
        if loading[0].is_planned:
            sections["optimizer"] = loading[0].entries
        return sections, loading[0].misfits

    missing, unexpected, wrong, restored = reader.load(collect, given["rng_state"])
    if loading and loading[0].is_planned:
        loading[0].finish()
    text = reader.document(EXTRA_FILE)
    return LoadedCheckpoint(missing, unexpected, wrong, None if text is None else json.loads(text), reader.world_size(),
                            restored)


def latest_checkpoint(parent: Path) -> str | None:
    """The complete checkpoint in the folder `parent` with the largest number at the end of its name; None: there is
    none. No communication."""
    return _C.latest_checkpoint(os.fspath(parent))


class CheckpointSaver:
    """Saves checkpoints while training goes on: what is saved is copied, and a thread writes it.

    All ranks make one and call it alike. Saves do not overlap. One that failed, failed on all ranks; its error is
    raised by the next call. When it goes it waits, and logs an error that nobody has asked for.
    """

    def __init__(
        self,
        *,
        process_group: dist.ProcessGroup | None = None,
        when_saving: Literal["wait", "refuse"] = "wait",
        max_copy_bytes: int | None = None,
    ) -> None:
        """A collective call. when_saving: what becomes of a save while another one is being written. max_copy_bytes: a
        rank that holds more writes from the tensors themselves: there `start_save` returns when they are written. The
        copy's memory is kept for the next save."""
        _one_of(when_saving, ("wait", "refuse"), "CheckpointSaver: when_saving")
        if max_copy_bytes is not None:
            _checks.byte_count(max_copy_bytes, "CheckpointSaver: max_copy_bytes")
        self._saver = _C.checkpoint_saver(_world(process_group), when_saving == "refuse", max_copy_bytes)

    def start_save(
        self,
        path: Path,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        extra: Any = None,
        **options: Unpack[SaveCheckpointOptions],
    ) -> bool:
        """As `save_checkpoint`; returns when all is copied. False, on all ranks, where another save is being written
        and `when_saving` is "refuse". Raises what an earlier save failed with, and begins none then. A collective call."""
        if options.get("process_group") is not None:
            raise ValueError("CheckpointSaver.start_save: process_group is the saver's; give it to CheckpointSaver")
        given = _save_options(options, "CheckpointSaver.start_save")
        return self._saver.start_save(os.fspath(path), lambda: _parts(model, optimizer, extra, given), given)

    def wait(self) -> None:
        """Returns when nothing is being written here. Raises what the last save failed with, once."""
        self._saver.wait()

    def is_saving(self) -> bool:
        """Whether a save is being written on this rank."""
        return self._saver.is_saving()


def _parts(model, optimizer, extra, options):
    sections = {"model": model_section(model, options["dtype"])}
    documents = {}
    if optimizer is not None:
        sections["optimizer"], documents[OPTIMIZER_FILE] = optimizer_parts(named_tensors(model), optimizer)
    if extra is not None:
        try:
            documents[EXTRA_FILE] = json.dumps(extra, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"save_checkpoint: extra cannot be written as JSON: {error}") from error
    return sections, documents


def _world(group):
    if group is None:
        group = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    elif not isinstance(group, dist.ProcessGroup):
        raise ValueError("checkpoint: process_group: expected a process group with this rank in it, or None, found "
                         f"{group!r}")
    return None if group is None else communicator_of(group)


def _one_of(value, known, subject):
    if value not in known:
        raise ValueError(f"{subject}: expected one of {', '.join(map(repr, known))}, found {value!r}")


def _checked(options, defaults, caller):
    unknown = set(options) - set(defaults)
    if unknown:
        raise TypeError(f"{caller}: no argument is called {', '.join(sorted(unknown))}; there are "
                        f"{', '.join(defaults)}")
    given = {**defaults, **options}
    for name, default in defaults.items():
        if isinstance(default, bool):
            given[name] = _checks.flag(given[name], f"{caller}: {name}")
        elif isinstance(default, int):
            given[name] = _checks.byte_count(given[name], f"{caller}: {name}")
    return given


def _save_options(options, caller):
    defaults = {"dtype": None, "max_file_bytes": 4 << 30, "keep_last": 0, "rng_state": True, "process_group": None}
    given = _checked(options, defaults, caller)
    given["keep_last"] = _checks.whole_number(given["keep_last"], f"{caller}: keep_last")
    dtype = _checks.dtype(given["dtype"], f"{caller}: dtype")
    if dtype is not None and not dtype.is_floating_point:
        raise ValueError(f"{caller}: dtype: expected a floating-point one, found {dtype}")
    return given


def _load_options(options):
    caller = "load_checkpoint"
    given = _checked(options, {
        "strict": True, "convert_dtypes": False, "verify": "while_loading", "readers": "all_ranks",
        "max_extra_bytes": 256 << 20, "rename": None, "follow_symlinks": False, "rng_state": True,
        "process_group": None}, caller)
    _one_of(given["verify"], ("while_loading", "before_loading", "never"), f"{caller}: verify")
    _one_of(given["readers"], ("all_ranks", "first_rank"), f"{caller}: readers")
    if isinstance(given["rename"], dict):
        given["rename"] = _C.map_prefixes(given["rename"])
    _checks.function(given["rename"], f"{caller}: rename")
    return given
