"""An island, as the coordinator knows it."""

from dataclasses import dataclass, field

from llmfoundry_islands.coordination.division import Rate
from llmfoundry_islands.coordination.messages import Message


@dataclass(kw_only=True)
class Island:
    """A launch, from the first hello of its ranks on."""

    name: str
    launch: str
    size: int
    """Number of ranks."""
    first_hello_at: float
    hellos: dict[int, Message] = field(default_factory=dict)
    """Rank -> its hello, in order of arrival."""
    connections: dict[int, int] = field(default_factory=dict)
    """Rank -> the number of its connection."""
    received_at: dict[int, float] = field(default_factory=dict)
    """Rank -> the time of its last message."""
    phases: dict[int, tuple[str, int]] = field(default_factory=dict)
    """Rank -> its phase, and the bytes that it has exchanged, from its last heartbeat."""
    prepared: Message | None = None
    """Its report on the present batch. None until it has reported."""
    rate: Rate = field(default_factory=Rate)
    """Rows per second."""
    link: Rate = field(default_factory=Rate)
    """Bytes per second that come from other islands."""
    is_leaving: bool = False
    """It leaves after the last committed batch."""
    has_state: bool = False
    """It has the run's weights, so it may save them and send them to joiners."""
    wait_reason: str = ""
    """The last reason for waiting that was sent to it."""

    @property
    def has_all_ranks(self) -> bool:
        return len(self.connections) == self.size

    @property
    def facts(self) -> Message:
        """The hello of rank 0. Its facts about the island are those of all ranks."""
        return self.hellos[0]

    @property
    def batch(self) -> int:
        """Number of batches in its checkpoint. All ranks have restored the same one."""
        first_hello = next(iter(self.hellos.values()))
        return first_hello["batch"]

    def describe(self) -> list[Message]:
        """Return the messages that introduce this island to another: one for each rank.

        They are not one message, because the boxes of all ranks may exceed MAX_BYTES.
        """
        descriptions = []
        for hello in self.hellos.values():
            description = {"kind": "member", "name": self.name, "launch": self.launch, "machine": self.facts["machine"]}
            for key in ("size", "rank", "address", "boxes", "data_ranks"):
                description[key] = hello[key]
            descriptions.append(description)
        return descriptions
