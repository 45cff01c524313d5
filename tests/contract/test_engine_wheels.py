"""vLLM and SGLang, which need a GPU to run: what we use of them, read from their real wheels.

The newest versions are downloaded (400 MB) and read, not installed.
"""

import ast
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
import fake_engines

pytestmark = pytest.mark.matrix

MODULES = {
    "vllm": ("vllm/v1/engine/async_llm.py", "AsyncLLM", "generate", fake_engines.AsyncLLM),
    "sglang": (
        "sglang/srt/managers/tokenizer_manager.py",
        "TokenizerManager",
        "generate_request",
        fake_engines.TokenizerManager,
    ),
}


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    folder, found = tmp_path_factory.mktemp("wheels"), {}
    for name in MODULES:
        subprocess.run(
            [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-cache-dir", "--dest", folder, name],
            check=True,
            timeout=900,
        )
        (wheel,) = folder.glob(f"{name}-*.whl")
        found[name] = zipfile.ZipFile(wheel)
    return found


def method_of(source, of, name):
    (found,) = [
        method
        for cls in ast.walk(ast.parse(source))
        if isinstance(cls, ast.ClassDef) and cls.name == of
        for method in cls.body
        if getattr(method, "name", None) == name
    ]
    return found


def arguments(method):
    given = method.args
    return [a.arg for a in (*given.posonlyargs, *given.args)], {a.arg for a in given.kwonlyargs}


@pytest.mark.parametrize("name", MODULES)
def test_what_we_wrap_is_an_async_generator_that_takes_what_we_give(wheels, name):
    path, of, method, stand_in = MODULES[name]
    real = method_of(wheels[name].read(path).decode(), of, method)
    own = method_of(Path(fake_engines.__file__).read_text(), stand_in.__name__, method)
    assert isinstance(real, ast.AsyncFunctionDef) and any(isinstance(node, ast.Yield) for node in ast.walk(real))
    positional, by_keyword = arguments(own)
    assert arguments(real)[0] == positional
    assert by_keyword <= arguments(real)[1], "what the stand-in takes, the real one takes too"


def test_vllm_says_where_we_look_whether_it_traces(wheels):
    source = wheels["vllm"].read("vllm/v1/engine/async_llm.py").decode()
    enabled = method_of(source, "AsyncLLM", "is_tracing_enabled")
    assert "self.observability_config.otlp_traces_endpoint is not None" in ast.unparse(enabled)
    assert "TraceContextTextMapPropagator().extract(headers)" in wheels["vllm"].read("vllm/tracing/otel.py").decode()


def test_sglang_says_where_we_look_whether_it_traces(wheels):
    source = wheels["sglang"].read("sglang/srt/managers/tokenizer_manager.py").decode()
    assert "self.enable_trace = " in source
    assert "external_trace_header = obj.external_trace_header" in source
    assert "external_trace_header: " in wheels["sglang"].read("sglang/srt/managers/io_struct.py").decode()


def test_vllm_has_the_metrics_that_the_stand_in_of_its_server_shows(wheels):
    source = wheels["vllm"].read("vllm/v1/metrics/loggers.py").decode()
    stub = (Path(__file__).parents[1] / "testbed" / "verl_cpu" / "stub_metrics.py").read_text()
    shown = {line.split()[2] for line in stub.splitlines() if line.startswith("# TYPE ")}
    assert len(shown) >= 5
    for name in shown:
        assert f'"{name.removesuffix("_total")}"' in source, name
