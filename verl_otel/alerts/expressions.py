"""The expressions of the alert rules, and of what is recorded for them, in PromQL.

Names are the registry's, limits come from `deploy/prometheus/thresholds.yaml`. Three things hold for all of them:

- Points come every half second to every ten seconds, steps take from half a second to half an hour. So what is usual is
  mostly a mean over the attempt's whole life, from the sums and counts of histograms, which needs no window. Gauges
  show a step's value until the next one, so that an average over any window has at least one step in it.
- Points are pushed: a series whose process has ended is shown for five minutes more; one that a process withdraws, such
  as a stage that ends, is not. Who ends and who goes on is told by `last_over_time(...[fresh])`, which sees points of
  the last two minutes, of both.
- A counter begins with its first event, which `increase()` does not see, since it has no point before: see `_grown`.
"""

from typing import Any

from verl_otel.alerts.thresholds import seconds
from verl_otel.semconv import registry
from verl_otel.semconv.prometheus import prometheus_name
from verl_otel.semconv.stages import PAUSE_TIMER, STEP_TIMER

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
    f"otelcol_exporter_{what}_failed_{items}{suffix}"
    for suffix in ("", "_total")  # by the Collector's version and settings
    for what in ("send", "enqueue")
    for items in ("spans", "metric_points", "log_records")
)


def metric(name: str) -> str:
    """The name in Prometheus of a metric of the registry."""
    found = registry.load().metrics[name]
    return prometheus_name(found.name, found.unit, found.instrument)


class Parameters:
    """The parameters of one alert, for all projects or for some, and the selectors that go with them."""

    def __init__(self, run: Any, values: Any, projects: str) -> None:
        self._values = {**run, **values}
        self._projects = projects

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def seconds(self, name: str) -> int:
        return seconds(self._values[name])

    def series(self, name: str, *matchers: str) -> str:
        """A selector of a metric of the registry."""
        return _selector(metric(name), *matchers, self._projects)

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


def recorded(run: Any) -> list[dict[str, str]]:
    fresh, step = run["fresh"], f'verl_timer="{STEP_TIMER}"'

    def last(name: str, *matchers: str, suffix: str = "") -> str:
        return f"last_over_time({_selector(metric(name) + suffix, *matchers)}[{fresh}])"

    def duration(suffix: str, *matchers: str) -> str:
        return last("verl.stage.duration", *matchers, suffix=suffix)

    active, last_step = last("verl.stage.active"), last("verl.step.last_timestamp")
    # Looked for at each second, as a series that was withdrawn meanwhile is not there when the rule is evaluated.
    sent = [
        f"max_over_time(timestamp({metric(name)})[{fresh}:1s])"
        for name in ("verl.stage.active", "verl.step.last_timestamp")
    ]
    recent = [
        f"{_grown('verl:work:seconds_total', window, fresh)} / ({_grown('verl:steps:total', window, fresh)} > 0)"
        for window in SEVERAL_STEPS
    ]
    rules = {
        # Training goes on: the trainer is in a stage, or between two steps. Neither after `fit`.
        "verl:lives:bool": f"group by ({RUN}) ({active} or {last_step})",
        "verl:seen:timestamp_seconds": f"max by ({RUN}) ({' or '.join(sent)})",
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


# ---- the alerts, under their limits; the value of the expression is the alert's value


def _at_work(p: Parameters) -> str:
    """The stages that run, but for the pause that somebody has asked for."""
    return p.recorded("verl:stage_active:seconds", f'verl_timer!="{PAUSE_TIMER}"')


def run_hung(p: Parameters) -> str:
    active, usual = p.recorded("verl:stage_active:seconds"), p.recorded("verl:stage_usual:seconds")
    at_work = _at_work(p)
    times, at_least = p["times_usual"], p.seconds("at_least")
    step = p.recorded("verl:stage_usual:seconds", f'verl_timer="{STEP_TIMER}"')
    return _any(
        f"{at_work} > clamp_min({times} * {usual}, {at_least})",
        f"({at_work} > {p.seconds('never_timed')} unless {usual})",
        # Between two steps, in no stage: loading of data, for example.
        f"(time() - {p.recorded('verl:last_step:timestamp_seconds')} > on ({RUN}) "
        f"clamp_min({times} * {step}, {at_least}) unless on ({RUN}) {active})",
    )


def run_failed(p: Parameters) -> str:
    """Seconds since the trainer said that it has failed, or sent its last without having said that it ends."""
    remember = p["remember"]

    def ended(*matchers: str) -> str:
        return f"max by ({RUN}) (last_over_time({p.series('verl.run.end_time', *matchers)}[{remember}]))"

    def since(when: str, state: str) -> str:
        return f'label_replace(time() - {when}, "verl_run_state", "{state}", "", "")'

    seen = f"max by ({RUN}) (max_over_time({p.recorded('verl:seen:timestamp_seconds')}[{remember}]))"
    silent = p.above("silent_seconds", since(seen, "lost"))
    lost = silent and f"({silent} unless on ({RUN}) {ended()})"
    failed = since(ended('verl_run_state="failed"'), "failed")
    # Not where it was started again.
    return (
        f"{_any(failed, lost)}\nunless on (verl_run_id) ({p.recorded('verl:lives:bool')} unless on ({RUN}) {ended()})"
    )


def stage_slow(p: Parameters) -> str:
    usual = p.recorded("verl:stage_usual:seconds")
    return f"{_at_work(p)} > clamp_min({p['times_usual']} * {usual}, {p.seconds('at_least')})"


def throughput_low(p: Parameters) -> str:
    throughput = p.series("verl.throughput", ALL_RANKS)
    recent = f"max by ({RUN}) (avg_over_time({throughput}[{p['window']}]))"
    usual = f"max by ({RUN}) (quantile_over_time(0.5, {throughput}[{p['baseline']}]))"
    below = _any(p.below("below_usual", recent, usual), p.below("tokens_per_second", recent))
    return _and(below, p.settled, p.not_paused)


def step_time_high(p: Parameters) -> str:
    recent, usual = p.recorded("verl:step_recent:seconds"), p.recorded("verl:step_usual:seconds")
    above = _any(p.above("times_usual", recent, usual), p.above("seconds", recent))
    return _and(above, p.settled)


def kl_high(p: Parameters) -> str:
    by = f"{RUN}, stage, verl_kl_type"

    def kl(kind: str) -> str:
        divergence = p.series("verl.kl.divergence", ALL_RANKS, f'verl_kl_type="{kind}"')
        return f"max by ({by}) (abs({divergence}))"

    kinds = ("penalty", "loss", "update", "rollout")
    return _and(_any(*(p.above(kind, kl(kind)) for kind in kinds)), p.settled)


def clip_fraction_high(p: Parameters) -> str:
    clipped = f"max by ({RUN}, stage) ({p.series('verl.policy.clip_fraction', ALL_RANKS)})"
    return _and(f"{clipped} > {p['ratio']}", p.settled)


def value_error_high(p: Parameters) -> str:
    loss, by = p.series("verl.value.loss", ALL_RANKS), f"max by ({RUN}, stage)"
    usual = f"{by} (quantile_over_time(0.5, {loss}[{p['baseline']}]))"
    above = _any(p.above("times_usual", f"{by} ({loss})", usual), p.above("loss", f"{by} ({loss})"))
    return _and(above, p.settled)


def entropy_collapse(p: Parameters) -> str:
    entropy, by = p.series("verl.policy.entropy", ALL_RANKS), f"max by ({RUN}, stage)"
    recent = f"{by} (avg_over_time({entropy}[{p['window']}]))"
    usual = f"{by} (quantile_over_time(0.5, {entropy}[{p['baseline']}]))"
    below = _any(p.below("below_usual", recent, usual), p.below("entropy", recent))
    return _and(below, p.settled)


def reward_flat(p: Parameters) -> str:
    reward, steps = p.series("verl.reward.mean", ALL_RANKS), p.recorded("verl:steps:total")

    def flat(window: str) -> str:
        spread = f"max by ({RUN}, stage) (max_over_time({reward}[{window}]) - min_over_time({reward}[{window}]))"
        return f"({spread} <= {p['spread']} and on ({RUN}) {_grown(steps, window, p['fresh'])} >= {p['steps']})"

    return _and(_any(*map(flat, p["windows"])), p.settled)


def reward_collapsed(p: Parameters) -> str:
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


def zero_variance_groups(p: Parameters) -> str:
    groups = p.series("verl.group.zero_variance", ALL_RANKS)
    return _and(f"max by ({RUN}, stage) (avg_over_time({groups}[{p['window']}])) > {p['ratio']}", p.settled)


def non_finite(p: Parameters) -> str:
    ignored = f'metric!~"{p["ignore"]}"' if p["ignore"] else ""
    grown = _grown(p.series("verl.metric.non_finite", ignored), p["window"], p["fresh"])
    return f"sum by ({RUN}) ({grown}) > {p['values']}"


def rank_missing(p: Parameters) -> str:
    # By the rank's place, not by its process: Ray may have started another one for it.
    by = f"group by ({RUN}, verl_worker_group, rank)"
    start = p.series("verl.process.start_time", 'verl_process_role=~"worker|rollout_server"')
    gone = f"{by} (last_over_time({start}[{p['remember']}])) unless {by} (last_over_time({start}[{p['fresh']}]))"
    return f"count by ({RUN}, verl_worker_group) ({gone})\n{p.lives}"


def straggler(p: Parameters) -> str:
    # Rollouts differ by what they generate, and rank 0 writes more of a checkpoint than the others.
    straggler = p.series("verl.worker.straggler", ALL_RANKS, 'stage=~"log_prob|values|update"')
    slowest = f"avg_over_time({straggler}[{p['window']}])"
    long = f"{p.recorded('verl:stage_usual:seconds')} > {p.seconds('at_least')}"
    return f"max by ({RUN}) ({slowest} and on ({RUN}, verl_timer) {long}) > {p['ratio']}\n{p.settled}"


def gpu_memory_high(p: Parameters) -> str:
    used = f"avg_over_time({p.series('hw.gpu.memory.utilization')}[{p['window']}])"
    return f"max by ({RUN}) ({used}) > {p['ratio']}\n{p.lives}"


def gpu_underused(p: Parameters) -> str:
    used = f"avg_over_time({p.series('hw.gpu.utilization')}[{p['window']}])"
    return f"avg by ({RUN}) ({used}) < {p['ratio']}\n{p.settled}\n{p.not_paused}"


def gpu_ecc_errors(p: Parameters) -> str:
    # The driver counts, from long before the run: increase(), which takes no first value for an error.
    errors = p.series("hw.errors", 'error_type="uncorrected"')
    return f"sum by ({RUN}, host_name, hw_id) (increase({errors}[{p['window']}])) > {p['errors']}"


def gpu_xid(p: Parameters) -> str:
    by, fresh = f"({RUN}, host_name, hw_id)", p["fresh"]
    status, failed = p.series("hw.status"), p.series("hw.status", 'hw_state="failed"')
    lost = f"max by {by} (last_over_time({failed}[{fresh}])) > 0"

    def code(when: str) -> str:
        return f'max by (hw_id) (label_replace({DCGM_XID}{when}, "hw_id", "$1", "UUID", "(.+)"))'

    # A code stays until the next one, so only a new one counts; and only on a GPU that a run uses.
    new = f"({code('')} > 0 unless {code('')} == {code(' offset ' + p['window'])})"
    return _any(lost, f"{new} * on (hw_id) group_right () group by {by} (last_over_time({status}[{fresh}]))")


def telemetry_loss(p: Parameters) -> str:
    window, fresh = p["window"], p["fresh"]
    lost = (
        p.series("verl.otel.exported", 'verl_otel_outcome="dropped"'),
        p.series("verl.otel.dropped", 'verl_otel_reason="queue_full"'),  # the other reasons are limits that are meant
        p.series("verl.otel.failures"),
    )
    return f"sum by ({RUN}) (" + "\nor\n".join(_grown(one, window, fresh) for one in lost) + f") > {p['items']}"


def collector_loss(p: Parameters) -> str:
    by = "max by (job, instance, exporter)"
    return _any(*(f"{by} ({_grown(name, p['window'], p['fresh'])}) > {p['items']}" for name in COLLECTOR_LOSSES))


def collector_queue_filling(p: Parameters) -> str:
    by = "max by (job, instance, exporter, data_type)"
    return f"{by} (otelcol_exporter_queue_size) / {by} (otelcol_exporter_queue_capacity) > {p['ratio']}"
