"""The two commands of a quarter of an hour on a GPU: which parts, one group after another, and how many seconds each has.

A device's machine that is lent takes one to two minutes to start, twice where it goes back between them.
"""

from dataclasses import dataclass, replace

import pack
from makers import chosen, gpu, native, offload_timeline, python_cases, script, steps, under_sanitizer
from parts import Part

BUDGETS_S = {"first": 300, "second": 330}
NAMES = tuple(BUDGETS_S)
# For looking at the machine and opening what was packed.
START_S = 5
AGAIN_S = 45
TRAINS = "a sharded model trains as the plain one does"
# What has a group of its own, alone on the device.
ELSEWHERE = ("--without", "graph,peak,released,host_goes_on,no_synchronization")
WAITS = chosen("host_goes_on", "no_synchronization")


@dataclass(frozen=True)
class Group:
    """Parts that run side by side. stage: which record they are in. is_spare: they have no seconds of the plan, and what others
    leave."""

    name: str
    limit_s: float
    parts: tuple
    stage: str
    is_spare: bool = False


def parts_of(options, command):
    """What a command has of its own."""
    return {"first": first, "second": second}[command](options)


def groups(options, command, record):
    """Of a call: in the second command what has failed in the first comes before all else, and what the first has not reached
    behind, in the time that is left."""
    own = parts_of(options, command)
    if command == "first":
        return own
    failed = tuple(part for group in first(options) for part in group.parts if record.verdict("first", part.name) == "failed")
    again = [Group("what failed, again", AGAIN_S, failed, "first")] if failed else []
    behind = [replace(group, parts=tuple(part for part in group.parts if record.verdict("first", part.name) is None),
                      is_spare=True) for group in first(options)]
    return [*again, *own, *(group for group in behind if group.parts)]


def first(options):
    over, two = ("gloo", ()) if options.device == "cpu" else ("nccl", ("two_ranks",))

    def group(name, limit_s, *parts):
        return Group(name, limit_s, parts, "first")

    def cases(name, limit_s, world, *arguments, shows):
        return python_cases(options, name, limit_s, world, *arguments, shows=shows)

    return [
        group("what is here", 25,
              Part("libraries", script("tools/gpu/libraries.py", "{out}"), 25, needs=("torch",),
                   shows="the packed library, extension and programs start with this torch"),
              Part("two_ranks", script("tools/gpu/two_ranks.py", "{out}", "{limit}"), 25, needs=gpu(options) or ("torch",),
                   shows="two ranks gather, sum and average bfloat16 over torch's own group")),
        group("one rank", 70,
              cases("one", 70, "one", *ELSEWHERE, shows=f"{TRAINS}, one rank; late streams; offload"),
              cases("fake", 70, "fake", *ELSEWHERE, shows="a step of one rank of eight runs: hybrid, mixed precision, offload"),
              native(options, "native_one", 1, 70, "~[symmetric]", shows="the library's own NCCL communicator, one rank")),
        group("the library's communicator, two ranks", 60,
              native(options, "native_two", 2, 60, "[collectives],[training],[streams]",
                     shows="the library's own NCCL communicator, two ranks: collectives, training, streams"),
              Part("train", script("test/gpu/train_losses.py", "--seconds", "{limit}", "--out", "{out}"), 60,
                   needs=(f"built:{pack.TRAIN}", *two), shows="tools/train's losses on two ranks beside the plain model's")),
        group("torch's groups, two ranks", 60,
              cases("nccl", 60, over, *chosen("mixed_precision", "hybrid", "reshard_after_forward", "accumulation",
                                              "bfloat16_parameters", "late_streams"),
                    shows=f"{TRAINS}, two ranks over torch's groups: mixed precision, hybrid, reshard, accumulation, late "
                          "streams")),
        group("no host waits", 20, *(cases(f"waits_{world}", 20, world, *WAITS, shows="no step waits for the device")
                                     for world in ("one", "fake"))),
        group("graphs", 35, *(cases(f"graphs_{world}", 35, over if world == "nccl" else world, *chosen("graph"),
                                    shows="a captured step replays with the results of an eager one")
                              for world in ("one", "fake", "nccl"))),
        group("peaks", 25, *(cases(f"peak_{world}", 25, over if world == "nccl" else world, *chosen("peak", "released"),
                                   shows="peak bytes of a step are at most FSDP2's, and no step leaves any behind")
                             for world in ("one", "fake", "nccl"))),
    ]


def second(options):
    def group(name, limit_s, *parts):
        return Group(name, limit_s, parts, "second")

    memcheck = native(options, "memcheck", 1, 45, "~[symmetric]~[offload]", shows="")
    return [
        group("steps", 140, steps(options, "steps", 140, "--worlds", "fake,one", "--tokens", "512,2048", needs=("memory:70",),
                                  shows="step, host time, kernels and copies around each collective of a 1.2B Llama: ours in "
                                        "C++ and Python, FSDP2 and the plain model in turns")),
        group("compiled", 75, steps(options, "compiled", 75, "--worlds", "fake", "--tokens", "512,2048", "--compile",
                                    needs=("memory:30", "compiler"), shows="the same under torch.compile")),
        group("offload", 20, offload_timeline(options, "offload", 20, "how much of the copies to and from pinned memory runs "
                                              "beside kernels")),
        group("memcheck", 45, under_sanitizer("memcheck", memcheck, 45)),
    ]


def most_s(options, command):
    """What a plan of this command can come to."""
    own = sum(group.limit_s for group in parts_of(options, command))
    return START_S + own + (AGAIN_S if command == "second" else 0)


def lines(command, some, slower):
    """The plan in words, before anything of it begins."""
    times = f", {slower:g} times as long as on 16 cores" if slower != 1 else ""
    yield f"plan of {command}: at most {BUDGETS_S[command] * slower:.0f} s{times}"
    for group in some:
        limit = " if left" if group.is_spare else f"{group.limit_s * slower:6.0f} s"
        yield f"{limit}  {group.name}: {', '.join(part.name for part in group.parts)}"
    whole = START_S + sum(group.limit_s for group in some if not group.is_spare)
    yield f"{whole * slower:6.0f} s  in all, {START_S * slower:.0f} s of it to begin"
