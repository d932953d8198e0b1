"""The Debian packages (bookworm) that hold the corpora, and what their copyright files say."""

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path

VERSIONS = "versions.json"


@dataclass(frozen=True)
class Package:
    """One package, the kind of text it gives, and its licence in a few words."""

    name: str
    kind: str
    what: str
    licence: str


PACKAGES = (
    Package("r-cran-janeaustenr", "stories", "six novels by Jane Austen", "novels: public domain; package: MIT"),
    Package("r-cran-tokenizers", "stories", "Moby Dick by Herman Melville", "novel: public domain; package: MIT"),
    Package("bible-kjv-text", "scripture", "King James Bible", "copyright expired; files for unrestricted use"),
    Package("bible-kjv", "scripture", "the program that prints it, not trained on", "unrestricted use, parts GPL-2+"),
    Package("sword-text-sparv", "spanish", "Reina-Valera Bible of 1909", "public domain"),
    Package("libpython3.11-minimal", "python", "CPython 3.11 library", "PSF"),
    Package("libpython3.11-stdlib", "python", "CPython 3.11 library", "PSF"),
    Package("python3-distutils", "python", "CPython 3.11 distutils, lib2to3", "PSF"),
    Package("idle-python3.11", "python", "CPython 3.11 IDLE", "PSF"),
    Package("python3-networkx", "python", "NetworkX 2.8", "BSD-3-Clause"),
    Package("python3.11-doc", "documentation", "sources of the Python 3.11 manual", "PSF"),
    Package("wordnet-base", "definitions", "WordNet 3.0", "WordNet 3.0"),
)

NOTICES = (
    'The King James Version: "The copyright for the King James Version text of the Bible is expired since the translation '
    'was done in 1611 under King James the first of Great Britain."',
    'Reina-Valera 1909: "This work is not copyrighted. It is in the Public Domain. You may copy and publish this work '
    'freely, but you may not claim copyright on it."',
    'CPython and its manual: "Copyright (c) 2001, 2002, 2003, 2004, 2005, 2006, 2007, 2008, 2009, 2010, 2011, 2012, 2013, '
    '2014 Python Software Foundation; All Rights Reserved". PSF licence; a few files of the library have notices of their own.',
    "NetworkX: Copyright (c) 2004-2022, NetworkX Developers, Aric Hagberg, Dan Schult, Pieter Swart. BSD-3-Clause.",
    'WordNet: "Permission to use, copy, modify and distribute this software and database and its documentation for any '
    "purpose and without fee or royalty is hereby granted [...] WordNet 3.0 Copyright 2006 by Princeton University. All "
    'rights reserved. THIS SOFTWARE AND DATABASE IS PROVIDED "AS IS" [...]"',
)


def fetch(root: Path) -> None:
    """Download and unpack the packages below ``root`` without installing them, and note their versions.

    Needs ``apt-get`` with bookworm's package lists, and ``dpkg-deb``.
    """
    archives = root / "archives"
    archives.mkdir(parents=True, exist_ok=True)
    subprocess.run(["apt-get", "download", *(package.name for package in PACKAGES)], cwd=archives, check=True)
    versions = {}
    for package in PACKAGES:
        (archive,) = archives.glob(f"{package.name}_*.deb")
        subprocess.run(["dpkg-deb", "-x", archive, root / package.name], check=True)
        versions[package.name] = printed(["dpkg-deb", "-f", str(archive), "Version"])
    (root / VERSIONS).write_text(json.dumps(versions, indent=1) + "\n")


def printed(command: list[str]) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def versions_below(root: Path) -> dict[str, str]:
    versions: dict[str, str] = json.loads((root / VERSIONS).read_text())
    return versions
