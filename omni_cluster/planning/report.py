"""A plan as text: a table, where its figures are from, and a plot by the number of streams."""

from __future__ import annotations

from omni_cluster.config.plan import columns
from omni_cluster.planning.measured import Measured
from omni_cluster.planning.plan import ClusterPlan
from omni_cluster.planning.simulation import DayFigures

BAR = 40
STEPS = 12
BEYOND = 1.25
"""How far the plot goes past what the cards carry."""
SECONDS_A_BAR = 2.0
"""First audio of which a bar is full."""


def render(plan: ClusterPlan, measured: Measured) -> str:
    target = plan.target
    sound, prompts = (_span(each.low, each.high) for each in (target.sound_s, target.prompt_tokens))
    hosts = f"{_count(plan.cards, 'card')}, {_count(plan.hosts, 'host')} of {target.cards_per_host}"
    lines = [
        f"{plan.streams:.0f} streams, {plan.rate_per_s:.2f} requests/s, sound {sound} s, prompts {prompts} tokens",
        f"{hosts}; costs: {measured.card.name}, {measured.dimensions} dimensions",
        "",
        *columns([("stage", "replicas", "GPUs", "beside it"), *_stages(plan)]),
        "",
        *columns([("expected", "", "source"), *((f.name, f.value, f.source) for f in plan.figures)]),
        f"at most {plan.most_streams:.0f} streams with {100 * target.without_gap:g} % of the streams without a gap and "
        f"first audio p95 within {target.first_audio_s:g} s",
        "",
        *plot(plan),
        "Runs of the same load differed by up to 13 % in first audio, by 4 points in streams without a gap.",
    ]
    return "\n".join(lines) + "\n"


def _stages(plan: ClusterPlan) -> list[tuple[str, ...]]:
    return [(s.name, str(s.replicas), f"{s.gpus:g}", ", ".join(s.shares) or "nothing") for s in plan.stages]


def plot(plan: ClusterPlan) -> list[str]:
    """Streams without a gap and first audio p95, from one step of streams to beyond what the cards carry."""
    rows = [("streams", "without a gap".ljust(BAR), "first audio p95")]
    most_per_s = min(BEYOND * plan.most_per_s, plan.open_loop.without_gap.end * plan.sound_cards)
    for step in range(1, STEPS + 1):
        rate_per_s = most_per_s * step / STEPS
        each_per_s = rate_per_s / plan.sound_cards
        share = min(1.0, max(0.0, plan.open_loop.without_gap.at(each_per_s)))
        late_s = plan.open_loop.first_audio_p95_s.at(each_per_s) + plan.late_s
        streams = f"{rate_per_s * plan.target.sound_s.mean:.0f}"
        rows.append((streams, f"{_bar(share)} {100 * share:.1f} %", f"{_bar(late_s / SECONDS_A_BAR)} {late_s:.2f} s"))
    return columns(rows)


def render_day(day: DayFigures) -> str:
    saved = 1 - day.gpu_hours / day.fixed_gpu_hours
    rows = [
        ("a day, simulated", ""),
        ("answers", f"{day.answers}"),
        ("streams at the peak", f"{day.peak_streams:.0f}"),
        ("streams without a gap", f"{100 * day.without_gap:.2f} %"),
        ("first audio p50 / p95", f"{day.first_audio_p50_s:.2f} / {day.first_audio_p95_s:.2f} s"),
        ("GPU hours", f"{day.gpu_hours:.0f} of {day.fixed_gpu_hours:.0f}, {100 * saved:.0f} % fewer"),
    ]
    return "\n" + "\n".join(columns(rows)) + "\n"


def _bar(part: float) -> str:
    return "#" * round(BAR / 2 * min(1.0, max(0.0, part)))


def _span(low: float, high: float) -> str:
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
