"""Simulated networks of GPUs, and where their figures come from.

Latencies are those of NCCL's own cost model for its ring and Simple protocol, in src/graph/tuning.cc of
github.com/NVIDIA/nccl (versions that know PAT and Blackwell): 8.4 us to launch, 3.4 us a step over NVLink, 14 us
a step over the network. With several GPUs a node NCCL gathers in rings: PAT wants one GPU a node there.

Bandwidths are meant as bus bandwidth of large buffers, in 10^9 bytes a second and rank. NVLink 4 of an HGX H100 has
450 in each direction (NVIDIA H100 datasheet: 900 both ways); 340, three quarters of it, is assumed here. NDR
InfiniBand has 50 a port (400 Gb/s), of which 46 to 48 are to be expected: github.com/NVIDIA/nccl-tests/issues/290. A
node of eight GPUs has a port for each, as those of arXiv 2407.21783 have.
"""

from dataclasses import asdict, dataclass, replace

LAUNCH_US, NVLINK_STEP_US, NET_STEP_US = 8.4, 3.4, 14.0
NVLINK_GB_PER_S, INFINIBAND_GB_PER_S = 340.0, 47.0
GPUS_A_NODE = 8


@dataclass(frozen=True)
class Network:
    """What makes a fsdp::SimulatedNetwork, with its nodes."""

    world: int
    latency_us: float
    bandwidth_gb_per_s: float
    launch_us: float = LAUNCH_US
    ranks_per_node: int = 0
    node_latency_us: float = 0.0
    node_bandwidth_gb_per_s: float = 0.0

    def request(self):
        return asdict(self)

    def scaled(self, factor):
        """Every byte takes the time of `factor` bytes: for tensors that stand in for larger ones."""
        return replace(self, bandwidth_gb_per_s=self.bandwidth_gb_per_s / factor,
                       node_bandwidth_gb_per_s=self.node_bandwidth_gb_per_s / factor)

    def ring(self):
        """The same for collectives over all ranks on the simulated device (bench/extension/simulated_device)."""
        return {"launch_us": self.launch_us, "ring_us": self.latency_of_us() - self.launch_us,
                "us_per_byte": self.sending_us(1)}

    def latency_of_us(self):
        """What a collective of no bytes over all ranks takes."""
        nodes = -(-self.world // self.ranks_per_node) if self.ranks_per_node else 1
        return self.launch_us + (self.world - nodes) * self.latency_us + (nodes - 1) * self.node_latency_us

    def sending_us(self, size):
        """What its `size` bytes take beside that."""
        bandwidth = self.bandwidth_gb_per_s
        nodes = -(-self.world // self.ranks_per_node) if self.ranks_per_node else 1
        if nodes > 1 and self.node_bandwidth_gb_per_s:
            bandwidth = min(bandwidth, self.node_bandwidth_gb_per_s * (self.world // nodes))
        return 1e-3 * (self.world - 1) * size / self.world / bandwidth


def nvlink(world):
    """One switch for all: an HGX H100 of eight GPUs, or a rack-scale NVLink domain at its speed."""
    return Network(world, latency_us=NVLINK_STEP_US, bandwidth_gb_per_s=NVLINK_GB_PER_S)


def infiniband(world):
    """Nodes of eight GPUs, NVLink within and a port of NDR InfiniBand for each GPU between them."""
    if world <= GPUS_A_NODE:
        return nvlink(world)
    return replace(nvlink(world), ranks_per_node=GPUS_A_NODE, node_latency_us=NET_STEP_US,
                   node_bandwidth_gb_per_s=INFINIBAND_GB_PER_S)


PRESETS = {"nvlink": nvlink, "infiniband": infiniband}
