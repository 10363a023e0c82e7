"""A file system that behaves as a bucket mounted with gcsfuse; it implements the FUSE protocol without a library.

    python -m tests.bucket.server JOURNAL MOUNTPOINT [--no-folder-renames]      as root, on Linux

The contents of the bucket are stored as a journal of its operations, one JSON object per line, so that a test can
inspect the bucket after each of them. After SIGKILL only the uploaded objects remain, as after the loss of a machine.
"""

import ctypes
import errno
import os
import stat
import struct
import sys
import time
from pathlib import Path

from tests.bucket.objects import Bucket, Node

ENTRY, ATTR, DIRENT = struct.Struct("<QQQQII"), struct.Struct("<QQQQQQIIIIIIIIII"), struct.Struct("<QQII")
IN, OUT = struct.Struct("<IIQQIIIHH"), struct.Struct("<IiQ")
SIZE_SET = 1 << 3
LARGEST_WRITE = 1 << 20


class Server:
    """Answers the requests of the kernel; each method has the name of a request and returns the bytes of its answer."""

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket
        self.by_code = {
            1: self.lookup, 3: self.getattr, 4: self.setattr, 9: self.mkdir, 10: self.unlink, 11: self.unlink,
            12: self.rename, 14: self.open, 15: self.read, 16: self.write, 17: self.statfs, 18: self.nothing,
            20: self.flush, 25: self.flush, 26: self.init, 27: self.open, 28: self.readdir, 29: self.nothing,
            35: self.create, 45: self.rename,
        }  # fmt: skip
        self.code = 0

    def serve(self, device: int) -> None:
        while True:
            try:
                request = os.read(device, LARGEST_WRITE + 4096)
            except OSError as error:
                if error.errno == errno.ENODEV:  # unmounted
                    return
                continue
            _, self.code, unique, number, *_ = IN.unpack_from(request)
            if self.code in (2, 36, 42):  # forget, interrupt: no answer
                continue
            failed, answer = 0, b""
            try:
                answer = self.by_code[self.code](self.bucket.nodes.get(number, self.bucket.root), request[IN.size :])
            except KeyError:
                failed = errno.ENOSYS
            except OSError as error:
                failed = error.errno or errno.EIO
            os.write(device, OUT.pack(OUT.size + len(answer), -failed, unique) + answer)

    def init(self, _node: Node, _body: bytes) -> bytes:
        return struct.pack("<IIIIHHIIHHII6I", 7, 31, 1 << 17, 1 << 5, 16, 12, LARGEST_WRITE, 1, 0, 0, 0, 0, *[0] * 6)

    def lookup(self, node: Node, body: bytes) -> bytes:
        return self._entry(self.bucket.find(node, _names(body)[0]))

    def getattr(self, node: Node, _body: bytes) -> bytes:
        return struct.pack("<QII", 1, 0, 0) + self._attributes(node)

    def setattr(self, node: Node, body: bytes) -> bytes:
        valid, _, _, size = struct.unpack_from("<IIQQ", body)
        if valid & SIZE_SET:
            node.data[:] = node.data[:size].ljust(size, b"\0")
            node.dirty = True
        node.mtime = time.time()
        return self.getattr(node, b"")

    def mkdir(self, node: Node, body: bytes) -> bytes:
        return self._entry(self.bucket.make(node, _names(body[8:])[0]))

    def unlink(self, node: Node, body: bytes) -> bytes:
        self.bucket.delete(node, _names(body)[0])
        return b""

    def rename(self, node: Node, body: bytes) -> bytes:
        name, new_name = _names(body[8 if self.code == 12 else 16 :])[:2]
        self.bucket.rename(node, name, self.bucket.nodes[struct.unpack_from("<Q", body)[0]], new_name)
        return b""

    def open(self, node: Node, _body: bytes) -> bytes:
        return struct.pack("<QII", node.number, 0, 0)

    def create(self, node: Node, body: bytes) -> bytes:
        made = self.bucket.add(node, _names(body[16:])[0], folder=False)
        return self._entry(made) + self.open(made, b"")

    def read(self, node: Node, body: bytes) -> bytes:
        _, offset, size = struct.unpack_from("<QQI", body)
        return bytes(node.data[offset : offset + size])

    def write(self, node: Node, body: bytes) -> bytes:
        _, offset, size = struct.unpack_from("<QQI", body)
        node.data.extend(bytes(max(offset - len(node.data), 0)))
        node.data[offset : offset + size] = body[40 : 40 + size]
        node.dirty, node.mtime = True, time.time()
        return struct.pack("<II", size, 0)

    def flush(self, node: Node, _body: bytes) -> bytes:
        self.bucket.upload(node)
        return b""

    def nothing(self, _node: Node, _body: bytes) -> bytes:
        return b""

    def statfs(self, _node: Node, _body: bytes) -> bytes:
        return struct.pack("<QQQQQIIII6I", *[1 << 30] * 5, 4096, 255, 4096, 0, *[0] * 6)

    def readdir(self, node: Node, body: bytes) -> bytes:
        _, offset, size = struct.unpack_from("<QQI", body)
        found = b""
        for place, child in enumerate(list((node.children or {}).values())[offset:], offset + 1):
            name = child.name.encode()
            kind = stat.S_IFREG if child.children is None else stat.S_IFDIR
            one = DIRENT.pack(child.number, place, len(name), kind >> 12) + name
            found_next = found + one + bytes(-len(one) % 8)
            if len(found_next) > size:
                break
            found = found_next
        return found

    def _entry(self, node: Node) -> bytes:
        return ENTRY.pack(node.number, 0, 1, 1, 0, 0) + self._attributes(node)

    def _attributes(self, node: Node) -> bytes:
        mode = stat.S_IFREG | 0o644 if node.children is None else stat.S_IFDIR | 0o755
        seconds, rest = int(node.mtime), int(node.mtime % 1 * 1e9)
        size = len(node.data)
        times = seconds, seconds, seconds, rest, rest, rest
        return ATTR.pack(node.number, size, -(-size // 512), *times, mode, 1, 0, 0, 0, 4096, 0)


def _names(body: bytes) -> list[str]:
    return [name.decode() for name in body.split(b"\0")]


def main() -> None:
    journal, mountpoint, *options = sys.argv[1:]
    device = os.open("/dev/fuse", os.O_RDWR)
    output = f"fd={device},rootmode=40000,user_id=0,group_id=0,allow_other"
    if ctypes.CDLL(None, use_errno=True).mount(b"bucket", mountpoint.encode(), b"fuse.bucket", 0, output.encode()):
        sys.exit(os.strerror(ctypes.get_errno()))
    print("mounted", flush=True)
    Server(Bucket(Path(journal), "--no-folder-renames" not in options)).serve(device)


if __name__ == "__main__":
    main()
