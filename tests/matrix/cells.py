"""The table of versions: each program or mode of verl in each version, and the test that says that it is recorded.

Declared here, tried by `support.py`, shown in docs/support.md and the README.
"""

from dataclasses import dataclass

from environments import VERSIONS

COLUMNS = {
    "ppo": "PPO",
    "grpo": "GRPO",
    "legacy": "`RayPPOTrainer`",
    "v1_sync": "V1 `sync`",
    "v1_colocate_async": "V1 `colocate_async`",
    "v1_separate_async": "V1 `separate_async`",
    "main_ppo_sync": "`main_ppo_sync`",
    "one_step_off": "one-step-off",
    "fully_async": "fully-async",
    "sft_torchrun": "SFT, torchrun",
    "sft_ray": "SFT on Ray",
    "tools": "agent loop with tools",
}

PROGRAM_TESTS = {
    **dict.fromkeys(("ppo", "grpo", "legacy"), "test_legacy_trainer"),
    **dict.fromkeys(("v1_sync", "v1_colocate_async", "v1_separate_async"), "test_v1_trainers"),
    **{column: f"test_{column}" for column in ("main_ppo_sync", "one_step_off", "fully_async")},
    **{"sft_torchrun": "test_sft_by_torchrun", "sft_ray": "test_sft_on_ray", "tools": "test_agent_loop_with_tools"},
}
"""Column -> the contract test of it, in contract/test_programs.py."""


def program_test(verl: str, column: str) -> str:
    """From 0.9.0 on, PPO and GRPO use the V1 trainers unless told otherwise."""
    return "test_v1_trainers" if verl >= "0.9" and column in ("ppo", "grpo") else PROGRAM_TESTS[column]


NEWEST = VERSIONS[-1]

RUN, CONTRACT, ABSENT = "run", "contract", "absent"


@dataclass(frozen=True)
class Cell:
    """How a program of a version is covered."""

    how: str
    """`run`: a real training; `contract`: the seams of the real wheel, with real Ray actors; `absent`: not there."""
    tests: tuple[str, ...] = ()
    """Ids of tests, from the folder `tests` on; all of them have to pass."""
    note: str = ""
    """Of one that is absent: the module of verl that another version has it in."""


def run(*tests: str) -> Cell:
    return Cell(RUN, tests)


def _absent(module: str) -> Cell:
    return Cell(ABSENT, note=module)


def _contract(verl: str, column: str) -> Cell:
    program = program_test(verl, column)
    if verl == NEWEST:  # here, and not in an environment of its own
        on_ray = "test_every_rank_of_every_kind_of_worker_group_is_under_the_stage_that_called_it"
        return Cell(CONTRACT, (f"contract/test_programs.py::{program}", f"integration/test_ray.py::{on_ray}"))
    tests = (f"test_a_program[{verl}-{column}]", f"test_the_hooks_fit[{verl}]")
    return Cell(CONTRACT, tuple(f"matrix/test_contract.py::{test}" for test in tests))


_V1 = "verl.trainer.ppo.v1"
_MAIN_PPO_SYNC = "verl.trainer.main_ppo_sync"
_ONE_STEP_OFF = "verl.experimental.one_step_off_policy.main_ppo"
_FULLY_ASYNC = "verl.experimental.fully_async_policy.fully_async_main"

FIRST = {
    "v1_sync": ("0.9.0", _V1),
    "v1_colocate_async": ("0.9.0", _V1),
    "v1_separate_async": ("0.9.0", _V1),
    "main_ppo_sync": ("0.8.0", _MAIN_PPO_SYNC),
    "one_step_off": ("0.8.0", _ONE_STEP_OFF),
    "fully_async": ("0.8.0", _FULLY_ASYNC),
    "sft_ray": ("0.7.0", "verl.trainer.sft_trainer_ray"),
}
"""Column -> the first version that has it, and where."""

GONE = {"main_ppo_sync": "0.9.0"}
"""Column -> the first version that has it no more (it has become V1)."""

_MODES = "e2e/test_modes.py"

RUNS = {
    ("0.6.1", "ppo"): run("matrix/test_runs.py::test_ppo_of_0_6_1"),
    ("0.6.1", "grpo"): run("matrix/test_runs.py::test_grpo_of_0_6_1"),
    ("0.6.1", "legacy"): run("matrix/test_runs.py::test_ppo_of_0_6_1", "matrix/test_runs.py::test_grpo_of_0_6_1"),
    ("0.7.1", "grpo"): run("matrix/test_runs.py::test_grpo_of_0_7_1"),
    ("0.7.1", "legacy"): run("matrix/test_runs.py::test_grpo_of_0_7_1"),
    ("0.8.0", "ppo"): run("matrix/test_runs.py::test_ppo_of_0_8_0"),
    ("0.8.0", "grpo"): run("matrix/test_runs.py::test_main_ppo_sync_of_0_8_0"),
    ("0.8.0", "legacy"): run("matrix/test_runs.py::test_ppo_of_0_8_0"),
    ("0.8.0", "main_ppo_sync"): run("matrix/test_runs.py::test_main_ppo_sync_of_0_8_0"),
    ("0.9.0", "grpo"): run("matrix/test_runs.py::test_grpo_of_0_9_0"),
    ("0.9.0", "v1_sync"): run("matrix/test_runs.py::test_grpo_of_0_9_0"),
    ("0.9.1", "ppo"): run("e2e/test_embedded.py::test_a_run_that_joins_an_older_cluster_has_the_same_trace"),
    ("0.9.1", "grpo"): run("e2e/test_embedded.py::test_one_trace_for_each_step_with_stages_and_ranks"),
    ("0.9.1", "legacy"): run("matrix/test_runs.py::test_legacy_trainer_of_0_9_1"),
    ("0.9.1", "v1_sync"): run("e2e/test_embedded.py::test_one_trace_for_each_step_with_stages_and_ranks"),
    ("0.9.1", "v1_colocate_async"): run(f"{_MODES}::test_colocate_async_has_whole_traces_and_no_idle_time"),
    ("0.9.1", "v1_separate_async"): run(f"{_MODES}::test_separate_async_has_whole_traces_without_gaps"),
    ("0.9.1", "one_step_off"): run(
        f"{_MODES}::test_one_step_off_has_whole_traces_and_links_to_what_was_generated_ahead"
    ),
    ("0.9.1", "fully_async"): run(f"{_MODES}::test_fully_async_has_whole_traces_without_gaps"),
    ("0.9.1", "sft_torchrun"): run(f"{_MODES}::test_each_step_of_sft_is_a_trace_with_every_rank[torchrun]"),
    ("0.9.1", "sft_ray"): run(f"{_MODES}::test_each_step_of_sft_is_a_trace_with_every_rank[ray]"),
    ("0.9.1", "tools"): run("e2e/test_agents.py::test_a_trajectory_reads_from_top_to_bottom"),
}


def cell(verl: str, column: str) -> Cell:
    """How a column is covered in a version."""
    first, module = FIRST.get(column, ("0", ""))
    if verl < first or (column in GONE and verl >= GONE[column]):
        return _absent(module)
    return RUNS.get((verl, column)) or _contract(verl, column)


CELLS = {(verl, column): cell(verl, column) for verl in VERSIONS for column in COLUMNS}
CONTRACTS = [key for key, covered in CELLS.items() if covered.how == CONTRACT and key[0] != NEWEST]
