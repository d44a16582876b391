"""Prometheus' metrics from values that somebody else has counted, and their text. Used by `server.metrics`."""

from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from protocol.figures import Histogram

COUNTER, GAUGE, HISTOGRAM = "counter", "gauge", "histogram"

Labels = tuple[str, ...]


def family(
    name: str, kind: str, text: str, labels: tuple[str, ...], own: tuple[str, ...], values: Mapping[Labels, object]
) -> Metric:
    """One metric. `values` are by the values of `labels`, which stand in each of its samples; `own` name those labels
    that each of the values gives."""
    names = [*labels, *own]
    if kind == HISTOGRAM:
        histogram = HistogramMetricFamily(name, text, labels=names)
        for given, value in values.items():
            assert isinstance(value, Histogram)
            _add_histogram(histogram, [*given], value)
        return histogram
    made = (CounterMetricFamily if kind == COUNTER else GaugeMetricFamily)(name, text, labels=names)
    for given, value in values.items():
        assert isinstance(value, Mapping)
        for of, number in value.items():
            made.add_metric([*given, *of], number)
    return made


def _add_histogram(made: HistogramMetricFamily, labels: list[str], values: Histogram) -> None:
    below, buckets = 0, []
    for bound, count in zip([*map(str, values.bounds), "+Inf"], values.counts or [0], strict=False):
        below += count
        buckets.append((bound, float(below)))
    if buckets[-1][0] != "+Inf":
        buckets.append(("+Inf", float(below)))
    made.add_metric(labels, buckets=buckets, sum_value=values.total)


class _Given(Collector):
    """Gives the registry what was made for one request."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = [*metrics]

    def collect(self) -> Iterable[Metric]:
        return self._metrics


def exposition(metrics: Iterable[Metric]) -> bytes:
    """Prometheus' text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Given(metrics))
    return generate_latest(registry)
