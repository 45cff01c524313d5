"""Prometheus' alert rules: what each alert says, and the file with all of them.

One alert stands for one cause: values are joined over ranks and processes; which ranks, its description says.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import yaml

from verl_otel.alerts import expressions
from verl_otel.alerts.expressions import Parameters, metric
from verl_otel.alerts.thresholds import BadThresholds, Thresholds

GROUP = "verl"


@dataclass(frozen=True)
class Alert:
    """What an alert says, and its expression as a function of its parameters; texts are templates of Prometheus."""

    name: str
    expression: Callable[[Parameters], str]
    summary: str
    description: str
    value: str
    of_run: bool = True
    component: str = ""
    """A label that tells it from the alert of the same name about runs."""


def _listing(query: str, line: str, limit: int = 5, order: str = "") -> str:
    """A template that asks Prometheus, and has a line for each of the largest series of the answer.

    Args:
        query: with `%[1]q` for the run's id, `%[2]q` for the worker group, and `[fresh]`, `[remember]` for durations;
            quotes in it are single ones.
        line: with `.Labels` and `.Value`.
        order: a label by which they are sorted, where many have the same value, and Prometheus any order.
    """
    given = "$labels.verl_run_id" + (" $labels.verl_worker_group" if "%[2]q" in query else "")
    ordered = f' | sortByLabel "{order}"' if order else ""
    return f'{{{{ range printf "topk({limit}, {query})" {given} | query{ordered} }}}} {line};{{{{ end }}}}'


def _alerts() -> Iterable[Alert]:
    run = "run {{ $labels.verl_run_id }}"
    in_stage = 'stage {{ $labels.stage }}{{ with $labels.verl_timer }} ("{{ . }}"){{ end }}'
    non_finite, duration = metric("verl.metric.non_finite"), metric("verl.worker.duration")
    start, straggler = metric("verl.process.start_time"), metric("verl.worker.straggler")
    memory, exported = metric("hw.gpu.memory.utilization"), metric("verl.otel.exported")
    failures = metric("verl.otel.failures")
    gpu = "{{ $labels.hw_id }} of {{ $labels.host_name }}"
    of_run = "verl_run_id=%[1]q"
    of_group = f"{start}{{{of_run},verl_worker_group=%[2]q}}"
    yield Alert(
        "VerlRunHung",
        expressions.run_hung,
        f"{run} hangs{{{{ if $labels.stage }}}} in {in_stage}{{{{ else }}}} between two steps{{{{ end }}}}",
        "For {{ $value | humanizeDuration }} now, far longer than it takes in this run, and the trainer still waits.",
        "{{ $value | humanizeDuration }}",
    )
    yield Alert(
        "VerlRunFailed",
        expressions.run_failed,
        f'{run} {{{{ if eq $labels.verl_run_state "lost" }}}}is lost{{{{ else }}}}has failed{{{{ end }}}}',
        '{{ if eq $labels.verl_run_state "lost" }}Its trainer has sent nothing for {{ $value | humanizeDuration }}, '
        "and never said that it ends: it was killed, ran out of memory, or its node or its Collector is gone."
        "{{ else }}An exception has ended it, {{ $value | humanizeDuration }} ago; the event verl.run.finished has it, "
        "and so has its run in MLflow.{{ end }}",
        "{{ $value | humanizeDuration }} ago",
    )
    yield Alert(
        "VerlStageSlow",
        expressions.stage_slow,
        f"{run}: {in_stage} takes long",
        "It has been running for {{ $value | humanizeDuration }}, a multiple of its mean in this attempt.",
        "{{ $value | humanizeDuration }}",
    )
    yield Alert(
        "VerlThroughputLow",
        expressions.throughput_low,
        f"{run}: throughput is low",
        "{{ $value | printf `%.4g` }} tokens per second and GPU on average.",
        "{{ $value | printf `%.4g` }} tokens/s",
    )
    yield Alert(
        "VerlStepTimeHigh",
        expressions.step_time_high,
        f"{run}: steps take long",
        "A step takes {{ $value | humanizeDuration }} in its stages, without checkpoints and validation.",
        "{{ $value | humanizeDuration }}",
    )
    yield Alert(
        "HighKLDivergence",
        expressions.kl_high,
        f"{run}: KL divergence ({{{{ $labels.verl_kl_type }}}}) is {{{{ $value | printf `%.3g` }}}}",
        "The KL divergence of the kind {{ $labels.verl_kl_type }} is outside its band, at {{ $value | printf `%.3g` }} "
        "(its amount).",
        "{{ $value | printf `%.3g` }}",
    )
    yield Alert(
        "VerlClipFractionHigh",
        expressions.clip_fraction_high,
        f"{run}: {{{{ $value | humanizePercentage }}}} of tokens are clipped",
        "The policy ratio of {{ $value | humanizePercentage }} of the tokens is clipped: updates are too large, or the "
        "data is too old.",
        "{{ $value | humanizePercentage }}",
    )
    yield Alert(
        "VerlValueErrorHigh",
        expressions.value_error_high,
        f"{run}: the critic's loss is {{{{ $value | printf `%.3g` }}}}",
        "The loss of the value function is {{ $value | printf `%.3g` }}, above its limit or a multiple of what is "
        "usual in this attempt: advantages are noise while the critic is wrong.",
        "{{ $value | printf `%.3g` }}",
    )
    yield Alert(
        "VerlEntropyCollapse",
        expressions.entropy_collapse,
        f"{run}: entropy has fallen to {{{{ $value | printf `%.3g` }}}}",
        "The policy's entropy is {{ $value | printf `%.3g` }}: it hardly explores any more.",
        "{{ $value | printf `%.3g` }}",
    )
    yield Alert(
        "VerlRewardFlat",
        expressions.reward_flat,
        f"{run}: the mean reward does not move",
        "It was the same in each of the last steps (they differ by {{ $value | printf `%.3g` }}), which not even noise "
        "explains: look at the reward function.",
        "{{ $value | printf `%.3g` }}",
    )
    yield Alert(
        "VerlRewardCollapsed",
        expressions.reward_collapsed,
        f"{run}: the mean reward has fallen to {{{{ $value | printf `%.3g` }}}}",
        "It is {{ $value | printf `%.3g` }}, far below what it was in this attempt before.",
        "{{ $value | printf `%.3g` }}",
    )
    yield Alert(
        "VerlZeroVarianceGroups",
        expressions.zero_variance_groups,
        f"{run}: {{{{ $value | humanizePercentage }}}} of groups teach nothing",
        "All samples of {{ $value | humanizePercentage }} of the groups have the same reward, so that their advantages "
        "are 0."
        + _listing(f"{metric('verl.group.all_right')}{{{of_run}}}", "all right: {{ .Value | printf `%.3g` }}", 1)
        + _listing(f"{metric('verl.group.all_wrong')}{{{of_run}}}", "all wrong: {{ .Value | printf `%.3g` }}", 1),
        "{{ $value | humanizePercentage }}",
    )  # fmt: skip
    yield Alert(
        "VerlNonFinite",
        expressions.non_finite,
        f"{run}: NaN or infinite values",
        "{{ $value }} of them in the last minutes; since the start:"
        + _listing(
            f"sum by (metric, rank, stage) ({non_finite}{{{of_run}}})",
            "{{ .Labels.metric }} in stage {{ .Labels.stage }} on rank {{ .Labels.rank }}: {{ .Value }}",
            order="rank",
        ),
        "{{ $value }}",
    )
    yield Alert(
        "VerlRankMissing",
        expressions.rank_missing,
        f"{run}: {{{{ $value }}}} ranks of {{{{ $labels.verl_worker_group }}}} send nothing any more",
        "Training goes on, or waits for them:"
        + _listing(
            f"max by (rank, host_name) (last_over_time({of_group}[remember])) "
            f"unless on (rank) max by (rank) (last_over_time({of_group}[fresh]))",
            "rank {{ .Labels.rank }}, last on {{ .Labels.host_name }}",
            order="rank",
        ),
        "{{ $value }} ranks",
    )
    yield Alert(
        "VerlStraggler",
        expressions.straggler,
        f"{run}: one rank is slower than the others",
        "The slowest rank takes {{ $value | printf `%.3g` }} times the median."
        + _listing(f"{straggler}{{{of_run},rank='all'}}", "{{ .Labels.verl_timer }}: {{ .Value | printf `%.3g` }}")
        + " Most time since the start:"
        + _listing(
            f"sum by (rank, host_name) ({duration}_sum{{{of_run},stage=~'log_prob|values|update'}})",
            "rank {{ .Labels.rank }} on {{ .Labels.host_name }}: {{ .Value | humanizeDuration }}",
            3,
        ),
        "{{ $value | printf `%.3g` }}",
    )
    yield Alert(
        "VerlGpuMemoryHigh",
        expressions.gpu_memory_high,
        f"{run}: GPU memory is {{{{ $value | humanizePercentage }}}} full",
        "On average over the window, rollout and training together."
        + _listing(
            f"max by (host_name, hw_id) ({memory}{{{of_run}}})",
            "{{ .Labels.hw_id }} of {{ .Labels.host_name }}: {{ .Value | humanizePercentage }}",
            3,
        ),
        "{{ $value | humanizePercentage }}",
    )
    yield Alert(
        "VerlGpuUnderused",
        expressions.gpu_underused,
        f"{run}: its GPUs are used {{{{ $value | humanizePercentage }}}} of the time",
        "A kernel ran on them {{ $value | humanizePercentage }} of the time, on average over the run's GPUs.",
        "{{ $value | humanizePercentage }}",
    )
    yield Alert(
        "VerlGpuEccErrors",
        expressions.gpu_ecc_errors,
        f"{gpu} has uncorrected memory errors",
        f"{gpu}, which {run} uses, had {{{{ $value | printf `%.0f` }}}} uncorrected ECC errors: its results cannot be "
        "trusted.",
        "{{ $value | printf `%.0f` }}",
    )
    yield Alert(
        "VerlGpuXid",
        expressions.gpu_xid,
        f"{gpu} has failed",
        f"{gpu}, which {run} uses, is off the bus (1), or its driver reported the XID {{{{ $value }}}}.",
        "{{ $value }}",
    )
    yield Alert(
        "VerlTelemetryLoss",
        expressions.telemetry_loss,
        f"{run}: telemetry is lost",
        "{{ $value | printf `%.3g` }} spans, points and events were dropped, or parts of verl-otel have failed or were "
        "used wrongly. Since the start:"
        + _listing(
            f"sum by (verl_otel_signal, verl_otel_reason) ({exported}{{{of_run},verl_otel_outcome='dropped'}})",
            "{{ .Labels.verl_otel_signal }} dropped ({{ .Labels.verl_otel_reason }}): {{ .Value }}",
        )
        + _listing(
            f"sum by (verl_otel_site) ({failures}{{{of_run}}}) > 0",
            "{{ .Labels.verl_otel_site }}: {{ .Value }}",
        ),
        "{{ $value | printf `%.3g` }}",
    )
    yield Alert(
        "VerlTelemetryLoss",
        expressions.collector_loss,
        "The Collector {{ $labels.instance }} loses telemetry",
        "{{ $value | printf `%.3g` }} items for {{ $labels.exporter }} were refused by it, or did not fit into its "
        "queue.",
        "{{ $value | printf `%.3g` }}",
        of_run=False,
        component="collector",
    )
    yield Alert(
        "VerlCollectorQueueFilling",
        expressions.collector_queue_filling,
        "The Collector's queue for {{ $labels.exporter }} is {{ $value | humanizePercentage }} full",
        "{{ $labels.exporter }} does not take the {{ $labels.data_type }} of the Collector {{ $labels.instance }} as "
        "fast as they come. What does not fit any more is lost.",
        "{{ $value | humanizePercentage }}",
        of_run=False,
    )


ALERTS = tuple(_alerts())


# ---- the file


def generate(thresholds: Thresholds) -> str:
    """The rule file, as YAML."""
    rules = expressions.recorded(thresholds.run)
    for alert in ALERTS:
        rules += _rules_of(alert, thresholds)
    content = {"groups": [{"name": GROUP, "rules": rules}]}
    head = "# Made by `verl-otel alert-rules` from thresholds.yaml and verl_otel/alerts/rules.py; do not edit.\n"
    return head + yaml.dump(content, Dumper=_Dumper, sort_keys=False, width=10_000, allow_unicode=True)


def _rules_of(alert: Alert, thresholds: Thresholds) -> Iterable[dict[str, Any]]:
    """One rule: its expression has an alternative for the projects without parameters of their own, and one for each
    of the others. (More than one rule where severity or `for` differ.)"""
    own = {project: changed[alert.name] for project, changed in thresholds.projects.items() if alert.name in changed}
    if not alert.of_run:
        own = {}
    others = f"verl_project_name!~{_quoted('|'.join(map(_escaped, own)))}" if own else ""
    cases = [(thresholds.alerts[alert.name], others)]
    cases += [(values, f"verl_project_name={_quoted(project)}") for project, values in own.items()]
    expressions: dict[tuple[str, str], list[str]] = {}
    for values, projects in cases:
        if values is None:
            continue
        expression = alert.expression(Parameters(thresholds.run, values, projects))
        if not expression:
            raise BadThresholds(f"{alert.name}: all its limits are off; turn the alert off instead: {alert.name}: off")
        expressions.setdefault((values["severity"], values["for"]), []).append(expression)
    for (severity, lasting), alternatives in expressions.items():
        yield {
            "alert": alert.name,
            "expr": alternatives[0] if len(alternatives) == 1 else "\nor\n".join(f"({one})" for one in alternatives),
            "for": lasting,
            "labels": {"severity": severity, **({"component": alert.component} if alert.component else {})},
            "annotations": _annotations(alert, thresholds),
        }


def _annotations(alert: Alert, thresholds: Thresholds) -> dict[str, str]:
    links = thresholds.links
    texts = {
        "summary": alert.summary,
        "description": alert.description,
        "value": alert.value,
        "runbook_url": links["runbook"].replace("{alert}", alert.name),
    }
    if alert.of_run:
        texts |= {f"{kind}_url": links[kind] for kind in ("dashboard", "trace", "mlflow")}
    durations = {**thresholds.run, **(thresholds.alerts[alert.name] or {})}
    for name in ("fresh", "remember"):
        texts["description"] = texts["description"].replace(f"[{name}]", f"[{durations.get(name)}]")
    return {name: text for name, text in texts.items() if text}


def _escaped(project: str) -> str:
    """As a literal in a regular expression of RE2, which knows no escapes of characters that need none."""
    return "".join(f"\\{c}" if c in r"\.+*?()|[]{}^$" else c for c in project)


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


class _Dumper(yaml.SafeDumper):
    """Expressions of several lines as blocks."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)
