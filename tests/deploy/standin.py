"""A stand-in for Flower's grid. It uses real messages, which Flower serialises both ways, and the relay's real reply.

A site answers only when its message is pulled, so that a test decides which sites answer and which are late.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from flwr.app import Error, Message
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.task_identity import TaskIdentity

from equipoise.deploy.transport import relay
from equipoise.deploy.transport.wire import Packet

SUPERLINK = 1  # the id that Flower gives to the SuperLink itself


class StandInGrid:
    """`clients` has a function for each node that answers its messages. For a node in `offline`, a pull gives
    Flower's error; for a node in `silent`, it gives nothing."""

    def __init__(self, clients: dict[int, Callable[[Packet], Packet]]) -> None:
        self.clients = dict(clients)
        self.offline: set[int] = set()
        self.silent: set[int] = set()
        self.sent: list[Message] = []
        self.objects: dict[str, int] = {}  # the size in bytes of each distinct object that was sent
        self._waiting: dict[str, dict[str, bytes]] = {}
        # Flower sets these in every process that runs an app.
        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, SUPERLINK

    def get_node_ids(self) -> list[int]:
        return [node for node in self.clients if node not in self.offline]

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        ids = []
        for message in messages:
            key = message.object_id
            contents = serialise(message)
            self.objects |= {name: len(content) for name, content in contents.items()}
            self.sent.append(message)
            self._waiting[key] = contents
            ids.append(key)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        replies = []
        for key in message_ids:
            if key not in self._waiting:
                continue
            message = restore(key, dict(self._waiting[key]))
            node = message.metadata.dst_node_id
            if node in self.offline:
                reply = Message(Error(5, "Node Unavailable"), reply_to=message)
            elif node in self.silent:
                continue
            else:
                reply = self.reply(node, message)
            del self._waiting[key]
            replies.append(restore(reply.object_id, serialise(reply)))
        return replies

    def reply(self, node: int, message: Message) -> Message:
        return relay.answer(message, self.clients[node])


def serialise(message: Message) -> dict[str, bytes]:
    """What Flower sends for a message: its objects, by their hash."""
    return {key: value.deflate() for key, value in get_all_nested_objects(message).items()}


def restore(key: str, contents: dict[str, bytes]) -> Message:
    message = inflate_object_from_contents(key, contents)
    assert isinstance(message, Message)
    message.metadata.__dict__["_message_id"] = key  # as Flower's own grid does
    return message
