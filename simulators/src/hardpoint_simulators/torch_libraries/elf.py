"""What a shared library imports and exports, read from its dynamic section (System V ABI, 64-bit little-endian ELF)."""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_DYNAMIC, _DYNSYM, _VERSION_NEEDS, _VERSION_TABLE = 6, 11, 0x6FFFFFFE, 0x6FFFFFFF
_TAG_NEEDED, _TAG_SONAME = 1, 14
_UNDEFINED_SECTION = 0
_BIND_LOCAL, _BIND_WEAK = 0, 2
_HIDDEN_VERSION = 0x8000


@dataclass(frozen=True)
class Import:
    """A symbol that a library must find elsewhere.

    Attributes:
        name: the symbol.
        version: the version it must have; "" for any.
    """

    name: str
    version: str = ""


@dataclass(frozen=True)
class SharedLibrary:
    """The dynamic side of one library.

    Attributes:
        soname: its own name; "" when it has none.
        needed: names of the libraries that it is linked with.
        imports: symbols that must be found when it is loaded; weak ones are left out.
        exports: names of the symbols that it defines.
        versions: versions that it wants of other libraries, by the name of the library.
    """

    soname: str
    needed: tuple[str, ...]
    imports: frozenset[Import]
    exports: frozenset[str]
    versions: dict[str, frozenset[str]]


@dataclass(frozen=True)
class _Section:
    kind: int
    offset: int
    size: int
    link: int
    info: int


def read_library(path: Path) -> SharedLibrary:
    """Read a library; raises ValueError for a file that is not a 64-bit little-endian ELF file."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        if data[:6] != b"\x7fELF\x02\x01":
            raise ValueError(f"{path} is not a 64-bit little-endian ELF file")
        return _Reader(data).library()


class _Reader:
    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        (start,) = struct.unpack_from("<Q", data, 40)
        size, count = struct.unpack_from("<HH", data, 58)
        headers = [struct.unpack_from("<IIQQQQII", data, start + index * size) for index in range(count)]
        self._sections = [_Section(header[1], *header[4:]) for header in headers]

    def library(self) -> SharedLibrary:
        tags = list(self._dynamic())
        versions, wanted = self._version_needs()
        imports, exports = self._symbols(versions)
        return SharedLibrary(
            soname=next((text for tag, text in tags if tag == _TAG_SONAME), ""),
            needed=tuple(text for tag, text in tags if tag == _TAG_NEEDED),
            imports=imports,
            exports=exports,
            versions=wanted,
        )

    def _section(self, kind: int) -> _Section | None:
        return next((section for section in self._sections if section.kind == kind), None)

    def _text(self, strings: int, offset: int) -> str:
        start = self._sections[strings].offset + offset
        return self._data[start : self._data.find(b"\0", start)].decode()

    def _dynamic(self) -> Iterator[tuple[int, str]]:
        section = self._section(_DYNAMIC)
        if section is None:
            return
        for offset in range(section.offset, section.offset + section.size, 16):
            tag, value = struct.unpack_from("<qQ", self._data, offset)
            if tag in (_TAG_NEEDED, _TAG_SONAME):
                yield tag, self._text(section.link, value)

    def _version_needs(self) -> tuple[dict[int, str], dict[str, frozenset[str]]]:
        """Return the wanted versions by their index in the version table, and by the library that is to have them."""
        section = self._section(_VERSION_NEEDS)
        by_index: dict[int, str] = {}
        by_library: dict[str, frozenset[str]] = {}
        entry = section.offset if section else 0
        for _ in range(section.info if section else 0):
            assert section is not None
            _, count, file, first, following = struct.unpack_from("<HHIII", self._data, entry)
            names = set()
            version = entry + first
            for _ in range(count):
                _, _, index, name, next_version = struct.unpack_from("<IHHII", self._data, version)
                by_index[index & ~_HIDDEN_VERSION] = self._text(section.link, name)
                names.add(by_index[index & ~_HIDDEN_VERSION])
                version += next_version
            by_library[self._text(section.link, file)] = frozenset(names)
            entry += following
        return by_index, by_library

    def _symbols(self, versions: dict[int, str]) -> tuple[frozenset[Import], frozenset[str]]:
        section, table = self._section(_DYNSYM), self._section(_VERSION_TABLE)
        imports, exports = set(), set()
        symbols = (
            struct.iter_unpack("<IBBHQQ", self._data[section.offset : section.offset + section.size]) if section else ()
        )
        for position, (name, info, _, place, _, _) in enumerate(symbols):
            assert section is not None
            binding = info >> 4
            if binding == _BIND_LOCAL:
                continue
            if place != _UNDEFINED_SECTION:
                exports.add(self._text(section.link, name))
            elif binding != _BIND_WEAK:
                index = struct.unpack_from("<H", self._data, table.offset + 2 * position)[0] if table else 0
                imports.add(Import(self._text(section.link, name), versions.get(index & ~_HIDDEN_VERSION, "")))
        return frozenset(imports), frozenset(exports)
