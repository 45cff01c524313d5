"""The rollout servers of verl, which need a GPU to run: read from its sources, they are as the hooks expect them."""

import ast
import re
from pathlib import Path

import pytest
import verl

from verl_otel.identity import ROLLOUT_SERVER, role_of_class

FOLDER = Path(verl.__file__).parent / "workers" / "rollout"
ALL = {
    "vLLMHttpServer": FOLDER / "vllm_rollout" / "vllm_async_server.py",
    "SGLangHttpServer": FOLDER / "sglang_rollout" / "async_sglang_server.py",
    "TRTLLMHttpServer": FOLDER / "trtllm_rollout" / "trtllm_async_server.py",  # 0.8.0 on
}
SERVERS = [name for name, path in ALL.items() if path.exists()]


def source(name):
    """As `ast` writes it."""
    return ast.unparse(ast.parse(ALL[name].read_text()))


def generate_of(name):
    (found,) = [
        method
        for cls in ast.walk(ast.parse(ALL[name].read_text()))
        if isinstance(cls, ast.ClassDef) and cls.name.removesuffix("Base") == name  # with a base in 0.6.1 and 0.7.0
        for method in cls.body
        if isinstance(method, ast.AsyncFunctionDef) and method.name == "generate"
    ]
    return found


def test_verl_has_servers():
    assert {"vLLMHttpServer", "SGLangHttpServer"} <= set(SERVERS)


@pytest.mark.parametrize("name", SERVERS)
def test_a_server_is_told_by_its_name_and_its_coroutine(name):
    assert role_of_class(name) == ROLLOUT_SERVER
    assert [argument.arg for argument in generate_of(name).args.args][:2] == ["self", "prompt_ids"]


@pytest.mark.parametrize("name", SERVERS)
def test_a_server_says_its_replica_and_the_version_of_its_weights(name):
    text = source(name)
    assert "self.replica_rank = replica_rank" in text
    if not verl.__version__.startswith(("0.6.", "0.7.0")):  # these do not know the version
        assert "self.global_steps" in text and "extra_fields" in text


@pytest.mark.parametrize("name", SERVERS)
def test_a_server_becomes_an_actor_by_ray_remote(name):
    assert re.search(rf"ray\.remote\({name}\)|@ray\.remote(\(.*\))?\nclass {name}\b", source(name))


def test_verl_calls_vllm_by_keywords_and_gives_it_no_context():
    calls = [
        call
        for call in ast.walk(generate_of("vLLMHttpServer"))
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "self.engine.generate"
    ]
    assert len(calls) == 1 and not calls[0].args
    assert "trace_headers" not in {keyword.arg for keyword in calls[0].keywords}
