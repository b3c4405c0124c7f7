"""Images that buildah builds and podman runs: neither asks a daemon.

What they keep is in one folder, and what they mount and run is in namespaces of their own: when the first process of
these ends, all of it ends. So it does when the tests are killed.
"""

from __future__ import annotations

import contextlib
import os
import platform
import resource
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.packages import NoPackages, fetch
from tests.served.app import PATIENCE_S, ROOT

BASE = "localhost/base:tests"
FREE_GIB = 40
"""Of the disk: what is downloaded, the container that is built in, and the image twice while it is committed."""
NAMESPACES = (
    "unshare",
    "--mount",
    "--pid",
    "--fork",
    "--kill-child",
    "--mount-proc",
    "--propagation",
    "private",
)
GROUPS = Path("/sys/fs/cgroup")
KEPT = "/var/lib/containers"
"""Some of what they keep is there whatever they are told: the place is one of the namespaces' own."""
_BEGIN = f"mkdir -p {KEPT} && mount -t tmpfs tmpfs {KEPT} && echo ready && exec sleep infinity"
_SETTINGS = {
    "/etc/pip.conf": "[global]\ncert = /etc/ssl/certs/ca-certificates.crt\n",
    "/etc/uv/uv.toml": "system-certs = true\n",
}
"""Of pip and uv by their place, where this machine has none: to trust what the system trusts."""
_CERTIFICATES = Path("/usr/local/share/ca-certificates")
"""Of authorities that this machine knows beside Debian's; Debian's `ca-certificates` takes up what is there."""
_MOST_FILES, _MOST_PROCESSES = 1 << 16, 1 << 15


def skip_without_images(folder: Path) -> None:
    """Where none can be built in the folder."""
    if os.geteuid() != 0:
        pytest.skip("Namespaces and mounts are made by root alone.")
    needed = ("apt-get", "buildah", "mmdebstrap", "nsenter", "podman", "setpriv", "unshare")
    if missing := [program for program in needed if shutil.which(program) is None]:
        pytest.skip(f"Not installed here: {', '.join(missing)}.")
    tried = subprocess.run([*NAMESPACES, "true"], capture_output=True, text=True)
    if tried.returncode != 0:
        pytest.skip(f"This process may not make namespaces: {tried.stderr.strip()}")
    if (free_gib := shutil.disk_usage(folder).free >> 30) < FREE_GIB:
        pytest.skip(f"{folder} has {free_gib} GiB of disk, and {FREE_GIB} GiB are needed.")


@dataclass(frozen=True)
class Images:
    """Those in one folder."""

    folder: Path
    pid: int
    """Of the namespaces' first process."""

    def command(self, *words: str) -> list[str]:
        """What runs `buildah` or `podman` on them."""
        places = {"CONTAINERS_CONF": "containers.conf", "CONTAINERS_STORAGE_CONF": "storage.conf", "TMPDIR": "tmp"}
        environment = [f"{name}={self.folder / place}" for name, place in places.items()]
        return ["nsenter", f"--target={self.pid}", "--mount", "--pid", "env", f"--chdir={ROOT}", *environment, *words]

    def run(self, *words: str, timeout_s: float = PATIENCE_S) -> str:
        """What the command printed; it ends well."""
        done = subprocess.run(self.command(*words), capture_output=True, text=True, timeout=timeout_s)
        assert done.returncode == 0, f"{' '.join(words)}:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
        return done.stdout

    def make_base(self) -> None:
        """This machine's distribution with apt and nothing else, by its registry of packages. Raises NoPackages."""
        folder = self.folder / "base"
        folder.mkdir()
        suite = platform.freedesktop_os_release()["VERSION_CODENAME"]
        fetch(self.command("mmdebstrap", "--quiet", "--variant=minbase", suite, f"{folder}/base.tar", mirror(suite)))
        (folder / "Dockerfile").write_text("FROM scratch\nADD base.tar /\n")
        self.run("buildah", "bud", "--tag", BASE, str(folder))
        (folder / "base.tar").unlink()

    def build(self, words: Sequence[str], timeout_s: float) -> None:
        """By this command of a page, on the base."""
        program, bud, *rest = words
        given = ["--pull-never", "--build-arg", f"BASE={BASE}", *self._reaching_registries()]
        self.run(program, bud, *given, *rest, timeout_s=timeout_s)
        shutil.rmtree(self.folder / "tmp")  # what was downloaded
        (self.folder / "tmp").mkdir()

    def _reaching_registries(self) -> Iterator[str]:
        """As this machine does. The certificates stay in the image, which does not stay."""
        if _CERTIFICATES.is_dir():
            yield f"--volume={_CERTIFICATES}:{_CERTIFICATES}:ro"
        for place, text in _SETTINGS.items():
            ours = self.folder / Path(place).name
            ours.write_text(text)
            yield f"--volume={place if Path(place).exists() else ours}:{place}:ro"


def mirror(suite: str) -> str:
    """Where this machine's apt has the packages of the suite from. Raises NoPackages."""
    asked = ["apt-get", "indextargets", "--format", "$(CODENAME) $(REPO_URI)", "Created-By: Packages"]
    found = subprocess.run(asked, check=True, capture_output=True, text=True).stdout.splitlines()
    uris = [line.removeprefix(f"{suite} ") for line in found if line.startswith(f"{suite} ")]
    if not uris:
        raise NoPackages(f"This machine's apt has no source of {suite}.")
    return uris[0]


@contextmanager
def images_in(folder: Path) -> Iterator[Images]:
    """Nothing of the folder stays."""
    _furnish(folder)
    words = ["setpriv", "--pdeathsig", "KILL", *NAMESPACES, "bash", "-c", _BEGIN]
    begun = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    try:
        assert begun.stdout is not None and begun.stdout.readline() == "ready\n"
        (first,) = psutil.Process(begun.pid).children()
        yield Images(folder, first.pid)
    finally:
        _, left = _end(begun)
        shutil.rmtree(folder)
        _remove_groups()
    assert left == []


def _furnish(folder: Path) -> None:
    for name in ("graph", "run", "tmp"):
        (folder / name).mkdir()
    storage = {"driver": "overlay", "graphroot": f"{folder}/graph", "runroot": f"{folder}/run/storage"}
    engine = {"cgroup_manager": "cgroupfs", "events_logger": "none", "lock_type": "file", "tmp_dir": f"{folder}/run"}
    if shutil.which("runc"):
        engine["runtime"] = "runc"  # the other one, crun, refuses a host that has control groups of both versions
    limits = [f"nofile={_at_most(resource.RLIMIT_NOFILE, _MOST_FILES)}"]
    limits += [f"nproc={_at_most(resource.RLIMIT_NPROC, _MOST_PROCESSES)}"]
    (folder / "storage.conf").write_text(f"[storage]\n{_lines(storage)}")
    containers = f'log_driver = "k8s-file"\ndefault_ulimits = {limits}\n'
    (folder / "containers.conf").write_text(f"[containers]\n{containers}[engine]\n{_lines(engine)}")


def _lines(values: dict[str, str]) -> str:
    return "".join(f'{name} = "{value}"\n' for name, value in values.items())


def _at_most(limit: int, most: int) -> str:
    """Soft and hard one: no more than this process has, which it may not raise."""
    _, hard = resource.getrlimit(limit)
    number = most if hard == resource.RLIM_INFINITY else min(hard, most)
    return f"{number}:{number}"


def _end(begun: subprocess.Popen[str]) -> tuple[list[psutil.Process], list[psutil.Process]]:
    """All processes of the namespaces: those that ended, and those that did not."""
    processes = psutil.Process(begun.pid).children(recursive=True)
    begun.kill()
    begun.wait()
    return psutil.wait_procs(processes, PATIENCE_S)


def _remove_groups() -> None:
    """podman leaves the control groups above those of its containers."""
    for name in ("libpod_parent/conmon", "libpod_parent"):
        for group in [*GROUPS.glob(name), *GROUPS.glob(f"*/{name}")]:
            with contextlib.suppress(OSError):  # another podman's containers are in it
                group.rmdir()
