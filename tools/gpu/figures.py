"""The parts of --more that measure steps: shapes and worlds beside those of the second command.

GiB of memory: the model's parameters, gradients and states, of all that are there at once, and activations.
"""

from makers import steps

TOKENS = ("--tokens", "128,512,2048,8192")


def parts(options):
    def one(name, limit_s, shows, *arguments, needs=()):
        return steps(options, name, limit_s, *TOKENS, *arguments, shows=shows, needs=needs)

    return [
        one("1.2B_fake64", 120, "the sizes of 64 ranks", "--worlds", "fake", "--ranks", "64"),
        one("8B_fake8", 240, "a large model with the sizes of 8 ranks", "--worlds", "fake", "--shape", "8B",
            needs=("memory:70",)),
        one("8B_fake64", 240, "a large model with the sizes of 64 ranks", "--worlds", "fake", "--ranks", "64",
            "--shape", "8B", needs=("memory:70",)),
        one("1.2B_one_compiled", 240, "a rank alone, under torch.compile", "--worlds", "one", "--compile",
            needs=("memory:30", "compiler")),
        one("8B_one", 240, "a large model alone, each kind by itself", "--worlds", "one", "--shape", "8B", "--alone",
            "--no-optimizer", needs=("memory:70",)),
        one("8B_fake8_compiled", 300, "a large model under torch.compile", "--worlds", "fake", "--shape", "8B", "--compile",
            needs=("memory:70", "compiler")),
        one("1.2B_nccl", 150, "two ranks with a GPU each: kernels and copies around each collective", "--worlds", "nccl",
            needs=("gpus:2", "memory:60")),
    ]
