"""What a process does with SIGTERM (`export/termination.py`): in processes of their own."""

import signal
import subprocess
import sys

import pytest

HEAD = """
import os, signal, sys, threading, time
from verl_otel.export.termination import OnTermination

def say(text):
    os.write(1, (text + "\\n").encode())

def watch():
    return OnTermination(lambda: say("flushed"), lambda: say("closed"))

def terminate(pid=None):
    os.kill(pid or os.getpid(), signal.SIGTERM)
    time.sleep(0.5)
"""


def run(program):
    result = subprocess.run([sys.executable, "-c", HEAD + program], capture_output=True, text=True, timeout=60)
    assert result.stderr == ""
    return result.returncode, sorted(result.stdout.split())


def test_where_nobody_handles_it_the_process_ends_by_it_once_what_is_pending_is_saved():
    assert run("watch(); terminate(); time.sleep(60)") == (-signal.SIGTERM, ["closed"])


@pytest.mark.parametrize("order", ["signal.signal(15, users); watch()", "watch(); signal.signal(15, users)"])
def test_the_handler_of_the_user_decides_what_is_done(order):
    users = "def users(*_): say('users')\n"
    assert run(users + order + "; terminate(); say('alive')") == (0, ["alive", "flushed", "users"])


def test_a_handler_that_calls_the_one_before_it_ends_the_process():
    users = """
def users(*arguments):
    say("users")
    before(*arguments)

watch()
before = signal.getsignal(signal.SIGTERM)
signal.signal(signal.SIGTERM, users)
terminate()
time.sleep(60)
"""
    code, said = run(users)
    assert code == -signal.SIGTERM and "closed" in said and "users" in said


def test_an_ignored_signal_stays_ignored():
    assert run("signal.signal(15, signal.SIG_IGN); watch(); terminate(); say('alive')") == (0, ["alive"])


def test_an_event_loop_that_takes_the_descriptor_later_changes_nothing():
    program = """
import asyncio

async def main():
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, print)
    watched = watch()
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.sleep(60)

asyncio.run(main())
"""
    assert run(program) == (-signal.SIGTERM, ["closed"])


def test_a_forked_child_ends_as_without_us_and_its_parent_goes_on():
    program = """
watch()
child = os.fork()
if child == 0:
    time.sleep(60)
os.kill(child, signal.SIGTERM)
_, status = os.waitpid(child, 0)
say(str(os.WTERMSIG(status)))
time.sleep(0.5)
say("alive")
"""
    assert run(program) == (0, ["15", "alive"])


def test_stopped_it_leaves_nothing_behind():
    program = """
watched = watch()
threads = threading.active_count()
watched.stop()
time.sleep(0.5)
assert threading.active_count() == threads - 1
assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
assert signal.set_wakeup_fd(-1) == -1
terminate()
"""
    assert run(program) == (-signal.SIGTERM, [])


RAYS = """
def handler(*_):
    sys.exit(15)

handler.__module__ = module
signal.signal(15, handler)
watching = watch()
try:
    terminate()
except SystemExit:
    say(str(watching.ray_exits()))
"""


@pytest.mark.parametrize(("module", "exits"), [("ray._private.worker", "True"), ("rayon", "False"), (None, "False")])
def test_that_rays_handler_ends_the_process_is_known(module, exits):
    assert run(f"module = {module!r}" + RAYS) == (0, sorted([exits, "flushed"]))


def test_without_the_signal_nothing_ends_the_process():
    assert run("say(str(watch().ray_exits()))") == (0, ["False"])
