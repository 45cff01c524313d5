"""GPUs and host (`verl_otel/hardware`): the right GPUs, once per node, and nothing where that is not certain.

There is no GPU where these tests run: NVML is a fake module with the names, codes and errors of the real `pynvml` (the
first test holds it to that). Started as a program, this file is a process of a run that samples the fake's GPUs.
"""

import contextlib
import importlib
import inspect
import json
import logging
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from importlib.metadata import EntryPoint
from types import ModuleType, SimpleNamespace

import pytest
from opentelemetry.semconv._incubating.metrics import hw_metrics
from opentelemetry.semconv.schemas import Schemas
from waiting import until

from verl_otel import border, hardware
from verl_otel.hardware import board, election, host, names, nvml, readers, sampler, visible
from verl_otel.hardware.readers import Device
from verl_otel.identity import Identity

GIB = 1 << 30
KEYS = {"hw.id", "hw.name", "hw.vendor", "hw.model", "hw.parent", "rank", "stage", "model_type"}
ERRORS = {
    "NotSupported": 3,
    "NoPermission": 4,
    "NotFound": 6,
    "DriverNotLoaded": 9,
    "LibraryNotFound": 12,
    "FunctionNotFound": 13,
    "GpuIsLost": 15,
    "ResetRequired": 16,
    "LibRmVersionMismatch": 18,
    "Unknown": 999,
}


class Card:
    """A GPU, or with `parent` a MIG instance, of the fake."""

    def __init__(self, number, model="NVIDIA H100", total=80 * GIB, parent=None, uuid=None):
        self.uuid = uuid or f"GPU-{number}{number}aaaaaa-0000-4000-8000-00000000000{number}"
        self.number, self.model, self.total, self.parent = number, model, total, parent
        self.instances = []
        self.refuses = {}
        """Function -> the name of the error that it raises for this card; `*` for every function."""

    def split(self, *uuids):
        self.instances = [
            Card(i, f"{self.model} MIG 1g.10gb", 10 * GIB, self, uuid) if uuid else None for i, uuid in enumerate(uuids)
        ]
        for instance in filter(None, self.instances):
            instance.refuses["nvmlDeviceGetUtilizationRates"] = "NotSupported"
        return self


def fake_nvml(cards=(), init_error=None):
    """A module like `pynvml`, on a node with these cards."""
    module = ModuleType("pynvml")
    module.shut_down = 0

    class NVMLError(Exception):
        def __init__(self, value):
            self.value = value

        def __eq__(self, other):  # so that it has no hash, as the real one
            return self.value == other.value

    module.NVMLError = NVMLError
    for name, code in ERRORS.items():
        setattr(module, f"NVMLError_{name}", type(f"NVMLError_{name}", (NVMLError,), {"code": code}))

    def error(name):
        return getattr(module, f"NVMLError_{name}")(ERRORS[name])

    module.NVML_TEMPERATURE_GPU = 0
    module.NVML_MEMORY_ERROR_TYPE_CORRECTED, module.NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 0, 1
    module.NVML_VOLATILE_ECC = 0
    module.NVML_DEVICE_MIG_ENABLE = 1

    def add(function):
        def called(*arguments):
            if arguments and isinstance(arguments[0], Card):
                refuses = arguments[0].refuses
                name = refuses.get(function.__name__, refuses.get("*"))
                if name:
                    raise error(name)
            return function(*arguments)

        called.__wrapped__ = function
        setattr(module, function.__name__, called)

    @add
    def nvmlInit():
        if init_error:
            raise error(init_error)

    @add
    def nvmlShutdown():
        module.shut_down += 1

    @add
    def nvmlDeviceGetCount():
        return len(cards)

    @add
    def nvmlDeviceGetHandleByIndex(index):
        if "*" in cards[index].refuses:
            raise error(cards[index].refuses["*"])
        return cards[index]

    @add
    def nvmlDeviceGetUUID(handle):
        return handle.uuid

    @add
    def nvmlDeviceGetName(handle):
        return handle.model

    @add
    def nvmlDeviceGetMigMode(device):
        return [int(bool(device.instances))] * 2

    @add
    def nvmlDeviceGetMaxMigDeviceCount(device):
        return 7

    @add
    def nvmlDeviceGetMigDeviceHandleByIndex(device, index):
        if index >= len(device.instances) or device.instances[index] is None:
            raise error("NotFound")
        return device.instances[index]

    @add
    def nvmlDeviceGetGpuInstanceId(device):
        return 7 + device.number

    @add
    def nvmlDeviceGetComputeInstanceId(device):
        return 0

    @add
    def nvmlDeviceGetMemoryInfo(handle, version=None):
        used = (handle.number + 1) * GIB
        return SimpleNamespace(total=handle.total, used=used, free=handle.total - used)

    @add
    def nvmlDeviceGetUtilizationRates(handle):
        return SimpleNamespace(gpu=10 * (handle.number + 1), memory=1)

    @add
    def nvmlDeviceGetPowerUsage(handle):
        return 700_500

    @add
    def nvmlDeviceGetTotalEnergyConsumption(handle):
        return 2_000_500

    @add
    def nvmlDeviceGetTemperature(handle, sensor):
        return 60 + handle.number

    @add
    def nvmlDeviceGetTemperatureV(handle, sensor, version=0x100000C):
        return 50 + handle.number

    @add
    def nvmlDeviceGetTotalEccErrors(handle, errorType, counterType):
        return 3 + errorType

    return module


@pytest.fixture(autouse=True)
def own_machine(monkeypatch, tmp_path):
    """A temp dir of its own, no device mask, no host metrics, and no thread left."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for variable in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "LOCAL_RANK"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(host, "is_available", lambda: False)
    yield
    hardware.stop()
    assert "verl-otel-hardware" not in [thread.name for thread in threading.enumerate()]


@pytest.fixture
def on_node(monkeypatch):
    """Put a fake NVML with these cards in place of the real module."""

    def put(*cards, **more):
        module = fake_nvml(cards, **more)
        monkeypatch.setitem(sys.modules, "pynvml", module)
        return module

    return put


def process(memory, role="worker", rank="0", run="run-1", stopping=None):
    return sampler.Sampler(
        Identity(run, 1, role, worker_index=rank), memory.meter_provider, 0.05, stopping or threading.Event()
    )


@contextlib.contextmanager
def running(memory, **more):
    """A process of the run, as its own thread with its own locks."""
    stopping = threading.Event()
    thread = threading.Thread(target=process(memory, stopping=stopping, **more).run)
    thread.start()
    try:
        yield thread
    finally:
        stopping.set()
        thread.join(30)


def usage(memory):
    return memory.values("hw.gpu.memory.usage", "hw.id")


def sampled(memory, **more):
    """UUIDs that one process of a run shows when it is alone on the node."""
    with running(memory, **more):
        time.sleep(0.4)
        return [uuid for (uuid,) in usage(memory)]


# ---- the fake, and the conventions ---------------------------------------------------------------------------------


def test_the_fake_is_like_the_real_pynvml():
    real = importlib.import_module("pynvml")
    fake = fake_nvml()
    for name, ours in vars(fake).items():
        if name.startswith("NVMLError_"):
            assert issubclass(getattr(real, name), real.NVMLError)
            assert real.NVMLError(ours.code).__class__ is getattr(real, name)
        elif name.startswith("NVML_"):
            assert getattr(real, name) == ours, name
        elif name.startswith("nvml"):
            assert list(inspect.signature(ours).parameters) == list(inspect.signature(getattr(real, name)).parameters)
    assert {field for field, _ in real.c_nvmlMemory_t._fields_} == set(vars(fake.nvmlDeviceGetMemoryInfo(Card(0))))
    assert {field for field, _ in real.c_nvmlUtilization_t._fields_} == set(
        vars(fake.nvmlDeviceGetUtilizationRates(Card(0)))
    )


def test_all_of_nvml_that_is_used_is_in_the_fake():
    used = set(re.findall(r"nvml\.(nvml\w+|NVML\w+)", inspect.getsource(nvml)))
    assert len(used) > 15 and used <= set(vars(fake_nvml()))


def test_instruments_and_units_are_those_of_the_conventions():
    made = {}

    class Meter:
        def __getattr__(self, kind):
            return lambda name, unit, **_: made.update({name: (kind.removeprefix("create_"), unit)})

    for name, create in vars(hw_metrics).items():
        if name.startswith("create_hw"):
            create(Meter(), *[[]][: len(inspect.signature(create).parameters) - 1])
    for metric in names.ALL:
        kind, unit = made[metric.name]
        assert (metric.kind, metric.unit) == (kind.removeprefix("observable_"), unit), metric.name
    assert names.SCHEMA_URL in {schema.value for schema in Schemas}


# ---- G1: a device mask means these GPUs and no others ----------------------------------------------------------------

FOUR = [Card(number) for number in range(4)]
U0, U1, U2, U3 = (card.uuid for card in FOUR)


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        (None, [U0, U1, U2, U3]),
        ("2,3", [U2, U3]),
        ("3,2", [U3, U2]),
        ("3, 2", [U3, U2]),
        ("2", [U2]),
        (U1, [U1]),
        (f"{U3},{U1}", [U3, U1]),
        (U1[:6], [U1]),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("1,-1,2", [U1]),
        ("1,9,2", [U1]),
        ("9", []),
        ("1,1", []),
        ("GPU-", []),
        ("GPU-nobody", []),
        (f"0,{U1}", [U0]),
        ("MIG-nobody", []),
    ],
)
def test_a_mask_means_the_devices_that_cuda_would_take(on_node, mask, expected):
    on_node(*FOUR)
    devices = nvml.NvmlReader.open().devices()
    assert visible.resolve(mask, devices) == expected


def test_a_beginning_of_a_uuid_that_two_gpus_have_means_none(on_node):
    on_node(Card(0, uuid="GPU-aa1"), Card(1, uuid="GPU-aa2"))
    devices = nvml.NvmlReader.open().devices()
    assert visible.resolve("GPU-aa", devices) == []
    assert visible.resolve("GPU-aa2", devices) == ["GPU-aa2"]
    assert visible.resolve("GPU-", devices[:1]) == []


@pytest.mark.parametrize(
    "other", [Card(1, model="NVIDIA T4"), Card(1, total=40 * GIB), Card(1).split("MIG-x"), Card(1)], ids=str
)
def test_numbers_mean_nothing_in_cudas_own_order_unless_all_cards_are_of_one_kind(on_node, monkeypatch, other):
    on_node(Card(0), other)
    equal = not other.instances and (other.model, other.total) == (Card(0).model, Card(0).total)

    def by_mask(mask):
        return visible.resolve(mask, nvml.NvmlReader.open().devices())

    for order in (None, "FASTEST_FIRST"):
        if order:
            monkeypatch.setenv("CUDA_DEVICE_ORDER", order)
        with contextlib.nullcontext() if equal else pytest.raises(visible.Unsure):
            assert by_mask("0") == [U0]
    assert by_mask(U0) == [U0], "a UUID is certain all the same"
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    assert by_mask("0") == [U0]


def test_numbers_mean_nothing_when_one_card_does_not_answer(on_node):
    broken = Card(1)
    broken.refuses["*"] = "GpuIsLost"
    on_node(Card(0), broken, Card(2))
    devices = nvml.NvmlReader.open().devices()
    assert [device.uuid for device in devices] == [U0, U2]
    with pytest.raises(visible.Unsure):
        visible.resolve("1", devices)


def test_a_mask_that_is_not_certain_gives_no_data_and_one_warning(memory, on_node, monkeypatch, caplog):
    on_node(Card(0), Card(1, model="NVIDIA T4"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert sampled(memory) == []
    (warning,) = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert "CUDA_DEVICE_ORDER=PCI_BUS_ID" in warning and "CUDA_VISIBLE_DEVICES='0'" in warning
    assert border.failures() == {"devices by CUDA_VISIBLE_DEVICES": 1}


@pytest.mark.parametrize("mask", ["MIG-one", "MIG-{card}/8/0"])
def test_mig_instances_are_named_by_uuid_and_in_the_old_way(on_node, mask):
    card = Card(0).split(None, "MIG-one", "MIG-two")
    on_node(card)
    devices = nvml.NvmlReader.open().devices()
    assert [(device.uuid, device.parent) for device in devices] == [(U0, ""), ("MIG-one", U0), ("MIG-two", U0)]
    assert visible.resolve(mask.format(card=U0), devices) == ["MIG-one"]
    assert visible.resolve("MIG-o", devices) == []


@pytest.mark.parametrize("mask", [None, "0", U0])
def test_a_card_that_is_split_means_no_certain_instance(on_node, monkeypatch, mask):
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    on_node(Card(0).split("MIG-one", "MIG-two"), Card(1))
    with pytest.raises(visible.Unsure):
        visible.resolve(mask, nvml.NvmlReader.open().devices())


def devices_of(*cards):
    return nvml.NvmlReader(fake_nvml(cards)).devices()


def used(role, environ=(), given=None, seen=(), cards=FOUR):
    return visible.used(role, dict(environ), "CUDA_VISIBLE_DEVICES", devices_of(*cards), given, seen)


@pytest.mark.parametrize("role", ["worker", "rollout_server", "reward_worker", "trainer", "other"])
def test_an_actor_uses_what_ray_gave_it_whatever_its_mask_says(role):
    for environ in ({}, {"CUDA_VISIBLE_DEVICES": ""}, {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}):
        assert used(role, environ, given=[]) == []
        assert used(role, environ, given=["2"]) == [U2]
        assert used(role, environ, given=[U3]) == [U3]


def test_only_rank_workers_use_gpus_outside_of_ray():
    assert used("worker") == [U0, U1, U2, U3]
    assert used("worker", {"CUDA_VISIBLE_DEVICES": "3,1"}) == [U3, U1]
    assert used("launcher") == used("launcher", {"CUDA_VISIBLE_DEVICES": "0,1"}) == []


def test_a_worker_of_torchrun_uses_the_gpu_of_its_local_rank():
    assert used("worker", {"LOCAL_RANK": "2"}) == [U2]
    assert used("worker", {"LOCAL_RANK": "1", "CUDA_VISIBLE_DEVICES": "3,2"}) == [U2]
    assert used("worker", {"LOCAL_RANK": "2", "CUDA_VISIBLE_DEVICES": "3,2"}) == []
    with pytest.raises(visible.Unsure):
        used("worker", {"LOCAL_RANK": "1"}, cards=[Card(0), Card(1, model="NVIDIA T4")])


def test_cudas_own_order_is_preferred_once_it_is_known():
    different = [Card(0), Card(1, model="NVIDIA T4")]
    in_cuda = [U1.removeprefix("GPU-"), U0.removeprefix("GPU-")]
    assert used("worker", {"LOCAL_RANK": "0"}, seen=in_cuda, cards=different) == [U1]
    assert used("worker", given=["0"], seen=in_cuda[:1], cards=different) == [U1]
    assert used("worker", given=["2"], seen=["unknown"]) == [U2], "not NVML's: the mask decides"
    assert used("worker", given=["2"], seen=in_cuda) == [U2], "CUDA sees more than Ray gave: no mask of its own"


def test_torch_is_asked_only_when_it_has_initialised_cuda(monkeypatch):
    def torch(initialised):
        return SimpleNamespace(
            cuda=SimpleNamespace(
                is_initialized=lambda: initialised,
                device_count=lambda: 2,
                get_device_properties=lambda number: SimpleNamespace(uuid=f"u{number}"),
            )
        )

    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert visible.seen_by_torch() == []
    monkeypatch.setitem(sys.modules, "torch", torch(False))
    assert visible.seen_by_torch() == []
    monkeypatch.setitem(sys.modules, "torch", torch(True))
    assert visible.seen_by_torch() == ["u0", "u1"]
    monkeypatch.setitem(sys.modules, "torch", ModuleType("torch"))  # is being imported by another thread
    assert visible.seen_by_torch() == []


def test_ray_is_asked_in_its_workers_only(monkeypatch):
    context = SimpleNamespace(get_accelerator_ids=lambda: {"GPU": ["3"], "NPU": []})
    ray = SimpleNamespace(is_initialized=lambda: True, get_runtime_context=lambda: context)
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setattr(sys, "argv", ["main_ppo.py"])
    assert visible.given_by_ray("GPU") is None
    monkeypatch.setattr(sys, "argv", ["/x/default_worker.py"])
    assert visible.given_by_ray("GPU") == ["3"] and visible.given_by_ray("TPU") == []
    ray.is_initialized = lambda: False
    assert visible.given_by_ray("GPU") == []
    del ray.is_initialized
    assert visible.given_by_ray("GPU") == []


# ---- what a GPU shows ------------------------------------------------------------------------------------------------


def test_a_gpu_shows_all_it_has_by_the_conventions(memory, on_node, monkeypatch):
    on_node(*FOUR)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    with running(memory, rank="5"):
        (point,) = until(lambda: memory.points("hw.gpu.utilization"))
        assert point.value == 0.2
        assert dict(point.attributes) == {
            "hw.id": U1,
            "hw.name": "GPU 1",
            "hw.vendor": "NVIDIA",
            "hw.model": "NVIDIA H100",
            "hw.parent": "",
            "hw.gpu.task": "general",
            "rank": "5",
            "stage": "other",
            "model_type": "none",
        }
        assert usage(memory) == {(U1,): 2 * GIB}
        assert memory.values("hw.gpu.memory.limit") == {(): 80 * GIB}
        assert memory.values("hw.gpu.memory.utilization") == {(): 2 / 80}
        assert memory.values("hw.power", "hw.type") == {("gpu",): 700.5}
        assert memory.values("hw.energy", "hw.type") == {("gpu",): 2000.5}
        assert memory.values("hw.temperature", "hw.sensor_location") == {("gpu",): 61}
        errors = memory.values("hw.errors", "hw.type", "error.type")
        assert errors == {("gpu", "corrected"): 3, ("gpu", "uncorrected"): 4}
        assert memory.values("hw.status", "hw.type", "hw.state") == {("gpu", "ok"): 1, ("gpu", "failed"): 0}
        for metric, own in names.FIELDS.values():
            assert {frozenset(p.attributes) for p in memory.points(metric.name)} == {frozenset(KEYS | set(own))}


def test_what_a_gpu_does_not_support_is_left_out_and_asked_once(memory, on_node, monkeypatch):
    asked = []
    card = Card(0)
    card.refuses = {
        "nvmlDeviceGetTotalEccErrors": "NotSupported",
        "nvmlDeviceGetTotalEnergyConsumption": "NoPermission",
    }
    module = on_node(card)
    refuse = module.nvmlDeviceGetTotalEnergyConsumption
    monkeypatch.setattr(module, "nvmlDeviceGetTotalEnergyConsumption", lambda handle: asked.append(1) or refuse(handle))
    with running(memory):
        until(lambda: usage(memory))
        time.sleep(0.3)
        assert memory.points("hw.errors") == memory.points("hw.energy") == []
        assert memory.points("hw.power") != []
    assert len(asked) == 1


def test_what_is_not_known_for_a_moment_is_shown_again_later(memory, on_node):
    card = Card(0)
    card.refuses["nvmlDeviceGetPowerUsage"] = "Unknown"
    on_node(card)
    with running(memory):
        until(lambda: usage(memory))
        assert memory.points("hw.power") == []
        card.refuses.clear()
        until(lambda: memory.points("hw.power"))


@pytest.mark.parametrize("missing", ["function", "driver"])
def test_temperature_comes_from_the_newer_function_where_the_older_is_gone(memory, on_node, missing):
    card = Card(0)
    module = on_node(card)
    if missing == "function":
        del module.nvmlDeviceGetTemperature
    else:
        card.refuses["nvmlDeviceGetTemperature"] = "FunctionNotFound"
    with running(memory):
        until(lambda: memory.points("hw.temperature"))
        assert memory.values("hw.temperature") == {(): 50}


def test_a_mig_instance_shows_its_memory_and_card_but_nothing_of_the_whole_card(memory, on_node, monkeypatch):
    on_node(Card(0).split("MIG-one", "MIG-two"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-two")
    with running(memory):
        until(lambda: usage(memory))
        assert memory.values("hw.gpu.memory.usage", "hw.id", "hw.parent") == {("MIG-two", U0): 2 * GIB}
        assert memory.values("hw.gpu.memory.utilization", "hw.name") == {("GPU 0 MIG 1",): 0.2}
        for name in ("hw.gpu.utilization", "hw.power", "hw.energy", "hw.temperature", "hw.errors"):
            assert memory.points(name) == [], name


def test_a_gpu_that_falls_off_the_bus_is_dropped_and_the_others_go_on(memory, on_node, caplog):
    cards = [Card(0), Card(1)]
    on_node(*cards)
    with running(memory):
        until(lambda: len(usage(memory)) == 2)
        cards[0].refuses["*"] = "GpuIsLost"
        until(lambda: [uuid for (uuid,) in usage(memory)] == [U1])
        states = memory.values("hw.status", "hw.id", "hw.state")
        assert states == {(U0, "ok"): 0, (U0, "failed"): 1, (U1, "ok"): 1, (U1, "failed"): 0}
    (warning,) = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert U0 in warning and "is lost" in warning


def test_a_reader_that_hangs_blocks_no_export_and_shows_no_old_values(memory, on_node):
    release = threading.Event()
    module = on_node(Card(0))
    with running(memory):
        until(lambda: usage(memory))
        module.nvmlDeviceGetMemoryInfo = lambda handle: release.wait(30)
        until(lambda: not usage(memory), seconds=5)
        began = time.monotonic()
        assert usage(memory) == {}
        assert time.monotonic() - began < 1
        release.set()


# ---- G4: NVML that is absent or broken -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error", ["LibraryNotFound", "DriverNotLoaded", "LibRmVersionMismatch", "NoPermission", "Unknown", None]
)
def test_broken_or_absent_nvml_is_silent_and_leaves_no_thread(memory, on_node, monkeypatch, caplog, error):
    if error:
        on_node(Card(0), init_error=error)
    else:
        monkeypatch.setitem(sys.modules, "pynvml", None)
    hardware.start(Identity("run-1", 1, "worker"), memory.meter_provider, 0.05)
    until(lambda: "verl-otel-hardware" not in [thread.name for thread in threading.enumerate()])
    assert memory.points("hw.gpu.memory.usage") == []
    assert [r for r in caplog.records if r.levelno > logging.DEBUG] == [] and border.failures() == {}
    assert os.listdir(tempfile.gettempdir()) == []


def test_nvml_is_shut_down_at_the_end(memory, on_node):
    module = on_node(Card(0))
    sampled(memory)
    assert module.shut_down == 1


# ---- G6: one sampler per node and run --------------------------------------------------------------------------------


def test_two_runs_on_a_node_see_their_own_gpus_only(new_memory, on_node, monkeypatch):
    on_node(*FOUR)
    one, other = new_memory(), new_memory()
    monkeypatch.setattr(visible, "used_here", lambda *_: own.gpus)
    own = threading.local()

    def run(memory, run_id, gpus, stopping):
        own.gpus = gpus
        process(memory, run=run_id, stopping=stopping).run()

    stopping = threading.Event()
    threads = [
        threading.Thread(target=run, args=(one, "run", [U0, U1], stopping)),
        threading.Thread(target=run, args=(other, "run.1", [U2, U3], stopping)),
    ]
    for thread in threads:
        thread.start()
    try:
        until(lambda: usage(one) and usage(other))
        assert usage(one).keys() == {(U0,), (U1,)} and usage(other).keys() == {(U2,), (U3,)}
    finally:
        stopping.set()
        for thread in threads:
            thread.join(30)


def test_the_run_id_is_a_legal_file_name_and_stays_unique():
    assert election.file_name("20261129-155413-3f9a1c") == "20261129-155413-3f9a1c"
    made = {election.file_name(run) for run in ("a/b", "a.b", "a b", "../a", "x" * 300, "x" * 301, "ü")}
    assert len(made) == 7 and all(re.fullmatch(r"[A-Za-z0-9_-]{1,120}", name) for name in made)


def test_the_folder_is_private_and_must_be_ours(monkeypatch, tmp_path):
    path = election.folder()
    assert path == str(tmp_path / f"verl-otel-{os.getuid()}") and os.stat(path).st_mode & 0o777 == 0o700
    os.chmod(path, 0o777)
    assert election.folder() == path and os.stat(path).st_mode & 0o777 == 0o700
    real = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: real + 1)
    os.mkdir(tmp_path / f"verl-otel-{real + 1}")
    with pytest.raises(PermissionError):
        election.folder()
    monkeypatch.setattr(os, "getuid", lambda: real)
    os.rename(path, tmp_path / "elsewhere")
    os.symlink(tmp_path / "elsewhere", path)
    with pytest.raises(PermissionError):
        election.folder()


def test_a_temp_dir_that_cannot_be_written_costs_only_these_metrics(memory, on_node, monkeypatch, caplog):
    def refuse(path, mode=0o777):
        raise OSError(30, "Read-only file system", path)

    on_node(Card(0))
    monkeypatch.setattr(os, "mkdir", refuse)
    hardware.start(Identity("run-1", 1, "worker"), memory.meter_provider, 0.05)
    until(lambda: "verl-otel-hardware" not in [thread.name for thread in threading.enumerate()])
    (warning,) = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert "Read-only file system" in warning and "TMPDIR" in warning


def test_the_lock_is_won_by_one_and_free_when_it_leaves():
    one, other = election.Election("run-1"), election.Election("run-1")
    assert one.is_won() and one.is_won() and not other.is_won()
    one.leave()
    assert other.is_won() and not one.is_won()
    other.leave()
    assert os.listdir(election.folder()) == []


def test_a_lock_on_a_file_that_was_just_removed_is_no_win(monkeypatch):
    one, other = election.Election("run-1"), election.Election("run-1")
    assert one.is_won()
    lock = election.fcntl.flock

    def late(file, how):
        one.leave()  # between `open` and `flock` of the other
        lock(file, how)

    monkeypatch.setattr(election.fcntl, "flock", late)
    assert not other.is_won()
    monkeypatch.setattr(election.fcntl, "flock", lock)
    assert other.is_won()
    other.leave()


def test_announcements_of_the_dead_and_of_strangers_are_left_out():
    one = election.Election("run-1")
    one.announce({"uuids": [U0]})
    for name, text in (("run-1.1", '{"uuids": ["dead"]}'), ("run-1.2.new", "{}"), ("run-12.3", "{}")):
        with open(os.path.join(election.folder(), name), "w") as file:
            file.write(text)
    assert one.announced() == [{"uuids": [U0]}]
    one.announce({"uuids": [U1]})
    assert one.announced() == [{"uuids": [U1]}]
    assert sorted(os.listdir(election.folder())) == sorted([f"run-1.{os.getpid()}", "run-1.2.new", "run-12.3"])
    one.leave()


def test_what_earlier_runs_have_left_is_removed_and_what_lives_stays():
    one, other = election.Election("run-1"), election.Election("run-2")
    one.announce({"uuids": [U0]})
    folder = election.folder()
    for name in ("run-0.lock", "run-0.1", "run-9.lock"):
        open(os.path.join(folder, name), "w").close()
    for name in ("run-0.lock", "run-0.1", f"run-1.{os.getpid()}"):
        os.utime(os.path.join(folder, name), (1, 1))
    assert one.is_won() and other.is_won()
    left = ["run-1.lock", f"run-1.{os.getpid()}", "run-2.lock", "run-9.lock"]
    assert sorted(os.listdir(folder)) == sorted(left)
    one.leave()
    other.leave()


def test_a_forked_child_keeps_no_lock_and_shows_nothing(memory, on_node):
    on_node(Card(0))
    read_end, write_end = os.pipe()
    with running(memory):
        until(lambda: usage(memory))
        child = os.fork()
        if child == 0:
            try:
                os.write(write_end, str(len(usage(memory))).encode())
                signal.pause()
            finally:
                os._exit(0)
        os.close(write_end)
        shown = os.read(read_end, 10)
        os.close(read_end)
    # This process has left; the child lives on.
    other = election.Election("run-1")
    try:
        assert (shown, other.is_won(), other.announced()) == (b"0", True, [])
        assert os.listdir(election.folder()) == ["run-1.lock"]
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        other.leave()


def test_the_rank_is_that_of_the_only_rank_worker_on_the_gpu():
    assert sampler._rank(["3"]) == sampler._rank(["3", None]) == "3"
    assert sampler._rank(["3", "4"]) == sampler._rank([None]) == "all"


class Node:
    """Processes of a run (this file as a program) on a node with eight GPUs."""

    def __init__(self, folder):
        self._folder = folder
        self._groups = []
        self.processes = {}

    def start(self, rank, run="run-1", role="worker"):
        environ = {
            **os.environ,
            "TMPDIR": str(self._folder),
            "CUDA_VISIBLE_DEVICES": str(rank),
            "PYTHONPATH": os.pathsep.join(sys.path),
        }
        out = self._folder / f"out-{rank}"
        command = [sys.executable, __file__, role, str(rank), run, str(out)]
        self.processes[rank] = subprocess.Popen(command, env=environ, cwd=os.getcwd(), start_new_session=True)
        self._groups.append(self.processes[rank].pid)

    def shown(self):
        """What is shown on the whole node: (UUID, rank) for each point, sorted; and by which process."""
        points, by = [], []
        for rank in self.processes:
            with contextlib.suppress(FileNotFoundError):
                shown = json.loads((self._folder / f"out-{rank}").read_text())
                points += [tuple(point) for point in shown]
                by += [rank] * bool(shown)
        return sorted(points), by

    def kill(self, rank):
        """Kill a process, and not the child that it has forked."""
        process = self.processes.pop(rank)
        process.kill()
        process.wait()

    def end(self):
        for rank in list(self.processes):
            self.kill(rank)
        for group in self._groups:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)


@pytest.fixture
def node(tmp_path):
    made = Node(tmp_path)
    yield made
    made.end()


def test_eight_ranks_on_a_node_give_eight_gpus_once_each_also_after_the_sampler_is_killed(node):
    eight = [(Card(rank).uuid, str(rank)) for rank in range(8)]
    node.start(-1, role="trainer")
    for rank in range(8):
        node.start(rank)
    until(lambda: node.shown()[0] == eight, seconds=90)
    time.sleep(1)
    points, (first,) = node.shown()
    assert points == eight
    node.kill(first)
    left = [point for point in eight if point[1] != str(first)]
    until(lambda: node.shown()[0] == left, seconds=30)
    time.sleep(1)
    points, (second,) = node.shown()
    assert points == left and second != first


# ---- readers of other packages ---------------------------------------------------------------------------------------


class OtherReader:
    mask, ray_resource = "ASCEND_RT_VISIBLE_DEVICES", "NPU"

    def devices(self):
        return [Device(f"npu-{number}", f"NPU {number}", "Huawei", "910B", number) for number in range(2)]

    def read(self, device):
        return {"utilization": 0.5, "memory.usage": 1.0}

    def close(self):
        pass


def broken_reader():
    raise RuntimeError("no driver")


def test_readers_of_other_packages_are_used_and_broken_ones_reported_once(memory, on_node, monkeypatch, caplog):
    on_node(init_error="LibraryNotFound")
    found = [
        EntryPoint("ascend", f"{__name__}:OtherReader", readers.GROUP),
        EntryPoint("broken", f"{__name__}:broken_reader", readers.GROUP),
        EntryPoint("missing", "no_such_module:Reader", readers.GROUP),
    ]
    monkeypatch.setattr(readers, "entry_points", lambda group: found if group == readers.GROUP else [])
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "1")
    with running(memory):
        until(lambda: usage(memory))
        assert memory.values("hw.gpu.utilization", "hw.id", "hw.vendor") == {("npu-1", "Huawei"): 0.5}
        assert memory.points("hw.gpu.memory.utilization") == []
    warnings = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert (
        len(warnings) == 2 and "'broken'" in warnings[0] and "no driver" in warnings[0] and "'missing'" in warnings[1]
    )


def test_a_reader_that_fails_costs_only_its_own_devices(memory, on_node, monkeypatch):
    on_node(Card(0))
    monkeypatch.setattr(OtherReader, "read", broken_reader)
    found = [EntryPoint("ascend", f"{__name__}:OtherReader", readers.GROUP)]
    monkeypatch.setattr(readers, "entry_points", lambda group: found)
    assert sampled(memory) == [U0]
    assert border.failures().keys() == {"reading Huawei GPUs"}


# ---- the host --------------------------------------------------------------------------------------------------------


def all_points(memory):
    data = memory._reader.get_metrics_data()
    found = [m for r in data.resource_metrics for s in r.scope_metrics for m in s.metrics] if data else []
    return {metric.name: list(metric.data.data_points) for metric in found}


def test_the_host_is_shown_without_gpus_by_the_sampler_only(new_memory, on_node, monkeypatch):
    importlib.import_module("opentelemetry.instrumentation.system_metrics")
    psutil = importlib.import_module("psutil")
    on_node(init_error="LibraryNotFound")
    monkeypatch.setattr(host, "is_available", lambda: True)
    one, other = new_memory(), new_memory()
    with running(one, role="launcher"), running(other, role="trainer"):
        until(lambda: all_points(one) or all_points(other))
        time.sleep(0.3)
        shown, nothing = sorted([all_points(one), all_points(other)], key=len, reverse=True)
    assert nothing == {}
    assert shown.keys() == set(host.CONFIG)
    for name, points in shown.items():
        keys = {"rank", "stage", "model_type"} | ({"device", "direction"} if "network" in name else {"state"})
        assert {frozenset(point.attributes) for point in points} == {frozenset(keys)}, name
        assert {(p.attributes["rank"], p.attributes["stage"], p.attributes["model_type"]) for p in points} == {
            ("all", "other", "none")
        }
    assert 0 < sum(point.value for point in shown["system.cpu.utilization"]) < 1.5
    memory_used = {p.attributes["state"]: p.value for p in shown["system.memory.utilization"]}
    assert 0 < memory_used["used"] < 1
    assert "lo" not in {p.attributes["device"] for p in shown["system.network.io"]}
    idle = {p.attributes["state"]: p.value for p in shown["system.cpu.time"]}["idle"]
    assert idle == pytest.approx(psutil.cpu_times().idle, rel=0.2)


def test_utilization_is_asked_for_once_in_vain_since_the_first_answer_is_over_no_time(memory, monkeypatch):
    importlib.import_module("opentelemetry.instrumentation.system_metrics")
    psutil, asked = importlib.import_module("psutil"), []
    ask = psutil.cpu_times_percent
    monkeypatch.setattr(psutil, "cpu_times_percent", lambda percpu: asked.append(1) or ask(percpu=percpu))
    made = host.Host(memory.meter_provider, board.Board(), {})
    assert len(asked) == 1 and all_points(memory) == {}
    assert made.sample().keys() == set(host.CONFIG) and len(asked) == 2


def test_values_of_cpus_are_summed_or_averaged_and_virtual_devices_left_out():
    seen = [
        host.Observation(1.0, {"state": "idle", "cpu": 1}),
        host.Observation(3.0, {"state": "idle", "cpu": 2}),
        host.Observation(7.0, {"device": "eth0"}),
        host.Observation(9.0, {"device": "veth12ab"}),
    ]
    for of_all, expected in ((sum, 4.0), (host.fmean, 2.0)):
        made = {(o.value, *(o.attributes or {}).values()) for o in host._reduced(seen, of_all)}
        assert made == {(7.0, "eth0"), (expected, "idle")}


def test_the_users_own_instrumentor_keeps_its_configuration(memory):
    package = importlib.import_module("opentelemetry.instrumentation.system_metrics")
    own = package.SystemMetricsInstrumentor(config={"process.thread.count": None})
    try:
        host.Host(memory.meter_provider, board.Board(), {})
        assert package.SystemMetricsInstrumentor._instance is own and own._config == {"process.thread.count": None}
    finally:
        package.SystemMetricsInstrumentor._instance = None


# ---- start and stop --------------------------------------------------------------------------------------------------


def test_start_returns_at_once_works_once_per_process_and_again_after_stop(memory, on_node):
    module = on_node(Card(0))
    slow = module.nvmlInit
    module.nvmlInit = lambda: time.sleep(0.3) or slow()
    began = time.monotonic()
    for _ in range(3):
        hardware.start(Identity("run-1", 1, "worker"), memory.meter_provider, 0.05)
    assert time.monotonic() - began < 0.2
    until(lambda: usage(memory))
    assert [thread.name for thread in threading.enumerate()].count("verl-otel-hardware") == 1
    hardware.stop()
    assert usage(memory) == {} and os.listdir(election.folder()) == []
    hardware.start(Identity("run-1", 1, "worker"), memory.meter_provider, 0.05)
    until(lambda: usage(memory))


def test_start_never_raises(memory, monkeypatch):
    def refuse(_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    hardware.start(Identity("run-1", 1, "worker"), memory.meter_provider)
    assert border.failures() == {"starting the hardware sampler": 1}


def test_nothing_is_loaded_before_the_thread_does_it():
    code = "import sys, verl_otel.hardware; print(*[m for m in sys.modules if m == 'pynvml' or '.hardware.' in m])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "\n"


# ---- this file as a process of a run ---------------------------------------------------------------------------------


def main(role, rank, run, out):
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader

    sys.modules["pynvml"] = fake_nvml([Card(number) for number in range(8)])
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader], shutdown_on_exit=False)
    hardware.start(Identity(run, 1, role, worker_index=rank), provider, 0.2)
    forked = False
    while True:
        data = reader.get_metrics_data()
        found = [m for r in data.resource_metrics for s in r.scope_metrics for m in s.metrics] if data else []
        points = [p for m in found if m.name == "hw.gpu.memory.usage" for p in m.data.data_points]
        with open(f"{out}.new", "w") as file:
            json.dump([(point.attributes["hw.id"], point.attributes["rank"]) for point in points], file)
        os.replace(f"{out}.new", out)
        if points and not forked:  # as a data loader does
            forked = True
            if os.fork() == 0:
                signal.pause()
        time.sleep(0.1)


if __name__ == "__main__":
    main(*sys.argv[1:])
