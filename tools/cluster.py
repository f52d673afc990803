"""Ranks on a network of their own: each in a network namespace, behind a link of a given rate to one switch. A link can be
cut or slowed, and the switch parted, while programs run over it.

    with Cluster(4, rate="1gbit") as cluster:
        ranks = [cluster.start(rank, ["./train"]) for rank in range(4)]
        cluster.cut(1)

Needs root, and `ip` and `tc` of iproute2.
"""

import argparse
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

LINK = "eth0"  # what a rank calls its end of the link
PORT = 29500
MOST_RANKS = 200
# A namespace is called after the process that made it, and when that one began: a process number is given out again.
NAME = re.compile(r"fsdp-cluster-(\d+)-(\d+)-\d+-\w+")
ENDING = (signal.SIGTERM, signal.SIGHUP)
RATE = re.compile(r"(\d+(?:\.\d+)?)([kmg])bit")
# What a rank may take for its last words once another one has failed.
LAST_WORDS_S = 10


class NotAllowed(OSError):
    """Namespaces cannot be made here, and why."""


def began(process):
    """When a process began, in ticks since the machine did; None if there is no such process."""
    try:
        return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19])
    except OSError:
        return None


def bits_a_second(rate):
    match = RATE.fullmatch(rate)
    if match is None:
        raise ValueError(f"a rate is a number with kbit, mbit or gbit, such as 1gbit, not {rate}")
    return float(match[1]) * {"k": 1e3, "m": 1e6, "g": 1e9}[match[2]]


def run(*command, lines=None):
    """What a command says. lines: of its standard input."""
    try:
        return subprocess.run(command, check=True, text=True, capture_output=True,
                              input=None if lines is None else "\n".join(lines) + "\n").stdout
    except subprocess.CalledProcessError as error:
        raise OSError(f"{' '.join(command)}: {' '.join(error.stderr.split())}") from None


def remove(namespace):
    """With the processes that are in it, and its links."""
    listed = subprocess.run(["ip", "netns", "pids", namespace], text=True, capture_output=True, check=False).stdout
    for process in listed.split():
        try:
            os.kill(int(process), signal.SIGKILL)
        except ProcessLookupError:
            pass
    subprocess.run(["ip", "netns", "delete", namespace], capture_output=True, check=False)


def namespaces():
    folder = Path("/run/netns")
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def remove_leftovers():
    """What processes have left that were killed."""
    for name in namespaces():
        match = NAME.fullmatch(name)
        if match and began(match[1]) != int(match[2]):
            remove(name)


class Cluster:
    """Is gone when the block is left, with all processes in it. Where its own process is killed, its ranks are killed with it,
    and the next cluster removes the rest. Raises NotAllowed where the system does not allow it."""

    made = itertools.count()

    def __init__(self, ranks, rate=None):
        """rate: of each link and direction, such as "1gbit"; None: what the machine gives."""
        if not 1 <= ranks <= MOST_RANKS:
            raise ValueError(f"a cluster has 1 to {MOST_RANKS} ranks, not {ranks}")
        self.ranks = range(ranks)
        self.rate = bits_a_second(rate) if rate else None
        prefix = f"fsdp-cluster-{os.getpid()}-{began(os.getpid())}-{next(self.made)}"
        self.switch = f"{prefix}-switch"
        self.names = [f"{prefix}-rank{rank}" for rank in self.ranks]
        if os.geteuid() != 0:
            raise NotAllowed("network namespaces need root; run this with sudo")
        for tool in ("ip", "tc"):
            if shutil.which(tool) is None:
                raise NotAllowed(f"there is no {tool}; it is in Debian's package iproute2")
        remove_leftovers()
        try:
            self.make()
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):
                raise NotAllowed(f"network namespaces are not allowed here: {error}") from error
            raise

    def make(self):
        for name in (self.switch, *self.names):
            run("ip", "netns", "add", name)
        ports = [line for rank, name in enumerate(self.names) for line in (
            f"link add {self.port(rank)} type veth peer name {LINK} netns {name}",
            f"link set {self.port(rank)} master whole up")]
        # What is moved to the other one is parted from the rest.
        bridges = [line for bridge in ("whole", "half") for line in (f"link add {bridge} type bridge", f"link set {bridge} up")]
        run("ip", "-n", self.switch, "-batch", "-", lines=bridges + ports)
        for rank, name in enumerate(self.names):
            run("ip", "-n", name, "-batch", "-", lines=["link set lo up", f"address add {self.address(rank)}/24 dev {LINK}",
                                                        f"link set {LINK} up"])
        if self.rate:
            self.set_rate(self.rate)
        run(*self.before(0), "true")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        # A signal that ends this process waits until all is gone.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, *ENDING})
        try:
            for name in (*self.names, self.switch):
                remove(name)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    # --- programs

    @staticmethod
    def address(rank):
        return f"10.213.77.{rank + 1}"

    def before(self, rank):
        """In front of a command that is to run as this rank. It dies with the thread that starts it."""
        return ["ip", "netns", "exec", self.names[rank], "setpriv", "--pdeathsig", "KILL"]

    def environment(self, rank):
        """What torchrun would set on a machine of its own, and where gloo finds the link."""
        return {"RANK": str(rank), "WORLD_SIZE": str(len(self.ranks)), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
                "MASTER_ADDR": self.address(0), "MASTER_PORT": str(PORT), "GLOO_SOCKET_IFNAME": LINK}

    def start(self, rank, command, **options):
        """One rank's process. options: of subprocess.Popen."""
        environment = {"OMP_NUM_THREADS": "1", **os.environ, **options.pop("env", {}), **self.environment(rank)}
        return subprocess.Popen([*self.before(rank), *map(str, command)], env=environment, **options)

    # --- faults

    @staticmethod
    def port(rank):
        return f"rank{rank}"

    def of_ports(self, ranks, change):
        run("ip", "-n", self.switch, "-batch", "-", lines=[f"link set {self.port(rank)} {change}" for rank in ranks])

    def cut(self, *ranks):
        """Their cables are pulled: nothing comes through any more, and nobody is told."""
        self.of_ports(ranks, "down")

    def mend(self, *ranks):
        self.of_ports(ranks, "up")

    def part(self, *ranks):
        """These reach each other, the others reach each other."""
        self.of_ports(ranks, "master half")

    def join(self, *ranks):
        """They are with the others again."""
        self.of_ports(ranks, "master whole")

    def set_rate(self, bits, *ranks):
        """Of the links of these ranks, in bits a second; without ranks: of all."""
        # The bucket holds what the link carries in 2 ms, or a few packets; what waits longer than 50 ms is dropped.
        limits = ["tbf", "rate", f"{bits:.0f}bit", "burst", f"{max(16 << 10, bits / 8 * 0.002):.0f}", "latency", "50ms"]
        for rank in ranks or self.ranks:
            for namespace, device in ((self.names[rank], LINK), (self.switch, self.port(rank))):
                run("tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", *limits)


def end_on_signals():
    """SIGTERM and SIGHUP end this process by an exception, as SIGINT does, so that what it has made is removed."""
    for number in ENDING:
        signal.signal(number, lambda number, _: sys.exit(128 + number))


def run_ranks(cluster, command):
    """The exit code of the first rank that fails, or 0. The others are ended some seconds after it."""
    processes = [cluster.start(rank, command, stdin=subprocess.DEVNULL) for rank in cluster.ranks]
    first = None
    deadline = None
    while any(process.poll() is None for process in processes):
        if first is None:
            first = next((process for process in processes if process.poll()), None)
            deadline = first and time.monotonic() + LAST_WORDS_S
        elif time.monotonic() > deadline:
            break
        time.sleep(0.05)
    failed = first or next((process for process in processes if process.poll()), None)
    if failed is None:
        return 0
    rank, code = processes.index(failed), failed.returncode
    print(f"tools/cluster: rank {rank} failed with exit code {code}", file=sys.stderr)
    return code if code > 0 else 128 - code


def main():
    parser = argparse.ArgumentParser(
        prog="tools/cluster", usage="tools/cluster [--ranks N] [--rate RATE] [--] COMMAND [ARGUMENT...]",
        description="Starts a command once for each rank, in a network namespace of its own, with torchrun's variables.")
    parser.add_argument("--ranks", type=int, default=2, metavar="N", help="how many [2]")
    parser.add_argument("--rate", metavar="RATE", help="of each rank's link: 100mbit, 1gbit ... [what the machine gives]")
    parser.add_argument("--version", action="store_true", help="print the version of libfsdp and end")
    parser.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    given = parser.parse_args()
    command = given.command[1:] if given.command[:1] == ["--"] else given.command
    if not command:
        parser.error("there is no command to start")
    if shutil.which(command[0]) is None:
        parser.error(f"there is no program {command[0]}")
    end_on_signals()
    try:
        with Cluster(given.ranks, given.rate) as cluster:
            return run_ranks(cluster, command)
    except (ValueError, NotAllowed) as error:
        parser.exit(2, f"tools/cluster: {error}\n")
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
