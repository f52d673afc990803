"""Runs Python tests as forks of one process that has imported torch: an import takes two seconds of a processor, and there are
dozens of tests.
"""

import atexit
import ctypes
import json
import os
import queue
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
import weakref

from test_programs import Ran, wait_when_woken

LOOK_AGAIN_S = 0.02


class Forks:
    """The side of the one who asks; from any thread."""

    def __init__(self, python):
        self._server = subprocess.Popen([python, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                                        start_new_session=True)
        self._lock = threading.Lock()
        self._replies = {}  # by request: what the server has said of it
        threading.Thread(target=self._read, daemon=True).start()

    def run(self, command, environment, timeout_s):
        """What a fork gives that does what the command would, as test_programs.run.

        command: [python, file, arguments...]. environment: on top of the server's.
        """
        replies = queue.Queue()
        with tempfile.NamedTemporaryFile() as output:
            with self._lock:
                number = len(self._replies)
                self._replies[number] = replies
                self._server.stdin.write(json.dumps({"number": number, "arguments": command[1:], "output": output.name,
                                                     "environment": environment}) + "\n")
                self._server.stdin.flush()
            is_late = False
            pid = replies.get()["pid"]
            try:
                ended = replies.get(timeout=timeout_s)
            except queue.Empty:
                is_late = True
                os.killpg(pid, signal.SIGKILL)  # a test may have started processes of its own
                ended = replies.get()
            return Ran(None if is_late else ended["exit_code"], output.read().decode(errors="replace"), ended["cpu_s"])

    def close(self):
        self._server.stdin.close()
        self._server.wait()

    def _read(self):
        for line in self._server.stdout:
            reply = json.loads(line)
            self._replies[reply["number"]].put(reply)
        gone = {"pid": self._server.pid, "exit_code": 1, "cpu_s": 0.0}
        for replies in self._replies.values():
            replies.put(gone)
            replies.put(gone)


def import_torch():
    """What the forks would import. None of it starts a thread, which would not be there in a fork."""
    import torch._dynamo  # by every optimizer's first step
    import torch.distributed.fsdp
    import torch.distributed.tensor


def end_interpreter(code):
    """With all that destructors do, and not that of what is around the fork."""
    ctypes.pythonapi.Py_Exit(code)


def end_at_once(code):
    """Without taking torch down, which takes a second."""
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def fork_program(arguments, stdout, stderr, prepare, end):
    """The pid of a fork that runs a Python file as a program and prints to these descriptors.

    arguments: [file, argument...]. prepare: called in the fork first. end: called last, with the exit code.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    for finalizer in list(weakref.finalize._registry):
        finalizer.atexit = False  # of temporary folders, which stay the parent's
    try:
        os.dup2(stdout, 1)
        os.dup2(stderr, 2)
        prepare()
        sys.argv = [str(argument) for argument in arguments]
        sys.path.insert(0, os.path.dirname(os.path.abspath(sys.argv[0])))
        runpy.run_path(sys.argv[0], run_name="__main__")
        code = 0
    except SystemExit as ended:
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        end(code)


def start(request):
    """The pid of a fork for a test, the leader of a session of its own."""
    def prepare():
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.environ.update(request["environment"])
        sys.path.pop(0)  # this file's folder

    output = os.open(request["output"], os.O_WRONLY)
    try:
        return fork_program(request["arguments"], output, output, prepare, end_at_once)
    finally:
        os.close(output)


def reply(**said):
    os.write(1, (json.dumps(said) + "\n").encode())


def serve():
    """Reads requests from standard input until it ends, and writes to standard output what became of them."""
    import_torch()
    wait_when_woken()
    unread, numbers = b"", {}
    while True:
        if select.select([0], [], [], LOOK_AGAIN_S if numbers else None)[0]:
            read = os.read(0, 1 << 16)
            if not read:
                return
            *lines, unread = (unread + read).split(b"\n")
            for line in lines:
                request = json.loads(line)
                pid = start(request)
                numbers[pid] = request["number"]
                reply(number=request["number"], pid=pid)
        while numbers:
            pid, status, usage = os.wait4(-1, os.WNOHANG)
            if not pid:
                break
            reply(number=numbers.pop(pid), exit_code=os.waitstatus_to_exitcode(status),
                  cpu_s=usage.ru_utime + usage.ru_stime)


if __name__ == "__main__":
    serve()
