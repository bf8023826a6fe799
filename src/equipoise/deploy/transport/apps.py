"""The two apps that Flower starts. They pass packets between Flower and the process that does the work.

That process listens on a unix socket; the environment has the path of the socket. At a site, Flower imports this
module for every message, so the import must be fast and must not need torch.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from equipoise.deploy.transport import carrier, relay, wire
from equipoise.deploy.transport.wire import Packet, WireError

SOCKET = "EQUIPOISE_SOCKET"  # the environment variable with the path of the socket
LIMIT = "EQUIPOISE_LIMIT"  # the environment variable with the most bytes that a message may have

client = ClientApp()
server = ServerApp()


def _limit() -> int:
    return int(os.environ.get(LIMIT, wire.LIMIT))


@contextmanager
def _connection() -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect(os.environ[SOCKET])
        yield connection


def _ask(packet: Packet) -> Packet:
    try:
        with _connection() as connection:
            carrier.send(connection, packet)
            return carrier.receive(connection)
    except OSError as error:
        raise WireError(f"the process of `equipoise join` cannot be reached ({error})") from error


@client.train()
@client.query()
def answer(message: Message, context: Context) -> Message:
    return relay.answer(message, _ask, _limit())


@server.main()
def main(grid: Grid, context: Context) -> None:
    with _connection() as connection:
        carrier.serve_carrier(connection, relay.GridCarrier(grid, _limit()))
