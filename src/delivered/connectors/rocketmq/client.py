"""A session with RocketMQ's proxies, and translation of their errors.

The client library provides channels, signatures and the protocol's messages. Its consumer and producer are not used:
one drops a batch with one unreadable message, the other retries sends of unknown outcome.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as Late
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NoReturn

from delivered.connectors.rocketmq import Place
from delivered.kits.options import trust
from delivered.model.errors import (
    BadRecord,
    DeliveredError,
    MissingExtra,
    OutcomeUnknown,
    Refused,
    Unreachable,
    UsageError,
)
from delivered.model.limits import CONNECT_TIMEOUT_S, REQUEST_TIMEOUT_S
from delivered.model.options import resolve_secret
from delivered.model.patience import left_s

_OPTIONS = [
    ("grpc.enable_retries", 0),
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1),
]
_DISTRUST = ("CERTIFICATE_VERIFY_FAILED", "not in peer certificate", "Hostname Verification Check failed")


class Channels:
    """gRPC channels of a session, one per proxy, used in the client's thread.

    The client library's own channels have no option for trusted certificates."""

    def __init__(self, library: SimpleNamespace, options: Place) -> None:
        """Raises UsageError: the file of trusted certificates is invalid."""
        self._library = library
        self._tls = options.tls
        self._trusted = None if options.trusted is None else _certificates(options.trusted)
        self._open: dict[Any, tuple[Any, Any]] = {}

    def stub(self, proxy: Any) -> Any:
        if proxy not in self._open:
            grpc = self._library.grpc
            if self._tls:
                # gRPC always verifies certificates and host names.
                credentials = grpc.ssl_channel_credentials(self._trusted)
                channel = grpc.aio.secure_channel(proxy.facade, credentials, _OPTIONS)
            else:
                channel = grpc.aio.insecure_channel(proxy.facade, _OPTIONS)
            self._open[proxy] = channel, self._library.Stub(channel)
        return self._open[proxy][1]

    async def close(self) -> None:
        channels, self._open = self._open, {}
        for channel, _ in channels.values():
            await channel.close()


def untrusted(options: Place, detail: str) -> UsageError | None:
    """The error for a gRPC message about a certificate; None: it is about something else."""
    if not options.tls or not any(word in detail for word in _DISTRUST):
        return None
    trusted = f"those in {options.trusted}" if options.trusted is not None else "gRPC's built-in ones"
    return UsageError(
        "CERTIFICATE_REFUSED.ROCKETMQ",
        endpoints=options.endpoints,
        error=detail[-300:],
        trusted=trusted,
        endpoint=options.endpoints.split(";")[0],
    )


def _certificates(path: str) -> bytes:
    """Check the file first: if it has no certificate, gRPC fails every connection without a reason."""
    trust("tlsTrustCertsFile", path)
    return Path(path).read_bytes()


_LOG_MODULE = "rocketmq.v5.log"
_DETAIL_MAX = 300


@lru_cache(maxsize=1)
def library() -> SimpleNamespace:
    """The parts of the client library in use, imported on use. Raises MissingExtra.

    Its log module creates files in the user's home on import, so it is replaced by one that does not.
    """
    if _LOG_MODULE not in sys.modules:
        stand_in = ModuleType(_LOG_MODULE)
        stand_in.logger = logging.getLogger("rocketmq-python-client")  # type: ignore[attr-defined]
        sys.modules[_LOG_MODULE] = stand_in
    try:
        import grpc
        import rocketmq.grpc_protocol as protocol
        from rocketmq.grpc_protocol import definition_pb2, service_pb2
        from rocketmq.v5.client import ClientConfiguration, Credentials
        from rocketmq.v5.client.connection import RpcClient, RpcEndpoints
        from rocketmq.v5.util import ClientId, Signature
    except ImportError:
        sys.modules.pop(_LOG_MODULE, None)
        raise MissingExtra("rocketmq") from None
    return SimpleNamespace(
        grpc=grpc,
        of=definition_pb2,
        calls=service_pb2,
        code=protocol.Code,
        RpcClient=RpcClient,
        RpcEndpoints=RpcEndpoints,
        Stub=protocol.MessagingServiceStub,
        ClientConfiguration=ClientConfiguration,
        Credentials=Credentials,
        ClientId=ClientId,
        Signature=Signature,
    )


class Session:
    """One client in RocketMQ's sense: an id, and a settings stream to each proxy.

    Args:
        describe: fills in this client's Settings.
    """

    def __init__(self, options: Place, describe: Callable[[Any], None]) -> None:
        self.library = client = library()
        self.options = options
        self.failed: DeliveredError | None = None
        self.granted: Any = None  # the Settings that a proxy returned
        self.changed = threading.Condition()
        self._describe = describe
        secret = None if options.secret_key is None else resolve_secret("secretKey", options.secret_key)
        self._config = client.ClientConfiguration(
            options.endpoints, client.Credentials(options.access_key, secret), options.namespace
        )
        self._id = client.ClientId().client_id
        self._channels = Channels(client, options)
        client.RpcClient()  # starts the client's own thread
        self._streams: dict[Any, Any] = {}
        self.closed = False
        try:
            self.queues = self._route()
            self.proxies = list({client.RpcEndpoints(q.broker.endpoints): None for q in self.queues})
            for proxy in self.proxies:
                self.wait(self.run(self._introduce(proxy)), left_s(CONNECT_TIMEOUT_S))
        except BaseException:
            self.close()
            raise

    def resource(self, name: str) -> Any:
        """A resource name in this session's namespace."""
        return self.library.of.Resource(name=name, resource_namespace=self.options.namespace)

    def run(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        """Run in the client's thread, whose event loop the process shares."""
        return asyncio.run_coroutine_threadsafe(work, self.library.RpcClient.get_channel_io_loop())

    def wait(self, future: Future[Any], timeout_s: float) -> Any:
        """Raises Unreachable, UsageError, Refused."""
        try:
            return future.result(timeout_s)
        except Late:
            future.cancel()
            raise self._unreachable(f"no answer within {timeout_s:.0f} s") from None
        except self.library.grpc.RpcError as error:
            raise self.explained(error) from error
        except (DeliveredError, asyncio.CancelledError):
            raise
        except Exception as error:  # the library has no type for an ended session
            raise self._unreachable(f"{type(error).__name__}: {error}") from error

    async def call(self, proxy: Any, name: str, request: Any, timeout_s: float) -> Any:
        """One request and its answer, with unchecked status."""
        stub = self._channels.stub(proxy)
        return await getattr(stub, name)(request, metadata=self._sign(), timeout=timeout_s)

    def stream(self, proxy: Any, name: str, request: Any, timeout_s: float) -> Any:
        """One request and its answers; for the client's own thread."""
        stub = self._channels.stub(proxy)
        return getattr(stub, name)(request, metadata=self._sign(), timeout=timeout_s)

    def fail(self, error: DeliveredError) -> None:
        """Keep the first error: later ones are its consequences."""
        with self.changed:
            self.failed = self.failed or error
            self.changed.notify_all()

    def close(self, last: Callable[[], None] | None = None) -> None:
        """Idempotent. Args: last: run before the streams end."""
        if self.closed:
            return
        self.closed = True
        with suppress(DeliveredError):
            if last is not None:
                last()
        with suppress(Late, self.library.grpc.RpcError, asyncio.CancelledError):
            self.run(self._end()).result(REQUEST_TIMEOUT_S)

    def explained(self, error: Exception) -> DeliveredError:
        """Translate a gRPC error."""
        codes = self.library.grpc.StatusCode
        code = error.code() if isinstance(error, self.library.grpc.RpcError) else None
        detail = str(getattr(error, "details", lambda: None)() or error)
        if code in (codes.UNAUTHENTICATED, codes.PERMISSION_DENIED):
            return self._credentials(detail)
        if "group not found" in detail:
            return self._group_missing(detail)
        if code is codes.INVALID_ARGUMENT:
            return UsageError("ROCKETMQ_ERROR.PROXY", endpoints=self.options.endpoints, detail=detail[:_DETAIL_MAX])
        return untrusted(self.options, detail) or self._unreachable(detail)

    def error_of(self, status: Any) -> DeliveredError:
        """Translate a status that is not OK."""
        codes, code, text = self.library.code, status.code, status.message[:_DETAIL_MAX]
        if code in (codes.UNAUTHORIZED, codes.FORBIDDEN):
            return self._credentials(text)
        if code == codes.TOPIC_NOT_FOUND:
            return UsageError("TOPIC_MISSING.ROCKETMQ", topic=self.options.topic, endpoints=self.options.endpoints)
        if code == codes.CONSUMER_GROUP_NOT_FOUND:
            return self._group_missing(text)
        if code in (codes.MESSAGE_BODY_TOO_LARGE, codes.PAYLOAD_TOO_LARGE):
            return BadRecord("MESSAGE_TOO_LARGE.ROCKETMQ_PROXY", endpoints=self.options.endpoints, text=text)
        if code == codes.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE:
            return UsageError("TOPIC_TYPE.MESSAGE", topic=self.options.topic, text=text)
        if code == codes.ILLEGAL_INVISIBLE_TIME:
            return UsageError("INVISIBLE_TIME", endpoints=self.options.endpoints, text=text)
        passing = (codes.REQUEST_TIMEOUT, codes.TOO_MANY_REQUESTS, codes.UNRECOGNIZED_CLIENT_TYPE)
        if 40_000 <= code < 50_000 and code not in passing:
            return UsageError("ROCKETMQ_ERROR.CODE", endpoints=self.options.endpoints, number=code, text=text)
        return self._unreachable(f"{code}: {text}")

    def _sign(self) -> Any:
        return self.library.Signature.metadata(self._config, self._id)

    async def new_route(self) -> Sequence[Any]:
        """The topic's queues now; their proxies know this session. Raises DeliveredError, TimeoutError, RpcError."""
        queues = await self._ask_route()
        for proxy in {self.library.RpcEndpoints(q.broker.endpoints): None for q in queues}:
            if proxy not in self._streams:
                try:
                    await asyncio.wait_for(self._introduce(proxy), CONNECT_TIMEOUT_S)
                except BaseException:
                    self._streams.pop(proxy).cancel()
                    raise
                self.proxies.append(proxy)
        return queues

    def _route(self) -> Sequence[Any]:
        answer: Sequence[Any] = self.wait(self.run(self._ask_route()), left_s(CONNECT_TIMEOUT_S))
        return answer

    async def _ask_route(self) -> Sequence[Any]:
        asked = self.library.calls.QueryRouteRequest(
            topic=self.resource(self.options.topic), endpoints=self._config.rpc_endpoints.endpoints
        )
        answer = await self.call(self._config.rpc_endpoints, "QueryRoute", asked, CONNECT_TIMEOUT_S)
        if answer.status.code != self.library.code.OK:
            raise self.error_of(answer.status)
        return list(answer.message_queues)

    async def _introduce(self, proxy: Any) -> None:
        stub = self._channels.stub(proxy)
        stream = self._streams[proxy] = stub.Telemetry(metadata=self._sign())
        command = self.library.calls.TelemetryCommand()
        settings = command.settings
        settings.access_point.CopyFrom(proxy.endpoints)
        settings.request_timeout.seconds = int(CONNECT_TIMEOUT_S)
        settings.user_agent.language = self.library.of.PYTHON
        settings.user_agent.version = "5.1.0"
        settings.user_agent.hostname = socket.gethostname()
        settings.metric.on = False
        self._describe(settings)
        await stream.write(command)
        while True:
            answer = await stream.read()
            if answer is self.library.grpc.aio.EOF:
                raise self._unreachable("it closed the stream of settings")
            if answer.HasField("settings"):
                break
        if answer.status.code not in (0, self.library.code.OK):
            raise self.error_of(answer.status)
        self.granted = answer.settings
        asyncio.get_running_loop().create_task(self._listen(stream)).add_done_callback(_forget)

    async def _listen(self, stream: Any) -> None:
        """Read until the proxy ends the stream, which drops this client's settings."""
        try:
            while await stream.read() is not self.library.grpc.aio.EOF:
                pass
            self.fail(self._unreachable("it closed the stream of settings"))
        except self.library.grpc.RpcError as error:
            self.fail(self.explained(error))

    async def _end(self) -> None:
        for proxy, stream in [*self._streams.items()]:
            with suppress(self.library.grpc.RpcError):
                leaving = self.library.calls.NotifyClientTerminationRequest()
                group = getattr(self.options, "group", None)
                if group is not None:
                    leaving.group.CopyFrom(self.resource(group))
                await self.call(proxy, "NotifyClientTermination", leaving, 2.0)
            stream.cancel()
        await self._channels.close()

    def _unreachable(self, detail: str) -> Unreachable:
        return Unreachable("ROCKETMQ_UNREACHABLE.PROXY", endpoints=self.options.endpoints, detail=detail[:_DETAIL_MAX])

    def _credentials(self, detail: str) -> Refused:
        return Refused("ROCKETMQ_CREDENTIALS", address=self.options.endpoints, detail=detail[:_DETAIL_MAX])

    def _group_missing(self, detail: str) -> UsageError:
        group = getattr(self.options, "group", "")
        return UsageError("GROUP_MISSING", group=group, endpoints=self.options.endpoints, detail=detail[:_DETAIL_MAX])


def unknown(error: DeliveredError, count: int) -> NoReturn:
    """Raise the error for this many sent but unconfirmed messages."""
    raise OutcomeUnknown("ROCKETMQ_UNCONFIRMED", count=count, error=error.message) from error


def _forget(task: asyncio.Task[Any]) -> None:
    """Ignore a task that was cancelled with its stream."""
    if not task.cancelled():
        task.exception()
