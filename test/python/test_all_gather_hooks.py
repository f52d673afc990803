"""Parameters that are tensor subclasses, which say how they are gathered: equal to FSDP2 (hook_programs/)."""

from parity_case import ParityCase, add_tests
from closing_line import main


class AllGatherHooks(ParityCase):
    pass


add_tests(AllGatherHooks, "hook_programs")

if __name__ == "__main__":
    main()
