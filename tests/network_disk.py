"""A disk of a network, as one machine of several sees it: a FUSE file system whose mounts do not share a page cache.

`python network_disk.py SERVED MOUNTED [--no-allocation] -- command ...` runs a command in MOUNTED, where it sees the
folder SERVED through a page cache of its own: pages are read when they are first touched, dirty ones are written back
whole and at fsync or close, and clean ones are compared with the server's file at open only (close-to-open consistency,
as NFS has it). A lock of a file is the server's; one of a folder is not seen by other mounts. With `--no-allocation`
the disk has no fallocate, as NFS before 4.2: glibc then touches every block.

Needs Linux, /dev/fuse, and the right to mount (root, or user namespaces); `available` says whether that is so.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import resource
import signal
import stat
import struct
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

NEW_MOUNTS, NEW_USERS = 0x00020000, 0x10000000
PRIVATE, RECURSIVE = 1 << 18, 1 << 14
DIE_WITH_PARENT = 1
REQUEST, ANSWER, ATTRIBUTES = struct.Struct("<IIQQIIII"), struct.Struct("<IiQ"), struct.Struct("<6Q10I")
LARGEST = 1 << 17  # bytes per write
FLAGS = 1 << 0 | 1 << 3 | 1 << 5 | 1 << 10 | 1 << 16  # async reads, O_TRUNC, large writes, flock, write-back cache
LOOKUP, FORGET, GETATTR, SETATTR, MKDIR, UNLINK, RMDIR, RENAME, OPEN, READ, WRITE, STATFS, RELEASE, FSYNC = (
    1, 2, 3, 4, 9, 10, 11, 12, 14, 15, 16, 17, 18, 20,
)  # fmt: skip
FLUSH, INIT, OPENDIR, READDIR, RELEASEDIR, FSYNCDIR, SETLK, SETLKW, ACCESS, CREATE, INTERRUPT, FORGETS, FALLOCATE = (
    25, 26, 27, 28, 29, 30, 32, 33, 34, 35, 36, 42, 43,
)  # fmt: skip
RENAME2 = 45
LOCKS = {fcntl.F_RDLCK: fcntl.LOCK_SH, fcntl.F_WRLCK: fcntl.LOCK_EX, fcntl.F_UNLCK: fcntl.LOCK_UN}
libc = ctypes.CDLL(None, use_errno=True)


def available() -> bool:
    """Whether this machine can mount such a disk."""
    command = [sys.executable, __file__, os.path.dirname(__file__), os.path.dirname(__file__), "--", "true"]
    return os.path.exists("/dev/fuse") and not subprocess.run(command, capture_output=True, check=False).returncode


@dataclass
class Node:
    """A file or folder that the kernel knows."""

    handle: int
    """of the file itself (O_PATH)"""
    state: tuple[int, int] | None
    """its size and time of change, as this mount last saw or made them; None where another one's came in between"""
    lookups: int = 0


class Disk:
    """Answers the kernel's requests for one mount."""

    def __init__(self, device: int, served: str, allocation: bool) -> None:
        self.device, self.allocation = device, allocation
        self.nodes: dict[int, Node] = {1: Node(os.open(served, os.O_PATH | os.O_DIRECTORY), None, 1)}
        self.current: dict[int, int] = {}  # inode -> its node, while the pages of that are not out of date
        self.last = 1
        self.listings: dict[int, list[os.DirEntry[str]]] = {}

    def serve(self) -> None:
        """Answer requests until the disk is unmounted."""
        while True:
            try:
                request = os.read(self.device, LARGEST + 4096)
            except OSError as error:
                if error.errno in (errno.ENOENT, errno.EINTR, errno.EAGAIN):
                    continue
                return  # unmounted
            _, code, unique, node, *_ = REQUEST.unpack_from(request)
            if code in (FORGET, FORGETS, INTERRUPT):
                self._forget(code, node, request[REQUEST.size :])
                continue
            try:
                answer = self._answer(code, node, memoryview(request)[REQUEST.size :])
                failed = 0
            except OSError as error:
                answer, failed = b"", error.errno or errno.EIO
            try:
                os.write(self.device, ANSWER.pack(ANSWER.size + len(answer), -failed, unique) + answer)
            except OSError:  # who asked is gone
                continue

    def _answer(self, code: int, number: int, body: memoryview) -> bytes:
        node = self.nodes.get(number)
        answer = self.answers.get(code)
        if answer is None:
            raise OSError(errno.ENOSYS, "")
        return answer(self, number, node, body)

    # names

    def _lookup(self, number: int, node: Node, body: memoryview) -> bytes:
        return self._entry(node, name_of(body))

    def _entry(self, parent: Node, name: bytes) -> bytes:
        handle = os.open(name, os.O_PATH | os.O_NOFOLLOW, dir_fd=parent.handle)
        there = os.fstat(handle)
        number = self.current.get(there.st_ino)
        node = self.nodes.get(number) if number else None
        fresh = node is not None and (not stat.S_ISREG(there.st_mode) or node.state == state_of(there))
        if node is None or not fresh or os.fstat(node.handle).st_nlink == 0:
            self.last += 1
            number, node = self.last, Node(handle, state_of(there))
            self.nodes[number], self.current[there.st_ino] = node, number
        else:
            os.close(handle)
        node.lookups += 1
        return struct.pack("<4Q2I", number, 0, 0, 0, 0, 0) + attributes(there)

    def _forget(self, code: int, number: int, body: bytes) -> None:
        if code == INTERRUPT:
            return
        if code == FORGET:
            gone = [(number, *struct.unpack_from("<Q", body))]
        else:
            count, _ = struct.unpack_from("<II", body)
            gone = [struct.unpack_from("<QQ", body, 8 + 16 * i) for i in range(count)]
        for one, times in gone:
            node = self.nodes.get(one)
            if node is None or one == 1:
                continue
            node.lookups -= times
            if node.lookups <= 0:
                inode = os.fstat(node.handle).st_ino
                if self.current.get(inode) == one:
                    del self.current[inode]
                os.close(node.handle)
                del self.nodes[one]

    def _mkdir(self, number: int, node: Node, body: memoryview) -> bytes:
        mode, umask = struct.unpack_from("<II", body)
        name = name_of(body[8:])
        os.mkdir(name, mode & ~umask, dir_fd=node.handle)
        return self._entry(node, name)

    def _unlink(self, number: int, node: Node, body: memoryview) -> bytes:
        os.unlink(name_of(body), dir_fd=node.handle)
        return b""

    def _rmdir(self, number: int, node: Node, body: memoryview) -> bytes:
        os.rmdir(name_of(body), dir_fd=node.handle)
        return b""

    def _rename(self, number: int, node: Node, body: memoryview) -> bytes:
        return self._renamed(node, struct.unpack_from("<Q", body)[0], body[8:])

    def _rename2(self, number: int, node: Node, body: memoryview) -> bytes:
        target, flags, _ = struct.unpack_from("<QII", body)
        if flags:
            raise OSError(errno.EINVAL, "")
        return self._renamed(node, target, body[16:])

    def _renamed(self, node: Node, target: int, body: memoryview) -> bytes:
        old, new, _ = bytes(body).split(b"\0", 2)
        os.rename(old, new, src_dir_fd=node.handle, dst_dir_fd=self.nodes[target].handle)
        return b""

    # attributes

    def _getattr(self, number: int, node: Node, body: memoryview) -> bytes:
        return struct.pack("<QII", 0, 0, 0) + attributes(os.fstat(node.handle))

    def _setattr(self, number: int, node: Node, body: memoryview) -> bytes:
        valid, _, _, size, _, atime, mtime, _, atime_ns, mtime_ns, _, mode, _, _, _, _ = struct.unpack_from(
            "<IIQQQQQQIIIIIIII", body
        )
        path = f"/proc/self/fd/{node.handle}"
        before = self._unchanged(node)
        if valid & 1:
            os.chmod(path, stat.S_IMODE(mode))
        if valid & 8:
            os.truncate(path, size)
        if valid & (16 | 32):
            there = os.fstat(node.handle)
            times = (
                atime * 10**9 + atime_ns if valid & 16 and not valid & 128 else there.st_atime_ns,
                mtime * 10**9 + mtime_ns if valid & 32 and not valid & 256 else there.st_mtime_ns,
            )
            os.utime(path, ns=times)
        self._changed(node, before)
        return struct.pack("<QII", 0, 0, 0) + attributes(os.fstat(node.handle))

    def _unchanged(self, node: Node) -> bool:
        """Whether no other mount has changed a file since this one saw it."""
        return node.state == state_of(os.fstat(node.handle))

    def _changed(self, node: Node, before: bool) -> None:
        node.state = state_of(os.fstat(node.handle)) if before else None

    def _statfs(self, number: int, node: Node, body: memoryview) -> bytes:
        s = os.fstatvfs(self.nodes[1].handle)
        counts = s.f_blocks, s.f_bfree, s.f_bavail, s.f_files, s.f_ffree
        return struct.pack("<5Q4I24x", *counts, s.f_bsize, s.f_namemax, s.f_frsize, 0)

    # files

    def _open(self, number: int, node: Node, body: memoryview) -> bytes:
        flags, _ = struct.unpack_from("<II", body)
        return struct.pack("<QII", self._opened(node, flags & os.O_TRUNC), 0, 0)  # whose clean pages are dropped

    def _opened(self, node: Node, more: int = 0) -> int:
        before = self._unchanged(node)
        handle = os.open(f"/proc/self/fd/{node.handle}", os.O_RDWR | more)  # the cache reads what it writes
        self._changed(node, before)
        return handle

    def _create(self, number: int, node: Node, body: memoryview) -> bytes:
        flags, mode, umask, _ = struct.unpack_from("<4I", body)
        name = name_of(body[16:])
        more = os.O_CREAT | (flags & (os.O_EXCL | os.O_TRUNC))
        os.close(os.open(name, os.O_RDWR | more, mode & ~umask, dir_fd=node.handle))
        entry = self._entry(node, name)
        return entry + struct.pack("<QII", self._opened(self.nodes[struct.unpack_from("<Q", entry)[0]]), 0, 0)

    def _read(self, number: int, node: Node, body: memoryview) -> bytes:
        handle, offset, size = struct.unpack_from("<QQI", body)
        return os.pread(handle, size, offset)

    def _write(self, number: int, node: Node, body: memoryview) -> bytes:
        handle, offset, size = struct.unpack_from("<QQI", body)
        before = self._unchanged(node)
        done = os.pwrite(handle, body[40 : 40 + size], offset)
        self._changed(node, before)
        return struct.pack("<II", done, 0)

    def _release(self, number: int, node: Node, body: memoryview) -> bytes:
        os.close(struct.unpack_from("<Q", body)[0])
        return b""

    def _fsync(self, number: int, node: Node, body: memoryview) -> bytes:
        os.fdatasync(struct.unpack_from("<Q", body)[0])
        return b""

    def _allocate(self, number: int, node: Node, body: memoryview) -> bytes:
        if not self.allocation:
            raise OSError(errno.EOPNOTSUPP, "")
        handle, offset, length, mode, _ = struct.unpack_from("<QQQII", body)
        if mode:
            raise OSError(errno.EOPNOTSUPP, "")
        before = self._unchanged(node)
        os.posix_fallocate(handle, offset, length)
        self._changed(node, before)
        return b""

    def _lock(self, number: int, node: Node, body: memoryview) -> bytes:
        handle, _, _, _, kind, _, flags, _ = struct.unpack_from("<QQQQIIII", body)
        if not flags & 1:
            raise OSError(errno.ENOSYS, "")
        fcntl.flock(handle, LOCKS[kind] | fcntl.LOCK_NB)
        return b""

    # folders

    def _open_folder(self, number: int, node: Node, body: memoryview) -> bytes:
        self.last += 1
        with os.scandir(f"/proc/self/fd/{node.handle}") as there:
            self.listings[self.last] = list(there)
        return struct.pack("<QII", self.last, 0, 0)

    def _read_folder(self, number: int, node: Node, body: memoryview) -> bytes:
        handle, offset, size = struct.unpack_from("<QQI", body)
        answer = b""
        for i, one in enumerate(self.listings[handle][offset:], offset + 1):
            name = os.fsencode(one.name)
            kind = 4 if one.is_dir(follow_symlinks=False) else 8
            entry = struct.pack("<QQII", one.inode(), i, len(name), kind) + name
            entry += bytes(-len(entry) % 8)
            if len(answer) + len(entry) > size:
                break
            answer += entry
        return answer

    def _close_folder(self, number: int, node: Node, body: memoryview) -> bytes:
        del self.listings[struct.unpack_from("<Q", body)[0]]
        return b""

    def _nothing(self, number: int, node: Node, body: memoryview) -> bytes:
        return b""

    def _init(self, number: int, node: Node, body: memoryview) -> bytes:
        major, _, ahead, flags = struct.unpack_from("<4I", body)
        return struct.pack("<4IHHIIHHII24x", major, 31, ahead, flags & FLAGS, 12, 9, LARGEST, 1, 0, 0, 0, 0)

    answers: dict[int, Any] = {  # noqa: RUF012
        LOOKUP: _lookup, GETATTR: _getattr, SETATTR: _setattr, MKDIR: _mkdir, UNLINK: _unlink, RMDIR: _rmdir,
        RENAME: _rename, RENAME2: _rename2, OPEN: _open, READ: _read, WRITE: _write, STATFS: _statfs,
        RELEASE: _release, FSYNC: _fsync, FLUSH: _nothing, INIT: _init, OPENDIR: _open_folder, READDIR: _read_folder,
        RELEASEDIR: _close_folder, FSYNCDIR: _nothing, SETLK: _lock, SETLKW: _lock, ACCESS: _nothing, CREATE: _create,
        FALLOCATE: _allocate,
    }  # fmt: skip


def name_of(body: memoryview) -> bytes:
    """Return the name that a request ends with."""
    return bytes(body).split(b"\0", 1)[0]


def state_of(there: os.stat_result) -> tuple[int, int]:
    return there.st_size, there.st_mtime_ns


def attributes(there: os.stat_result) -> bytes:
    """Return what is known of a file as the kernel reads it."""
    times = there.st_atime_ns, there.st_mtime_ns, there.st_ctime_ns
    return ATTRIBUTES.pack(
        there.st_ino, there.st_size, there.st_blocks, *(t // 10**9 for t in times), *(t % 10**9 for t in times),
        there.st_mode, there.st_nlink, there.st_uid, there.st_gid, 0, 4096, 0,
    )  # fmt: skip


def checked(result: int) -> None:
    """Raise the system's error if a call of libc failed."""
    if result:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def mount(mounted: str) -> int:
    """Mount the disk where this process and its children alone see it; return the handle to serve it by."""
    user, group = os.getuid(), os.getgid()
    checked(libc.unshare(NEW_MOUNTS | (0 if user == 0 else NEW_USERS)))
    if user:
        for name, line in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(line)
    checked(libc.mount(b"none", b"/", None, PRIVATE | RECURSIVE, None))
    device = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={device},rootmode=40000,user_id={user},group_id={group},allow_other"
    checked(libc.mount(b"epimer", os.fsencode(mounted), b"fuse", 0, options.encode()))
    return device


def main() -> int:
    """Mount, run the command, and return its exit code."""
    split = sys.argv.index("--")
    served, mounted, *options = sys.argv[1:split]
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    served = os.path.abspath(served)
    here = os.open(served, os.O_PATH)  # before something is mounted over it
    device = mount(mounted)
    server = os.fork()
    if server == 0:
        libc.prctl(DIE_WITH_PARENT, signal.SIGKILL)  # the machine is gone then, with what it has not written back
        os.setsid()  # Ctrl-C in a terminal is the command's
        Disk(device, f"/proc/self/fd/{here}", "--no-allocation" not in options).serve()
        os._exit(0)
    os.close(device)
    os.chdir(mounted)
    try:
        os.execvp(sys.argv[split + 1], sys.argv[split + 1 :])
    except OSError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    sys.exit(main())
