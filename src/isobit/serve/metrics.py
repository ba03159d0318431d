"""What a server counts, in Prometheus' text format: requests, tokens, time, what waits."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from isobit.serve.device import Device

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)


class Metrics:
    """Counters of one server."""

    def __init__(self, device: Device) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_OfDevice(device))
        labels = ["route", "tenant", "status"]
        self.requests = Counter(
            "isobit_requests", "Requests answered", labels, registry=self._registry
        )
        self.first_token = self._histogram(
            "first_token", "Time to a streamed request's first token"
        )
        self.whole = self._histogram("request", "Time to a request's end")

    def text(self) -> bytes:
        """All of them."""
        return generate_latest(self._registry)

    def _histogram(self, name: str, what: str) -> Histogram:
        return Histogram(f"isobit_{name}_seconds", what, registry=self._registry, buckets=_SECONDS)


class _OfDevice(Collector):
    """What the device thread counts, read when somebody asks."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        """One family for each number."""
        device, totals = self._device, self._device.totals
        for name, what, value in (
            ("isobit_sampled_tokens", "Tokens sampled", totals.sampled),
            ("isobit_prompt_tokens", "Prompt tokens", totals.prompt),
            ("isobit_cached_tokens", "Prompt tokens found in the cache", totals.cached),
            ("isobit_engine_steps", "Steps of the engine", totals.steps),
        ):
            yield CounterMetricFamily(name, what, value=value)
        pages = device.engine.pages
        for name, what, value in (
            ("isobit_open_requests", "Requests in the engine", device.num_open),
            ("isobit_waiting_jobs", "Jobs that wait for their turn", device.num_waiting),
            ("isobit_adapters", "Adapters served", len(device.snapshots.names)),
            ("isobit_free_pages", "Pages of the cache that no request holds", pages.num_free),
        ):
            yield GaugeMetricFamily(name, what, value=value)
