"""Training steps of a Llama of 1.2 billion parameters on a GPU: the package, FSDP2 and the plain model in turns.

Two worlds: one rank with NCCL, with AdamW; and a fake world of eight ranks, whose collectives are copies within the
device, without an optimizer (what it reduces to is no number to train with). `--worlds nccl` is two ranks over NCCL, on
two GPUs, or on one with NCCL_MULTI_RANK_GPU_ENABLE=1. For each number of tokens in a micro-batch:

ms: a step, by events on the device. exposed: of that what the plain model does not take in the same turn. issue: the
host's, until it has issued the step (waits for the device where that is behind). host: the same of a model so narrow that
the device waits for the host. idle: of the device's time, from the kernels that torch.profiler saw. copies: kernels and
commands that only copy. peak: bytes of tensors, the model alone on the device; reserved: what torch's allocator took for
it.

Starts without tools/bench, too: `python bench/run.py cuda_step --no-build --out steps.jsonl` with FSDP_BUILD_DIR set.
"""

import json
import time

import arguments
import conductor
import harness

IMPLS = ("plain", "fsdp2", "python")
LARGE = {"blocks": 16, "dim": 2048, "hidden": 8192, "vocabulary": 32768, "heads": 16}
NARROW = {"blocks": 16, "dim": 64, "hidden": 128, "vocabulary": 128, "heads": 2}
SMALL = {"blocks": 2, "dim": 64, "hidden": 128, "vocabulary": 128, "heads": 2}
FAKE_RANKS = 8
WORLDS = {"fake": 1, "one": 1, "nccl": 2}  # processes
MODEL = {"python": "ours", "fsdp2": "FSDP2", "plain": "plain"}


def add_options(parser):
    parser.add_argument("--worlds", type=arguments.names(WORLDS), default=["one", "fake"],
                        help=f"of {', '.join(WORLDS)} (default one,fake)")
    parser.add_argument("--tokens", type=arguments.wholes(1), default=[128, 512, 2048, 8192])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: tiny sizes, to try it out")
    parser.add_argument("--repeats", type=arguments.whole(1), default=8, help="turns (default 8)")
    parser.add_argument("--steps", type=arguments.whole(1), default=3, help="of a turn, issued without a wait (default 3)")
    parser.add_argument("--limit", type=arguments.positive, default=140,
                        help="seconds: what is left then is left out (default 140)")
    parser.add_argument("--out", type=arguments.new_file(), help="a file that gets each case as a JSON line at once")


class Run:
    """One world's measurements."""

    def __init__(self, world, name, options, report, deadline):
        self.world, self.name, self.options, self.report, self.deadline = world, name, options, report, deadline
        self.shape = SMALL if options.device == "cpu" else LARGE
        self.narrow = SMALL if options.device == "cpu" else NARROW
        self.rows = {}  # (tokens, impl) -> cells

    def ask(self, do, **request):
        return self.world.ask({"do": do, **request})[0]

    def case(self, **fields):
        line = {"world": self.name, **fields}
        self.report.case(**line)
        if self.options.out:
            with open(self.options.out, "a") as out:
                out.write(json.dumps(line) + "\n")

    def is_late(self, what):
        if time.monotonic() < self.deadline:
            return False
        self.report.note(f"  {self.name}: no time is left for {what}")
        return True

    def all(self):
        about = self.ask("setup", world=self.name, ranks=FAKE_RANKS, device=self.options.device)
        self.report.setting(world=self.name, **about, **self.shape, dtype="bfloat16", warm_up_steps=3,
                            repeats=f"{self.options.repeats} turns of {self.options.steps} steps",
                            optimizer="none" if self.name == "fake" else "fused AdamW")
        self.case(setting=about, shape=self.shape)
        self.memory()
        made = self.ask("make", impls=IMPLS, shape=self.shape)
        self.case(parameters_of_plain=made["parameters"])
        for tokens in self.options.tokens:
            if not self.is_late(f"steps of {tokens} tokens"):
                self.times("step", tokens)
        for tokens in self.options.tokens:
            if not self.is_late(f"the kernels of {tokens} tokens"):
                self.kernels(tokens)
        if not self.is_late("the host's time"):
            self.ask("make", impls=IMPLS, shape=self.narrow)
            self.times("host", 32)
        self.ask("drop")

    def memory(self):
        for impl in IMPLS:
            if self.is_late(f"the memory of {MODEL[impl]}"):
                return
            for peak in self.ask("memory", impl=impl, shape=self.shape, tokens=self.options.tokens)["peaks"]:
                self.case(measured="memory", impl=impl, **peak)
                self.rows.setdefault((peak["tokens"], impl), {}).update(
                    peak_GB=peak["peak_bytes"] / 1e9, reserved_GB=peak["reserved_bytes"] / 1e9)

    def times(self, what, tokens):
        samples = {impl: {"ms": [], "issue_ms": []} for impl in IMPLS}
        for impl in IMPLS:
            self.ask("warm", impl=impl, tokens=tokens, steps=3)
        for turn in range(self.options.repeats):
            if turn > 1 and self.is_late(f"more turns of {tokens} tokens"):
                break
            for impl in IMPLS:
                taken = self.ask("time", impl=impl, tokens=tokens, steps=self.options.steps)
                samples[impl]["ms"].append(sum(taken["ms"]) / len(taken["ms"]))
                samples[impl]["issue_ms"].append(taken["issue_ms"])
        for impl in IMPLS:
            self.report_times(what, tokens, impl, samples)

    def report_times(self, what, tokens, impl, samples):
        mine = samples[impl]
        ratios = {f"of_{other}": harness.paired_ratio(mine["ms"], samples[other]["ms"]) for other in IMPLS[:2]
                  if other != impl}
        step, issue = harness.spread(mine["ms"], "ms"), harness.spread(mine["issue_ms"], "ms")
        exposed = harness.spread([ours - plain for ours, plain in zip(mine["ms"], samples["plain"]["ms"])], "ms")
        self.case(measured=what, impl=impl, tokens=tokens, step=step, exposed=exposed, issue=issue, turns=len(mine["ms"]),
                  **ratios)
        if what == "host":
            self.report.note(f"  {self.name}: host of {MODEL[impl]}, narrow model: {issue['median_ms']:.2f} ms a step "
                             f"(p10 {issue['p10_ms']:.2f}, p90 {issue['p90_ms']:.2f})")
            return
        of_fsdp2 = ratios.get("of_fsdp2", {}).get("median_ratio", "") if impl == "python" else ""
        of_plain = ratios.get("of_plain", {}).get("median_ratio", "")
        self.rows.setdefault((tokens, impl), {}).update(
            ms=step["median_ms"], p10=step["p10_ms"], p90=step["p90_ms"], of_plain=of_plain, of_FSDP2=of_fsdp2,
            exposed_ms=exposed["median_ms"], issue_ms=issue["median_ms"])

    def kernels(self, tokens):
        found = {}
        for impl in IMPLS:
            found[impl] = self.ask("profile", impl=impl, tokens=tokens, steps=2)
        plain = found["plain"]["names"]
        for impl, summary in found.items():
            names = summary.pop("names")
            added = {name: [round(count - plain.get(name, [0, 0])[0], 2), round(us - plain.get(name, [0, 0])[1], 1)]
                     for name, (count, us) in names.items() if count != plain.get(name, [0, 0])[0]}
            self.case(measured="kernels", impl=impl, tokens=tokens, **summary, beyond_plain=added)
            self.rows.setdefault((tokens, impl), {}).update(
                idle=f"{100 * summary['idle_fraction']:.1f}%", kernels=summary["kernels"], copies=summary["copies"],
                copies_us=summary["copies_us"])

    def table(self):
        columns = ["ms", "p10", "p90", "of_plain", "of_FSDP2", "exposed_ms", "issue_ms", "idle", "kernels", "copies",
                   "copies_us", "peak_GB", "reserved_GB"]
        rows = [[tokens, MODEL[impl], *(self.rows[tokens, impl].get(column, "-") for column in columns)]
                for tokens in self.options.tokens for impl in IMPLS if (tokens, impl) in self.rows]
        self.report.note(f"\nworld {self.name}: a step")
        self.report.table(["tokens", "model", *(column.replace("_", " ") for column in columns)], rows)


def run(options, report):
    if options.quick:
        options.repeats, options.tokens = 2, options.tokens[:1]
    if options.device == "cuda" and not harness.has_gpu():
        raise SystemExit("cuda_step: needs a CUDA device, found none; --device cpu tries it out with tiny sizes")
    if options.device == "cpu":
        options.tokens = sorted({max(2, tokens // 16) for tokens in options.tokens})
    harness.build(options, harness.PACKAGE)
    begin, done, failed = time.monotonic(), [], []
    for at, name in enumerate(options.worlds):
        share = options.limit * (at + 1) / len(options.worlds)
        with conductor.Workers() as workers:
            world = workers.start_world(name, conductor.pytorch_command("cuda_step.py"), WORLDS[name], timeout_s=90)
            one = Run(world, name, options, report, begin + share)
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
