"""A worker's launcher: asks the template process (template.py) for a forked worker, and stands for it until it ends.

Run as `python -I -S launch.py PYTHON -m MODULE ...`. Imports only what is built in: it must start in milliseconds.
If there is no template, or it does not answer, this process becomes the ordinary interpreter PYTHON.
"""

# ruff: noqa: PTH109, S606, SIM105

import _signal  # type: ignore[import-not-found]
import _socket
import marshal
import os
import sys

_STREAMS = range(3)


def ask(path: str) -> tuple[_socket.socket, int]:
    """The connection to the template, and the id of the forked process; 0: there is none."""
    request = marshal.dumps((sys.argv[2:], dict(os.environ), os.getcwd()))
    template = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    streams = b"".join(n.to_bytes(4, sys.byteorder) for n in _STREAMS)
    try:
        template.connect(path)
        length = len(request).to_bytes(4, "big")
        template.sendmsg([length], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, streams)])
        template.sendall(request)
        pid = template.recv(4)
    except OSError:
        return template, 0
    return template, int.from_bytes(pid, "big")


def main() -> None:
    template, pid = ask(os.environ["DELIVERED_TEMPLATE"])
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
    status = template.recv(4)
    code = int.from_bytes(status, "big", signed=True) if len(status) == 4 else 1
    if code < 0:
        if -code in handled:
            _signal.signal(-code, _signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    main()
