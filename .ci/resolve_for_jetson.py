"""What pip would install beside JetPack's torch on a Jetson Orin. Nothing is installed.

Fails if pip would replace that torch, or add a Triton that it did not ask for. The stand-in for
JetPack's wheel has its name, tags and dependencies, and no content. pip evaluates markers for the
machine that it runs on, so a requirement must not depend on the architecture by a marker.
"""

import json
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TORCHES = ("2.8.0", "2.10.0")  # the oldest and the newest for JetPack 6.2
DEPENDENCIES = ("filelock", "typing-extensions>=4.10.0", "sympy", "networkx", "jinja2", "fsspec")
TAG = "cp310-cp310-linux_aarch64"
PLATFORMS = ("linux_aarch64", "manylinux2014_aarch64", "manylinux_2_28_aarch64")


def main() -> None:
    for version in TORCHES:
        found = resolved(version)
        unwanted = [name for name in found if name == "triton" or name.startswith("nvidia-")]
        if found["torch"] != version or unwanted:
            sys.exit(f"beside torch {version} pip would install {found}")
        print(f"torch {version} stays; pip would install {len(found) - 1} other packages")


def resolved(torch_version: str) -> dict[str, str]:
    """Package → version of all that pip would install, with torch of this version asked for."""
    with tempfile.TemporaryDirectory() as folder:
        write_stand_in(Path(folder), torch_version)
        report = Path(folder, "report.json")
        platforms = [option for name in PLATFORMS for option in ("--platform", name)]
        command = (
            *(sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--report", report),
            *("--only-binary", ":all:", "--python-version", "3.10", "--implementation", "cp"),
            *("--target", Path(folder, "target"), "--find-links", folder, *platforms),
            *(f"torch=={torch_version}", ROOT),
        )
        variables = {**os.environ, "FLASHATTN3_BUILD": "python"}
        if subprocess.run(command, env=variables).returncode != 0:
            sys.exit(f"pip cannot leave torch {torch_version} as it is")
        installs = json.loads(report.read_text())["install"]
    return {entry["metadata"]["name"].lower(): entry["metadata"]["version"] for entry in installs}


def write_stand_in(folder: Path, version: str) -> None:
    info = f"torch-{version}.dist-info"
    requires = "".join(f"Requires-Dist: {name}\n" for name in DEPENDENCIES)
    texts = {
        "METADATA": f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n{requires}",
        "WHEEL": f"Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: {TAG}\n",
        "RECORD": "",
    }
    with zipfile.ZipFile(folder / f"torch-{version}-{TAG}.whl", "w") as wheel:
        for name, text in texts.items():
            wheel.writestr(f"{info}/{name}", text)


if __name__ == "__main__":
    main()
