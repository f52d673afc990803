"""Programs that use other libraries do the same with torch's fully_shard and with ours (library_programs/)."""

from parity_case import ParityCase, add_tests
from closing_line import main


class Libraries(ParityCase):
    pass


add_tests(Libraries, "library_programs", timeout_s=400)

if __name__ == "__main__":
    main()
