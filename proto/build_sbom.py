"""The bill of materials of a build: CycloneDX 1.6, put into the wheel by the build hook (PEP 770).

`python proto/build_sbom.py` prints it. Standard library only, because it runs inside a build.

Invariant: it follows from the source tree and SOURCE_DATE_EPOCH alone, so that two builds agree.
What a package needs is stated as it is declared, a range: which versions get installed is decided
elsewhere (for our own runs by .ci/requirements.lock).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
import tomllib
import uuid
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

NAME = "entresol.cdx.json"
KERNEL_SOURCES = "proto/entresol_proto/native/*.[ch]"
# Files that are not our code: path -> CycloneDX type.
DATA = {
    "client/entresol_client/demo/data/decoder.weights": "machine-learning-model",
    "client/entresol_client/demo/data/tokenizer.json": "data",
    "client/entresol_client/demo/data/ownership.txt": "data",
}
_REQUIREMENT = re.compile(r"([A-Za-z0-9._-]+)(?:\[[^\]]*\])?\s*(.*)")


def sbom(root: Path) -> bytes:
    """The document for the tree at `root`; ends in a newline."""
    with open(root / "pyproject.toml", "rb") as file:
        project = tomllib.load(file)["project"]
    name, version = project["name"], project["version"]
    own = f"pkg:pypi/{name}@{version}"
    packages = _packages(project, name)
    sources = sorted(path.relative_to(root).as_posix() for path in root.glob(KERNEL_SOURCES))
    files = [_file(root, name, "file") for name in sources]
    files += [_file(root, *one) for one in DATA.items()]
    metadata: dict[str, Any] = {
        "component": {
            "type": "library", "bom-ref": own, "name": name, "version": version, "purl": own,
            "description": project["description"],
            "licenses": [{"license": {"id": project["license"]}}],
        },
    }  # fmt: skip
    epoch = os.environ.get("SOURCE_DATE_EPOCH")
    if epoch:
        metadata["timestamp"] = datetime.fromtimestamp(int(epoch), UTC).isoformat()
    content = json.dumps([own, packages, files], sort_keys=True)
    document = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, content)}",
        "version": 1,
        "metadata": metadata,
        "components": [*packages, *files],
        "dependencies": [{"ref": own, "dependsOn": [one["bom-ref"] for one in packages]}],
    }
    return json.dumps(document, indent=1, sort_keys=True).encode() + b"\n"


def _packages(project: dict[str, Any], own_name: str) -> list[dict[str, Any]]:
    """Every package that is declared, once, with the ranges and the extras that want it."""
    wanted: dict[str, list[tuple[str, str]]] = {}
    declared = {"": project["dependencies"], **project.get("optional-dependencies", {})}
    for extra, requirements in declared.items():
        for requirement in requirements:
            match = _REQUIREMENT.fullmatch(requirement.strip())
            assert match, requirement
            found = re.sub(r"[-_.]+", "-", match[1]).lower()
            if found != own_name:
                wanted.setdefault(found, []).append((extra, match[2]))
    return [
        {
            "type": "library",
            "bom-ref": f"pkg:pypi/{name}",
            "name": name,
            "purl": f"pkg:pypi/{name}",
            "scope": "required" if any(not extra for extra, _ in uses) else "optional",
            "properties": [
                {"name": f"entresol:requirement:{extra or 'core'}", "value": bound or "any"}
                for extra, bound in uses
            ],
        }
        for name, uses in sorted(wanted.items())
    ]


def _file(root: Path, path: str, kind: str) -> dict[str, Any]:
    digest = hashlib.sha256((root / path).read_bytes()).hexdigest()
    return {
        "type": kind, "bom-ref": path, "name": path,
        "hashes": [{"alg": "SHA-256", "content": digest}],
    }  # fmt: skip


if __name__ == "__main__":
    sys.stdout.write(sbom(Path(__file__).resolve().parents[1]).decode())
