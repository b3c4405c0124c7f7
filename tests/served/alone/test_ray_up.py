"""Commands of docs/operate/clusters.md, typed by an operator: from two machines without Ray to an answer, and back.

The machines are namespaces of this one: tests/served/machines.py says what they share. In `ray_cluster.yaml` only that
is replaced which the file says to replace. The toy model is served, since no machine here has a card. `make setup` runs
on both and finds that all is installed. tests/stranger.py tries the installation from a registry.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import yaml

from tests.commands import lines_of
from tests.pages import ROOT, section
from tests.processes import command_line
from tests.served.machines import HOME, VENV, Machine, desk, skip_without, ssh_host
from tests.stranger import Commands, said
from tests.terminal import Terminal, on_terminal

pytestmark = [pytest.mark.cluster, pytest.mark.full, pytest.mark.timeout(1800)]

FILE = "ray_cluster.yaml"
OPERATOR, HEAD, WORKER = "192.0.2.254", "192.0.2.1", "192.0.2.2"
REPLACED = {
    "head_ip: 192.0.2.1 ": f"head_ip: {HEAD} ",
    "worker_ips: [192.0.2.2, 192.0.2.3] ": f"worker_ips: [{WORKER}] ",
    "ssh_user: ubuntu ": "ssh_user: root ",
    "ssh_private_key: ~/.ssh/id_ed25519 ": f"ssh_private_key: {HOME}/.ssh/id_ed25519 ",
    "setup EXTRA=gpu ": "setup EXTRA=cpu ",
}
"""What the file says to replace, by what is there."""
OF_GPUS = " config=stage_configs/qwen2_5_omni.yaml"
"""Without it the toy model is served."""
STEP_S = 300
UP_S = 600
LOOK_S = 2
OF_RAY = re.compile(r"ray::|\S*/(gcs_server|raylet)\b")
"""What holds cards and memory. A log monitor outlives its raylet, as the page says."""


@dataclass(frozen=True)
class Page:
    """The commands of the page, in their order."""

    export: str
    token: str
    check: str
    up: str
    nodes: str
    serve: str
    status: str
    attach: str
    end: tuple[str, ...]

    @classmethod
    def read(cls) -> Page:
        start, serve, _, end, _ = (
            tuple(lines_of(block.text)) for block in section("docs/operate/clusters.md", "Several hosts")
        )
        run, status, dashboard, attach = serve
        assert OF_GPUS in run and dashboard.startswith("ray dashboard")
        return cls(*start, run.replace(OF_GPUS, ""), status, attach, end)


@dataclass(frozen=True)
class Operator:
    """Types commands in the folder of the checkout."""

    machine: Machine
    export: str

    @contextmanager
    def typing(self, line: str) -> Iterator[Terminal]:
        """All that the screen showed is printed at the end."""
        environment = {"HOME": HOME, "PATH": f"{VENV / 'bin'}:/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8"}
        shell = self.machine.inside("bash", "-c", f"cd ~/omni_cluster && {self.export}\n{line}")
        with on_terminal(shell, ROOT, environment) as terminal:
            try:
                yield terminal
            finally:
                print(f"$ {line}", *terminal.lines, sep="\n")

    def type(self, line: str, patience_s: float = STEP_S) -> str:
        """What the command shows."""
        with self.typing(line) as terminal:
            assert terminal.end(patience_s) == 0
        return "\n".join(terminal.lines)

    def is_answered(self) -> bool:
        """Through the port that `ray attach` forwards."""
        asked = self.machine.inside("curl", "--silent", "--fail", "http://127.0.0.1:8000/ready")
        return subprocess.run(asked, capture_output=True).returncode == 0


@dataclass(frozen=True)
class Machines:
    operator: Operator
    hosts: tuple[Machine, ...]

    def of_ray(self) -> list[psutil.Process]:
        """Processes of Ray on the hosts."""
        return [each for host in self.hosts for each in host.processes() if OF_RAY.match(command_line(each))]


@pytest.fixture(scope="module")
def page() -> Page:
    return Page.read()


@pytest.fixture
def machines(page: Page, tmp_path: Path) -> Iterator[Machines]:
    skip_without("curl", "make", "rsync")
    (tmp_path / "desk").mkdir()
    with ExitStack() as stack:
        operator = stack.enter_context(desk(tmp_path / "desk", OPERATOR))
        addresses = {"head": HEAD, "worker": WORKER}
        hosts = [
            stack.enter_context(ssh_host(tmp_path / name, address, operator, OPERATOR))
            for name, address in addresses.items()
        ]
        copy_checkout(operator.home / "omni_cluster")
        yield Machines(Operator(operator, page.export), tuple(hosts))


def copy_checkout(folder: Path) -> None:
    """What the file copies to all machines, and the file itself with its placeholders replaced."""
    text = (ROOT / FILE).read_text()
    for there, here in REPLACED.items():
        assert text.count(there) == 1, there
        text = text.replace(there, here)
    (folder / FILE).write_text(text)
    for name in yaml.safe_load(text)["file_mounts"].values():
        if (source := ROOT / name).is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        elif source.exists():
            shutil.copy2(source, folder / name)


def until(condition: Callable[[], bool], what: str) -> None:
    ends_s = time.monotonic() + UP_S
    while not condition():
        assert time.monotonic() < ends_s, what
        time.sleep(LOOK_S)


def living_nodes(status: str) -> int:
    """Of what `ray status` shows: those with work, and without."""
    living = re.search(r"^Active:$(.*)^Pending:$", status, re.MULTILINE | re.DOTALL)
    return sum(map(int, re.findall(r"^ (\d+) ", living[1], re.MULTILINE))) if living else 0


def test_the_commands_of_the_page_lead_from_nothing_to_an_answer_and_back(page: Page, machines: Machines) -> None:
    operator = machines.operator
    assert not machines.of_ray()
    for line in (page.token, page.check):
        operator.type(line)
    operator.type(page.up, UP_S)
    until(lambda: living_nodes(operator.type(page.nodes)) == len(machines.hosts), "both machines are nodes")
    operator.type(page.serve, UP_S)
    until(lambda: "  status: RUNNING" in operator.type(page.status), "the application runs")
    with operator.typing(page.attach) as shell:
        shell.until(operator.is_answered, UP_S)
        assert said(operator.type(Commands.of((ROOT / "README.md").read_text()).ask))
        shell.press(b"exit\n")
        shell.end(STEP_S)
    for line in page.end:
        operator.type(line)
    until(lambda: not machines.of_ray(), "Ray has ended on all machines")
