"""TensorBoard: event files, written with tensorboard's own writer, so that torch is not imported
for it.

A run that goes on writes another event file, which opens with a session start at the first step
that it holds: readers then forget what earlier files say of that step and later ones (`purge_step`
in torch.utils.tensorboard).
"""

import json
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from isobit.monitor.trackers.base import COMPLETION_COLUMNS, Opened, TrackedRun

if TYPE_CHECKING:
    from tensorboard.compat.proto.summary_pb2 import Summary


class TensorBoard:
    """The tracker TensorBoard: scalars, the config and completions as text, in an event file."""

    def check(self, settings: Mapping[str, Any]) -> None:
        """Check nothing: a TensorBoard writer needs no credentials before it is opened."""

    def open(self, run: TrackedRun) -> Opened:
        """Open a new event file in the run's directory."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._writer = EventFileWriter(str(run.directory))
        if run.last >= 0:
            start = SessionLog(status=SessionLog.START)
            self._writer.add_event(
                Event(wall_time=time.time(), step=run.last + 1, session_log=start)
            )
        else:
            text = json.dumps(run.config, indent=1, ensure_ascii=False)
            self._add(0, _text("config", "\n".join(f"    {line}" for line in text.splitlines())))
        self._writer.flush()
        return Opened(run.last, note=f"tensorboard --logdir {run.directory}")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one event for the row."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._add(step, Summary(value=values))
        self._writer.flush()

    def log_completions(self, step: int, rows: Sequence[Sequence[Any]]) -> None:
        """Write a table in Markdown."""
        lines = [COMPLETION_COLUMNS, ["---"] * len(COMPLETION_COLUMNS), *rows]
        self._add(
            step,
            _text(
                "completions", "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines)
            ),
        )

    def close(self, exit_code: int) -> None:
        """Flush and close the event file."""
        self._writer.close()

    def _add(self, step: int, summary: "Summary") -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=summary))


def _cell(value: object) -> str:
    return str(value).replace("|", "\\|").replace("\n", "<br>")


def _text(tag: str, text: str) -> "Summary":
    """Return a text summary, as torch.utils.tensorboard.summary.text makes it."""
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto

    plugin = SummaryMetadata.PluginData(plugin_name="text", content=b"")
    shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)])
    tensor = TensorProto(dtype="DT_STRING", string_val=[text.encode()], tensor_shape=shape)
    value = Summary.Value(
        tag=f"{tag}/text_summary", metadata=SummaryMetadata(plugin_data=plugin), tensor=tensor
    )
    return Summary(value=[value])
