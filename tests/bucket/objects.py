"""The objects of a bucket as gcsfuse mounts it, and the journal of what was uploaded and deleted.

A file becomes an object when it is closed or synced, complete, and not before. A file is renamed by a copy and a
deletion. A folder is renamed object by object, or not at all, as is the default of gcsfuse (EMFILE).
"""

import base64
import errno
import json
import time
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Node:
    """A folder if `children` is not None, else a file."""

    number: int
    name: str
    parent: "Node | None"
    children: "dict[str, Node] | None" = None
    data: bytearray = field(default_factory=bytearray)
    dirty: bool = False
    uploaded: bool = False
    """Whether the bucket has an object of this name."""
    mtime: float = 0.0

    @property
    def path(self) -> str:
        return f"{self.parent.path}/{self.name}".lstrip("/") if self.parent else ""

    def below(self) -> "list[Node]":
        """All files and folders inside a folder, each folder before its contents."""
        return [node for child in (self.children or {}).values() for node in (child, *child.below())]


class Bucket:
    """The tree of nodes, and the journal of what was uploaded and deleted."""

    def __init__(self, journal: Path, folder_renames: bool) -> None:
        self.nodes: dict[int, Node] = {}
        self.folder_renames = folder_renames
        self.root = self._node("", None, folder=True)
        for operation in operations(journal):
            self._replay(**operation)
        self._journal = journal.open("ab", buffering=0)

    def _replay(self, do: str, path: str, data: str = "") -> None:
        parent = self.root
        *folders, name = path.split("/")
        for one in folders:
            assert parent.children is not None
            parent = parent.children[one]
        if do in ("put", "mkdir"):
            node = self.add(parent, name, folder=do == "mkdir")
            node.data, node.uploaded = bytearray(base64.b64decode(data)), True
        else:
            self.drop(parent, name)

    def _node(self, name: str, parent: Node | None, *, folder: bool) -> Node:
        node = Node(len(self.nodes) + 1, name, parent, {} if folder else None, mtime=time.time())
        self.nodes[node.number] = node
        return node

    def add(self, parent: Node, name: str, *, folder: bool) -> Node:
        assert parent.children is not None
        if name not in parent.children:
            parent.children[name] = self._node(name, parent, folder=folder)
        return parent.children[name]

    def drop(self, parent: Node, name: str) -> Node:
        """Remove a file from its folder. An open file keeps its data, but is not uploaded any more."""
        assert parent.children is not None
        node = parent.children.pop(name)
        node.parent = None
        return node

    def note(self, do: str, path: str, data: bytes | bytearray = b"") -> None:
        more = {"data": base64.b64encode(data).decode()} if do == "put" else {}
        self._journal.write((json.dumps({"do": do, "path": path, **more}) + "\n").encode())

    def upload(self, node: Node) -> None:
        if node.parent and (node.dirty or not node.uploaded):
            self.note("put", node.path, node.data)
            node.dirty, node.uploaded = False, True

    def make(self, parent: Node, name: str) -> Node:
        node = self.add(parent, name, folder=True)
        self.note("mkdir", node.path)
        return node

    def delete(self, parent: Node, name: str) -> None:
        node = self.find(parent, name)
        if node.children:
            raise OSError(errno.ENOTEMPTY, name)
        if node.children is not None or node.uploaded:
            self.note("delete" if node.children is None else "rmdir", node.path)
        self.drop(parent, name)

    def rename(self, old: Node, name: str, new: Node, new_name: str) -> None:
        node = self.find(old, name)
        assert new.children is not None
        if (there := new.children.get(new_name)) and there.children:
            raise OSError(errno.ENOTEMPTY, new_name)
        if node.children and not self.folder_renames:
            raise OSError(errno.EMFILE, "too many objects to be renamed")
        moved, was = [node, *node.below()], node.path
        before = [one.path for one in moved]
        for one in moved:  # gcsfuse uploads an open file before it renames it
            if one.children is None:
                self.upload(one)
        self.drop(old, name)
        node.name, node.parent, new.children[new_name] = new_name, new, node
        for one, path in zip(moved, before):
            self.note("mkdir" if one.children is not None else "put", one.path, one.data)
            if one.children is None:
                self.note("delete", path)
        for path in sorted((p for p, one in zip(before, moved) if one.children is not None), reverse=True):
            self.note("rmdir", path)
        assert node.path != was or (old, name) == (new, new_name)

    @staticmethod
    def find(parent: Node, name: str) -> Node:
        if not parent.children or name not in parent.children:
            raise OSError(errno.ENOENT, name)
        return parent.children[name]


def operations(journal: Path) -> list[dict[str, str]]:
    """The operations on the bucket, in order."""
    lines = journal.read_bytes().splitlines(keepends=True) if journal.exists() else []
    return [json.loads(line) for line in lines if line.endswith(b"\n")]


def apply(operation: dict[str, str], folder: Path) -> None:
    """Apply the operation to a local folder."""
    path, do = folder / operation["path"], operation["do"]
    if do == "put":
        path.write_bytes(base64.b64decode(operation["data"]))
    elif do == "mkdir":
        path.mkdir(exist_ok=True)
    elif do == "delete":
        path.unlink()
    else:
        path.rmdir()
