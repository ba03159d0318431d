"""The counters of a server in Prometheus' text format: requests, tokens, time, jobs that wait.

The operator, whose token is the first, sees the counters of all. Another tenant sees its own
requests and tokens: counters of all would tell of other tenants.
"""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from isobit.serve.device import Device, Totals
from isobit.serve.keys import OPERATOR

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)


class Metrics:
    """The counters of one server."""

    def __init__(self, device: Device) -> None:
        self._registry, self._device = CollectorRegistry(), device
        self._registry.register(_OfDevice(device))
        labels = ["route", "tenant", "status"]
        self.requests = Counter(
            "isobit_requests", "Requests answered", labels, registry=self._registry
        )
        self.first_token = self._histogram(
            "first_token", "Time to a streamed request's first token"
        )
        self.whole = self._histogram("request", "Time to a request's end")

    def text(self, tenant: str) -> bytes:
        """Return all counters that a tenant may see, in Prometheus' text format."""
        if tenant == OPERATOR:
            return generate_latest(self._registry)
        registry = CollectorRegistry()
        registry.register(_Own(self.requests, self._device, tenant))
        return generate_latest(registry)

    def _histogram(self, name: str, what: str) -> Histogram:
        return Histogram(f"isobit_{name}_seconds", what, registry=self._registry, buckets=_SECONDS)


class _Own(Collector):
    """The counters of one tenant: its requests and tokens."""

    def __init__(self, requests: Counter, device: Device, tenant: str) -> None:
        self._requests, self._device, self._tenant = requests, device, tenant

    def collect(self) -> Iterator[Metric]:
        """Yield one family for each counter of the tenant."""
        for family in self._requests.collect():
            family.samples = [s for s in family.samples if s.labels["tenant"] == self._tenant]
            yield family
        yield from _tokens([self._device.totals.get(self._tenant, Totals())])


class _OfDevice(Collector):
    """The counters of the device thread, read when a client asks for them."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def collect(self) -> Iterator[Metric]:
        """Yield one family for each counter of the device."""
        device = self._device
        yield from _tokens(list(device.totals.values()))
        yield CounterMetricFamily("isobit_engine_steps", "Steps of the engine", value=device.steps)
        pages = device.engine.pages
        for name, description, value in (
            ("isobit_open_requests", "Requests in the engine", device.num_open),
            ("isobit_waiting_jobs", "Jobs that wait for their turn", device.num_waiting),
            ("isobit_adapters", "Adapters served", len(device.snapshots.names)),
            ("isobit_free_pages", "Pages of the cache that no request holds", pages.num_free),
        ):
            yield GaugeMetricFamily(name, description, value=value)


def _tokens(totals: list[Totals]) -> Iterator[Metric]:
    """Yield the counters of tokens, of some tenants together."""
    for name, description, value in (
        ("isobit_sampled_tokens", "Tokens sampled", sum(counts.sampled for counts in totals)),
        ("isobit_prompt_tokens", "Prompt tokens", sum(counts.prompt for counts in totals)),
        (
            "isobit_cached_tokens",
            "Prompt tokens found in the cache",
            sum(counts.cached for counts in totals),
        ),
    ):
        yield CounterMetricFamily(name, description, value=value)
