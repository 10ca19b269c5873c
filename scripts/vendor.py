#!/usr/bin/env python3
"""Puts the parts of Highway and xxHash that gradwire needs into a folder, for builds without a
network: `scripts/vendor.py third_party`. CMake takes them from there (GRADWIRE_BUNDLED).

cmake/third_party.json names each archive and its SHA-256. An archive comes from its address or,
where that cannot be reached, from Debian's source package (apt-get), whose upstream archive is the
same file."""

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
import urllib.error
import urllib.request
from pathlib import Path, PurePosixPath
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def download(source: dict[str, Any], folder: Path) -> Path:
    """The archive of `source` in `folder`. Raises OSError if it cannot be had."""
    archive = folder / f"{source['name']}.tar.gz"
    try:
        with urllib.request.urlopen(source["url"], timeout=60) as reply:
            archive.write_bytes(reply.read())
    except urllib.error.URLError as error:
        print(f"vendor.py: {source['url']}: {error.reason}; trying Debian", file=sys.stderr)
        shutil.copy(download_from_debian(source["debian"], folder), archive)
    return archive


def download_from_debian(source_package: str, folder: Path) -> Path:
    """The upstream archive of a source package, "suite/name", with the system's keys and lists of
    its own."""
    if shutil.which("apt-get") is None:
        raise OSError("there is no apt-get here")
    suite, package = source_package.split("/")
    lists = folder / suite
    (lists / "partial").mkdir(parents=True, exist_ok=True)
    sources = folder / f"{suite}.list"
    keys = "signed-by=/usr/share/keyrings/debian-archive-keyring.gpg"
    sources.write_text(f"deb-src [{keys}] http://deb.debian.org/debian {suite} main\n")
    options = {
        "Dir::Etc::sourcelist": sources,
        "Dir::Etc::sourceparts": "-",
        "Dir::State::lists": lists,
        "APT::Sandbox::User": "root",
    }
    apt = ["apt-get", "-qq", *(f"-o{key}={value}" for key, value in options.items())]
    for words in (["update"], ["source", "--download-only", package]):
        done = subprocess.run([*apt, *words], cwd=folder, stdout=sys.stderr, check=False)
        if done.returncode != 0:
            raise OSError(f"apt-get {' '.join(words)} failed")
    return next(folder.glob(f"{package}_*.orig.tar.*"))


def is_wanted(path: PurePosixPath, patterns: list[str]) -> bool:
    """Whether a path relative to the archive's root is one of the files that gradwire needs."""
    if path.name.endswith("_test.cc"):
        return False
    return any(
        len(path.parts) == len(PurePosixPath(pattern).parts) and path.match(pattern)
        for pattern in patterns
    )


def extract(archive: Path, source: dict[str, Any], folder: Path) -> None:
    """Copies the wanted files of `archive` into `folder`, without the archive's top folder."""
    found = hashlib.sha256(archive.read_bytes()).hexdigest()
    if found != source["sha256"]:
        sys.exit(
            f"vendor.py: {source['name']} {source['version']} has SHA-256 {found}, but "
            f"cmake/third_party.json wants {source['sha256']}"
        )
    with tarfile.open(archive) as members:
        for member in members:
            path = PurePosixPath(*PurePosixPath(member.name).parts[1:])
            content = members.extractfile(member) if member.isfile() else None
            if content is None or not is_wanted(path, source["files"]):
                continue
            target = folder / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content.read())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where highway/ and xxhash/ are made anew")
    parser.add_argument(
        "--archives", type=Path, help="folder with NAME.tar.gz of each, to download nothing"
    )
    arguments = parser.parse_args()
    sources = json.loads((ROOT / "cmake" / "third_party.json").read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as temporary:
        for source in sources.values():
            if arguments.archives is not None:
                archive = arguments.archives / f"{source['name']}.tar.gz"
            else:
                try:
                    archive = download(source, Path(temporary))
                except OSError as error:
                    sys.exit(
                        f"vendor.py: no archive of {source['name']} {source['version']}: {error}. "
                        f"Download {source['url']} as {source['name']}.tar.gz into a folder and "
                        "name it with --archives"
                    )
            folder = arguments.folder / source["name"]
            shutil.rmtree(folder, ignore_errors=True)
            extract(archive, source, folder)


if __name__ == "__main__":
    main()
