"""Code that tests of half messages run in separate processes.

    python rocketmq_process.py apply CODED [after SIGNAL]

With a count and a signal, the process sends itself that signal after posting that many ends, and posts no more.
"""

from __future__ import annotations

import base64
import os
import pickle
import sys
from typing import Any

from delivered.connectors.rocketmq import remoting


def tell(what: Any) -> None:
    print(base64.b64encode(pickle.dumps(what)).decode(), flush=True)


def strike(after: int, signal: int) -> None:
    """Replaces the n-th end: a process can die or be paused between any two."""
    post, posted = remoting.Peer.post, [0]

    def counted(self: Any, code: int, *rest: Any) -> None:
        if code == remoting.END:
            posted[0] += 1
            if posted[0] == after + 1:
                os.kill(os.getpid(), signal)
        post(self, code, *rest)

    remoting.Peer.post = counted  # type: ignore[method-assign]


def apply(sink: Any, work: Any, prepared: Any) -> None:
    tell(sink.committer(work.scope).commit(work, prepared))


if __name__ == "__main__":
    if len(sys.argv) > 3:
        strike(int(sys.argv[3]), int(sys.argv[4]))
    globals()[sys.argv[1]](*pickle.loads(base64.b64decode(sys.argv[2])))
