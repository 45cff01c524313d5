"""Prometheus' alert rules, made of the registry's names and the parameters in `deploy/prometheus/thresholds.yaml`.

Three things hold for all expressions:

- Points come every half second to every ten seconds, steps take from half a second to half an hour. So what is usual is
  mostly a mean over the attempt's whole life, from the sums and counts of histograms, which needs no window. Gauges
  show a step's value until the next one, so that an average over any window has at least one step in it.
- Points are pushed: a series that has ended is shown for five minutes more. Who ends and who goes on is told by
  `last_over_time(...[fresh])`, which sees points of the last two minutes only.
- A counter begins with its first event, which `increase()` does not see, since it has no point before: see `_grown`.

One alert stands for one cause: values are joined over ranks and processes; which ranks, its description says.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from verl_otel.alerts.thresholds import BadThresholds, Thresholds, seconds
from verl_otel.semconv import registry
from verl_otel.semconv.prometheus import prometheus_name
from verl_otel.semconv.stages import STEP_TIMER

GROUP = "verl"

RUN = "verl_run_id, verl_run_attempt, verl_project_name, verl_experiment_name"
STAGE = "stage, verl_timer"

ALL_RANKS = 'rank="all"'
"""The value that verl has reduced over the ranks."""

PAUSES = 'stage=~"checkpoint|validation"'
WORK = 'stage!~"step|checkpoint|validation|other"'
"""Stages in which a step works; `other` is set-up and what only some steps do."""

SEVERAL_STEPS = ("10m", "2h")
"""Windows of the recent time per step: the longer one where no step ended in the shorter."""

DCGM_XID = "DCGM_FI_DEV_XID_ERRORS"
"""NVIDIA's dcgm-exporter: code of the last XID of a GPU, 0 for none. NVML, which we read, tells nobody of it later."""

COLLECTOR_LOSSES = tuple(
    f"otelcol_exporter_{what}_failed_{items}_total"
    for what in ("send", "enqueue")
    for items in ("spans", "metric_points", "log_records")
)


def metric(name: str) -> str:
    """The name in Prometheus of a metric of the registry."""
    found = registry.load().metrics[name]
    return prometheus_name(found.name, found.unit, found.instrument)


@dataclass(frozen=True)
class Alert:
    """What an alert says, and its expression as a function of its parameters; texts are templates of Prometheus."""

    name: str
    expression: Callable[["Parameters"], str]
    summary: str
    description: str
    value: str
    of_run: bool = True
    component: str = ""
    """A label that tells it from the alert of the same name about runs."""


class Parameters:
    """The parameters of one alert, for all projects or for some, and the selectors that go with them."""

    def __init__(self, run: Any, values: Any, projects: str) -> None:
        self._values = {**run, **values}
        self._projects = projects

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def seconds(self, name: str) -> int:
        return seconds(self._values[name])

    def series(self, name: str, *matchers: str, suffix: str = "") -> str:
        """A selector of a metric of the registry."""
        return _selector(metric(name) + suffix, *matchers, self._projects)

    def recorded(self, name: str, *matchers: str) -> str:
        """A selector of what a recording rule makes."""
        return _selector(name, *matchers, self._projects)

    def above(self, limit: str, value: str, usual: str = "") -> str | None:
        """`value` is above the limit, or above so many times what is usual; None where the limit is off."""
        return self._compare(value, ">", limit, usual)

    def below(self, limit: str, value: str, usual: str = "") -> str | None:
        return self._compare(value, "<", limit, usual)

    def _compare(self, value: str, operator: str, limit: str, usual: str) -> str | None:
        if self[limit] is False:
            return None
        return f"{value} {operator} {self[limit]}" + (f" * {usual}" if usual else "")

    @property
    def settled(self) -> str:
        """To be appended: only runs that go on, after their first steps."""
        return f"and on ({RUN}) {self.recorded('verl:steps:total')} >= {self['min_steps']}"

    @property
    def lives(self) -> str:
        """To be appended: only runs that go on."""
        return f"and on ({RUN}) {self.recorded('verl:lives:bool')}"

    @property
    def not_paused(self) -> str:
        return f"unless on ({RUN}) {self.recorded('verl:paused:ratio')} > {self['paused']}"


def _selector(name: str, *matchers: str) -> str:
    given = ",".join(matcher for matcher in matchers if matcher)
    return f"{name}{{{given}}}" if given else name


def _any(*alternatives: str | None) -> str:
    """The alternatives that are on; empty if none is."""
    given = [alternative for alternative in alternatives if alternative]
    return "(" + "\nor\n".join(given) + ")" if given else ""


def _and(expression: str, *conditions: str) -> str:
    return "\n".join((expression, *conditions)) if expression else ""


def _grown(counter: str, window: str, fresh: str) -> str:
    """By how much each series of a counter has grown in `window`, its first value included."""
    now = f"last_over_time({counter}[{fresh}])"
    # Any point of the hour before will do: the Collector or Prometheus may have been away.
    return f"({now} - (last_over_time({counter}[1h] offset {window}) or {now} * 0))"


# ---- what is recorded first, so that the alerts' expressions stay short


def _recorded(run: Any) -> list[dict[str, str]]:
    fresh, step = run["fresh"], f'verl_timer="{STEP_TIMER}"'

    def last(name: str, *matchers: str, suffix: str = "") -> str:
        return f"last_over_time({_selector(metric(name) + suffix, *matchers)}[{fresh}])"

    def duration(suffix: str, *matchers: str) -> str:
        return last("verl.stage.duration", *matchers, suffix=suffix)

    active, last_step = last("verl.stage.active"), last("verl.step.last_timestamp")
    recent = [
        f"{_grown('verl:work:seconds_total', window, fresh)} / ({_grown('verl:steps:total', window, fresh)} > 0)"
        for window in SEVERAL_STEPS
    ]
    rules = {
        # Training goes on: the trainer is in a stage, or between two steps. Neither after `fit`.
        "verl:lives:bool": f"group by ({RUN}) ({active} or {last_step})",
        "verl:last_step:timestamp_seconds": f"max by ({RUN}) ({last_step})",
        # Of this attempt, since its trainer's process counts them.
        "verl:steps:total": f"max by ({RUN}) ({duration('_count', step)}) and on ({RUN}) "
        "verl:last_step:timestamp_seconds",
        # The stage that began last is the innermost; the step itself only where it is in no stage.
        "verl:stage_active:seconds": f"time() - min by ({RUN}, {STAGE}) (topk by ({RUN}, instance) (1, {active}))",
        "verl:stage_usual:seconds": f"sum by ({RUN}, {STAGE}) ({duration('_sum')}) / "
        f"sum by ({RUN}, {STAGE}) ({duration('_count')})",
        "verl:work:seconds_total": f"sum by ({RUN}) ({duration('_sum', WORK)})",
        "verl:step_recent:seconds": "\nor\n".join(recent),
        "verl:step_usual:seconds": "verl:work:seconds_total / (verl:steps:total > 0)",
        "verl:paused:ratio": f"sum by ({RUN}) "
        f"({_grown(_selector(metric('verl.stage.duration') + '_sum', PAUSES), '30m', fresh)}) / {seconds('30m')}",
    }
    return [{"record": name, "expr": expression} for name, expression in rules.items()]


# ---- the alerts


def _run_hung(p: Parameters) -> str:
    active, usual = p.recorded("verl:stage_active:seconds"), p.recorded("verl:stage_usual:seconds")
    times, at_least = p["times_usual"], p.seconds("at_least")
    step = p.recorded("verl:stage_usual:seconds", f'verl_timer="{STEP_TIMER}"')
    return _any(
        f"{active} > clamp_min({times} * {usual}, {at_least})",
        f"({active} > {p.seconds('never_timed')} unless {usual})",
        # Between two steps, in no stage: loading of data, for example.
        f"(time() - {p.recorded('verl:last_step:timestamp_seconds')} > on ({RUN}) "
        f"clamp_min({times} * {step}, {at_least}) unless on ({RUN}) {active})",
    )


def _stage_slow(p: Parameters) -> str:
    active, usual = p.recorded("verl:stage_active:seconds"), p.recorded("verl:stage_usual:seconds")
    return f"{active} > clamp_min({p['times_usual']} * {usual}, {p.seconds('at_least')})"


def _throughput_low(p: Parameters) -> str:
    throughput = p.series("verl.throughput", ALL_RANKS)
    recent = f"max by ({RUN}) (avg_over_time({throughput}[{p['window']}]))"
    usual = f"max by ({RUN}) (quantile_over_time(0.5, {throughput}[{p['baseline']}]))"
    below = _any(p.below("below_usual", recent, usual), p.below("tokens_per_second", recent))
    return _and(below, p.settled, p.not_paused)


def _step_time_high(p: Parameters) -> str:
    recent, usual = p.recorded("verl:step_recent:seconds"), p.recorded("verl:step_usual:seconds")
    above = _any(p.above("times_usual", recent, usual), p.above("seconds", recent))
    return _and(above, p.settled)


def _kl_high(p: Parameters) -> str:
    by = f"{RUN}, stage, verl_kl_type"

    def kl(kind: str) -> str:
        divergence = p.series("verl.kl.divergence", ALL_RANKS, f'verl_kl_type="{kind}"')
        return f"max by ({by}) (abs({divergence}))"

    kinds = ("penalty", "loss", "update", "rollout")
    return _and(_any(*(p.above(kind, kl(kind)) for kind in kinds)), p.settled)


def _clip_fraction_high(p: Parameters) -> str:
    clipped = f"max by ({RUN}, stage) ({p.series('verl.policy.clip_fraction', ALL_RANKS)})"
    return _and(f"{clipped} > {p['ratio']}", p.settled)


def _value_error_high(p: Parameters) -> str:
    loss, by = p.series("verl.value.loss", ALL_RANKS), f"max by ({RUN}, stage)"
    usual = f"{by} (quantile_over_time(0.5, {loss}[{p['baseline']}]))"
    above = _any(p.above("times_usual", f"{by} ({loss})", usual), p.above("loss", f"{by} ({loss})"))
    return _and(above, p.settled)


def _entropy_collapse(p: Parameters) -> str:
    entropy, by = p.series("verl.policy.entropy", ALL_RANKS), f"max by ({RUN}, stage)"
    recent = f"{by} (avg_over_time({entropy}[{p['window']}]))"
    usual = f"{by} (quantile_over_time(0.5, {entropy}[{p['baseline']}]))"
    below = _any(p.below("below_usual", recent, usual), p.below("entropy", recent))
    return _and(below, p.settled)


def _reward_flat(p: Parameters) -> str:
    reward, steps = p.series("verl.reward.mean", ALL_RANKS), p.recorded("verl:steps:total")

    def flat(window: str) -> str:
        spread = f"max by ({RUN}, stage) (max_over_time({reward}[{window}]) - min_over_time({reward}[{window}]))"
        return f"({spread} <= {p['spread']} and on ({RUN}) {_grown(steps, window, p['fresh'])} >= {p['steps']})"

    return _and(_any(*map(flat, p["windows"])), p.settled)


def _reward_collapsed(p: Parameters) -> str:
    reward, by = p.series("verl.reward.mean", ALL_RANKS), f"max by ({RUN}, stage)"
    recent = f"{by} (avg_over_time({reward}[{p['window']}]))"
    # Quantiles, and from before: what is usual must not follow the fall at once.
    before = f"{reward}[{p['baseline']}] offset {p['before']}"
    usual, low = f"{by} (quantile_over_time(0.5, {before}))", f"{by} (quantile_over_time(0.1, {before}))"
    drop = f"{usual} - {recent}"
    far = p.above("times_spread", drop, f"({usual} - {low})")
    # The value of the alert is the reward, whichever limit it is under.
    relative = far and f"({recent} and ({far} and {drop} > {p['share']} * abs({usual})))"
    return _and(_any(relative, p.below("reward", recent)), p.settled)


def _zero_variance_groups(p: Parameters) -> str:
    groups = p.series("verl.group.zero_variance", ALL_RANKS)
    return _and(f"max by ({RUN}, stage) (avg_over_time({groups}[{p['window']}])) > {p['ratio']}", p.settled)


def _non_finite(p: Parameters) -> str:
    ignored = f'metric!~"{p["ignore"]}"' if p["ignore"] else ""
    grown = _grown(p.series("verl.metric.non_finite", ignored), p["window"], p["fresh"])
    return f"sum by ({RUN}) ({grown}) > {p['values']}\n{p.lives}"


def _rank_missing(p: Parameters) -> str:
    # By the rank's place, not by its process: Ray may have started another one for it.
    by = f"group by ({RUN}, verl_worker_group, rank)"
    start = p.series("verl.process.start_time", 'verl_process_role=~"worker|rollout_server"')
    gone = f"{by} (last_over_time({start}[{p['remember']}])) unless {by} (last_over_time({start}[{p['fresh']}]))"
    return f"count by ({RUN}, verl_worker_group) ({gone})\n{p.lives}"


def _straggler(p: Parameters) -> str:
    # Rollouts differ by what they generate, and rank 0 writes more of a checkpoint than the others.
    straggler = p.series("verl.worker.straggler", ALL_RANKS, 'stage=~"log_prob|values|update"')
    slowest = f"avg_over_time({straggler}[{p['window']}])"
    long = f"{p.recorded('verl:stage_usual:seconds')} > {p.seconds('at_least')}"
    return f"max by ({RUN}) ({slowest} and on ({RUN}, verl_timer) {long}) > {p['ratio']}\n{p.settled}"


def _gpu_memory_high(p: Parameters) -> str:
    used = f"avg_over_time({p.series('hw.gpu.memory.utilization')}[{p['window']}])"
    return f"max by ({RUN}) ({used}) > {p['ratio']}\n{p.lives}"


def _gpu_underused(p: Parameters) -> str:
    used = f"avg_over_time({p.series('hw.gpu.utilization')}[{p['window']}])"
    return f"avg by ({RUN}) ({used}) < {p['ratio']}\n{p.settled}\n{p.not_paused}"


def _gpu_ecc_errors(p: Parameters) -> str:
    # The driver counts, from long before the run: increase(), which takes no first value for an error.
    errors = p.series("hw.errors", 'error_type="uncorrected"')
    return f"sum by ({RUN}, host_name, hw_id) (increase({errors}[{p['window']}])) > {p['errors']}"


def _gpu_xid(p: Parameters) -> str:
    by, fresh = f"({RUN}, host_name, hw_id)", p["fresh"]
    status, failed = p.series("hw.status"), p.series("hw.status", 'hw_state="failed"')
    lost = f"max by {by} (last_over_time({failed}[{fresh}])) > 0"

    def code(when: str) -> str:
        return f'max by (hw_id) (label_replace({DCGM_XID}{when}, "hw_id", "$1", "UUID", "(.+)"))'

    # A code stays until the next one, so only a new one counts; and only on a GPU that a run uses.
    new = f"({code('')} > 0 unless {code('')} == {code(' offset ' + p['window'])})"
    return _any(lost, f"{new} * on (hw_id) group_right () group by {by} (last_over_time({status}[{fresh}]))")


def _telemetry_loss(p: Parameters) -> str:
    window, fresh = p["window"], p["fresh"]
    lost = (
        p.series("verl.otel.exported", 'verl_otel_outcome="dropped"'),
        p.series("verl.otel.dropped", 'verl_otel_reason="queue_full"'),  # the other reasons are limits that are meant
        p.series("verl.otel.failures"),
    )
    return f"sum by ({RUN}) (" + "\nor\n".join(_grown(one, window, fresh) for one in lost) + f") > {p['items']}"


def _collector_loss(p: Parameters) -> str:
    by = "max by (job, instance, exporter)"
    return _any(*(f"{by} ({_grown(name, p['window'], p['fresh'])}) > {p['items']}" for name in COLLECTOR_LOSSES))


def _collector_queue_filling(p: Parameters) -> str:
    by = "max by (job, instance, exporter, data_type)"
    return f"{by} (otelcol_exporter_queue_size) / {by} (otelcol_exporter_queue_capacity) > {p['ratio']}"


def _listing(query: str, line: str, limit: int = 5) -> str:
    """A template that asks Prometheus, and has a line for each of the largest series of the answer.

    Args:
        query: with `%[1]q` for the run's id; quotes in it are single ones.
        line: with `.Labels` and `.Value`.
    """
    return f'{{{{ range printf "topk({limit}, {query})" $labels.verl_run_id | query }}}} {line};{{{{ end }}}}'


def _alerts() -> Iterable[Alert]:
    run = "run {{ $labels.verl_run_id }}"
    in_stage = 'stage {{ $labels.stage }}{{ with $labels.verl_timer }} ("{{ . }}"){{ end }}'
    non_finite, duration = metric("verl.metric.non_finite"), metric("verl.worker.duration")
    start, straggler = metric("verl.process.start_time"), metric("verl.worker.straggler")
    memory, exported = metric("hw.gpu.memory.utilization"), metric("verl.otel.exported")
    gpu = "GPU {{ $labels.hw_id }} of {{ $labels.host_name }}"
    of_run = "verl_run_id=%[1]q"
    yield Alert(
        "VerlRunHung",
        _run_hung,
        f"{run} hangs{{{{ if $labels.stage }}}} in {in_stage}{{{{ else }}}} between two steps{{{{ end }}}}",
        "For {{ $value | humanizeDuration }} now, far longer than it takes in this run, and the trainer still waits.",
        "{{ $value | humanizeDuration }}",
    )
    yield Alert(
        "VerlStageSlow",
        _stage_slow,
        f"{run}: {in_stage} takes long",
        "It has been running for {{ $value | humanizeDuration }}, a multiple of its mean in this attempt.",
        "{{ $value | humanizeDuration }}",
    )
    yield Alert(
        "VerlThroughputLow",
        _throughput_low,
        f"{run}: throughput is low",
        "{{ $value | humanize }} tokens per second and GPU on average.",
        "{{ $value | humanize }} tokens/s",
    )
    yield Alert(
        "VerlStepTimeHigh",
        _step_time_high,
        f"{run}: steps take long",
        "A step takes {{ $value | humanizeDuration }} in its stages, without checkpoints and validation.",
        "{{ $value | humanizeDuration }}",
    )
    yield Alert(
        "HighKLDivergence",
        _kl_high,
        f"{run}: KL divergence ({{{{ $labels.verl_kl_type }}}}) is {{{{ $value | humanize }}}}",
        "The KL divergence of the kind {{ $labels.verl_kl_type }} is outside its band, at {{ $value | humanize }} "
        "(its amount).",
        "{{ $value | humanize }}",
    )
    yield Alert(
        "VerlClipFractionHigh",
        _clip_fraction_high,
        f"{run}: {{{{ $value | humanizePercentage }}}} of tokens are clipped",
        "The policy ratio of {{ $value | humanizePercentage }} of the tokens is clipped: updates are too large, or the "
        "data is too old.",
        "{{ $value | humanizePercentage }}",
    )
    yield Alert(
        "VerlValueErrorHigh",
        _value_error_high,
        f"{run}: the critic's loss is {{{{ $value | humanize }}}}",
        "The loss of the value function is {{ $value | humanize }}, above its limit or a multiple of what is usual in "
        "this attempt: advantages are noise while the critic is wrong.",
        "{{ $value | humanize }}",
    )
    yield Alert(
        "VerlEntropyCollapse",
        _entropy_collapse,
        f"{run}: entropy has fallen to {{{{ $value | humanize }}}}",
        "The policy's entropy is {{ $value | humanize }}: it hardly explores any more.",
        "{{ $value | humanize }}",
    )
    yield Alert(
        "VerlRewardFlat",
        _reward_flat,
        f"{run}: the mean reward does not move",
        "It was the same in each of the last steps (they differ by {{ $value | humanize }}), which not even noise "
        "explains: look at the reward function.",
        "{{ $value | humanize }}",
    )
    yield Alert(
        "VerlRewardCollapsed",
        _reward_collapsed,
        f"{run}: the mean reward has fallen to {{{{ $value | humanize }}}}",
        "It is {{ $value | humanize }}, far below what it was in this attempt before.",
        "{{ $value | humanize }}",
    )
    yield Alert(
        "VerlZeroVarianceGroups",
        _zero_variance_groups,
        f"{run}: {{{{ $value | humanizePercentage }}}} of groups teach nothing",
        "All samples of {{ $value | humanizePercentage }} of the groups have the same reward, so that their advantages "
        "are 0." + _listing(f"{metric('verl.group.all_right')}{{{of_run}}}", "all right: {{ .Value }}", 1)
        + _listing(f"{metric('verl.group.all_wrong')}{{{of_run}}}", "all wrong: {{ .Value }}", 1),
        "{{ $value | humanizePercentage }}",
    )  # fmt: skip
    yield Alert(
        "VerlNonFinite",
        _non_finite,
        f"{run}: NaN or infinite values",
        "{{ $value }} of them in the last minutes; since the start:"
        + _listing(
            f"sum by (metric, rank, stage) ({non_finite}{{{of_run}}})",
            "{{ .Labels.metric }} in stage {{ .Labels.stage }} on rank {{ .Labels.rank }}: {{ .Value }}",
        ),
        "{{ $value }}",
    )
    yield Alert(
        "VerlRankMissing",
        _rank_missing,
        f"{run}: {{{{ $value }}}} ranks of {{{{ $labels.verl_worker_group }}}} send nothing any more",
        "Training goes on, or waits for them. Last seen:"
        + _listing(
            f"max by (rank, host_name) (timestamp(last_over_time({start}{{{of_run}}}[6h])) < time() - 120)",
            "rank {{ .Labels.rank }} on {{ .Labels.host_name }}",
        ),
        "{{ $value }} ranks",
    )
    yield Alert(
        "VerlStraggler",
        _straggler,
        f"{run}: one rank is slower than the others",
        "The slowest rank takes {{ $value | humanize }} times the median."
        + _listing(f"{straggler}{{{of_run},rank='all'}}", "{{ .Labels.verl_timer }}: {{ .Value | humanize }}")
        + " Most time since the start:"
        + _listing(
            f"sum by (rank, host_name) ({duration}_sum{{{of_run},stage=~'log_prob|values|update'}})",
            "rank {{ .Labels.rank }} on {{ .Labels.host_name }}: {{ .Value | humanizeDuration }}",
            3,
        ),
        "{{ $value | humanize }}",
    )
    yield Alert(
        "VerlGpuMemoryHigh",
        _gpu_memory_high,
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
        _gpu_underused,
        f"{run}: its GPUs are used {{{{ $value | humanizePercentage }}}} of the time",
        "A kernel ran on them {{ $value | humanizePercentage }} of the time, on average over the run's GPUs.",
        "{{ $value | humanizePercentage }}",
    )
    yield Alert(
        "VerlGpuEccErrors",
        _gpu_ecc_errors,
        f"{gpu} has uncorrected memory errors",
        f"{gpu}, which {run} uses, had {{{{ $value | humanize }}}} uncorrected ECC errors: its results cannot be "
        "trusted.",
        "{{ $value | humanize }}",
    )
    yield Alert(
        "VerlGpuXid",
        _gpu_xid,
        f"{gpu} has failed",
        f"{gpu}, which {run} uses, is off the bus (1), or its driver reported the XID {{{{ $value }}}}.",
        "{{ $value }}",
    )
    yield Alert(
        "VerlTelemetryLoss",
        _telemetry_loss,
        f"{run}: telemetry is lost",
        "{{ $value | humanize }} spans, points and events were dropped, or parts of verl-otel have failed. Dropped "
        "since the start:"
        + _listing(
            f"sum by (verl_otel_signal, verl_otel_reason) ({exported}{{{of_run},verl_otel_outcome='dropped'}})",
            "{{ .Labels.verl_otel_signal }} ({{ .Labels.verl_otel_reason }}): {{ .Value }}",
        ),
        "{{ $value | humanize }}",
    )
    yield Alert(
        "VerlTelemetryLoss",
        _collector_loss,
        "The Collector {{ $labels.instance }} loses telemetry",
        "{{ $value | humanize }} items for {{ $labels.exporter }} were refused by it, or did not fit into its queue.",
        "{{ $value | humanize }}",
        of_run=False,
        component="collector",
    )
    yield Alert(
        "VerlCollectorQueueFilling",
        _collector_queue_filling,
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
    rules = _recorded(thresholds.run)
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
            "annotations": _annotations(alert, thresholds.links),
        }


def _annotations(alert: Alert, links: Mapping[str, str]) -> dict[str, str]:
    texts = {
        "summary": alert.summary,
        "description": alert.description,
        "value": alert.value,
        "runbook_url": links["runbook"].replace("{alert}", alert.name),
    }
    if alert.of_run:
        texts |= {f"{kind}_url": links[kind] for kind in ("dashboard", "trace", "mlflow")}
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
