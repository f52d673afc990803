"""What is claimed of GPUs, and which parts show it. The report says of each: shown, failed, or not reached."""

from dataclasses import dataclass

from parts import BAD

SHOWN, FAILED, NOT_REACHED = "shown", "failed", "not reached"


@dataclass(frozen=True)
class Claim:
    """case: with this in their name cases of the parts show it, whatever the others do."""

    text: str
    parts: tuple  # stage/part: all of them together show it
    case: str = ""


def of(text, *parts, case=""):
    return Claim(text, parts, case)


CLAIMS = (
    of("library, extension and programs that were built elsewhere run with this torch", "first/libraries"),
    of("two ranks gather, sum and average, bfloat16 too, over torch's NCCL", "first/two_ranks"),
    of("a sharded model trains as the plain one does on CUDA tensors, one rank", "first/one"),
    of("the same on two ranks over torch's NCCL: mixed precision, hybrid, reshard, accumulation", "first/nccl"),
    of("a step with the sizes of eight ranks runs: hybrid, mixed precision, offload", "first/fake"),
    of("nothing reads a buffer too early or frees it too early while streams are late", "first/one", "first/nccl",
       case="late_streams"),
    of("offloaded training is right, with pinned memory and without", "first/one", case="cpu_offload"),
    of("the library's own NCCL communicator is right: collectives, training, streams, checkpoints", "first/native_one",
       "first/native_two"),
    of("tools/train's losses over it are the plain model's", "first/train"),
    of("timeouts, aborts and ranks that die end in readable errors over it", "more/failures"),
    of("no step waits on the host", "first/waits_one", "first/waits_fake"),
    of("a whole step is captured in a CUDA graph and replayed with equal results", "first/graphs_one", "first/graphs_fake",
       "first/graphs_nccl"),
    of("peak memory of a step is at most FSDP2's", "first/peak_one", "first/peak_fake", "first/peak_nccl"),
    of("a step of a 1.2B Llama, and its host time, beside FSDP2's and the plain model's; kernels and copies around each "
       "collective", "second/steps"),
    of("the same under torch.compile", "second/compiled"),
    of("copies of an offloaded model run beside kernels", "second/offload"),
    of("compute-sanitizer finds no fault in the library's own communicator", "second/memcheck"),
    of("compute-sanitizer finds no fault in training", "more/memcheck_one", "more/memcheck_fake", "more/racecheck_fake",
       "more/synccheck_fake"),
    of("the C++ tests hold with CUDA tensors", "more/runtime"),
    of("collectives of CUDA tensors over a user's gloo group go through c10d", "more/gloo"),
    of("collectives run beside compute, with a simulated link in a stream", "more/stream", "more/stream_infiniband"),
    of("slots in symmetric memory leave gradients as they are, also where windows cannot be made", "more/slots",
       "more/without_cumem", "more/without_windows"),
    of("gathers and reductions take NCCL's symmetric kernels or copy engines", "more/kernels", "more/copy_engine"),
    of("host and step time of larger models and worlds", "more/1.2B_fake64", "more/8B_fake8", "more/8B_fake64", "more/8B_one",
       "more/1.2B_one_compiled", "more/8B_fake8_compiled"),
    of("symmetric memory over NVLink, and the library's communicator on two GPUs", "more/two_gpus", "more/native_two_gpus"),
    of("a step over NCCL is near its bound and at most FSDP2's, two GPUs", "more/1.2B_nccl", "more/overlap_nccl"),
    of("which start of reductions is fastest on a real network", "more/start_of_reductions_two_gpus"),
    of("NVLink and InfiniBand are as the simulated networks are", "more/link_times_two_gpus", "more/link_times_eight_gpus",
       "more/link_times_nodes"),
)


def states(record):
    """[(claim, one of the three words, why)]"""
    return [(claim, *state(claim, record)) for claim in CLAIMS]


def state(claim, record):
    verdicts = {part: verdict(claim, part, record) for part in claim.parts}
    failed = [part for part, verdict in verdicts.items() if verdict == "failed"]
    if failed:
        return FAILED, "; ".join(why(part, record, None if claim.case else "failed") for part in failed)
    left = [part for part, verdict in verdicts.items() if verdict is None]
    if left:
        none = f", and no case of {claim.case} has passed" if claim.case else ""
        return NOT_REACHED, "; ".join(why(part, record) + none for part in left)
    return SHOWN, ""


def verdict(claim, part, record):
    """passed, failed or None."""
    if not claim.case:
        return record.verdict(*part.split("/"))
    statuses = [line["status"] for line in record.found(*part.split("/")) if claim.case in line.get("case", "")]
    if set(statuses) & set(BAD):
        return "failed"
    return "passed" if "passed" in statuses and "left" not in statuses else None


def why(part, record, status=None):
    last = record.last(*part.split("/"), status)
    if last is None:
        return f"{part} has not begun"
    return f"{part} {last['status']}{': ' + last['why'] if last.get('why') else ''}"
