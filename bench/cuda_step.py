"""Training steps of a Llama on a GPU: the package, FSDP2, the plain model and the C++ library in turns.

It has 1.2 billion parameters, or with `--shape 8B` eight. Two worlds: one rank with NCCL, with AdamW; and a fake world of
eight ranks (`--ranks`), whose collectives are copies within the device, without an optimizer (what it reduces to is no
number to train with). `--worlds nccl` is two ranks over NCCL, on two GPUs.
`--compile` compiles each block, of all but the C++ library. `--alone` has one model at a time on the device, where all of
them do not fit: their turns are not pairs then. For each number of tokens in a micro-batch:

ms: a step, by events on the device. exposed: of that what the plain model does not take in the same turn. issue: the
host's, until it has issued the step (waits for the device where that is behind). host: the same of a model so narrow that
the device waits for the host. idle: of the device's time, from the kernels that torch.profiler saw. copies: kernels and
commands that only copy. a collective: kernels and copies beyond the plain model's, for each collective. peak: bytes of
tensors, the model alone on the device; reserved: what torch's allocator took for it. What no time was left for is told.

Starts without tools/bench, too: `python bench/run.py cuda_step --no-build --out steps.jsonl` with FSDP_BUILD_DIR set.
"""

import json
import tempfile
import time

import arguments
import conductor
import harness

IMPLS = ("plain", "fsdp2", "python", "cpp")
SHAPES = {"1.2B": {"blocks": 16, "dim": 2048, "hidden": 8192, "vocabulary": 32768, "heads": 16},
          "8B": {"blocks": 32, "dim": 4096, "hidden": 14336, "vocabulary": 128256, "heads": 32, "key_value": 1024}}
NARROW = {"blocks": 16, "dim": 64, "hidden": 128, "vocabulary": 128, "heads": 2}
SMALL = {"blocks": 2, "dim": 64, "hidden": 128, "vocabulary": 128, "heads": 2}
WORLDS = {"fake": 1, "one": 1, "nccl": 2}  # processes
MODEL = {"python": "ours", "fsdp2": "FSDP2", "plain": "plain", "cpp": "ours, C++"}
PROGRAM = "bench/fsdp_bench_cuda_step"
QUICK = {"tokens": [128], "repeats": 2}


def add_options(parser):
    parser.add_argument("--worlds", type=arguments.names(WORLDS), default=["one", "fake"],
                        help=f"of {', '.join(WORLDS)} (default one,fake)")
    parser.add_argument("--tokens", type=arguments.wholes(1), default=[128, 512, 2048, 8192])
    parser.add_argument("--shape", choices=SHAPES, default="1.2B")
    parser.add_argument("--impls", type=arguments.names(IMPLS), default=list(IMPLS),
                        help=f"of {', '.join(IMPLS)} (default all)")
    parser.add_argument("--ranks", type=arguments.whole(1), default=8, help="of the fake world (default 8)")
    parser.add_argument("--compile", action="store_true", help="each block by torch.compile")
    parser.add_argument("--no-optimizer", action="store_true")
    parser.add_argument("--alone", action="store_true", help="one model at a time on the device")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: tiny sizes, to try it out")
    parser.add_argument("--repeats", type=arguments.whole(1), default=8, help="turns (default 8)")
    parser.add_argument("--steps", type=arguments.whole(1), default=3, help="of a turn, issued without a wait (default 3)")
    parser.add_argument("--limit", type=arguments.positive, default=140,
                        help="seconds: what is left then is left out (default 140)")
    parser.add_argument("--out", type=arguments.new_file(), help="a file that gets each case as a JSON line at once")


class Run:
    """One world's measurements. worlds: of Python's processes, and of the C++ library's where that takes part."""

    def __init__(self, worlds, name, options, report, deadline):
        self.worlds, self.name, self.options, self.report, self.deadline = worlds, name, options, report, deadline
        self.impls = [impl for impl in IMPLS if impl in options.impls]
        # Lambdas and compiled blocks are Python's.
        if options.compile and "cpp" in self.impls:
            self.impls.remove("cpp")
        self.shape = SHAPES[options.shape]
        if options.device == "cpu":
            self.shape = SMALL if "key_value" not in self.shape else {**SMALL, "key_value": 32}
        self.narrow = {**(SMALL if options.device == "cpu" else NARROW), "blocks": self.shape["blocks"]}
        self.rows = {}  # (tokens, impl) -> cells
        self.plain_kernels = {}  # tokens -> names of kernels, with counts and times
        self.samples = {}  # (what, tokens) -> impl -> ms and issue_ms of the turns

    def ask(self, impl, do, **request):
        return self.worlds["cpp" if impl == "cpp" else "python"].ask({"do": do, "impl": impl, **request})[0]

    def case(self, **fields):
        line = {"world": self.world_name(), **fields}
        self.report.case(**line)
        if self.options.out:
            with open(self.options.out, "a") as out:
                out.write(json.dumps(line) + "\n")

    def world_name(self):
        ranks = f" of {self.options.ranks}" if self.name == "fake" else ""
        compiled = ", compiled" if self.options.compile else ""
        return f"{self.name}{ranks}, {self.options.shape}{compiled}"

    def is_late(self, what):
        if time.monotonic() < self.deadline:
            return False
        self.case(left_out=what)
        self.report.note(f"  {self.world_name()}: no time is left for {what}")
        return True

    def all(self):
        about = {}
        for kind in sorted(self.worlds):  # C++ first: Python knows the device's name
            about |= self.ask(kind, "setup", world=self.name, ranks=self.options.ranks, device=self.options.device,
                              compiles=self.options.compile, optimizer=not self.options.no_optimizer)
        has_none = self.name == "fake" or self.options.no_optimizer
        self.report.setting(world=self.world_name(), **about, **self.shape, dtype="bfloat16", warm_up_steps=3,
                            repeats=f"{self.options.repeats} turns of {self.options.steps} steps",
                            optimizer="none" if has_none else "fused AdamW")
        self.case(setting=about, shape=self.shape)
        self.memory()
        for impls in [[impl] for impl in self.impls] if self.options.alone else [self.impls]:
            self.steps_of(impls)
        self.report_all_times()
        if not self.is_late("the host's time"):
            self.make(self.impls, self.narrow)
            self.times(self.impls, "host", 32)
            self.report_all_times()
        self.drop()

    def steps_of(self, impls):
        if self.is_late(f"steps of {', '.join(MODEL[impl] for impl in impls)}"):
            return
        self.make(impls, self.shape)
        for tokens in self.options.tokens:
            if not self.is_late(f"steps of {tokens} tokens of {', '.join(MODEL[impl] for impl in impls)}"):
                self.times(impls, "step", tokens)
        for tokens in self.options.tokens:
            if not self.is_late(f"the kernels of {tokens} tokens of {', '.join(MODEL[impl] for impl in impls)}"):
                self.kernels(impls, tokens)
        if self.options.alone:
            self.drop()

    def make(self, impls, shape):
        pythons = [impl for impl in impls if impl != "cpp"]
        if pythons:
            made = self.ask("python", "make", impls=pythons, shape=shape)
            self.case(parameters_of=MODEL[pythons[0]], parameters=made["parameters"])
        if "cpp" in impls:
            self.ask("cpp", "make", shape=shape)

    def drop(self):
        for kind in self.worlds:
            self.ask(kind, "drop")

    def memory(self):
        for impl in self.impls:
            if self.is_late(f"the memory of {MODEL[impl]}"):
                return
            for peak in self.ask(impl, "memory", shape=self.shape, tokens=self.options.tokens)["peaks"]:
                self.case(measured="memory", impl=impl, **peak)
                self.rows.setdefault((peak["tokens"], impl), {}).update(
                    peak_GB=peak["peak_bytes"] / 1e9, reserved_GB=peak["reserved_bytes"] / 1e9)
            self.ask(impl, "drop")

    def times(self, impls, what, tokens):
        mine = {impl: {"ms": [], "issue_ms": []} for impl in impls}
        self.samples.setdefault((what, tokens), {}).update(mine)
        for impl in impls:
            self.ask(impl, "warm", tokens=tokens, steps=3)
        for turn in range(self.options.repeats):
            if turn > 1 and self.is_late(f"more turns of {tokens} tokens"):
                break
            for impl in impls:
                taken = self.ask(impl, "time", tokens=tokens, steps=self.options.steps)
                mine[impl]["ms"].append(sum(taken["ms"]) / len(taken["ms"]))
                mine[impl]["issue_ms"].append(taken["issue_ms"])
        if not self.options.alone:
            self.report_all_times()

    def report_all_times(self):
        """Of all that is there now, which is told once."""
        for (what, tokens), samples in self.samples.items():
            for impl in samples:
                self.report_times(what, tokens, impl, samples)
        self.samples.clear()

    def report_times(self, what, tokens, impl, samples):
        mine = samples[impl]
        ratios = {f"of_{other}": harness.paired_ratio(mine["ms"], samples[other]["ms"]) for other in IMPLS[:2]
                  if other != impl and other in samples}
        step, issue = harness.spread(mine["ms"], "ms"), harness.spread(mine["issue_ms"], "ms")
        pairs = zip(mine["ms"], samples["plain"]["ms"] if "plain" in samples else [])
        beyond = [ours - plain for ours, plain in pairs]
        exposed = harness.spread(beyond, "ms") if beyond else {}
        self.case(measured=what, impl=impl, tokens=tokens, step=step, exposed=exposed, issue=issue, turns=len(mine["ms"]),
                  **ratios)
        if what == "host":
            self.report.note(f"  {self.world_name()}: host of {MODEL[impl]}, narrow model: {issue['median_ms']:.2f} ms a step "
                             f"(p10 {issue['p10_ms']:.2f}, p90 {issue['p90_ms']:.2f})")
            return
        of_fsdp2 = ratios.get("of_fsdp2", {}).get("median_ratio", "") if impl in ("python", "cpp") else ""
        of_plain = ratios.get("of_plain", {}).get("median_ratio", "")
        self.rows.setdefault((tokens, impl), {}).update(
            ms=step["median_ms"], p10=step["p10_ms"], p90=step["p90_ms"], of_plain=of_plain, of_FSDP2=of_fsdp2,
            exposed_ms=exposed.get("median_ms", ""), issue_ms=issue["median_ms"])

    def kernels(self, impls, tokens):
        found = {impl: self.profile(impl, tokens, steps=2) for impl in impls}
        if "plain" in found:
            self.plain_kernels[tokens] = found["plain"]["names"]
        plain = self.plain_kernels.get(tokens)
        for impl, summary in found.items():
            names = summary.pop("names")
            if plain is not None:
                summary |= beyond(names, plain, summary["collectives"])
            self.case(measured="kernels", impl=impl, tokens=tokens, **summary)
            self.rows.setdefault((tokens, impl), {}).update(
                idle=f"{100 * summary['idle_fraction']:.1f}%", kernels=summary["kernels"], copies=summary["copies"],
                copies_us=summary["copies_us"], a_collective=summary.get("beyond_plain_a_collective", "-"))

    def profile(self, impl, tokens, steps):
        if impl != "cpp":
            return self.ask(impl, "profile", tokens=tokens, steps=steps)
        with tempfile.TemporaryDirectory() as folder:
            traced = self.ask("cpp", "profile", tokens=tokens, steps=steps, folder=folder)
            summary = self.ask("python", "summary", trace=traced["trace"], steps=steps)
        return {**summary, "collectives": traced["collectives"]}

    def table(self):
        columns = ["ms", "p10", "p90", "of_plain", "of_FSDP2", "exposed_ms", "issue_ms", "idle", "kernels", "copies",
                   "copies_us", "a_collective", "peak_GB", "reserved_GB"]
        rows = [[tokens, MODEL[impl], *(self.rows[tokens, impl].get(column, "-") for column in columns)]
                for tokens in self.options.tokens for impl in self.impls if (tokens, impl) in self.rows]
        self.report.note(f"\nworld {self.world_name()}: a step")
        self.report.table(["tokens", "model", *(column.replace("_", " ") for column in columns)], rows)


def beyond(names, plain, collectives):
    """Kernels and copies of a step that the plain model's does not have, all and for each collective."""
    added = {name: [round(count - plain.get(name, [0, 0])[0], 2), round(us - plain.get(name, [0, 0])[1], 1)]
             for name, (count, us) in names.items() if count != plain.get(name, [0, 0])[0]}
    whole = sum(count for count, _ in added.values())
    return {"beyond_plain": added, "beyond_plain_a_collective": round(whole / collectives, 2) if collectives else 0.0}


def run(options, report):
    if options.device == "cuda" and not harness.has_gpu():
        raise SystemExit("cuda_step: needs a CUDA device, found none; --device cpu tries it out with tiny sizes")
    if options.device == "cuda" and "nccl" in options.worlds and harness.gpus() < WORLDS["nccl"]:
        raise SystemExit(f"cuda_step: --worlds nccl needs {WORLDS['nccl']} CUDA devices, found {harness.gpus()}; the worlds one "
                         "and fake need one")
    if options.device == "cpu":
        options.tokens = sorted({max(2, tokens // 16) for tokens in options.tokens})
    if "cpp" in options.impls and not options.compile and not harness.has_target(PROGRAM):
        options.impls.remove("cpp")
        report.note(f"  without the C++ library: the build has no {PROGRAM}")
    harness.build(options, [*harness.PACKAGE, *([PROGRAM] if "cpp" in options.impls else [])])
    begin, done, failed = time.monotonic(), [], []
    for at, name in enumerate(options.worlds):
        share = options.limit * (at + 1) / len(options.worlds)
        with conductor.Workers() as workers:
            limit_s = 240 if options.compile else 90
            worlds = {"python": workers.start_world(name, conductor.pytorch_command("cuda_step.py"), WORLDS[name], limit_s)}
            if "cpp" in options.impls and not options.compile:
                program = [str(harness.build_dir() / PROGRAM)]
                worlds["cpp"] = workers.start_world(f"{name}, C++", program, WORLDS[name], limit_s)
            one = Run(worlds, name, options, report, begin + share)
            done.append(one)
            try:
                one.all()
            except conductor.WorkerError as error:
                failed.append(name)
                one.case(failed=str(error))
                report.note(f"  {name}: {error}")
    for one in done:
        one.table()
    return f"failed in {', '.join(failed)}" if failed else None
