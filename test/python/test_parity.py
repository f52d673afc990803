"""Programs for FSDP2's interface do the same with torch's fully_shard and with ours (programs/)."""

from parity_case import ParityCase, add_tests
from closing_line import main


class Parity(ParityCase):
    pass


add_tests(Parity, "programs")

if __name__ == "__main__":
    main()
