"""A recording -> the HTML page: overview, time of the stages step by step, time line of a step, curves of the metrics.

The page holds its data and its plotting library (plotly.js), and needs no network. Numbers are those of the recording:
nothing is smoothed, resampled or filled in.
"""

import json
import math
from collections import Counter, defaultdict
from typing import Any

import jinja2
from plotly.offline import get_plotlyjs

from verl_otel.recording.reader import Event, Recording, Span
from verl_otel.semconv import attributes as attr
from verl_otel.semconv.stages import stage_of
from verl_otel.version import __version__

HEADLINES = (
    "critic/score/mean",
    "critic/rewards/mean",
    "actor/pg_loss",
    "actor/loss",
    "critic/vf_loss",
    "actor/entropy",
    "actor/ppo_kl",
    "actor/kl_loss",
    "actor/grad_norm",
    "response_length/mean",
    "perf/throughput",
    "timing_s/step",
    "train/loss",
    "val/loss",
)
"""Keys whose curves are shown first, where the run has them."""

MAX_TIMELINES = 60
"""Steps whose time line is on the page; of longer runs the first, the last and the slowest."""

_COLORS = {  # by the attribute `stage`; two spans of one stage have shades of its colour where time is split by span
    "rollout": "#e8590c",
    "reward": "#9c36b5",
    "log_prob": "#1971c2",
    "ref_log_prob": "#74c0fc",
    "values": "#0c8599",
    "advantage": "#868e96",
    "update": "#2f9e44",
    "update_actor": "#2f9e44",
    "update_critic": "#8ce99a",
    "weight_sync": "#f08c00",
    "checkpoint": "#5c940d",
    "validation": "#c2255c",
    "other": "#495057",
    "(no stage)": "#dee2e6",
}


def render(recording: Recording) -> str:
    """The page, as one string."""
    environment = jinja2.Environment(loader=jinja2.PackageLoader("verl_otel.report"), autoescape=True)
    data = json.dumps(_page_data(recording), separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return environment.get_template("page.html").render(
        overview=_overview(recording),
        parameters=_parameters(recording),
        errors=_errors(recording),
        non_finite=_non_finite(recording),
        version=__version__,
        data=data,
        plotlyjs=get_plotlyjs(),
    )


def _overview(recording: Recording) -> list[tuple[str, str]]:
    steps = recording.events_named(attr.EVENT_STEP)
    started = recording.events_named(attr.EVENT_RUN_STARTED)
    finished = recording.events_named(attr.EVENT_RUN_FINISHED)
    resource = next((x.resource for x in [*recording.events, *recording.spans]), {})
    names: dict[str, Any] = {**resource, **(started[-1].attributes if started else {})}
    times = [s.start for s in recording.spans] + [e.time for e in recording.events]
    ends = [s.end for s in recording.spans] + [e.time for e in recording.events]
    roles: defaultdict[str, set[str]] = defaultdict(set)
    for item in [*recording.spans, *recording.events]:
        role = str(item.resource.get(attr.PROCESS_ROLE, "other"))
        roles[role].add(str(item.resource.get(attr.SERVICE_INSTANCE_ID)))
    numbers = [n for n in (e.attributes.get(attr.STEP_NUMBER) for e in steps) if n is not None]
    state = (
        str(finished[-1].attributes.get(attr.RUN_STATE)) if finished else "not finished (running, or ended abruptly)"
    )
    return [
        ("Project", str(names.get(attr.PROJECT_NAME, ""))),
        ("Experiment", str(names.get(attr.EXPERIMENT_NAME, ""))),
        ("Run", ", ".join(recording.runs())),
        ("State", state),
        ("Steps", f"{min(numbers)} to {max(numbers)}" if numbers else "none logged"),
        ("Duration", _duration((max(ends) - min(times)) / 1e9)),
        ("verl", str(names.get(attr.VERL_VERSION, ""))),
        ("Processes", ", ".join(f"{len(found)} {role}" for role, found in sorted(roles.items()))),
        ("Recorded", f"{len(recording.spans)} spans, {len(steps)} step events"),
        *([("Unreadable lines", str(recording.unreadable_lines))] if recording.unreadable_lines else []),
    ]


def _duration(seconds: float) -> str:
    minutes, rest = divmod(seconds, 60)
    hours, minutes = divmod(int(minutes), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest:.0f} s" if minutes else f"{rest:.1f} s"


def _parameters(recording: Recording) -> list[tuple[str, str]]:
    started = recording.events_named(attr.EVENT_RUN_STARTED)
    return [(key, str(value)) for key, value in sorted(started[-1].body.items())] if started else []


def _errors(recording: Recording) -> list[str]:
    counts = Counter(
        f"{span.name} (rank {span.attributes.get(attr.RANK, '?')}): {span.error}"
        for span in recording.spans
        if span.error
    )
    return [f"{text}" + (f"  x {count}" if count > 1 else "") for text, count in counts.most_common(50)]


def _non_finite(recording: Recording) -> list[str]:
    """What was NaN or infinite: the metric, where, and in which steps."""
    found: defaultdict[str, list[Any]] = defaultdict(list)
    for event in recording.events_named(attr.EVENT_NON_FINITE):
        get = event.attributes.get
        rank = get(attr.RANK)
        whose = "reduced over the ranks" if rank == attr.ALL_RANKS else f"rank {rank}"
        found[f"{get(attr.VERL_KEY) or get(attr.METRIC)}, {whose}"].append(get(attr.STEP_NUMBER, "?"))
    shown = []
    for what, steps in found.items():
        more = f" and {len(steps) - 20} more" if len(steps) > 20 else ""
        shown.append(f"{what}: step {', '.join(map(str, steps[:20]))}{more}")
    return shown[:50]


def _page_data(recording: Recording) -> dict[str, Any]:
    traces: defaultdict[str, list[Span]] = defaultdict(list)
    for span in recording.spans:
        traces[span.trace_id].append(span)
    timelines, shares = [], []
    for spans in sorted(traces.values(), key=lambda found: min(s.start for s in found)):
        label = _label(spans)
        if label is None:
            continue
        timelines.append(_timeline(label, spans))
        if any(s.name == attr.SPAN_STEP for s in spans):
            shares.append(_share(spans))
    return {
        "colors": _COLORS,
        "timelines": _chosen(timelines),
        "omitted": max(0, len(timelines) - MAX_TIMELINES),
        "shares": shares,
        "curves": _curves(recording.events_named(attr.EVENT_STEP)),
        "headlines": list(HEADLINES),
    }


def _label(spans: list[Span]) -> str | None:
    roots = {s.name: s for s in spans if not s.parent_id}
    if attr.SPAN_STEP in roots:
        root = roots[attr.SPAN_STEP]
        attempt = root.attributes.get(attr.RUN_ATTEMPT, 1)
        return f"step {root.attributes.get(attr.STEP_NUMBER, '?')}" + (f" (attempt {attempt})" if attempt != 1 else "")
    if attr.SPAN_RUN in roots:
        return "set-up"
    return "validation before training" if "verl.validation" in roots else None


def _timeline(label: str, spans: list[Span]) -> dict[str, Any]:
    """Bars by lane: the trainer's stages, then each rank, then each recorded trajectory. Seconds from the start."""
    around = (attr.SPAN_STEP, attr.SPAN_RUN, attr.SPAN_TRAJECTORY, attr.SPAN_TURN)  # others say what fills them
    shown = [s for s in spans if s.name not in around]
    origin = min(s.start for s in (spans if label != "set-up" else shown or spans))
    by_id = {s.span_id: s for s in spans}
    trajectories: dict[str, str] = {}
    ordered = sorted((s for s in spans if s.name == attr.SPAN_TRAJECTORY), key=lambda s: s.start)
    for number, trajectory in enumerate(ordered):
        trajectories[trajectory.span_id] = f"trajectory {number + 1}"
    lane_of = {s.span_id: _lane(s, by_id, trajectories) for s in shown}
    bars = []
    for span in sorted(shown, key=lambda s: s.start):
        lane = lane_of[span.span_id]
        bars.append(
            {
                "lane": lane,
                "inner": lane_of.get(span.parent_id) == lane,
                "name": span.name,
                "stage": str(span.attributes.get(attr.STAGE, "other")),
                "start": (span.start - origin) / 1e9,
                "seconds": span.seconds,
                "model": str(span.attributes.get(attr.MODEL_TYPE, "")),
                "error": span.error or "",
            }
        )
    lanes = ["trainer"]
    lanes += sorted({b["lane"] for b in bars if b["lane"].startswith("rank ")}, key=lambda lane: (len(lane), lane))
    lanes += [lane for lane in trajectories.values() if any(b["lane"] == lane for b in bars)]
    total = (max(s.end for s in spans) - origin) / 1e9
    return {"label": label, "bars": bars, "lanes": lanes, "total": total}


def _lane(span: Span, by_id: dict[str, Span], trajectories: dict[str, str]) -> str:
    """That of the trajectory, or of the call of a rank, in which it is, itself included; else the trainer's."""
    inside: Span | None = span
    for _ in by_id:  # no further than there are spans: in a foreign recording they may be in a circle
        if inside is None:
            break
        if inside.span_id in trajectories:
            return trajectories[inside.span_id]
        if inside.name.startswith(attr.WORKER_SPAN_PREFIX):
            return f"rank {inside.attributes.get(attr.RANK, '?')}"
        inside = by_id.get(inside.parent_id)
    return "trainer"


def _chosen(timelines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    if len(timelines) <= MAX_TIMELINES:
        return timelines
    third = MAX_TIMELINES // 3
    slowest = sorted(range(len(timelines)), key=lambda i: timelines[i]["total"])[-third:]
    keep = {*range(third), *range(len(timelines) - third, len(timelines)), *slowest}
    return [timelines[i] for i in sorted(keep)]


def _share(spans: list[Span]) -> dict[str, Any]:
    root = next(s for s in spans if s.name == attr.SPAN_STEP)
    seconds: defaultdict[str, float] = defaultdict(float)
    for span in spans:
        if span.parent_id == root.span_id and attr.TIMER in span.attributes:
            name = stage_of(str(span.attributes[attr.TIMER])).span.removeprefix("verl.")
            if span.end <= root.end + 1_000_000:  # what follows the step (validation) is not a part of it
                seconds[name] += span.seconds
    seconds["(no stage)"] = max(0.0, root.seconds - sum(seconds.values()))
    number = root.attributes.get(attr.STEP_NUMBER)
    return {"step": number, "attempt": root.attributes.get(attr.RUN_ATTEMPT, 1), "seconds": dict(seconds)}


def _curves(events: list[Event]) -> dict[str, list[dict[str, Any]]]:
    """Key -> one curve per attempt: steps and values. A value that is not finite is null and counted."""
    curves: dict[str, dict[Any, dict[str, Any]]] = {}
    for event in events:
        attempt, step = event.attributes.get(attr.RUN_ATTEMPT, 1), event.attributes.get(attr.STEP_NUMBER)
        for key, value in event.body.items():
            if isinstance(value, bool) or not isinstance(value, int | float):
                continue
            curve = curves.setdefault(key, {}).setdefault(attempt, {"attempt": attempt, "x": [], "y": [], "bad": 0})
            finite = math.isfinite(value)
            curve["x"].append(step)
            curve["y"].append(value if finite else None)
            curve["bad"] += not finite
    return {key: list(by_attempt.values()) for key, by_attempt in sorted(curves.items())}
