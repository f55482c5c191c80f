"""Arrow Flight: one record batch of a binary column per block, over one gRPC stream per batch.

Flight hands out Arrow buffers of its own; they are copied into the caller's memory. A server in
Python serves from memory that it was given by a put, without copying.
"""

from __future__ import annotations

from typing import Any

from bench.peers.base import Client, Peer, Server, Work


def _schema() -> Any:
    import pyarrow

    return pyarrow.schema([("block", pyarrow.large_binary())])


def _batch(view: Any) -> Any:
    """One block as a record batch that points at it."""
    import pyarrow

    offsets = pyarrow.array([0, len(view)], pyarrow.int64()).buffers()[1]
    column = pyarrow.Array.from_buffers(
        pyarrow.large_binary(), 1, [None, offsets, pyarrow.py_buffer(view)]
    )
    return pyarrow.record_batch([column], schema=_schema())


class FlightClient(Client):
    """do_put and do_get."""

    def __init__(self, work: Work) -> None:
        from pyarrow import flight

        self._region = work.open_region()
        self._client = flight.connect(f"grpc://127.0.0.1:{work.ports['flight']}")
        self._flight = flight

    def put(self, generation: int) -> None:
        path = self._flight.FlightDescriptor.for_path(str(generation))
        writer, reader = self._client.do_put(path, _schema())
        with writer:
            for block in self._region.blocks(self._region.source):
                writer.write_batch(_batch(block))
            writer.done_writing()
            reader.read()  # nothing, once the server has it all

    def get(self, generation: int) -> None:
        stream = self._client.do_get(self._flight.Ticket(str(generation).encode()))
        for block in self._region.blocks(self._region.into):
            block[:] = memoryview(stream.read_chunk().data.column(0)[0].as_buffer()).cast("B")

    def close(self) -> None:
        self._client.close()


class Flight(Peer):
    name = "flight"
    about = "Arrow Flight (gRPC), a record batch per block"
    wheels = ("pyarrow==26.0.1",)
    ports = ("flight",)

    def servers(self, work: Work) -> list[Server]:
        return [Server("flight", self.driver("serve"), work.ports["flight"])]

    def serve(self, work: Work) -> None:
        from pyarrow import flight

        kept: dict[str, list[Any]] = {}

        class Blocks(flight.FlightServerBase):  # type: ignore[misc]
            def do_put(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
                name = descriptor.path[0].decode()
                kept[name] = [chunk.data for chunk in reader]

            def do_get(self, context: Any, ticket: Any) -> Any:
                batches = kept[ticket.ticket.decode()]
                return flight.GeneratorStream(_schema(), iter(batches))

            def do_action(self, context: Any, action: Any) -> list[bytes]:
                kept.pop(action.body.to_pybytes().decode(), None)
                return []

        Blocks(f"grpc://127.0.0.1:{work.ports['flight']}").serve()

    def client(self, work: Work) -> Client:
        return FlightClient(work)


PEER = Flight()
