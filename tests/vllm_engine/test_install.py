from __future__ import annotations

import json
import subprocess
import sys
import threading
import types

import pytest

from omni_cluster.vllm_engine.install import add_utility_calls, replaced

PATIENCE_S = 20.0

IMPORTS = """
import gc, importlib, json, pkgutil, sys, types
gc.disable()  # looking for garbage takes a quarter of the time of imports
import omni_cluster.vllm_engine as room

for module in pkgutil.walk_packages(room.__path__, room.__name__ + "."):
    importlib.import_module(module.name)
ours = []
for name, module in sorted(sys.modules.items()):
    if name.split(".")[0] == "vllm":
        of_vllm = [v for v in vars(module).values() if isinstance(v, type) and v.__module__.startswith("vllm")]
        for owner in [module, *of_vllm]:
            for key, value in vars(owner).items():
                if isinstance(value, type | types.FunctionType) and value.__module__.startswith("omni_cluster"):
                    ours.append(f"{owner.__name__}.{key}")
print(json.dumps(["vllm.v1.engine.core" in sys.modules, ours]))
"""


@pytest.mark.full
def test_importing_the_room_changes_nothing_in_vllm() -> None:
    done = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, check=True)
    is_imported, ours = json.loads(done.stdout.splitlines()[-1])
    assert is_imported
    assert ours == []


def test_a_name_is_ours_for_as_long_as_the_context_and_no_longer_after_an_error() -> None:
    owner = types.SimpleNamespace(part="stock")
    with pytest.raises(ValueError, match="construction failed"), replaced(owner, "part", "ours"):
        assert owner.part == "ours"
        raise ValueError("construction failed")
    assert owner.part == "stock"


def test_two_constructions_at_once_leave_the_stock_name() -> None:
    """Without waiting for each other, the later one would take the earlier one's part for vLLM's, and put it back."""
    owner = types.SimpleNamespace(part="stock")
    second_begins, first_has_ended = threading.Event(), threading.Event()

    def construct_second() -> None:
        second_begins.set()
        with replaced(owner, "part", "second"):
            first_has_ended.wait(PATIENCE_S)

    second = threading.Thread(target=construct_second)
    with replaced(owner, "part", "first"):
        second.start()
        second_begins.wait(PATIENCE_S)
        second.join(0.2)  # without a lock it has replaced the name by now
    first_has_ended.set()
    second.join(PATIENCE_S)
    assert owner.part == "stock"


def test_an_engine_core_answers_added_calls_by_their_names() -> None:
    class Core:
        steps = 3

    def omni_steps(core: Core) -> int:
        return core.steps

    add_utility_calls(Core, omni_steps)
    assert Core().omni_steps() == 3  # type: ignore[attr-defined]


def test_a_signal_comes_to_python_s_handler_again_once_a_native_one_was_put_over_it() -> None:
    code = (
        "import ctypes, os, signal\n"
        "from omni_cluster.vllm_engine.install import take_back_signals\n"
        "signal.signal(signal.SIGTERM, lambda *_: print('heard', flush=True))\n"
        "ctypes.CDLL(None).signal(signal.SIGTERM, 0)\n"  # without Python's knowledge
        "take_back_signals()\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "heard\n"


def test_a_process_of_an_engine_searches_no_garbage_at_its_end() -> None:
    code = (
        "import atexit, gc\n"
        "from omni_cluster.vllm_engine.install import search_no_garbage_at_exit\n"
        "atexit.register(lambda: print(gc.get_freeze_count()))\n"  # called last
        "search_no_garbage_at_exit()\n"
        "assert gc.get_freeze_count() == 0\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) > 1000
