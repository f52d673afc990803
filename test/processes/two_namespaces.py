"""Two network namespaces with a link between them that can be taken down. Needs root and iproute2."""

import os
import subprocess
import uuid


class TwoNamespaces:
    """Raises OSError where the system does not allow it."""

    addresses = ("10.213.77.1", "10.213.77.2")
    link = "fsdp_link"

    def __init__(self):
        self.names = [f"fsdp_test_{os.getpid()}_{uuid.uuid4().hex[:6]}_{end}" for end in "ab"]
        try:
            for name in self.names:
                self.ip("netns", "add", name)
                self.ip("-n", name, "link", "set", "lo", "up")
            first, second = self.names
            self.ip("-n", first, "link", "add", self.link, "type", "veth", "peer", "name", self.link, "netns", second)
            for name, address in zip(self.names, self.addresses):
                self.ip("-n", name, "address", "add", f"{address}/24", "dev", self.link)
                self.ip("-n", name, "link", "set", self.link, "up")
        except (OSError, subprocess.CalledProcessError) as error:
            self.close()
            raise OSError(getattr(error, "stderr", None) or str(error)) from error

    @staticmethod
    def ip(*arguments):
        subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)

    def command(self, end):
        """In front of a command that is to run at this end."""
        return ["ip", "netns", "exec", self.names[end]]

    def cut(self):
        self.ip("-n", self.names[1], "link", "set", self.link, "down")

    def close(self):
        for name in self.names:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)
