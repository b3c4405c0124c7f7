"""Machines made of namespaces of this one. They reach each other by SSH and nothing else.

Each has its own network, processes, home, /tmp and /dev/shm. What is installed is this environment: each machine has
it, read-only, at ~/omni_cluster/.venv, as `make setup` leaves it. The environment names the checkout that it was made
for. A machine sees its own ~/omni_cluster at that place, so what runs there is what is in its home.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

VENV = Path(sys.prefix)
UV = VENV.with_name(f"{VENV.name}-uv")
HOME = "/tmp/home"
SWITCH = "lan"
END_S = 60
_NAMESPACES = (
    "unshare",
    "--net",
    "--pid",
    "--mount",
    "--fork",
    "--kill-child",
    "--mount-proc",
    "--propagation",
    "private",
)
_BEGIN = """
set -e
folder=$1 venv=$2
shift 2
mount --bind -o ro "$venv" "$folder/home/omni_cluster/.venv"
mount --bind -o ro "$venv-uv" "$folder/home/omni_cluster/.venv-uv"
mount --bind "$folder/ready" "$folder/home/omni_cluster/.venv/ready-cpu"
mount --rbind "$folder" /tmp
mkdir -p "$(dirname "$venv")"
mount --rbind /tmp/home/omni_cluster "$(dirname "$venv")"
for name in passwd shadow resolv.conf; do
  if [ -e "/etc/$name" ]; then mount --bind "/tmp/$name" "/etc/$name"; fi
done
for place in /dev/shm /run /var/log; do mount -t tmpfs tmpfs "$place"; done
mkdir -m 755 /run/sshd
ip link set lo up
echo ready
"$@" &
wait
"""
"""/etc/passwd names the home. No name server is named: that a name is not known is said at once."""


@dataclass(frozen=True)
class Machine:
    folder: Path
    """What it has as /tmp."""
    pid: int
    """Of its first process."""

    @property
    def home(self) -> Path:
        return self.folder / "home"

    def inside(self, *words: str) -> list[str]:
        """The command that runs another one on this machine."""
        return ["nsenter", f"--target={self.pid}", "--net", "--pid", "--mount", *words]

    def ip(self, *words: str) -> None:
        subprocess.run(["nsenter", f"--target={self.pid}", "--net", "ip", *words], check=True)

    def processes(self) -> Sequence[psutil.Process]:
        """All but its first, which waits."""
        return psutil.Process(self.pid).children(recursive=True)


def skip_without(*programs: str) -> None:
    """Also without what machines are made with."""
    if os.geteuid() != 0:
        pytest.skip("Network namespaces and mounts are made by root alone.")
    needed = ("ip", "mount", "nsenter", "setpriv", "ssh", "ssh-keygen", "sshd", "unshare", *programs)
    if missing := [program for program in needed if shutil.which(program) is None]:
        pytest.skip(f"Not installed here: {', '.join(missing)}.")
    if missing := [str(path) for path in (VENV / "ready-cpu", UV / "bin/uv") if not path.exists()]:
        pytest.skip(f"`make setup` did not make this environment: {', '.join(missing)} is not there.")
    tried = subprocess.run(
        [*_NAMESPACES, "ip", "link", "add", SWITCH, "type", "bridge"], capture_output=True, text=True
    )
    if tried.returncode != 0:
        pytest.skip(f"No network can be made here: {tried.stderr.strip()}")


@contextmanager
def _machine(folder: Path, *command: str) -> Iterator[Machine]:
    """`command` runs on it. All ends with its first process, its network too; so it does when the tests are killed."""
    _furnish(folder)
    words = [
        "setpriv",
        "--pdeathsig",
        "KILL",
        *_NAMESPACES,
        "bash",
        "-c",
        _BEGIN,
        "bash",
        str(folder),
        str(VENV),
        *command,
    ]
    with (folder / "errors").open("w") as errors:
        begun = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=errors, text=True)
    try:
        assert begun.stdout is not None
        assert begun.stdout.readline() == "ready\n", (folder / "errors").read_text()
        (first,) = psutil.Process(begun.pid).children()
        yield Machine(folder, first.pid)
    finally:
        begun.kill()
        begun.wait(END_S)


def _furnish(folder: Path) -> None:
    """A home with an empty checkout, and the accounts of this machine. Root's home is the new one."""
    for name in ("home/.ssh", "home/omni_cluster/.venv", "home/omni_cluster/.venv-uv"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    folder.chmod(0o1777)
    for name in ("ready", "resolv.conf", "home/.bashrc"):
        (folder / name).touch()
    lines = Path("/etc/passwd").read_text().splitlines()
    (folder / "passwd").write_text("".join(f"{_moved(line)}\n" for line in lines))
    (folder / "shadow").write_text("root:*:20000:0:99999:7:::\n")


def _moved(line: str) -> str:
    name, *middle, _, shell = line.split(":")
    return ":".join([name, *middle, HOME, shell]) if name == "root" else line


@contextmanager
def desk(folder: Path, address: str) -> Iterator[Machine]:
    """Where an operator sits: a key in its ~/.ssh, and the switch that other machines are plugged into."""
    with _machine(folder, "sleep", "infinity") as made:
        _make_key(made.home / ".ssh/id_ed25519")
        made.ip("link", "add", SWITCH, "type", "bridge")
        made.ip("address", "add", f"{address}/24", "dev", SWITCH)
        made.ip("link", "set", SWITCH, "up")
        yield made


@contextmanager
def ssh_host(folder: Path, address: str, of: Machine, gateway: str) -> Iterator[Machine]:
    """Its sshd lets in the key of `of`. The route leads to no other network; Ray finds its own address by it."""
    folder.mkdir()
    _make_key(folder / "host_key")
    options = ("HostKey=/tmp/host_key", "PidFile=none", "UsePAM=no")
    sshd = (str(shutil.which("sshd")), "-D", "-E", "/tmp/sshd.log", "-f", "/dev/null")
    with _machine(folder, *sshd, *(word for option in options for word in ("-o", option))) as made:
        shutil.copy(of.home / ".ssh/id_ed25519.pub", made.home / ".ssh/authorized_keys")
        of.ip("link", "add", folder.name, "type", "veth", "peer", "name", "eth0", "netns", str(made.pid))
        of.ip("link", "set", folder.name, "master", SWITCH, "up")
        made.ip("address", "add", f"{address}/24", "dev", "eth0")
        made.ip("link", "set", "eth0", "up")
        made.ip("route", "add", "default", "via", gateway)
        yield made


def _make_key(path: Path) -> None:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)], check=True)
