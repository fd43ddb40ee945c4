"""Asks the server (`__init__.py`) for a forked process, and stands for it until it ends.

Run as `python -I -S launch.py PYTHON -m MODULE ...`. Imports only what is built in: it must start in milliseconds.
If there is no server, or it does not answer, this process becomes the ordinary interpreter PYTHON.
"""

# ruff: noqa: PTH109, S606, SIM105

import _signal  # type: ignore[import-not-found]
import _socket
import marshal
import os
import sys

_STREAMS = range(3)


def ask(path: str) -> tuple[_socket.socket, int]:
    """The connection to the server, and the id of the forked process; 0: there is none."""
    request = marshal.dumps((sys.argv[2:], dict(os.environ), os.getcwd()))
    server = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    streams = b"".join(n.to_bytes(4, sys.byteorder) for n in _STREAMS)
    try:
        server.connect(path)
        length = len(request).to_bytes(4, "big")
        server.sendmsg([length], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, streams)])
        server.sendall(request)
        pid = server.recv(4)
    except OSError:
        return server, 0
    return server, int.from_bytes(pid, "big")


def main() -> None:
    server, pid = ask(os.environ["DELIVERED_TEMPLATE"])
    if not pid:
        os.execv(sys.argv[1], sys.argv[1:])

    def forward(number: int, _: object) -> None:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            pass

    handled = (_signal.SIGTERM, _signal.SIGINT, _signal.SIGHUP)
    for number in handled:
        _signal.signal(number, forward)
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in _STREAMS:  # the worker has them, and whoever reads them must see their end
        os.dup2(nothing, stream)
    status = server.recv(4)
    code = int.from_bytes(status, "big", signed=True) if len(status) == 4 else 1
    if code < 0:
        if -code in handled:
            _signal.signal(-code, _signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    main()
