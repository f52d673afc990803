"""A server that hands everything on to another one until it is told to fall silent."""

import socket
import threading


class SilentProxy:
    """In front of 127.0.0.1:`port`. Connections stay when it falls silent: nothing comes through any more."""

    def __init__(self, port):
        self.to_port = port
        self.is_silent = threading.Event()
        self.connections = []
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self):
        while True:
            try:
                client, _ = self.listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(("127.0.0.1", self.to_port))
            except OSError:  # it does not listen yet: the client tries again
                client.close()
                continue
            self.connections += [client, server]
            for source, sink in ((client, server), (server, client)):
                threading.Thread(target=self.hand_on, args=(source, sink), daemon=True).start()

    def hand_on(self, source, sink):
        try:
            while data := source.recv(65536):
                if self.is_silent.is_set():
                    return
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            pass

    def fall_silent(self):
        self.is_silent.set()

    def close(self):
        self.listener.close()
        for connection in self.connections:
            connection.close()
